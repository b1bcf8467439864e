"""TRL trainers on tiny models, with and without padless."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

from padless.integrations.transformers import PadlessOptions, with_padless
from support.trainers import (
    VOCAB,
    CountTokens,
    Outcome,
    common_arguments,
    ids_of,
    outcome_of,
    run_plain,
    sft_rows,
    skewed_lengths,
    tiny_config,
    tiny_model,
    tiny_tokenizer,
)

BUDGET = 128


def run_sft(folder: Path, kind: str, *, padless: PadlessOptions | None = None, **changes: Any) -> Outcome:
    """``SFTTrainer`` on tokenised rows with prompts masked."""
    trainer, counter = sft_trainer(folder, kind, padless=padless, **changes)
    return outcome_of(trainer, counter)


def sft_trainer(folder: Path, kind: str, *, padless: PadlessOptions | None = None, **changes: Any) -> tuple[Any, Any]:
    """The trainer of `run_sft` and its token counter."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    model = changes.pop("model", None) or tiny_model(kind)
    more = changes.pop("more", {})
    counter = CountTokens(model)
    trainer = _class(SFTTrainer, padless)(
        model=model,
        args=SFTConfig(**common_arguments(folder, max_length=None, **changes)),
        train_dataset=Dataset.from_list(sft_rows(80)),
        eval_dataset=Dataset.from_list(sft_rows(10, seed=5)),
        processing_class=tiny_tokenizer(),
        **more,
        **_options(padless),
    )
    return trainer, counter


def pair_rows(count: int, *, seed: int = 0) -> list[dict[str, list[int]]]:
    """Tokenised preference pairs: the chosen and the rejected answer to one prompt."""
    rng = np.random.default_rng(seed)
    lengths = skewed_lengths(3 * count, seed=seed, low=3, high=30).reshape(count, 3)
    return [
        {
            "prompt_ids": ids_of(int(prompt), rng),
            "chosen_ids": ids_of(int(chosen), rng),
            "rejected_ids": ids_of(int(rejected), rng),
        }
        for prompt, chosen, rejected in lengths
    ]


def pair_texts(count: int, *, seed: int = 0) -> list[dict[str, str]]:
    """The pairs of `pair_rows` as text, which ``DPOTrainer`` tokenises itself."""
    return [
        {key.removesuffix("_ids"): " ".join(f"t{i}" for i in ids) + " " for key, ids in row.items()}
        for row in pair_rows(count, seed=seed)
    ]


def run_dpo(folder: Path, kind: str, *, padless: PadlessOptions | None = None, **changes: Any) -> Outcome:
    """``DPOTrainer`` against a reference model with other weights."""
    return outcome_of(*dpo_trainer(folder, kind, padless=padless, **changes))


def dpo_trainer(folder: Path, kind: str, *, padless: PadlessOptions | None = None, **changes: Any) -> tuple[Any, Any]:
    """The trainer of `run_dpo` and its token counter."""
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    model, reference = changes.pop("model", None) or tiny_model(kind), tiny_model(kind, seed=1)
    counter = CountTokens(model)
    trainer = _class(DPOTrainer, padless)(
        model=model,
        ref_model=reference,
        args=DPOConfig(**common_arguments(folder, max_length=None, beta=0.5, **changes)),
        train_dataset=Dataset.from_list(pair_texts(80)),
        eval_dataset=Dataset.from_list(pair_texts(10, seed=5)),
        processing_class=tiny_tokenizer(),
        **_options(padless),
    )
    return trainer, counter


