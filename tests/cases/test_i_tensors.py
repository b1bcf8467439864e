"""Reported failures of multimodal batches, as tests."""

from __future__ import annotations

import torch

import padless
from padless import compact, regroup
from padless.tensors import MROPE, flatten, positions_from_mask, segment_lengths, vision


def test_i01_mrope_positions_are_cut_on_their_own_axes() -> None:
    """ROLL#452, Automodel#3052."""
    for rows in (2, 3):  # three rows: as many as axes
        lengths = [3, 4, 2][:rows]
        mask = (torch.arange(5) < torch.tensor(lengths)[:, None]).long()
        batch = {
            "input_ids": mask,
            "attention_mask": mask,
            "position_ids": torch.arange(3 * rows * 5).view(3, rows, 5),
        }
        small = compact(batch, fields={"position_ids": MROPE})
        assert small.batch["position_ids"].shape == (3, rows, 4)
        plan = padless.microbatch(lengths, 4, method="fixed", max_sequences=1)
        step = regroup(batch, plan=plan, fields=vision())
        assert step[1].inputs["position_ids"].shape == (3, 1, 4)
        assert torch.equal(step[1].inputs["position_ids"][:, 0], batch["position_ids"][:, 1, :4])


def test_i02_rounding_applies_to_mrope_positions_too() -> None:
    """LLaMA-Factory#10783."""
    ids = torch.ones(1, 1234, dtype=torch.long)
    batch = {"input_ids": ids, "attention_mask": ids, "position_ids": torch.arange(1234).expand(3, 1, 1234)}
    small = compact(batch, multiple_of=8, fields={"position_ids": MROPE}).batch
    assert small["input_ids"].shape[1] == 1240
    assert small["position_ids"].shape == (3, 1, 1240)
    assert int(small["attention_mask"].sum()) == 1234
    packed = flatten(batch, multiple_of=8, fields={"position_ids": MROPE})
    assert packed.inputs["position_ids"].shape == (3, 1, 1240)


def test_i04_a_segment_numbered_mask_counts_tokens_not_numbers() -> None:
    """LLaMA-Factory#7754."""
    mask = torch.tensor([[1, 1, 2, 2, 2, 0]])
    assert segment_lengths(mask) == [[2, 3]]
    assert positions_from_mask(mask)[mask > 0].tolist() == [0, 1, 0, 1, 2]
    small = compact({"input_ids": mask, "attention_mask": mask})
    assert small.lengths.tolist() == [5]
    assert small.batch["attention_mask"].tolist() == [[1, 1, 2, 2, 2]]
