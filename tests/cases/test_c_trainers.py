"""Loss normalisation, as users met it in trainers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from padless.integrations.transformers import PadlessOptions, with_padless
from support.trainers import assert_same_run, common_arguments, plain_trainer, run_plain, sft_rows

OURS = PadlessOptions(token_budget=96)


class OneNumber(torch.nn.Module):
    """Its loss is its parameter times the given value of each target: a step's loss and gradient can be read off."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor(1.0))

    def forward(
        self, input_ids: Any, attention_mask: Any, labels: Any, num_items_in_batch: Any = None, **_: Any
    ) -> Any:
        held = labels != -100
        total = (self.weight * labels.float() * held).sum()
        return {"loss": total / (held.sum() if num_items_in_batch is None else num_items_in_batch)}


def train(rows: list[list[int]], folder: Path, **changes: Any) -> list[float]:
    """Losses of the optimizer steps; a row's labels are its tokens, 0 is no target."""
    from transformers import Trainer, TrainingArguments

    def collate(given: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
        width = max(len(row["input_ids"]) for row in given)
        ids = torch.tensor([row["input_ids"] + [0] * (width - len(row["input_ids"])) for row in given])
        mask = torch.tensor([[1] * len(row["input_ids"]) + [0] * (width - len(row["input_ids"])) for row in given])
        return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(ids == 0, -100)}

    settings = {"per_device_train_batch_size": 1, "learning_rate": 0.0, "max_grad_norm": 0.0} | changes
    made: Any = with_padless(Trainer)
    trainer = made(
        model=OneNumber(),
        args=TrainingArguments(**common_arguments(folder, train_sampling_strategy="sequential", **settings)),
        train_dataset=[{"input_ids": row} for row in rows],
        data_collator=collate,
        padless=PadlessOptions(token_budget=8),
    )
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "grad_norm" in entry]
    norms = [float(entry["grad_norm"]) for entry in trainer.state.log_history if "grad_norm" in entry]
    assert norms == pytest.approx(losses), "the gradient of a product with 1 is the loss"
    return losses


def test_c01_the_mean_is_over_targets_not_over_micro_batches(tmp_path: Path) -> None:
    """torchtune#1875: [4] and [1, 1, 1] in two micro-batches have the mean 1.75, not 2.5."""
    assert train([[4], [1, 1, 1]], tmp_path, gradient_accumulation_steps=2, max_steps=1) == pytest.approx([1.75])


def test_c04_a_shorter_last_window_is_divided_by_its_own_targets(tmp_path: Path) -> None:
    """pytorch-lightning#19987: six micro-batches in windows of four give equal losses in both updates."""
    losses = train([[1] * 8] * 6, tmp_path, gradient_accumulation_steps=4, max_steps=2)
    assert losses == pytest.approx([1.0, 1.0])


def test_c05_a_micro_batch_without_targets_counts_nothing(tmp_path: Path) -> None:
    """NVIDIA-NeMo/Automodel#3796: sums 0 and 10 over 0 and 5 targets are 2.0."""
    losses = train([[0, 0, 0], [2, 2, 2, 2, 2]], tmp_path, gradient_accumulation_steps=2, max_steps=1)
    assert losses == pytest.approx([2.0])


def test_c05_a_step_without_targets_is_zero_and_not_nan(tmp_path: Path) -> None:
    losses = train([[0, 0, 0], [0, 0]], tmp_path, gradient_accumulation_steps=2, max_steps=1)
    assert losses == [0.0]


def test_c04_a_real_model_takes_the_steps_of_the_host_at_the_end_of_an_epoch(tmp_path: Path) -> None:
    def settings() -> dict[str, Any]:
        return {"max_steps": -1, "num_train_epochs": 1, "more": {"train_dataset": sft_rows(14)}}

    assert_same_run(
        run_plain(tmp_path, "qwen2", **settings()), run_plain(tmp_path, "qwen2", padless=OURS, **settings())
    )


def test_k01_the_log_tells_real_and_padded_rates_apart(tmp_path: Path) -> None:
    """OLMo-core#870: a headline rate that counts padding moves the wrong way."""
    trainer, counter = plain_trainer(tmp_path, "qwen2", padless=OURS, max_steps=3)
    trainer.train()
    steps = [entry for entry in trainer.state.log_history if "grad_norm" in entry]
    for entry in steps:
        ratio = entry["padless/real_tokens_per_second"] / entry["padless/padded_tokens_per_second"]
        assert ratio == pytest.approx(entry["padless/occupancy"])
    assert counter.total > 0
