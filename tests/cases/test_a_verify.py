"""Public reports of leaks between packed sequences: the check finds each, and the cure is exact."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import padless
from padless import PadlessError
from padless.verify import build_small, check_layouts, check_step
from padless.verify.feeds import build_feed
from support.broken import decoder

FP32 = {"device": torch.device("cpu"), "dtype": torch.float32}


@pytest.fixture(scope="module")
def llama() -> torch.nn.Module:
    return build_small("llama")


def verdict(model: torch.nn.Module, layout: str, **options: object) -> str:
    return check_layouts(model, layouts=[layout], seeds=(0,), cache=False, **options)[layout].verdict


def logits_of(model: torch.nn.Module, **keywords: Tensor) -> Tensor:
    with torch.no_grad():
        return model(**keywords, use_cache=False).logits


def test_a01_several_packed_rows_keep_their_boundaries(llama):
    """axolotl#1375: rows [0 1 2 0 1] and [0 1 0 1 2] hold four segments, not two rows of plain causal attention."""
    positions = torch.tensor([[0, 1, 2, 0, 1], [0, 1, 0, 1, 2]])
    ids = torch.arange(10, 20).reshape(2, 5)
    packed = logits_of(llama, input_ids=ids, position_ids=positions)
    for row, start, stop in ((0, 0, 3), (0, 3, 5), (1, 0, 2), (1, 2, 5)):
        alone = logits_of(llama, input_ids=ids[row : row + 1, start:stop])[0]
        assert torch.allclose(packed[row, start:stop], alone, atol=1e-5)
    assert padless.tensors.cu_seqlens(positions).tolist() == [0, 3, 5, 7, 10]


def test_a01_a_model_that_sees_boundaries_in_one_row_only_is_reported():
    """axolotl#1375: exact in one packed row, plain causal attention in two; the report says to keep to one."""
    report = check_layouts(decoder("one row only"), layouts=["packed-position-ids"], seeds=(0,), cache=False)
    assert report.allows("packed-position-ids")
    assert report.condition("several-rows", "packed-position-ids").verdict == "leaks"
    assert "keep one packed row in a micro-batch" in report.explain()


def test_a03_a_model_whose_positions_begin_at_two_is_fed_so():
    """transformers#47496, #47525: zero-based positions are other positions; lengths 3 and 2 give 2 3 4 2 3."""
    feed = build_feed("packed-position-ids", [torch.arange(10, 13), torch.arange(20, 22)], start=2, **FP32)
    assert feed.keywords["position_ids"].tolist() == [[2, 3, 4, 2, 3]]
    report = check_layouts(build_small("roberta"), layouts=["right-padded"], seeds=(0,), cache=False)
    assert report.environment["position_start"] == 2
    assert report.allows("right-padded")
    assert any("first position is 2" in note for note in report.notes)


def test_a06_resetting_positions_alone_does_not_isolate_samples(llama):
    """nanoVLM#201: replace every token of sample 0 and sample 1 must not move; positions alone do not ensure it."""
    feed = build_feed("packed-position-ids", [torch.arange(10, 14), torch.arange(20, 23)], **FP32)
    assert feed.keywords["position_ids"].tolist() == [[0, 1, 2, 3, 0, 1, 2]]
    other = build_feed("packed-position-ids", [torch.arange(30, 34), torch.arange(20, 23)], **FP32)
    first, second = logits_of(llama, **feed.keywords), logits_of(llama, **other.keywords)
    assert torch.equal(first[0, 4:], second[0, 4:])
    assert torch.allclose(first[0, 4:], logits_of(llama, input_ids=torch.arange(20, 23)[None])[0], atol=1e-6)
    ones = torch.ones(1, 7, dtype=torch.long)  # positions restart, attention does not: the report's own case
    moved = logits_of(llama, **feed.keywords, attention_mask=ones)
    again = logits_of(llama, **other.keywords, attention_mask=ones)
    assert not torch.allclose(moved[0, 4:], again[0, 4:], atol=1e-3)


@pytest.mark.parametrize("family", ["mamba", "lfm2"])
def test_a07_recurrent_state_across_documents_is_found_and_refused(family):
    """prime-rl#3000, SkyRL#2056, transformers#44836: the last token of document 0 changes document 1."""
    model = build_small(family)
    report = check_layouts(model, layouts=["right-padded", "packed-position-ids"], seeds=(0,), cache=False)
    result = report["packed-position-ids"]
    assert (result.verdict, result.cause) in {("leaks", "recurrent-state"), ("leaks", "convolution")}
    mask = torch.ones(2, 4, dtype=torch.long)
    batch = {"input_ids": torch.arange(10, 18).reshape(2, 4), "attention_mask": mask}
    with pytest.raises(PadlessError, match=r"layout='packed' is not exact for this model"):
        padless.regroup(batch, 8, layout="packed", report=report)
    assert padless.regroup(batch, 8, layout="auto", report=report).layout == report.best
    assert padless.regroup(batch, 8, layout="packed", report=report, unsafe=True).unsafe


def test_a08_an_all_ones_mask_beside_packed_positions_is_a_leak(llama):
    """trl#3673, trl#3067: the mask switches the boundaries off; without it, or with a block mask, packing is exact."""

    def with_ones(**keywords: Tensor) -> Tensor:
        return llama(**{"attention_mask": torch.ones_like(keywords["input_ids"]), **keywords}).logits

    assert verdict(llama, "packed-position-ids", forward=with_ones) == "leaks"
    assert verdict(llama, "packed-position-ids") == "exact"
    feed = build_feed("packed-block-mask-bool", [torch.arange(10, 12), torch.arange(20, 23)], **FP32)
    mask = feed.keywords["attention_mask"]
    assert mask.shape == (1, 1, 5, 5)
    assert int(mask.sum()) == 9
    assert "attention_mask" not in build_feed("packed-position-ids", [torch.arange(10, 12)], **FP32).keywords
    assert verdict(llama, "packed-block-mask-bool") == "exact"


def test_a09_a_block_mask_with_positions_that_go_on_is_not_exact():
    """LLaMA-Factory#7318: attention is blocked, positions count across samples; outputs are wrong all the same."""
    report = check_layouts(decoder("positions only"), layouts=["packed-position-ids"], seeds=(0,), cache=False)
    result = report["packed-position-ids"]
    assert result.verdict != "exact"
    assert result.support == 0.0
    assert result.cause == "positions"


def test_a12_packing_is_an_equal_value_transformation_of_the_summed_loss(llama):
    """functionary#265: samples of 3 and 5 tokens have 6 targets; naive concatenation has 7, and another loss."""
    ids = torch.tensor([[11, 12, 13, 0, 0], [14, 15, 16, 17, 18]])
    mask = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])
    targets = []

    def summed(model: torch.nn.Module, inputs: dict[str, Tensor]) -> Tensor:
        labels = inputs["labels"][:, 1:]
        kept = labels != -100
        targets.append(int(kept.sum()))
        given = {**{key: value for key, value in inputs.items() if key != "labels"}, "use_cache": False}
        return torch.nn.functional.cross_entropy(model(**given).logits[:, :-1][kept], labels[kept], reduction="sum")

    batch = {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
    how = {"layout": "packed-position-ids", "method": "best-fit-decreasing"}
    report = check_step(llama, batch, token_budget=8, loss=summed, **how)
    assert report.same, report.explain()
    assert report.micro_batches == 1
    assert set(targets) == {6}