def run_reward(folder: Path, kind: str, *, padless: PadlessOptions | None = None, **changes: Any) -> Outcome:
    """``RewardTrainer`` with margins and centred rewards."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForSequenceClassification
    from trl import RewardConfig, RewardTrainer

    torch.manual_seed(0)
    config = tiny_config(kind)
    config.num_labels = 1
    model = AutoModelForSequenceClassification.from_config(config).float()
    counter = CountTokens(model)
    rows = [
        {
            "chosen_ids": row["prompt_ids"] + row["chosen_ids"],
            "rejected_ids": row["prompt_ids"] + row["rejected_ids"],
            "margin": float(at % 3) / 3,
        }
        for at, row in enumerate(pair_rows(80))
    ]
    trainer = _class(RewardTrainer, padless)(
        model=model,
        args=RewardConfig(**common_arguments(folder, max_length=None, center_rewards_coefficient=0.1, **changes)),
        train_dataset=Dataset.from_list(rows),
        processing_class=tiny_tokenizer(),
        **_options(padless),
    )
    return outcome_of(trainer, counter)


def rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
    """Completions of skewed lengths that depend on the prompt and its place alone, so that two runs see the same."""
    prompt_ids, completion_ids = [], []
    for at, prompt in enumerate(prompts):
        ids = [int(word[1:]) for word in prompt.split()]
        rng = np.random.default_rng([at, *ids])
        prompt_ids.append(ids)
        length = int(np.clip(rng.lognormal(np.log(8), 0.8), 1, 40))
        completion_ids.append(ids_of(length, rng))
    return {
        "prompt_ids": prompt_ids,
        "completion_ids": completion_ids,
        "logprobs": [[0.0] * len(ids) for ids in completion_ids],
    }


def reward_of(completions: list[str], **kwargs: Any) -> list[float]:
    """A reward that tells completions of one group apart."""
    return [sum(int(word[1:]) for word in text.split()) % 7 / 7.0 for text in completions]


def prompts(count: int, *, seed: int = 0) -> list[dict[str, str]]:
    """Prompts of skewed lengths as text."""
    rng = np.random.default_rng(seed)
    lengths = skewed_lengths(count, seed=seed, low=2, high=20)
    return [{"prompt": " ".join(f"t{i}" for i in rng.integers(2, VOCAB, size=int(n)))} for n in lengths]


def run_grpo(folder: Path, kind: str, *, padless: PadlessOptions | None = None, **changes: Any) -> Outcome:
    """``GRPOTrainer`` with fixed rollouts, a reference model and old log-probabilities."""
    trainer, counter = grpo_trainer(folder, kind, padless=padless, **changes)
    return outcome_of(trainer, counter)


def grpo_trainer(folder: Path, kind: str, *, padless: PadlessOptions | None = None, **changes: Any) -> tuple[Any, Any]:
    """The trainer of `run_grpo` and its token counter."""
    import torch
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    model = changes.pop("model", None) or tiny_model(kind)
    model.config._name_or_path = str(_saved(folder, kind))  # the reference is loaded from there
    counter = CountTokens(model)
    settings: dict[str, Any] = {
        "num_generations": 4,
        "max_completion_length": 40,
        "beta": 0.1,
        "num_iterations": 2,
        "temperature": 1.0,
        "shuffle_dataset": False,
        "model_init_kwargs": None,
    }
    trainer = _class(GRPOTrainer, padless)(
        model=model,
        reward_funcs=reward_of,
        args=GRPOConfig(**common_arguments(folder, **(settings | changes))),
        train_dataset=Dataset.from_list(prompts(40)),
        eval_dataset=Dataset.from_list(prompts(4, seed=5)),
        processing_class=tiny_tokenizer(),
        rollout_func=rollout,
        **_options(padless),
    )
    torch.manual_seed(0)
    return trainer, counter


def _saved(folder: Path, kind: str, seed: int = 1) -> Path:
    place = folder / f"saved-{kind}-{seed}-{os.environ.get('RANK', '0')}"
    if not place.exists():
        from safetensors.torch import save_file

        place.mkdir(parents=True)
        model = tiny_model(kind, seed=seed)  # save_pretrained writes on rank 0 alone
        model.config.architectures = [type(model).__name__]
        model.config.to_json_file(place / "config.json", use_diff=False)
        weights = {name: value.contiguous() for name, value in model.state_dict().items()}
        save_file(weights, place / "model.safetensors", metadata={"format": "pt"})
    return place


def _class(trainer_class: Any, padless: PadlessOptions | None) -> Any:
    return with_padless(trainer_class) if padless else trainer_class


def _options(padless: PadlessOptions | None) -> dict[str, Any]:
    return {"padless": padless} if padless else {}


def sharded_model(folder: Path, kind: str) -> Any:
    """The model of `tiny_model` with parameters that transformers shards with FSDP2 while loading."""
    import torch.distributed as dist
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    if not dist.is_initialized():
        dist.init_process_group("gloo")
    config = DistributedConfig(fsdp_size=dist.get_world_size())
    model = AutoModelForCausalLM.from_pretrained(_saved(folder, kind, seed=0), distributed_config=config)
    sharded = [name for name, value in model.named_parameters() if hasattr(value, "full_tensor")]
    assert len(sharded) > 10, f"not sharded: {sharded}"
    return model


def run_sharded(folder: Path, kind: str, *, padless: PadlessOptions | None = None, **changes: Any) -> Outcome:
    """``Trainer`` on a sharded model."""
    return run_plain(folder, kind, model=sharded_model(folder, kind), padless=padless, **changes)


RUNS: dict[str, Any] = {
    "plain": run_plain,
    "sft": run_sft,
    "dpo": run_dpo,
    "reward": run_reward,
    "grpo": run_grpo,
    "sharded": run_sharded,
}


def both(scenarios: list[dict[str, Any]], folder: str) -> list[tuple[Outcome, Outcome]]:
    """Each scenario by the host alone and with padless: ``{"run": "sft", "kind": "qwen2", ...training arguments}``."""
    outcomes = []
    for at, given in enumerate(scenarios):
        changes = dict(given)
        run, kind, place = RUNS[changes.pop("run")], changes.pop("kind"), Path(folder) / str(at)
        options = PadlessOptions(token_budget=BUDGET, **changes.pop("options", {}))
        place.mkdir(parents=True, exist_ok=True)
        outcomes.append((run(place, kind, **changes), run(place, kind, padless=options, **changes)))
    return outcomes
