"""Public reports about trimming and left padding: the same log-probabilities, losses and gradients after it."""

from __future__ import annotations

import pytest
import torch

from padless.verify import build_small, check_layouts, check_step
from padless.verify.feeds import build_feed


@pytest.mark.parametrize("family", ["gpt2", "jamba"])
def test_h02_each_micro_batch_at_its_own_width_makes_the_untrimmed_step(family):
    """trl#7179, SkyRL#2089: lengths 8, 3, 2, 7 in a width of 10; trimming changes no loss and no gradient."""
    mask = (torch.arange(10) < torch.tensor([[8], [3], [2], [7]])).long()
    ids = torch.randint(5, 100, (4, 10), generator=torch.Generator().manual_seed(0)) * mask
    report = check_step(
        build_small(family), {"input_ids": ids, "attention_mask": mask}, token_budget=16, max_sequences=2
    )
    assert report.same, report.explain()
    assert report.padded_tokens == (40, 22)


@pytest.mark.parametrize("spare", [0, 1, 2, 7])
def test_h09_left_padding_shifts_no_position(spare):
    """TransformerLens#1609, nnsight#673: the loss is the same for 0, 1, 2, ... pad tokens on the left."""
    model = build_small("gpt2")
    sequences = [torch.arange(10, 13), torch.arange(20, 25)]
    how = {"device": torch.device("cpu"), "dtype": torch.float32}
    feed = build_feed("left-padded", sequences, spare=spare, **how)
    assert [place.of(feed.keywords["position_ids"]).tolist() for place in feed.places] == [[0, 1, 2], [0, 1, 2, 3, 4]]
    with torch.no_grad():
        padded = model(**feed.keywords, use_cache=False).logits
        for place, ids in zip(feed.places, sequences, strict=True):
            alone = model(input_ids=ids[None], use_cache=False).logits[0]
            assert torch.allclose(place.of(padded), alone, atol=1e-5)


def test_h09_left_padding_without_positions_is_reported_for_absolute_positions():
    """The report's own case: a model with absolute positions that is given a mask and no position_ids."""
    model = build_small("gpt2")

    def without(**keywords: torch.Tensor) -> torch.Tensor:
        keywords.pop("position_ids", None)
        return model(**keywords).logits

    layouts = ["left-padded", "right-padded"]
    report = check_layouts(model, layouts=layouts, seeds=(0,), forward=without, cache=False)
    assert report["left-padded"].verdict == "leaks"
    assert report["left-padded"].cause in ("position-ids-ignored", "positions")
    assert report.allows("right-padded")
