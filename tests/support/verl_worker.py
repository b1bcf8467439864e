"""verl's real `TrainingWorker` on a CPU: one policy-update step, as the Ray trainer drives it.

Each rank is a process of `support.verl_env.run_ranks`.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

import numpy as np

from support.verl_env import use_environment

use_environment()

VOCABULARY = 320


def make_model(kind: str, folder: Path, *, hidden: int = 32) -> Path:
    """A small random model saved where verl can load it."""
    import torch
    from transformers import JambaConfig, JambaForCausalLM, Qwen2Config, Qwen2ForCausalLM

    path = folder / kind
    if path.exists():
        return path
    torch.manual_seed(0)
    common: dict[str, Any] = {"vocab_size": VOCABULARY, "initializer_range": 0.1, "max_position_embeddings": 16384}
    common |= {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    if kind == "qwen2":
        config = Qwen2Config(
            hidden_size=hidden,
            intermediate_size=2 * hidden,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            **common,
        )
        model = Qwen2ForCausalLM(config)
    else:
        config = JambaConfig(
            hidden_size=hidden,
            intermediate_size=2 * hidden,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            attn_layer_period=2,
            attn_layer_offset=1,
            expert_layer_period=2,
            expert_layer_offset=1,
            num_experts=2,
            num_experts_per_tok=1,
            mamba_d_state=4,
            mamba_d_conv=3,
            mamba_expand=1,
            use_mamba_kernels=False,
            **common,
        )
        model = JambaForCausalLM(config)
    model.save_pretrained(path)
    return path


def make_worker(path: Path, token_budget: int, *, use_remove_padding: bool = False, **settings: Any) -> Any:
    """A `TrainingWorker` with FSDP2 in float32 and its loss set as the actor's is."""
    import torch.distributed as dist
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import (
        ActorConfig,
        FSDPEngineConfig,
        FSDPOptimizerConfig,
        HFModelConfig,
        TrainingWorkerConfig,
    )
    from verl.workers.engine_workers import TrainingWorker
    from verl.workers.utils.losses import ppo_loss

    if not dist.is_initialized():
        dist.init_process_group("gloo")
    external = settings.pop("external_lib", None)
    loss = {name: settings.pop(name) for name in ("loss_agg_mode", "loss_scale_factor") if name in settings}
    model = HFModelConfig(
        path=str(path),
        load_tokenizer=False,
        use_remove_padding=use_remove_padding,
        enable_gradient_checkpointing=False,
        external_lib=external,
        override_config={"attn_implementation": "sdpa"},
    )
    full = dict.fromkeys(("param_dtype", "reduce_dtype", "buffer_dtype"), "fp32")
    engine = FSDPEngineConfig(
        strategy="fsdp2",
        use_torch_compile=False,
        model_dtype="fp32",
        mixed_precision=full,
        max_token_len_per_gpu=token_budget,
        infer_max_token_len_per_gpu=token_budget,
        **({"use_dynamic_bsz": True} | settings),
    )
    worker = TrainingWorker(
        TrainingWorkerConfig(
            model_type="language_model",
            model_config=model,
            engine_config=engine,
            optimizer_config=FSDPOptimizerConfig(lr=1e-3, total_training_steps=10),
            checkpoint_config=CheckpointConfig(),
        )
    )
    worker.reset()
    actor = ActorConfig(
        strategy="fsdp2",
        rollout_n=1,
        ppo_mini_batch_size=64,
        use_dynamic_bsz=True,
        ppo_max_token_len_per_gpu=token_budget,
        clip_ratio=0.2,
        **loss,
    )
    worker.set_loss_fn(functools.partial(ppo_loss, config=actor))
    return worker


def make_batch(prompts: Any, responses: Any, *, seed: int = 0, jagged: bool = False) -> Any:
    """Rows as the rollout leaves them: prompts left padded, responses right padded, then verl's own conversion."""
    import torch
    from verl.utils import tensordict_utils as tu
    from verl.workers.utils.padding import left_right_2_no_padding

    rng = torch.Generator().manual_seed(seed)
    count, wide, long = len(prompts), int(max(prompts)), int(max(responses))
    p, r = torch.as_tensor(np.asarray(prompts)), torch.as_tensor(np.asarray(responses))
    left = torch.arange(wide) >= wide - p[:, None]  # (B, P)
    right = torch.arange(long) < r[:, None]  # (B, R)
    mask = torch.cat([left, right], dim=1).long()
    ids = torch.randint(3, VOCABULARY, (count, wide + long), generator=rng) * mask
    fields = {
        "prompts": ids[:, :wide],
        "responses": ids[:, wide:],
        "input_ids": ids,
        "attention_mask": mask,
        "position_ids": (mask.cumsum(dim=1) - 1).clamp(min=0),
        "response_mask": right.long(),
        "old_log_probs": torch.randn((count, long), generator=rng) * 0.1 - 5.5,
        "advantages": torch.randn((count, long), generator=rng),
    }
    data = left_right_2_no_padding(tu.get_tensordict(fields, non_tensor_dict={"temperature": 1.0}))
    if jagged:  # the trainer of verl 0.9 keeps every field jagged
        for name in ("response_mask", "old_log_probs", "advantages", "loss_mask", "prompts", "responses"):
            held = data.pop(name)
            keep = left if name == "prompts" else right
            rows = [row[kept] for row, kept in zip(held, keep, strict=True)]
            data[name] = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
        tu.pop(data, "max_response_len")
    return data


def shapes_of(worker: Any) -> list[tuple[int, int]]:
    """A list that grows by the (rows, width) of every forward pass of the worker's engine."""
    seen: list[tuple[int, int]] = []
    engine = worker.engine
    stock = type(engine).prepare_model_inputs

    def prepare(micro_batch: Any) -> Any:
        inputs, rest = stock(engine, micro_batch)
        seen.append(tuple(inputs["input_ids"].shape))
        return inputs, rest

    engine.prepare_model_inputs = prepare
    return seen


def step(worker: Any, data: Any, *, mini_batches: int = 1) -> dict[str, Any]:
    """Old log-probs, then one update, as the trainer asks for them."""
    import torch
    from verl.utils import tensordict_utils as tu
    from verl.workers.utils.padding import no_padding_2_padding

    seen = shapes_of(worker)
    ask = data.clone()
    tu.assign_non_tensor(ask, calculate_entropy=True, compute_loss=False)
    out = worker.infer_batch(ask)
    log_probs = no_padding_2_padding(tu.get(out, "log_probs"), data)
    infer_shapes = list(seen)
    seen.clear()
    rows = data.batch_size[0] * int(os.environ.get("WORLD_SIZE", "1"))
    update = data.clone()
    tu.assign_non_tensor(
        update,
        calculate_entropy=False,
        global_batch_size=rows // mini_batches,
        mini_batch_size=rows // mini_batches,
        epochs=1,
        seed=1,
        dataloader_kwargs={"shuffle": False},
        compute_loss=True,
    )
    metrics = tu.get(worker.train_mini_batch(update), "metrics")
    if data["response_mask"].is_nested:
        real = torch.cat(
            [row[: len(mask)] for row, mask in zip(log_probs, data["response_mask"].unbind(), strict=True)]
        )
    else:
        real = log_probs[data["response_mask"].bool()]
    return {
        "log_probs": real.numpy(),
        "metrics": metrics,
        "infer_shapes": infer_shapes,
        "update_shapes": list(seen),
    }
