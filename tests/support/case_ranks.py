"""Reported problems of trainers on several ranks: all of them in one group of processes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from padless.integrations.transformers import PadlessOptions, with_padless
from padless.tuning import Profile
from support.trainers import common_arguments, plain_trainer


class OneNumber(torch.nn.Module):
    """Its loss is its parameter times the value of each target: a step's loss and gradient can be read off."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor(1.0))
        self.passes: list[list[int]] = []

    def forward(
        self, input_ids: Any, attention_mask: Any, labels: Any, num_items_in_batch: Any = None, **_: Any
    ) -> Any:
        self.passes.append(sorted(attention_mask.sum(1).tolist()))
        held = labels != -100
        total = (self.weight * labels.float() * held).sum()
        return {"loss": total / (held.sum() if num_items_in_batch is None else num_items_in_batch)}


def train(rows: list[list[int]], folder: Path, options: PadlessOptions, **changes: Any) -> tuple[Any, Any]:
    """The trainer after its run, and its model; a row's labels are its tokens."""
    from transformers import Trainer, TrainingArguments

    def collate(given: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
        width = max(len(row["input_ids"]) for row in given)
        ids = torch.tensor([row["input_ids"] + [0] * (width - len(row["input_ids"])) for row in given])
        return {"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": ids.masked_fill(ids == 0, -100)}

    settings = {"learning_rate": 0.0, "max_grad_norm": 0.0, "gradient_accumulation_steps": 1} | changes
    model, made = OneNumber(), with_padless(Trainer)
    trainer: Any = made(  # type: ignore[call-arg]
        model=model,
        args=TrainingArguments(**common_arguments(folder, train_sampling_strategy="sequential", **settings)),
        train_dataset=[{"input_ids": row} for row in rows],
        data_collator=collate,
        padless=options,
    )
    trainer.train()
    return trainer, model


def logged(trainer: Any) -> list[dict[str, Any]]:
    """One entry per optimizer step."""
    return [entry for entry in trainer.state.log_history if "grad_norm" in entry]


def two(folder: str) -> dict[str, Any]:
    """What this rank of two saw."""
    rank, place = int(os.environ["RANK"]), Path(folder)
    told: dict[str, Any] = {}
    # One row per rank: [3, 3] has the sum 6 of 2 targets, [1] * 6 that of 6.
    once = {"per_device_train_batch_size": 1, "max_steps": 1}
    trainer, _ = train([[3, 3], [1] * 6], place, PadlessOptions(token_budget=8), **once)
    told["c02"] = [(entry["loss"], float(entry["grad_norm"])) for entry in logged(trainer)]
    # Rank 0 holds three rows of ten tokens, rank 1 rows of 5, 5 and 4.
    rows = [[1] * n for n in (10, 10, 10, 5, 5, 4)]
    for exchange in ("never", "auto"):
        options = PadlessOptions(token_budget=10, exchange=exchange)  # type: ignore[arg-type]
        trainer, model = train(rows, place, options, **{**once, "per_device_train_batch_size": 3})
        told[f"e01 {exchange}"] = model.passes[-int(logged(trainer)[0]["padless/micro_batches"]) :]
    rows = [[1] * n for n in (9, 9, 2, 2)]
    options = PadlessOptions(token_budget=18, exchange="never")
    trainer, _ = train(rows, place, options, **{**once, "per_device_train_batch_size": 2})
    told["k06"] = {key: value for key, value in logged(trainer)[0].items() if "imbalance" in key}
    # Each rank measured something else.
    profile = Profile(token_budget=(240, 200)[rank], cost=None).save(place / f"own-{rank}.json")
    trainer, counter = plain_trainer(place, "qwen2", padless=PadlessOptions(profile=profile), max_steps=1)
    trainer.train()
    told["e08"] = trainer.padless.budget, max(rows * width for rows, width in counter.shapes)
    return told
