"""Trimming and regrouping, as users met it in TRL: widths, order, and groups that stay together."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import padless
from padless.integrations._grpo import GRPOHost
from padless.integrations._options import PadlessOptions
from padless.integrations._trl_hosts import DPOHost
from support.trainers import sft_rows
from support.trl_runs import grpo_trainer, sft_trainer


def grpo_host() -> Any:
    """A GRPO host without a trainer: what rows mean needs none."""
    host = object.__new__(GRPOHost)
    host.options, host.rank, host._scale = PadlessOptions(token_budget=200), 0, 1.0
    host.trainer = SimpleNamespace(importance_sampling_level="token")
    return host


def generation_batch(sizes: list[tuple[int, int]]) -> dict[str, Any]:
    """Prompts left padded and completions right padded, as TRL pads them; token = 100 * row + place."""
    wide, long = max(p for p, _ in sizes), max(c for _, c in sizes)
    made: dict[str, list[list[int]]] = {
        "prompt_ids": [],
        "prompt_mask": [],
        "completion_ids": [],
        "completion_mask": [],
    }
    for row, (prompt, completion) in enumerate(sizes):
        ids = [100 * row + place + 1 for place in range(prompt + completion)]
        made["prompt_ids"].append([0] * (wide - prompt) + ids[:prompt])
        made["prompt_mask"].append([0] * (wide - prompt) + [1] * prompt)
        made["completion_ids"].append(ids[prompt:] + [0] * (long - completion))
        made["completion_mask"].append([1] * completion + [0] * (long - completion))
    batch: dict[str, Any] = {key: torch.tensor(value) for key, value in made.items()}
    batch["advantages"] = torch.arange(len(sizes)).float()
    batch["old_per_token_logps"] = batch["completion_ids"].float() / 1000 * batch["completion_mask"]
    batch["num_items_in_batch"] = torch.tensor(float(sum(c for _, c in sizes)))
    return batch


def regrouped(sizes: list[tuple[int, int]], budget: int) -> tuple[Any, list[dict[str, Any]]]:
    host = grpo_host()
    rows = host.build([generation_batch(sizes)])
    grouped = padless.regroup(rows.batch, budget, fields=rows.fields)
    return grouped, [host.inputs(micro) for micro in grouped]


def test_h01_prompt_and_completion_share_one_block() -> None:
    """SkyRL#1285: (5, 50) and (55, 4) need 59 columns, not 105."""
    grouped, (inputs,) = regrouped([(5, 50), (55, 4)], 200)
    assert inputs["prompt_ids"].shape[1] + inputs["completion_ids"].shape[1] == 59
    assert int(inputs["prompt_mask"].sum() + inputs["completion_mask"].sum()) == 5 + 50 + 55 + 4
    assert grouped.plan.padded_tokens == 2 * 59


def test_h02_each_micro_batch_has_the_width_of_its_own_longest_row() -> None:
    """trl#7179: lengths 8, 3, 2, 7 in two micro-batches take 22 positions, not 40."""
    _, micros = regrouped([(4, 4), (1, 2), (1, 1), (3, 4)], 16)
    widths = sorted(inputs["prompt_ids"].shape[1] + inputs["completion_ids"].shape[1] for inputs in micros)
    assert widths == [3, 8]


def test_h04_all_fields_of_a_row_move_by_the_same_offset() -> None:
    """trl#1717: masks and stored log-probabilities stay with their tokens."""
    _, micros = regrouped([(2, 3), (4, 1), (1, 5)], 20)
    for inputs in micros:
        ids, scored = inputs["completion_ids"], inputs["tool_mask"].bool()
        assert torch.equal(inputs["old_per_token_logps"][scored], ids[scored].float() / 1000)
        assert bool((inputs["old_per_token_logps"][~scored] == 0).all())
        assert inputs["completion_mask"][scored].all()
        assert scored.sum(1).tolist() == [(3, 1, 5)[int(a)] for a in inputs["advantages"]]


@pytest.mark.parametrize("rows", [5, 11])
def test_h08_predictions_come_back_in_the_order_of_the_rows(rows: int, tmp_path: Path) -> None:
    """NeMo-RL#648: the number of micro-batches need not divide the batch, and row i stays row i."""
    trainer, _ = sft_trainer(
        tmp_path, "qwen2", padless=PadlessOptions(token_budget=64), per_device_eval_batch_size=rows
    )
    from datasets import Dataset

    data = sft_rows(rows, seed=9)
    found = trainer.predict(trainer._prepare_dataset(Dataset.from_list(data), None, trainer.args, False, None, "test"))
    model = trainer.model.eval()
    for row, held in enumerate(data):
        ids = torch.tensor([held["input_ids"]])
        with torch.no_grad():
            alone = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[0]
        np.testing.assert_allclose(found.predictions[row][: ids.shape[1]], alone, rtol=1e-3, atol=1e-4)


def test_e11_both_answers_of_a_pair_stay_in_one_micro_batch() -> None:
    """trl#7328: pairs of lengths (5, 5), (3, 3), (4, 4), (2, 2) under a budget of 12."""
    host: Any = object.__new__(DPOHost)
    host.options, host.rank, host.trainer = PadlessOptions(token_budget=12), 0, None
    sizes = [5, 3, 4, 2]
    width = max(sizes)
    mask = torch.tensor([[1] * n + [0] * (width - n) for n in [*sizes, *sizes]])
    ids = torch.arange(8)[:, None].expand(8, width) + 10
    rows = host.build([{"input_ids": ids, "attention_mask": mask, "completion_mask": mask}])
    grouped = padless.regroup(rows.batch, 12, fields=rows.fields, atoms=rows.atoms)
    seen = []
    for micro in grouped:
        assert micro.padded_tokens <= 12
        inputs = host.inputs(micro)
        first = inputs["input_ids"][:, 0] - 10
        half = len(first) // 2
        assert torch.equal(first[:half] + 4, first[half:]), "chosen first, rejected in the same order"
        seen += first[:half].tolist()
    assert sorted(seen) == [0, 1, 2, 3]


def test_h02_the_trainer_itself_computes_fewer_positions(tmp_path: Path) -> None:
    """trl#7179 on GRPOTrainer: old and reference log-probabilities are trimmed too."""
    totals = []
    for options in (None, PadlessOptions(token_budget=128)):
        trainer, counter = grpo_trainer(tmp_path, "qwen2", padless=options, max_steps=2)
        trainer.train()
        totals.append(counter.total)
        widest = max(rows * width for rows, width in counter.shapes)
    assert totals[1] < 0.7 * totals[0]
    assert widest <= 128
