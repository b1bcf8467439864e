"""Reported failures of trimming, rolling and reordering, as tests."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import padless
from padless import PadlessError, compact, regroup
from padless.tensors import Field, positions_from_mask, rlhf
from support.trainers import tiny_model


def left_right(prompts: list[int], responses: list[int], prompt: int, response: int) -> torch.Tensor:
    column = torch.arange(prompt + response)
    begin, end = prompt - torch.tensor(prompts)[:, None], prompt + torch.tensor(responses)[:, None]
    return ((column >= begin) & (column < end)).long()


def right(lengths: list[int], width: int) -> torch.Tensor:
    return (torch.arange(width) < torch.tensor(lengths)[:, None]).long()


def test_h01_the_width_is_the_longest_prompt_and_response_of_one_row() -> None:
    """SkyRL#1285, trl#2944."""
    mask = left_right([5, 55], [50, 4], 55, 50)
    batch = {"input_ids": mask * torch.arange(1, 106), "attention_mask": mask}
    small = compact(batch, fields=rlhf())
    assert batch["input_ids"].shape[1] == 105
    assert small.batch["input_ids"].shape[1] == 59
    assert int((small.batch["input_ids"] > 0).sum()) == int(mask.sum())


def test_h02_each_micro_batch_is_cut_to_its_own_longest_row() -> None:
    """trl#7179, trl#3495, SkyRL#2089, textpolicy#58."""
    lengths = [8, 3, 2, 7]
    mask = right(lengths, 10)
    torch.manual_seed(0)
    batch = {"input_ids": torch.randint(2, 60, (4, 10)), "attention_mask": mask}
    model = tiny_model("qwen2").eval()
    given = padless.microbatch(lengths, 16, method="fixed", max_sequences=2)
    order = np.argsort(-np.array(lengths), kind="stable")
    widths = {}
    with torch.no_grad():
        whole = model(**batch).logits * mask[..., None]
        for name, plan in (("in order", given), ("sorted", padless.microbatch(lengths, 16, max_sequences=2))):
            step = regroup(batch, plan=plan)
            widths[name] = [m.inputs["input_ids"].shape for m in step]
            restored = step.restore([model(**m.inputs).logits for m in step])
            torch.testing.assert_close(restored, whole, atol=1e-5, rtol=1e-5)
    assert [shape[1] for shape in widths["in order"]] == [8, 7]
    assert sorted(shape[1] for shape in widths["sorted"]) == [3, 8]
    slots = {name: sum(shape.numel() for shape in shapes) for name, shapes in widths.items()}
    assert slots == {"in order": 30, "sorted": 22}
    assert order.tolist() == [0, 3, 1, 2]


def test_h03_keeping_the_end_cuts_each_rows_real_tokens() -> None:
    """trl#3398."""
    on_the_right = torch.tensor([[1, 2, 3, 4, 5, 6], [7, 8, 0, 0, 0, 0]])
    on_the_left = torch.tensor([[1, 2, 3, 4, 5, 6], [0, 0, 0, 0, 7, 8]])
    for ids in (on_the_right, on_the_left):
        batch = {"input_ids": ids, "attention_mask": (ids > 0).long()}
        small = compact(batch, max_length=3, keep="last")
        assert small.batch["input_ids"].tolist() == [[4, 5, 6], [7, 8, 0]]
        assert small.batch["attention_mask"].tolist() == [[1, 1, 1], [1, 1, 0]]
        assert small.truncated.tolist() == [0]
        assert compact(batch, max_length=3).batch["input_ids"].tolist() == [[1, 2, 3], [7, 8, 0]]


def test_h04_every_field_rolls_by_the_same_offset() -> None:
    """trl#1717."""
    batch = {
        "input_ids": torch.tensor([[0, 0, 5, 6, 7], [0, 1, 2, 3, 4]]),
        "attention_mask": torch.tensor([[0, 0, 1, 1, 1], [0, 1, 1, 1, 1]]),
        "response_mask": torch.tensor([[0, 0, 0, 1, 1], [0, 0, 0, 1, 1]]),
        "advantages": torch.tensor([[0, 0, 0, 0.1, 0.2], [0, 0, 0, 0.3, 0.4]]),
    }
    small = compact(batch).batch
    assert small["input_ids"].tolist() == [[5, 6, 7, 0], [1, 2, 3, 4]]
    assert small["attention_mask"].tolist() == [[1, 1, 1, 0], [1, 1, 1, 1]]
    assert small["response_mask"].tolist() == [[0, 1, 1, 0], [0, 0, 1, 1]]
    assert torch.equal(small["advantages"], torch.tensor([[0, 0.1, 0.2, 0], [0, 0, 0.3, 0.4]]))


