"""What ranks hear when one of them is called differently, holds a bad row, or dies."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from padless.integrations.transformers import PadlessOptions
from support.trainers import outcome_of, plain_trainer, sft_rows


def told(folder: str) -> dict[str, Any]:
    """Messages of this rank, scenario by scenario, and what a run with fewer rows than micro-batches gave."""
    rank = int(os.environ["RANK"])
    heard: dict[str, Any] = {}

    def attempt(name: str, **settings: Any) -> None:
        trainer, _ = plain_trainer(Path(folder), "qwen2", max_steps=2, **settings)
        try:
            trainer.train()
        except Exception as error:
            heard[name] = f"{type(error).__name__}: {error}"
        else:
            heard[name] = "no error"

    attempt("different budgets", padless=PadlessOptions(token_budget=64 + rank))
    attempt("different planners", padless=PadlessOptions(token_budget=64, method="greedy" if rank else "balanced"))
    long = [{"input_ids": [5] * 50, "labels": [5] * 50} if at % 8 == 3 else row for at, row in enumerate(sft_rows(80))]
    attempt("a long row", padless=PadlessOptions(token_budget=45), more={"train_dataset": long})
    single = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 1}
    heard["single rows"] = outcome_of(
        *plain_trainer(Path(folder), "qwen2", padless=PadlessOptions(token_budget=64), max_steps=4, **single)
    )
    heard["single rows, host"] = outcome_of(*plain_trainer(Path(folder), "qwen2", max_steps=4, **single))
    epochs = {"max_steps": -1, "num_train_epochs": 2, **single}
    for name, options in (("epochs, host", None), ("epochs", PadlessOptions(token_budget=64))):
        heard[name] = outcome_of(
            *plain_trainer(Path(folder), "qwen2", padless=options, more={"train_dataset": sft_rows(4)}, **epochs)
        )
    return heard


def die(folder: str) -> None:
    """Rank 1 raises in its second step; the others wait for it."""
    trainer, _ = plain_trainer(Path(folder), "qwen2", padless=PadlessOptions(token_budget=96))
    rank = int(os.environ["RANK"])

    def fail(*args: Any, **kwargs: Any) -> None:
        if rank == 1 and trainer.state.global_step == 1:
            raise ValueError("this rank is broken")

    trainer.model.register_forward_pre_hook(fail, with_kwargs=True)
    trainer.train()
