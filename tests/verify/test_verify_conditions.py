"""Several packed rows, positions past the original context, router losses: what a layout's own verdict leaves open."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from padless.verify import LayoutReport, build_small, check_layouts, shrink
from padless.verify.conditions import short_context
from padless.verify.feeds import PACKED, build_feed
from support.broken import Decoder, decoder

DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}


def built(family: str, **fields: object) -> torch.nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = shrink(AutoConfig.for_model(family))
    for name, value in fields.items():
        setattr(config, name, value)
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config)


def report_of(model: torch.nn.Module, *layouts: str, **options: object) -> LayoutReport:
    return check_layouts(model, layouts=layouts, seeds=(0,), cache=False, **options)


def test_a_model_that_sees_boundaries_in_one_row_only_is_exact_there_and_leaks_over_two_rows():
    report = report_of(decoder("one row only"), "packed-position-ids")
    assert report.allows("packed-position-ids")
    rows = report.condition("several-rows", "packed-position-ids")
    assert rows.verdict == "leaks"
    assert rows.difference > 0.01
    assert "keep one packed row" in rows.why
    assert "packed-position-ids with several-rows: leaks" in report.explain()
    assert "several-rows" in report.to_html()
    again = LayoutReport.from_dict(json.loads(report.to_json()))
    assert again.conditions == report.conditions


@pytest.mark.parametrize("make", [lambda: decoder(window=4), lambda: build_small("llama")], ids=["decoder", "llama"])
def test_a_sound_model_is_exact_over_two_packed_rows(make):
    report = report_of(make(), "right-padded", "packed-position-ids")
    assert [(one.name, one.layout, one.verdict) for one in report.conditions] == [
        ("several-rows", "packed-position-ids", "exact")
    ]
    assert "several-rows" not in report.explain()


def test_layouts_that_leak_in_one_row_are_not_asked_about_two():
    report = report_of(decoder("convolution"), "packed-position-ids")
    assert report.condition("several-rows", "packed-position-ids") is None


@pytest.mark.parametrize("layout", PACKED)
def test_two_rows_hold_every_sequence_and_end_in_a_tail(layout):
    sequences = [torch.arange(10 * n, 10 * n + n) for n in (4, 1, 3)]
    feed = build_feed(layout, sequences, device=torch.device("cpu"), dtype=torch.float32, pad=9, rows=2)
    ids = feed.input_ids
    assert ids.shape == (2, 7)
    assert all(torch.equal(place.of(ids), one) for place, one in zip(feed.places, sequences, strict=True))
    assert feed.padding().sum(1).tolist() == [0, 6]
    assert set(ids[feed.padding()].tolist()) == {9}
    assert feed.keywords["position_ids"].tolist() == [[0, 1, 2, 3, 0, 1, 2], [0, 0, 1, 2, 3, 4, 5]]
    if layout == "packed-fla":
        assert feed.keywords["cu_seqlens"].tolist() == [0, 4, 7, 8, 14]
        assert feed.keywords["cu_seqlens"].dtype == torch.int64
    if layout in ("packed-seq-idx", "packed-fla"):
        assert feed.keywords["seq_idx"].tolist() == [[0, 0, 0, 0, 1, 1, 1], [0, 1, 1, 1, 1, 1, 1]]
    if layout in ("packed-seq-idx", "packed-cu-seqlens"):
        assert feed.keywords["cu_seq_lens_q"].tolist() == [0, 4, 7, 8, 14]
        assert feed.keywords["max_length_k"] == 6


def test_dynamic_frequencies_are_shared_by_a_micro_batch():
    model = built("llama", rope_parameters=DYNAMIC)
    before = [buffer.clone() for buffer in model.buffers()]
    config = json.dumps(model.config.to_dict(), default=str)
    report = report_of(model, "right-padded", "packed-position-ids")
    assert report.safe == ("right-padded", "packed-position-ids")
    found = {one.layout: one for one in report.conditions if one.name == "long-positions"}
    assert {layout: one.verdict for layout, one in found.items()} == {
        "right-padded": "leaks",
        "packed-position-ids": "leaks",
        "right-padded-no-mask": "leaks",
    }
    assert "a longer sequence beside it" in found["packed-position-ids"].why
    assert "padding that positions run on through" in found["right-padded-no-mask"].why
    assert all(one.difference > 1e-3 for one in found.values())
    assert all(torch.equal(a, b) for a, b in zip(before, model.buffers(), strict=True))
    assert json.dumps(model.config.to_dict(), default=str) == config


@pytest.mark.parametrize(("long", "verdict"), [(4.0, "leaks"), (1.0, "inconclusive")])
def test_long_rope_leaks_only_where_its_factors_differ(long, verdict):
    """With the same factors on both sides there is nothing to see, and so nothing to call exact."""
    parameters = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 8,
        "long_factor": [long] * 8,
        "original_max_position_embeddings": 128,
        "attention_factor": 1.0,
    }
    report = report_of(built("phi3", rope_parameters=parameters), "right-padded")
    found = {one.layout: one.verdict for one in report.conditions if one.name == "long-positions"}
    assert set(found.values()) == {verdict}
    assert len(found) == 3


def test_frequencies_that_follow_each_row_are_exact():
    """The probe can say exact: frequencies by each row's own longest position are no leak, packed into one they are."""
    model = built("llama", rope_parameters=DYNAMIC)
    inner = model.model.rotary_emb.forward

    def by_row(x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        rows = [inner(x, row[None]) for row in position_ids.expand(len(x), -1)]
        return torch.cat([cos for cos, _ in rows]), torch.cat([sin for _, sin in rows])

    def none_on_padding(**keywords: Tensor) -> Tensor:
        mask = keywords.get("attention_mask")
        if mask is not None:
            keywords["position_ids"] = keywords["position_ids"] * mask
        return model(**keywords).logits

    model.model.rotary_emb.forward = by_row
    report = report_of(model, "right-padded", "packed-position-ids", forward=none_on_padding)
    assert report.condition("long-positions", "packed-position-ids").verdict == "leaks"
    assert report.condition("long-positions", "right-padded").verdict == "exact"


def test_ordinary_rope_has_no_such_condition_and_is_left_alone():
    model = build_small("llama")
    report = report_of(model, "right-padded")
    assert not [one for one in report.conditions if one.name == "long-positions"]
    with short_context(model, 8) as count:
        assert count == 1
        assert model.config.max_position_embeddings == 8
    assert model.config.max_position_embeddings == 256


def test_the_router_loss_of_mixtral_follows_padding_and_regrouping():
    report = report_of(build_small("mixtral"), "right-padded", "right-padded-no-mask")
    assert report.safe == ("right-padded-no-mask", "right-padded")  # outputs are not affected
    found = {one.layout: one for one in report.conditions if one.name == "router-loss"}
    assert {layout: one.verdict for layout, one in found.items()} == {
        "right-padded": "exact",
        "right-padded-no-mask": "leaks",
        "any regrouping": "differs",
    }
    assert found["right-padded-no-mask"].difference > 1e-3


class Routed(Decoder):
    """A router loss that is a mean over tokens: it can be regrouped, weighted by tokens."""

    config = SimpleNamespace(output_router_logits=False, vocab_size=64, to_dict=dict)

    def forward(self, input_ids, attention_mask=None, position_ids=None, output_router_logits=False):
        logits = super().forward(input_ids, attention_mask, position_ids)
        real = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        loss = (logits.square().mean(-1) * real).sum() / real.sum() if output_router_logits else None
        return SimpleNamespace(logits=logits, aux_loss=loss)


def test_a_router_loss_that_is_a_mean_over_tokens_may_be_regrouped():
    torch.manual_seed(0)
    report = report_of(Routed().eval(), "right-padded", "right-padded-no-mask")
    found = {one.layout: one.verdict for one in report.conditions if one.name == "router-loss"}
    assert found == {"right-padded": "exact", "right-padded-no-mask": "leaks", "any regrouping": "exact"}
