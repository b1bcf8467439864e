"""The plain Trainer with padless takes the same optimizer steps as the Trainer alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import Trainer, TrainingArguments

from padless.integrations.transformers import PadlessOptions, with_padless
from support.trainers import (
    MODELS,
    PAD,
    CountTokens,
    Outcome,
    assert_same_run,
    common_arguments,
    outcome_of,
    sft_rows,
    tiny_model,
)

BUDGET = 96


def collate(rows: list[dict[str, list[int]]], *, side: str = "right") -> dict[str, Any]:
    """Pad to the longest row of the batch, on one side."""
    import torch

    width = max(len(row["input_ids"]) for row in rows)

    def pad(values: list[int], fill: int) -> list[int]:
        gap = [fill] * (width - len(values))
        return gap + values if side == "left" else values + gap

    return {
        "input_ids": torch.tensor([pad(row["input_ids"], PAD) for row in rows]),
        "attention_mask": torch.tensor([pad([1] * len(row["input_ids"]), 0) for row in rows]),
        "labels": torch.tensor([pad(row["labels"], -100) for row in rows]),
    }


def collate_left(rows: list[dict[str, list[int]]]) -> dict[str, Any]:
    return collate(rows, side="left")


def run(
    folder: Path, kind: str, *, padless: PadlessOptions | None = None, collator: Any = collate, **changes: Any
) -> Outcome:
    model = tiny_model(kind)
    counter = CountTokens(model)
    arguments = TrainingArguments(**common_arguments(folder, **changes))
    more: dict[str, Any] = {"padless": padless} if padless else {}
    trainer_class: Any = with_padless(Trainer) if padless else Trainer
    trainer = trainer_class(model=model, args=arguments, train_dataset=sft_rows(80), data_collator=collator, **more)
    return outcome_of(trainer, counter)


@pytest.mark.parametrize("rows_and_steps", [(4, 2), (8, 1)], ids=["accumulated", "at-once"])
@pytest.mark.parametrize("kind", MODELS)
def test_ten_steps_are_those_of_the_trainer_alone(kind: str, rows_and_steps: tuple[int, int], tmp_path: Path) -> None:
    size, steps = rows_and_steps
    changes = {"per_device_train_batch_size": size, "gradient_accumulation_steps": steps}
    host = run(tmp_path, kind, **changes)
    ours = run(tmp_path, kind, padless=PadlessOptions(token_budget=BUDGET), **changes)
    assert_same_run(host, ours)
    assert ours.padded_tokens < host.padded_tokens
