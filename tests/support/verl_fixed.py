"""verl 0.7.1's fixed-padding actor and critic, alone and with padless; run with that verl first on the path."""

from __future__ import annotations

import os
import pickle
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

ROWS, PROMPT, RESPONSE, VOCABULARY = 6, 24, 40, 128
PROMPTS, RESPONSES = [5, 9, 4, 16, 6, 7], [30, 3, 21, 12, 25, 2]


def make_model(head: str) -> Any:
    from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2ForTokenClassification

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        initializer_range=0.1,
        num_labels=1,
        classifier_dropout=0.0,
        attn_implementation="sdpa",
    )
    return (Qwen2ForCausalLM if head == "actor" else Qwen2ForTokenClassification)(config)


def make_data() -> Any:
    from verl import DataProto

    rng = torch.Generator().manual_seed(1)
    prompts, responses = torch.tensor(PROMPTS), torch.tensor(RESPONSES)
    left = torch.arange(PROMPT) >= PROMPT - prompts[:, None]
    right = torch.arange(RESPONSE) < responses[:, None]
    mask = torch.cat([left, right], dim=1).long()
    ids = torch.randint(3, VOCABULARY, mask.shape, generator=rng) * mask
    shape = (ROWS, RESPONSE)
    data = DataProto.from_dict(
        {
            "input_ids": ids,
            "attention_mask": mask,
            "position_ids": (mask.cumsum(1) - 1).clamp(min=0),
            "responses": ids[:, PROMPT:],
            "response_mask": right.long(),
            "old_log_probs": torch.randn(shape, generator=rng) * 0.1 - 4.8,
            "advantages": torch.randn(shape, generator=rng),
            "values": torch.randn(shape, generator=rng),
            "returns": torch.randn(shape, generator=rng),
        }
    )
    data.meta_info = {"micro_batch_size": 2, "temperature": 0.8, "use_dynamic_bsz": False}
    return data


def widths_of(model: Any) -> list[tuple[int, int]]:
    seen: list[tuple[int, int]] = []
    model.register_forward_pre_hook(
        lambda _, __, kwargs: seen.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    return seen


def run(role: str) -> dict[str, Any]:
    """Log-probs (values), one update, the forward passes' shapes and the updated parameters."""
    from omegaconf import OmegaConf
    from verl.workers.actor import dp_actor
    from verl.workers.config import FSDPActorConfig
    from verl.workers.critic import dp_critic

    torch.autocast = lambda *_, **__: nullcontext()  # type: ignore[assignment,misc] - the critic's bfloat16 hides equality
    model = make_model(role)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = widths_of(model)
    data = make_data()
    valid = data.batch["response_mask"].bool()
    if role == "actor":
        config = FSDPActorConfig(
            strategy="fsdp",
            rollout_n=1,
            ppo_mini_batch_size=ROWS,
            ppo_micro_batch_size_per_gpu=2,
            use_dynamic_bsz=False,
            use_torch_compile=False,
            entropy_coeff=0.01,
            grad_clip=1.0,
        )
        worker = dp_actor.DataParallelPPOActor(config, model, optimizer)
        before = worker.compute_log_prob(data, calculate_entropy=True)
        metrics = worker.update_policy(data)
        outputs = {name: before[name][valid] for name in ("log_probs", "entropys")}
    else:
        config = OmegaConf.create(
            {
                "strategy": "fsdp",
                "model": {"use_remove_padding": False},
                "ulysses_sequence_parallel_size": 1,
                "ppo_mini_batch_size": ROWS,
                "ppo_micro_batch_size_per_gpu": 2,
                "ppo_epochs": 1,
                "use_dynamic_bsz": False,
                "grad_clip": 1.0,
                "cliprange_value": 0.5,
                "loss_agg_mode": "token-mean",
            }
        )
        worker = dp_critic.DataParallelPPOCritic(config, model, optimizer)
        outputs = {"values": worker.compute_values(data)[valid]}
        metrics = worker.update_critic(data)
    return {
        "outputs": {name: value.numpy() for name, value in outputs.items()},
        "metrics": {name: value for name, value in metrics.items() if "loss" in name or "norm" in name},
        "shapes": list(seen),
        "parameters": {name: value.detach().numpy().copy() for name, value in model.state_dict().items()},
    }


def main() -> None:
    import torch.distributed as dist
    import verl

    from padless.integrations.verl import install, uninstall

    os.environ |= {"MASTER_ADDR": "127.0.0.1", "RANK": "0", "WORLD_SIZE": "1"}
    folder = Path(sys.argv[1])
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
    result: dict[str, Any] = {"version": verl.__version__}
    for arm in ("stock", "padless", "restored"):
        (install if arm == "padless" else uninstall)()
        result[arm] = {role: run(role) for role in ("actor", "critic")}
    (folder / "rank0.pkl").write_bytes(pickle.dumps(result))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
