"""What verl's Ray trainer needs to run on a CPU: a model with a tokenizer, prompts, a reward, and its command line."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from support.verl_worker import VOCABULARY, make_model

CHAT = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def prepare(folder: Path, *, prompts: int = 32) -> Path:
    """Write model, tokenizer, ``prompts.parquet`` and ``reward.py``; return the model's folder."""
    import pyarrow as pa
    from pyarrow import parquet

    path = make_model("qwen2", folder)
    _make_tokenizer(path)
    rng = np.random.default_rng(0)
    rows = []
    for index in range(prompts):
        text = "".join(rng.choice(list("abcdefgh "), int(rng.integers(5, 60))))
        rows.append(
            {
                "prompt": [{"role": "user", "content": text}],
                "data_source": "random",
                "reward_model": {"style": "rule", "ground_truth": "1"},
                "extra_info": {"index": index},
            }
        )
    parquet.write_table(pa.Table.from_pylist(rows), folder / "prompts.parquet")
    (folder / "reward.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None, **_):\n"
        "    return len(solution_str) % 7 / 7\n"
    )
    return path


def _make_tokenizer(path: Path) -> None:
    """A Qwen2 tokenizer with one token per byte."""
    from tokenizers import pre_tokenizers
    from transformers import Qwen2Tokenizer

    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    vocabulary = {token: index for index, token in enumerate([*special, *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    assert len(vocabulary) <= VOCABULARY
    tokenizer = Qwen2Tokenizer(
        vocab=vocabulary,
        merges=[],
        unk_token="<|endoftext|>",
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
    )
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(path)


def command(
    folder: Path, *, ranks: int = 1, budget: int = 1024, steps: int = 2, extra: tuple[str, ...] = ()
) -> list[str]:
    """``python -m verl.trainer.main_ppo`` for a GRPO run on ``folder`` (see `prepare`)."""
    full = "{param_dtype:fp32,reduce_dtype:fp32,buffer_dtype:fp32}"
    actor, rollout = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
    return [
        sys.executable,
        "-m",
        "verl.trainer.main_ppo",
        "algorithm.adv_estimator=grpo",
        f"data.train_files={folder}/prompts.parquet",
        f"data.val_files={folder}/prompts.parquet",
        "data.train_batch_size=16",
        "data.max_prompt_length=128",
        "data.max_response_length=256",
        "data.dataloader_num_workers=0",
        f"actor_rollout_ref.model.path={folder}/qwen2",
        "actor_rollout_ref.model.use_remove_padding=False",
        "actor_rollout_ref.model.enable_gradient_checkpointing=False",
        "+actor_rollout_ref.model.override_config.attn_implementation=sdpa",
        f"{actor}.strategy=fsdp2",
        f"{actor}.use_dynamic_bsz=True",
        f"{actor}.ppo_max_token_len_per_gpu={budget}",
        f"{actor}.ppo_mini_batch_size=8",
        f"{actor}.use_torch_compile=False",
        f"{actor}.fsdp_config.use_torch_compile=False",
        f"{actor}.fsdp_config.model_dtype=fp32",
        f"+{actor}.fsdp_config.mixed_precision={full}",
        "actor_rollout_ref.ref.log_prob_use_dynamic_bsz=True",
        f"actor_rollout_ref.ref.log_prob_max_token_len_per_gpu={budget}",
        f"{rollout}.name=random",
        f"{rollout}.n=4",
        f"{rollout}.log_prob_use_dynamic_bsz=True",
        f"{rollout}.log_prob_max_token_len_per_gpu={budget}",
        f"{rollout}.tensor_model_parallel_size=1",
        f"{rollout}.agent.num_workers=1",
        f"{rollout}.disable_log_stats=True",
        "reward.num_workers=1",
        f"reward.custom_reward_function.path={folder}/reward.py",
        "reward.custom_reward_function.name=compute_score",
        "trainer.device=cpu",
        f"trainer.n_gpus_per_node={ranks}",
        "trainer.nnodes=1",
        f"trainer.total_training_steps={steps}",
        "trainer.save_freq=-1",
        "trainer.test_freq=-1",
        "trainer.val_before_train=False",
        "trainer.logger=[console]",
        "transfer_queue.backend.SimpleStorage.num_data_storage_units=1",
        "ray_kwargs.ray_init.num_cpus=32",
        f"+ray_kwargs.ray_init.num_gpus={ranks}",
        "+ray_kwargs.ray_init.address=local",  # a cluster of its own, whatever else runs here
        "+ray_kwargs.ray_init.include_dashboard=False",
        *extra,
    ]
