"""Multimodal columns in the batches of a Trainer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

import padless
from padless.data import measure
from padless.integrations._hosts import Host
from padless.integrations._options import PadlessOptions
from padless.tensors import MROPE, Field


def host(**fields: Field) -> Host:
    """The host of a plain Trainer, without one: what rows mean needs none."""
    trainer: Any = SimpleNamespace(args=SimpleNamespace(process_index=0))
    return Host(trainer, PadlessOptions(token_budget=64, fields=fields))


def batch(lengths: list[int], width: int) -> dict[str, Any]:
    mask = (torch.arange(width) < torch.tensor(lengths)[:, None]).long()
    return {"input_ids": mask * 7, "attention_mask": mask, "labels": mask * 7 - 100 * (1 - mask)}


def test_i01_mrope_positions_of_collated_batches_move_on_their_own_axes() -> None:
    """ROLL#452, Automodel#3052: (axes, rows, columns), also where there are as many rows as axes."""
    first, second = batch([3, 4], 5), batch([2], 3)
    first["position_ids"] = torch.arange(3 * 2 * 5).view(3, 2, 5)
    second["position_ids"] = torch.arange(3 * 1 * 3).view(3, 1, 3) + 100
    made = host(position_ids=MROPE)
    rows = made.build([first, second])
    assert rows.batch["position_ids"].shape == (3, 3, 5)
    for micro in padless.regroup(rows.batch, 4, fields=rows.fields):
        (row,) = micro.indices.tolist()
        given, at, length = (second, 0, 2) if row == 2 else (first, row, [3, 4][row])
        inputs = made.inputs(micro)
        assert inputs["position_ids"].shape == (3, 1, length)
        assert torch.equal(inputs["position_ids"][:, 0], given["position_ids"][:, at, :length])


def test_i02_rounding_widens_mrope_positions_too() -> None:
    """LLaMA-Factory#10783."""
    given = batch([1234], 1234) | {"position_ids": torch.arange(1234).expand(3, 1, 1234)}
    made = host(position_ids=MROPE)
    rows = made.build([given])
    (micro,) = padless.regroup(rows.batch, 2000, fields=rows.fields, multiple_of=8)
    inputs = made.inputs(micro)
    assert inputs["input_ids"].shape == (1, 1240)
    assert inputs["position_ids"].shape == (3, 1, 1240)
    assert int(inputs["attention_mask"].sum()) == 1234
    assert int((inputs["labels"] != -100).sum()) == 1234


def test_i04_a_mask_that_numbers_segments_counts_tokens() -> None:
    """LLaMA-Factory#7754: 1 1 2 2 2 0 holds five tokens, not eight."""
    mask = torch.tensor([[1, 1, 2, 2, 2, 0]])
    made = host()
    rows = made.build([{"input_ids": mask, "attention_mask": mask, "labels": mask}])
    grouped = padless.regroup(rows.batch, 5, fields=rows.fields)
    assert grouped.plan.lengths.tolist() == [5]
    assert made.inputs(grouped[0])["attention_mask"].tolist() == [[1, 1, 2, 2, 2]]


def test_i05_the_length_counts_what_an_image_expands_to() -> None:
    """ms-swift#3942: 10 tokens of text and 16 x 16 patches, merged two by two, are 74 tokens and not 11."""
    row = {"text_tokens": 10, "patches": (16, 16), "merge": 2}

    def length(item: Any) -> int:
        high, wide = item["patches"]
        return int(item["text_tokens"] + high * wide // item["merge"] ** 2)

    lengths = measure([row, {**row, "patches": (2, 2)}], length=length, cache=False).lengths
    assert lengths.tolist() == [74, 11]
    plan = padless.microbatch(lengths, 80)
    assert plan.steps == 2
    # The collated batch holds a placeholder per image token, so that the mask says the same.
    rows = host().build([batch([74, 11], 74)])
    assert padless.regroup(rows.batch, 80, fields=rows.fields).plan.lengths.tolist() == [74, 11]
