"""What the arms of the trainer benchmark share: lengths, clocks, trainer arguments, and how arms are compared."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, TrainerCallback

WARM_UP = 999
"""Number of the repeat that is not measured; its rows are short."""


def lengths_of(name: str, column: str, scale: float) -> np.ndarray:
    """Measured lengths where ``PADLESS_DATA`` has them, log-normal stand-ins otherwise; times ``scale``, at least 4."""
    if source() == "measured":
        with np.load(Path(os.environ["PADLESS_DATA"]) / "lengths.npz") as stored:
            held = stored[f"{name}.{column}"].astype(float)
    else:
        median, sigma, most = {
            "prompt_lengths": (125, 0.6, 2875),
            "response_lengths": (350, 1.1, 8192),
            "lengths": (223, 1.1, 12421),
        }[column]
        held = np.random.default_rng(1).lognormal(np.log(median), sigma, size=8000).clip(4, most)
    return np.maximum(np.round(held * scale), 4).astype(int)


def source() -> str:
    """Where `lengths_of` reads."""
    folder = os.environ.get("PADLESS_DATA")
    return "measured" if folder and (Path(folder) / "lengths.npz").exists() else "log-normal stand-ins"


class Clock(TrainerCallback):
    """Wall and processor seconds of each optimizer step, from its first batch to after the update.

    ``outside`` collects what is nobody's training step (making up rollouts); it is taken off.
    """

    def __init__(self) -> None:
        self.wall: list[float] = []
        self.cpu: list[float] = []
        self.outside = [0.0, 0.0]
        self._begun = (0.0, 0.0)

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self._begun = (time.perf_counter(), time.process_time())

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        now = (time.perf_counter(), time.process_time())
        self.wall.append(now[0] - self._begun[0] - self.outside[0])
        self.cpu.append(now[1] - self._begun[1] - self.outside[1])
        self._begun, self.outside = now, [0.0, 0.0]


class Passes:
    """Forward passes of a model: how many, over how many positions, and the most positions in one with gradients."""

    def __init__(self, *watched: Any) -> None:
        self.count = self.positions = self.most = 0
        for model in watched:
            model.model.register_forward_pre_hook(self._see, with_kwargs=True)

    def _see(self, module: Any, args: Any, kwargs: Any) -> None:
        size = kwargs["input_ids"].numel()
        self.count += 1
        self.positions += size
        if torch.is_grad_enabled():
            self.most = max(self.most, size)


@dataclass(slots=True, kw_only=True)
class Run:
    """One training run of one arm.

    Attributes:
        real_tokens: of all its steps.
        times_run: how often a step runs each of them (training, reference).
        parts: seconds of the whole run that went to named parts.
    """

    wall: list[float]
    cpu: list[float]
    real_tokens: int
    times_run: int
    passes: Passes
    losses: list[float]
    grad_norms: list[float]
    parts: dict[str, float] = field(default_factory=dict)

    def rate(self, kind: str = "wall") -> float:
        """Real tokens per second."""
        return self.real_tokens / sum(getattr(self, kind))


def history(trainer: Any) -> dict[str, list[float]]:
    """Losses and gradient norms of all steps, as the trainer logged them."""
    held = [entry for entry in trainer.state.log_history if "grad_norm" in entry]
    return {
        "losses": [float(entry["loss"]) for entry in held],
        "grad_norms": [float(entry["grad_norm"]) for entry in held],
    }


def tokenizer(vocabulary: int) -> Any:
    """Words ``t2``, ``t3``, ...: the trainers want to see one; the data are token ids."""
    words = {"<pad>": 0, "<eos>": 1} | {f"t{i}": i for i in range(2, vocabulary)}
    raw = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="<pad>", eos_token="<eos>")


def arguments(folder: str, steps: int, accumulation: int, seed: int) -> dict[str, Any]:
    """Trainer arguments of every arm; 8 rows in a device batch are the hosts' default."""
    return {
        "output_dir": folder,
        "max_steps": steps,
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": accumulation,
        "learning_rate": 1e-4,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "disable_tqdm": True,
        "seed": seed,
        "dataloader_pin_memory": False,
    }


def compare(
    run: Callable[[str, int], Run], arms: Sequence[str], repeats: int, tell: Callable[[str], None]
) -> list[dict[str, Any]]:
    """All arms in turns, repeat by repeat: every repeat has rows of its own, the same ones for all arms.

    Before that, every arm runs once on other rows, unmeasured: compiled planners and kernels are loaded then.
    """
    for arm in arms:
        run(arm, WARM_UP)
    held: dict[str, list[Run]] = {arm: [] for arm in arms}
    for repeat in range(repeats):
        for arm in arms if repeat % 2 == 0 else reversed(arms):
            made = run(arm, repeat)
            held[arm].append(made)
            tell(f"  repeat {repeat + 1}  {arm:30} {sum(made.wall) / len(made.wall):7.3f} s per step")
    return [summary(arm, held[arm], held[arms[0]]) for arm in arms]


def summary(arm: str, runs: list[Run], host: list[Run]) -> dict[str, Any]:
    """Medians over repeats; speed is compared with the host's on the same rows, repeat by repeat."""
    pairs = list(zip(runs, host, strict=True))
    each = {kind: [mine.rate(kind) / its.rate(kind) for mine, its in pairs] for kind in ("wall", "cpu")}
    return {
        "arm": arm,
        "step_seconds": statistics.median(sum(one.wall) / len(one.wall) for one in runs),
        "step_cpu_seconds": statistics.median(sum(one.cpu) / len(one.cpu) for one in runs),
        "real_tokens_per_second": statistics.median(one.rate() for one in runs),
        "times_host": {kind: statistics.median(values) for kind, values in each.items()},
        "times_host_each": {kind: [round(value, 3) for value in values] for kind, values in each.items()},
        "occupancy": sum(one.real_tokens * one.times_run for one in runs) / sum(one.passes.positions for one in runs),
        "passes_per_step": statistics.mean(one.passes.count / len(one.wall) for one in runs),
        "most_positions": max(one.passes.most for one in runs),
        "loss_difference": _difference(pairs, "losses"),
        "gradient_difference": _difference(pairs, "grad_norms"),
        "seconds_by_part": {
            key: statistics.median(one.parts[key] / len(one.wall) for one in runs) for key in runs[0].parts
        },
    }


def _difference(pairs: list[tuple[Run, Run]], name: str) -> float | None:
    """The largest difference from the host over all steps, relative to its largest; None for other numbers of steps."""
    worst = 0.0
    for mine, its in pairs:
        ours, theirs = np.array(getattr(mine, name)), np.array(getattr(its, name))
        if len(ours) != len(theirs):
            return None
        worst = max(worst, float(np.abs(ours - theirs).max() / np.abs(theirs).max()))
    return worst