def test_h05_response_fields_are_cut_to_the_longest_response_and_restored() -> None:
    """SkyRL#2089."""
    mask = left_right([3, 2], [2, 3], 4, 5)
    batch = {
        "input_ids": mask * 7,
        "attention_mask": mask,
        "old_log_probs": torch.arange(10.0).view(2, 5),
        "rewards": torch.tensor([1.0, 2.0]),
    }
    small = compact(batch, fields=rlhf(), responses="block")
    assert small.batch["input_ids"].shape == (2, 5)
    assert small.batch["old_log_probs"].shape == (2, 3)
    assert torch.equal(small.batch["rewards"], batch["rewards"])
    restored = small.restore(small.batch["old_log_probs"], span="response")
    assert restored.shape == (2, 5)
    assert torch.equal(restored, batch["old_log_probs"] * mask[:, 4:])
    landed = compact(batch, fields=rlhf()).batch["old_log_probs"]
    assert landed.tolist() == [[0, 0, 0, 0, 1], [0, 0, 5, 6, 7]]


def test_h06_rounding_up_pads_every_field_with_its_own_value() -> None:
    """prime-rl#2021, ROLL#298."""
    width = 6
    batch = {
        key: torch.ones(1, width)
        for key in ("input_ids", "attention_mask", "labels", "position_ids", "token_type_ids", "advantages")
    }
    batch["input_ids"], batch["position_ids"] = batch["input_ids"].long(), torch.arange(width)[None]
    small = compact(batch, multiple_of=4, fields={"advantages": Field(pad=0.0)}).batch
    assert {value.shape for value in small.values()} == {(1, 8)}
    assert small["labels"][0, 6:].tolist() == [-100, -100]
    assert small["attention_mask"][0, 6:].tolist() == [0, 0]
    assert small["position_ids"][0].tolist() == list(range(8))
    with pytest.raises(PadlessError, match="'weights'"):
        compact(batch | {"weights": torch.ones(1, width)})


@pytest.mark.parametrize("order", [[2, 0, 1], [1]])
def test_h07_objects_and_flat_rows_follow_their_row(order: list[int]) -> None:
    """AReaL#244, verl#3315, verl#2049."""
    objects, flat, counts = [{"n": 2}, {}, {"n": 1}], ["a", "b", "c"], [2, 0, 1]
    batch = {
        "input_ids": torch.ones(3, 2, dtype=torch.long),
        "attention_mask": torch.ones(3, 2, dtype=torch.long),
        "objects": objects,
        "pixels": torch.tensor([[ord(name)] for name in flat]),
        "num_images": torch.tensor(counts),
    }
    lengths = np.array([2, 2, 2])
    plan = padless.Plan(
        layout="padded",
        method="given",
        ranks=1,
        steps=2,
        lengths=lengths,
        order=np.array(order + [i for i in range(3) if i not in order]),
        offsets=np.array([0, len(order), 3]),
        token_budget=6,
    )
    micro = regroup(batch, plan=plan, fields={"pixels": Field(span="flat", counts="num_images")})[0]
    starts = np.cumsum([0, *counts])
    assert micro.inputs["objects"] == [objects[i] for i in order]
    assert micro.inputs["num_images"].tolist() == [counts[i] for i in order]
    expected = [name for i in order for name in flat[starts[i] : starts[i + 1]]]
    pixels = micro.inputs["pixels"]
    assert ([] if pixels is None else [chr(int(p)) for p in pixels]) == expected
    if order == [2, 0, 1]:
        assert expected == ["c", "a", "b"]


def test_h08_outputs_return_in_the_callers_order() -> None:
    """tinker-cloud#35, NVIDIA-NeMo/RL#648."""
    lengths = [5, 9, 2, 7]
    mask = right(lengths, 9)
    batch = {"input_ids": mask * torch.arange(36).view(4, 9), "attention_mask": mask}
    step = regroup(batch, 14, method="greedy")
    assert len(step) == 3  # does not divide the batch
    restored = step.restore([m.inputs["input_ids"] for m in step])
    assert torch.equal(restored, batch["input_ids"])
    rows = step.restore([m.inputs["input_ids"].sum(1) for m in step], span="row")
    assert torch.equal(rows, batch["input_ids"].sum(1))
    descending = np.argsort(-np.array(lengths), kind="stable")
    assert descending.tolist() == [1, 3, 0, 2]
    assert np.argsort(descending).tolist() == [2, 0, 3, 1]


@pytest.mark.parametrize("left", range(4))
def test_h09_positions_and_loss_do_not_depend_on_left_padding(left: int) -> None:
    """TransformerLens#1609, nnsight#673, trl#6800, alpaca-lora#315."""
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    positions = positions_from_mask(mask)
    assert [row[held > 0].tolist() for row, held in zip(positions, mask, strict=True)] == [[0, 1, 2], [0, 1, 2, 3, 4]]
    ids = torch.tensor([[9, 8, 7]])
    padded = {
        "input_ids": torch.nn.functional.pad(ids, (left, 0)),
        "attention_mask": torch.nn.functional.pad(torch.ones_like(ids), (left, 0)),
    }
    padded["position_ids"] = positions_from_mask(padded["attention_mask"])
    padded["labels"] = padded["input_ids"].masked_fill(padded["attention_mask"] == 0, -100)
    model = tiny_model("qwen2").eval()
    small = compact(padded).batch
    assert small["position_ids"].tolist() == [[0, 1, 2]]
    with torch.no_grad():
        assert torch.equal(model(**small).loss, model(input_ids=ids, labels=ids).loss)
