"""TRL's GRPO on one CPU with given rollouts: the host's default, its own option, and padless, on the same rows."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from arms import Clock, Passes, Run, arguments, history, lengths_of, tokenizer
from datasets import Dataset
from safetensors.torch import save_file
from trl import GRPOConfig, GRPOTrainer

from padless.bench.models import build
from padless.integrations.trl import PadlessOptions, with_padless

ARMS: dict[str, dict[str, Any]] = {
    "host": {},
    "host, steps_per_generation=1": {"steps_per_generation": 1},
    "padless": {},
}
GENERATIONS = 8


class Rollouts:
    """Completions of ``mix_rl_gsm8k_heavy``'s lengths, the same for every arm: a prompt's text names them.

    Calling it is what a generation engine would do, and takes no part in the step's time.
    """

    def __init__(self, setting: argparse.Namespace, repeat: int, vocabulary: int, clock: Clock) -> None:
        self.prompts = lengths_of("mix_rl_gsm8k_heavy", "prompt_lengths", setting.grpo_scale)
        self.responses = lengths_of("mix_rl_gsm8k_heavy", "response_lengths", setting.grpo_scale)
        self.seed, self.vocabulary, self.clock = repeat, vocabulary, clock
        self.real = 0
        self.seconds = 0.0

    def __call__(self, texts: list[str], trainer: Any) -> dict[str, Any]:
        begun = (time.perf_counter(), time.process_time())
        out: dict[str, Any] = {"prompt_ids": [], "completion_ids": [], "logprobs": []}
        for at in range(0, len(texts), GENERATIONS):
            rng = np.random.default_rng([13, self.seed, int(texts[at][1:])])
            prompt = rng.integers(2, self.vocabulary, size=rng.choice(self.prompts)).tolist()
            for size in rng.choice(self.responses, size=GENERATIONS).tolist():
                out["prompt_ids"].append(prompt)
                out["completion_ids"].append(rng.integers(2, self.vocabulary, size=size).tolist())
                out["logprobs"].append([0.0] * size)
                self.real += len(prompt) + size
        spent = (time.perf_counter() - begun[0], time.process_time() - begun[1])
        self.clock.outside = [held + more for held, more in zip(self.clock.outside, spent, strict=True)]
        self.seconds += spent[0]
        return out


def reward(completions: list[str], completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
    """Something that differs between the completions of a prompt, whatever batch they come in."""
    return [(sum(ids[:8]) % 11) / 11 for ids in completion_ids]


def timed(trainer: Any, parts: dict[str, float]) -> None:
    """Count the seconds of the passes without gradients (the reference's), and of the optimizer."""
    score = trainer._get_per_token_logps_and_entropies

    def scoring(*args: Any, **kwargs: Any) -> Any:
        begun = time.perf_counter()
        try:
            return score(*args, **kwargs)
        finally:
            if not torch.is_grad_enabled():
                parts["reference"] += time.perf_counter() - begun

    trainer._get_per_token_logps_and_entropies = scoring


def saved(model: Any, folder: Path) -> str:
    """The initial weights on disk, from where the trainer loads its reference model."""
    if not folder.exists():
        folder.mkdir()
        model.config.architectures = [type(model).__name__]
        model.config.to_json_file(folder / "config.json", use_diff=False)
        weights = {key: value.contiguous() for key, value in model.state_dict().items()}
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return str(folder)


def run(arm: str, repeat: int, setting: argparse.Namespace, folder: str) -> Run:
    """``grpo_steps`` optimizer steps of ``grpo_step`` completions, 8 to a prompt, with a reference model."""
    built = build(setting.model, seed=0)
    model, clock = built.model, Clock()
    model.config.pad_token_id, model.config.eos_token_id = 0, 1
    model.config._name_or_path = saved(model, Path(folder) / "reference")
    rollouts = Rollouts(setting, repeat, built.vocabulary, clock)
    made = GRPOConfig(
        **arguments(folder, setting.grpo_steps, setting.grpo_step // 8, seed=repeat),
        num_generations=GENERATIONS,
        max_completion_length=int(rollouts.responses.max()),
        beta=0.04,
        shuffle_dataset=False,
        **ARMS[arm],
    )
    trainer_class: Any = GRPOTrainer
    more: dict[str, Any] = {}
    if arm.startswith("padless"):
        trainer_class = with_padless(GRPOTrainer)
        more["padless"] = PadlessOptions(token_budget=setting.grpo_budget, cost=setting.cost)
    prompts = setting.grpo_steps * setting.grpo_step // GENERATIONS
    trainer = trainer_class(
        model=model,
        reward_funcs=reward,
        args=made,
        train_dataset=Dataset.from_list([{"prompt": f"t{at + 2}"} for at in range(prompts)]),
        processing_class=tokenizer(built.vocabulary),
        rollout_func=rollouts,
        callbacks=[clock],
        **more,
    )
    parts = {"reference": 0.0}
    timed(trainer, parts)
    passes = Passes(trainer.model, trainer.ref_model)
    trainer.train()
    parts["rollout, not counted"] = rollouts.seconds
    return Run(
        wall=clock.wall,
        cpu=clock.cpu,
        real_tokens=rollouts.real,
        times_run=2,
        passes=passes,
        parts=parts,
        **history(trainer),
    )
