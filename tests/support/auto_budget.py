"""Runs in which a trainer finds its token budget itself."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

import padless.integrations._auto as auto
from padless.integrations.transformers import PadlessOptions
from support.trainers import Outcome, outcome_of, run_plain

auto.CALIBRATE_SECONDS = 1.0


def states() -> list[Any]:
    """Random states of torch, NumPy and Python."""
    return [torch.get_rng_state().tolist(), str(np.random.get_state()), random.getstate()]  # noqa: NPY002


def watched(trainer: Any) -> list[tuple[Any, Any]]:
    """(before, after) of each search on this trainer: parameters, gradients, optimizer state, random states."""
    seen: list[tuple[Any, Any]] = []
    search: Callable[..., Any] = trainer.padless._search

    def look() -> Any:
        model = trainer.accelerator.unwrap_model(trainer.model)
        return {
            "parameters": {name: value.detach().clone() for name, value in model.named_parameters()},
            "buffers": {name: value.detach().clone() for name, value in model.named_buffers()},
            "gradients": [parameter.grad is None for parameter in model.parameters()],
            "training": [module.training for module in model.modules()],
            "optimizer": None if trainer.optimizer is None else dict(trainer.optimizer.state),
            "random": states(),
            "tokens": getattr(trainer, "_total_train_tokens", 0),
            "metrics": str(getattr(trainer, "_metrics", "")),
        }

    def spy(*args: Any, **kwargs: Any) -> Any:
        before = look()
        found = search(*args, **kwargs)
        seen.append((before, look()))
        return found

    trainer.padless._search = spy
    return seen


def assert_untouched(seen: list[tuple[Any, Any]]) -> None:
    """One search, bit for bit without a trace."""
    ((before, after),) = seen
    for kind in ("parameters", "buffers"):
        assert all(torch.equal(value, after[kind][name]) for name, value in before[kind].items()), kind
    for kind in ("gradients", "training", "optimizer", "random", "tokens", "metrics"):
        assert before[kind] == after[kind], kind


def two_ranks(folder: str, limits: list[str]) -> dict[str, Any]:
    """Ranks with limits of their own: budget, profile and outcome of this rank, and what it hears without a limit."""
    from support.trainers import plain_trainer

    rank = int(os.environ["RANK"])
    place = Path(folder) / f"profile-{rank}.json"  # no file system is shared
    options = PadlessOptions(memory_limit=limits[rank], profile=place)
    trainer, counter = plain_trainer(Path(folder), "qwen2", padless=options, max_steps=3)
    seen = watched(trainer)
    ours = outcome_of(trainer, counter)
    assert_untouched(seen)
    host: Outcome = run_plain(Path(folder), "qwen2", max_steps=3)
    heard: dict[str, Any] = {"budget": trainer.padless.budget, "outcome": ours, "host": host, "written": place.exists()}
    # From here on rank 0 alone has a profile; rank 1 may not search.
    options = PadlessOptions(memory_limit=None if rank else "2MB", profile=Path(folder) / f"other-{rank}.json")
    trainer, _ = plain_trainer(Path(folder), "qwen2", padless=options, max_steps=1)
    try:
        trainer.train()
    except Exception as error:
        heard["one without a limit"] = f"{type(error).__name__}: {error}"
    # One rank's loss is broken.
    options = PadlessOptions(memory_limit="2MB", profile=Path(folder) / f"broken-{rank}.json")
    trainer, _ = plain_trainer(Path(folder), "qwen2", padless=options, max_steps=1)
    trial = trainer.padless.host.trial

    def broken(*args: Any) -> Any:
        if rank:
            raise ValueError("this trial is broken")
        return trial(*args)

    trainer.padless.host.trial = broken
    try:
        trainer.train()
    except Exception as error:
        heard["one broken"] = f"{type(error).__name__}: {error}"
    return heard
