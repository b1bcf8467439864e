"""Laws of regroup and compact on random batches: nothing lost, budget, inverse, no guessing, padding never read."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import NonTensorStack, TensorDict

import padless
from padless import PadlessError, compact, regroup
from padless.tensors import LAYOUTS, PACKED_LAYOUTS, Field, causal_lm, preference, rlhf, seq2seq
from support.batches import FIELDS, leaf, random_mask, rl_batch, span_of, token_batch

seeds = st.integers(0, 1 << 30)
TOKEN_KEYS = ("input_ids", "labels", "advantages", "nested.flags", "nested.half")


def draw_batch(seed: int, *, holes: bool = True) -> tuple[np.random.Generator, dict[str, Any]]:
    rng = np.random.default_rng(seed)
    mask = random_mask(rng, int(rng.integers(1, 9)), int(rng.integers(1, 13)), holes=holes)
    return rng, token_batch(rng, mask)


def masked(values: torch.Tensor, mask: torch.Tensor, fill: float = 0) -> torch.Tensor:
    inside = span_of(mask)
    return values.masked_fill(~inside.view(*inside.shape, *(1,) * (values.ndim - 2)), fill)


@given(seeds, st.sampled_from(LAYOUTS), st.sampled_from([1, 2, 8]), st.sampled_from(["balanced", "greedy", "fixed"]))
@settings(max_examples=120)
def test_every_field_comes_back_to_its_place_from_any_layout(
    seed: int, layout: str, multiple: int, method: str
) -> None:
    rng, batch = draw_batch(seed, holes=layout not in PACKED_LAYOUTS or "mask" in layout)
    mask = batch["attention_mask"]
    budget = int(rng.integers(16, 64))
    method = method if layout not in PACKED_LAYOUTS else "best-fit-decreasing"
    step = regroup(batch, budget, layout=layout, multiple_of=multiple, method=method, fields=FIELDS)
    micros = list(step)
    for key in TOKEN_KEYS:
        if key == "labels" and layout in PACKED_LAYOUTS:
            continue  # the first label of a packed sequence is taken out on purpose
        restored = step.restore([leaf(m.inputs, key) for m in micros])
        assert torch.equal(restored, masked(leaf(batch, key), mask)), key
    assert torch.equal(step.restore([m.inputs["rewards"] for m in micros], span="row"), batch["rewards"])
    assert sorted(name for m in micros for name in m.inputs["uid"]) == sorted(batch["uid"])


@given(seeds, st.sampled_from(LAYOUTS), st.sampled_from([1, 2, 8]))
@settings(max_examples=60)
def test_no_micro_batch_computes_more_than_the_budget_and_the_figures_are_the_tensors_own(
    seed: int, layout: str, multiple: int
) -> None:
    rng, batch = draw_batch(seed, holes=False)
    budget = int(rng.integers(16, 40))
    step = regroup(batch, budget, layout=layout, multiple_of=multiple, fields=FIELDS)
    for micro in step:
        ids = micro.inputs["input_ids"]
        assert ids.numel() == micro.padded_tokens <= budget
        assert ids.shape[1] % multiple == 0
        assert int((micro.document_ids >= 0).sum()) == micro.real_tokens == int(micro.lengths.sum())
        assert micro.weight == 1.0
    assert sum(m.real_tokens for m in step) == int(span_of(batch["attention_mask"]).sum())


@given(seeds, st.sampled_from(LAYOUTS))
@settings(max_examples=60)
def test_what_lies_in_padding_never_reaches_a_micro_batch(seed: int, layout: str) -> None:
    _, batch = draw_batch(seed, holes=False)
    inside = span_of(batch["attention_mask"])
    spoiled = dict(batch, input_ids=batch["input_ids"].masked_fill(~inside, 59))
    spoiled["advantages"] = batch["advantages"].masked_fill(~inside, float("nan"))
    spoiled["labels"] = batch["labels"].masked_fill(~inside, 7)
    clean, dirty = (regroup(b, 40, layout=layout, fields=FIELDS) for b in (batch, spoiled))
    for a, b in zip(clean, dirty, strict=True):
        for key in ("input_ids", "advantages", "labels"):
            assert torch.equal(a.inputs[key], b.inputs[key]), key


@given(seeds)
def test_a_real_token_equal_to_the_fill_value_is_kept(seed: int) -> None:
    _, batch = draw_batch(seed)
    batch["input_ids"] = torch.zeros_like(batch["input_ids"])  # every token looks like padding
    lengths = span_of(batch["attention_mask"]).sum(1)
    got = np.concatenate([m.lengths for m in regroup(batch, 64, fields=FIELDS)])
    order = np.concatenate([m.indices for m in regroup(batch, 64, fields=FIELDS)])
    assert got[np.argsort(order)].tolist() == lengths.tolist()


@given(seeds, st.sampled_from(["sequence", "block"]), st.sampled_from(["padded", "packed"]))
@settings(max_examples=60)
def test_response_fields_land_at_their_rows_response_and_come_back(seed: int, responses: Any, layout: str) -> None:
    rng = np.random.default_rng(seed)
    prompt, response = int(rng.integers(1, 6)), int(rng.integers(1, 7))
    batch = rl_batch(rng, int(rng.integers(1, 7)), prompt, response)
    batch["responses"] = batch["input_ids"][:, prompt:]
    step = regroup(batch, 40, layout=layout, fields=rlhf(), responses=responses)
    for micro in step:
        inputs = micro.inputs
        if responses == "block" and layout == "padded":
            assert torch.equal(micro.take_responses(inputs["input_ids"]), inputs["responses"])
            assert inputs["response_mask"].shape[1] == max(1, int(inputs["response_mask"].sum(1).max()))
        else:
            held = inputs["response_mask"].bool()
            assert torch.equal(inputs["input_ids"][held], inputs["responses"][held])
    for key in ("old_log_probs", "advantages", "responses"):
        restored = step.restore([m.inputs[key] for m in step], span="response")
        assert torch.equal(restored, batch[key] * batch["response_mask"]), key


@given(seeds, st.sampled_from(["sequence", "block"]), st.sampled_from(["padded", "packed"]), st.booleans())
@settings(max_examples=60)
def test_responses_of_split_and_truncated_rows_come_back_too(
    seed: int, responses: Any, layout: str, split: bool
) -> None:
    rng = np.random.default_rng(seed)
    prompt, response = int(rng.integers(1, 6)), int(rng.integers(1, 9))
    batch = rl_batch(rng, int(rng.integers(1, 7)), prompt, response)
    policy = "split" if split else "truncate"
    step = regroup(batch, 5, layout=layout, fields=rlhf(), responses=responses, overlong=policy)
    kept = batch["response_mask"]
    if not split:
        kept = kept * (batch["attention_mask"].cumsum(1)[:, prompt:] <= 5)
    restored = step.restore([m.inputs["advantages"] for m in step], span="response")
    assert torch.equal(restored, batch["advantages"] * kept)


def test_a_rows_width_is_its_longest_prompt_and_response_together() -> None:
    batch = rl_batch(np.random.default_rng(0), 5, 7, 9)
    longest = int(batch["attention_mask"].sum(1).max())
    assert compact(batch, fields=rlhf()).batch["input_ids"].shape[1] == longest < 16


@given(seeds, st.sampled_from(["truncate", "split", "drop", "alone"]), st.sampled_from(["padded", "packed"]))
@settings(max_examples=60)
def test_what_the_overlong_policy_does_is_named_and_the_rest_comes_back(seed: int, policy: str, layout: str) -> None:
    if policy == "alone" and layout == "packed":
        return
    rng, batch = draw_batch(seed, holes=False)
    mask, budget = batch["attention_mask"], int(rng.integers(2, 8))
    step = regroup(batch, budget, layout=layout, overlong=policy, fields=FIELDS)
    restored = step.restore([m.inputs["input_ids"] for m in step])
    lengths = mask.sum(1).numpy()
    named = {"truncate": "truncated", "split": "split", "drop": "dropped", "alone": "alone"}[policy]
    assert getattr(step.plan, named).tolist() == np.flatnonzero(lengths > budget).tolist()
    expected = masked(batch["input_ids"], mask)
    place = mask.cumsum(1)
    if policy == "truncate":
        expected = expected.masked_fill(place > budget, 0)
    if policy == "drop":
        expected = expected.masked_fill(torch.from_numpy(lengths > budget)[:, None], 0)
    assert torch.equal(restored, expected)


@given(seeds, st.sampled_from([1, 2, 8]))
def test_compact_rolls_cuts_and_restores(seed: int, multiple: int) -> None:
    _, batch = draw_batch(seed)
    small = compact(batch, multiple_of=multiple, fields=FIELDS)
    mask = batch["attention_mask"]
    lengths = span_of(mask).sum(1)
    assert small.lengths.tolist() == lengths.tolist()
    assert small.batch["input_ids"].shape[1] == -(-int(lengths.max()) // multiple) * multiple
    assert (small.batch["attention_mask"][:, 0] == 1).all()
    assert small.batch["attention_mask"].sum() == mask.sum()
    for key in TOKEN_KEYS:
        assert torch.equal(small.restore(leaf(small.batch, key)), masked(leaf(batch, key), mask)), key


@given(seeds)
def test_a_tensordict_gives_what_a_dict_gives(seed: int) -> None:
    _, batch = draw_batch(seed)
    rows = len(batch["uid"])
    given_ = TensorDict({k: v for k, v in batch.items() if k != "uid"}, batch_size=[rows])
    given_["uid"] = NonTensorStack(*batch["uid"])
    given_.set_non_tensor("temperature", 0.7)
    plain, boxed = (regroup(b, 40, fields=FIELDS) for b in (batch, given_))
    for a, b in zip(plain, boxed, strict=True):
        assert isinstance(b.inputs, TensorDict)
        assert b.inputs.batch_size == torch.Size([len(a.indices)])
        for key in ("input_ids", "labels", "position_ids"):
            assert torch.equal(a.inputs[key], b.inputs[key])
        assert torch.equal(a.inputs["nested"]["half"], b.inputs["nested", "half"])
        assert b.inputs["uid"] == a.inputs["uid"]
        assert b.inputs["temperature"] == 0.7


def test_a_tensordict_can_be_packed() -> None:
    _, batch = draw_batch(4, holes=False)
    tensors = {key: batch[key] for key in ("input_ids", "attention_mask", "labels")}
    boxed = TensorDict(tensors, batch_size=[len(batch["uid"])])
    boxed["uid"] = NonTensorStack(*batch["uid"])
    step = regroup(boxed, 40, layout="packed")
    assert all(micro.inputs.batch_size == torch.Size([]) for micro in step)
    assert sorted(name for micro in step for name in micro.inputs["uid"]) == sorted(batch["uid"])
    restored = step.restore([micro.inputs["input_ids"] for micro in step])
    assert torch.equal(restored, masked(batch["input_ids"], batch["attention_mask"]))


def test_restored_outputs_carry_gradients() -> None:
    rng = np.random.default_rng(1)
    batch = token_batch(rng, random_mask(rng, 6, 9))
    batch["inputs_embeds"] = torch.randn(6, 9, 4, requires_grad=True)
    step = regroup(batch, 24, fields=FIELDS)
    weights = torch.randn(6, 9, 4)
    (step.restore([m.inputs["inputs_embeds"] for m in step]) * weights).sum().backward()
    assert torch.equal(batch["inputs_embeds"].grad, masked(weights, batch["attention_mask"]))


def test_micro_batches_can_be_made_again_and_by_number() -> None:
    _, batch = draw_batch(3)
    step = regroup(batch, 24, fields=FIELDS)
    first, second = list(step), list(step)
    assert len(step) == len(first)
    assert all(torch.equal(a.inputs["input_ids"], b.inputs["input_ids"]) for a, b in zip(first, second, strict=True))
    assert torch.equal(step[-1].inputs["input_ids"], first[-1].inputs["input_ids"])
    with pytest.raises(IndexError):
        step[len(step)]


def test_fields_with_masks_of_their_own_are_padded_apart() -> None:
    rng = np.random.default_rng(2)
    batch: dict[str, Any] = {}
    for side, width in (("chosen", 9), ("rejected", 6)):
        mask = random_mask(rng, 5, width)
        part = token_batch(rng, mask)
        batch |= {f"{side}_{key}": part[key] for key in ("input_ids", "attention_mask", "labels")}
    step = regroup(batch, 40, fields=preference())
    for micro in step:
        assert micro.lengths.shape == (len(micro.indices), 2)
        sizes = [micro.inputs[f"{side}_input_ids"].numel() for side in ("chosen", "rejected")]
        assert sum(sizes) == micro.padded_tokens <= 40
    for side in ("chosen", "rejected"):
        restored = step.restore([m.inputs[f"{side}_input_ids"] for m in step], mask=f"{side}_attention_mask")
        assert torch.equal(restored, masked(batch[f"{side}_input_ids"], batch[f"{side}_attention_mask"]))
    with pytest.raises(PadlessError, match="several masks"):
        step.restore([m.inputs["chosen_input_ids"] for m in step])
    with pytest.raises(PadlessError, match="several masks"):
        regroup(batch, 40, layout="packed", fields=preference())
    nested = {
        side: {k: batch[f"{side}_{k}"] for k in ("input_ids", "attention_mask")} for side in ("chosen", "rejected")
    }
    assert [m.indices.tolist() for m in regroup(nested, 40)] == [m.indices.tolist() for m in step]


def test_decoder_labels_follow_the_decoders_mask() -> None:
    batch = {
        "input_ids": torch.arange(12).view(2, 6),
        "attention_mask": torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 0, 0, 0, 0]]),
        "labels": torch.tensor([[1, 2, -100], [3, -100, -100]]),
        "decoder_attention_mask": torch.tensor([[1, 1, 0], [1, 0, 0]]),
    }
    (micro,) = regroup(batch, 100, fields=seq2seq())
    assert micro.inputs["labels"].shape == (2, 2)
    with pytest.raises(PadlessError, match="decoder_attention_mask"):
        regroup({k: v for k, v in batch.items() if k != "decoder_attention_mask"}, 100, fields=seq2seq())


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"mystery": torch.zeros(2, 4)}, "'mystery' of shape"),
        ({"mystery": torch.zeros(2)}, "'mystery' of shape"),
        ({"labels": torch.zeros(2, 3)}, "'labels' has shape"),
        ({"labels": torch.zeros(3, 4)}, "'labels' has shape"),
        ({"labels": [[1, 2], [3]]}, "'labels' is a list"),
        ({"position_ids": torch.zeros(3, 2, 4)}, "'position_ids' has shape"),
        ({"position_ids": torch.zeros(2, 4, 3)}, "'position_ids' has shape"),
        ({"rewards": torch.zeros(3)}, "'rewards' has 3 entries"),
        ({"uid": ["a"]}, "'uid' has 1 entries"),
        ({"attention_mask": torch.zeros(2, 1, 4, 4)}, "attention_mask is shape"),
        ({"attention_mask": torch.tensor([[0.0, -1e9, 0, 0], [0, 0, 0, 0]])}, "additive"),
        ({"attention_mask": torch.tensor([[1, 1, 0, 0], [0, 0, 0, 0]])}, r"lengths\[1\] is 0"),
        ({"attention_mask": None}, "attention_mask"),
        ({"a.b": torch.zeros(2)}, "without a dot"),
    ],
)
def test_a_batch_that_cannot_be_read_is_refused_by_key(change: dict[str, Any], named: str) -> None:
    batch = {"input_ids": torch.ones(2, 4, dtype=torch.long), "attention_mask": torch.ones(2, 4, dtype=torch.long)}
    with pytest.raises(PadlessError, match=named):
        regroup(batch | change, 8)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"token_budget": 3}, "4"),
        ({"token_budget": None}, "token_budget is missing"),
        ({"token_budget": 0}, "token_budget=0"),
        ({"layout": "diagonal"}, "layout='diagonal' is unknown"),
        ({"layout": "auto"}, "report="),
        ({"method": "clever"}, "method='clever' is unknown"),
        ({"responses": "beside"}, "responses='beside' is unknown"),
        ({"exchange": "maybe"}, "exchange='maybe' is unknown"),
        ({"sequence_multiple_of": 2}, "sequence_multiple_of"),
        ({"layout": "packed", "max_sequences": 2}, "max_sequences"),
        ({"plan": padless.microbatch([3, 4], 8)}, "other lengths"),
        ({"plan": padless.pack([4, 4], 8)}, "layout is 'packed'"),
        ({"plan": padless.microbatch([4, 4], 8, ranks=2)}, "2 ranks"),
        ({"atoms": [1]}, "atoms"),
    ],
)
def test_an_option_that_cannot_be_met_is_refused(options: dict[str, Any], named: str) -> None:
    batch = {"input_ids": torch.ones(2, 4, dtype=torch.long), "attention_mask": torch.ones(2, 4, dtype=torch.long)}
    with pytest.raises(PadlessError, match=named):
        regroup(batch, **{"token_budget": 8, **options})


def test_a_batch_without_a_mask_is_refused_even_where_ids_look_padded() -> None:
    with pytest.raises(PadlessError, match="no attention_mask"):
        regroup({"input_ids": torch.tensor([[5, 0]])}, 8)
    with pytest.raises(PadlessError, match="no rows"):
        regroup({"input_ids": torch.zeros(0, 3), "attention_mask": torch.zeros(0, 3)}, 8)
    with pytest.raises(PadlessError, match="expected a dict"):
        regroup(torch.zeros(2, 2), 8)


def test_outputs_that_do_not_fit_are_refused() -> None:
    _, batch = draw_batch(5)
    step = regroup(batch, 24, fields=FIELDS)
    outputs = [m.inputs["input_ids"] for m in step]
    with pytest.raises(PadlessError, match="outputs for"):
        step.restore([*outputs, outputs[0]])
    with pytest.raises(PadlessError, match="expected"):
        step.restore([output[:, :-1] for output in outputs])
    with pytest.raises(PadlessError, match="no field of span 'response'"):
        step.restore(outputs, span="response")
    with pytest.raises(PadlessError, match="span='rows' is unknown"):
        step.restore(outputs, span="rows")


def test_packed_rows_without_a_mask_refuse_holes_and_block_masks_keep_them() -> None:
    batch = {"input_ids": torch.tensor([[4, 5, 6], [7, 8, 9]]), "attention_mask": torch.tensor([[1, 1, 1], [1, 0, 1]])}
    with pytest.raises(PadlessError, match="row 1 has zeros between its real tokens"):
        regroup(batch, 8, layout="packed")
    (micro,) = regroup(batch, 8, layout="packed-block-mask-bool")
    hole = micro.inputs["input_ids"][0].tolist().index(8)
    seen = micro.inputs["attention_mask"][0, 0, :, hole]
    assert not seen.any()
    (micro,) = regroup(batch, 8, layout="right-padded-no-mask")
    assert "attention_mask" in micro.inputs  # a hole needs its mask


def test_pad_values_of_every_kind_of_field() -> None:
    batch = {
        "input_ids": torch.tensor([[1, 2, 3], [4, 0, 0]]),
        "attention_mask": torch.tensor([[1, 1, 1], [1, 0, 0]]),
        "labels": torch.tensor([[1, 2, 3], [4, 5, 6]]),
        "position_ids": torch.tensor([[5, 6, 7], [5, 9, 9]]),
    }
    (micro,) = regroup(batch, 8, multiple_of=4, fields=causal_lm() | {"input_ids": Field(pad=33)})
    assert micro.inputs["input_ids"].tolist() == [[1, 2, 3, 33], [4, 33, 33, 33]]
    assert micro.inputs["labels"].tolist() == [[1, 2, 3, -100], [4, -100, -100, -100]]
    assert micro.inputs["position_ids"].tolist() == [[5, 6, 7, 8], [5, 6, 7, 8]]


def test_widths_stay_on_a_ladder_for_compiled_models() -> None:
    rng = np.random.default_rng(0)
    batch = token_batch(rng, random_mask(rng, 40, 30))
    for ladder in (2, [8, 16, 30]):
        widths = {m.inputs["input_ids"].shape[1] for m in regroup(batch, 90, fields=FIELDS, ladder=ladder)}
        assert len(widths) <= (ladder if isinstance(ladder, int) else 3)
        assert isinstance(ladder, int) or widths <= set(ladder)
    with pytest.raises(PadlessError, match="ladder"):
        regroup({k: batch[k] for k in ("input_ids", "attention_mask")}, 90, layout="packed-block-mask-bool", ladder=2)


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int32, torch.float32, torch.bfloat16])
def test_masks_of_any_dtype_are_read_alike(dtype: torch.dtype) -> None:
    _, batch = draw_batch(11)
    expected = [m.indices.tolist() for m in regroup(batch, 40, fields=FIELDS)]
    batch["attention_mask"] = batch["attention_mask"].to(dtype)
    step = regroup(batch, 40, fields=FIELDS)
    assert [m.indices.tolist() for m in step] == expected
    assert all(m.inputs["attention_mask"].dtype == dtype for m in step)


def test_the_order_of_keys_changes_nothing() -> None:
    _, batch = draw_batch(12)
    turned = dict(reversed(batch.items()))
    for a, b in zip(regroup(batch, 40, fields=FIELDS), regroup(turned, 40, fields=FIELDS), strict=True):
        assert a.indices.tolist() == b.indices.tolist()
        assert torch.equal(a.inputs["labels"], b.inputs["labels"])


@given(seeds)
def test_positions_of_packed_rows_restart_with_every_piece_whatever_they_were(seed: int) -> None:
    _, batch = draw_batch(seed, holes=False)
    batch["position_ids"] = batch["position_ids"] + 2
    for micro in regroup(batch, 6, layout="packed", overlong="split", fields=FIELDS):
        assert micro.boundaries is not None
        assert torch.equal(micro.inputs["position_ids"], micro.boundaries.position_ids + 2)


def test_positions_that_begin_differently_cannot_be_packed() -> None:
    """The second row would go on exactly where the first one ends."""
    batch = {
        "input_ids": torch.tensor([[1, 2, 3], [4, 5, 6]]),
        "attention_mask": torch.ones(2, 3, dtype=torch.long),
        "position_ids": torch.tensor([[0, 1, 2], [3, 4, 5]]),
    }
    with pytest.raises(PadlessError, match="'position_ids' begins at 3 in row 1 and at 0 in row 0"):
        regroup(batch, 8, layout="packed")
    assert len(regroup(batch, 8)) == 1  # padded rows may


class Verdicts:
    """A layout report as regroup sees it."""

    def __init__(self, best: str | None, *allowed: str) -> None:
        self.best, self.allowed = best, allowed

    def allows(self, layout: str) -> bool:
        return layout in self.allowed

    def explain(self, layout: str | None = None) -> str:
        return "packed-position-ids leaks: 0.3 between sequences."


def test_auto_takes_the_reports_best_and_a_leaking_layout_needs_unsafe() -> None:
    batch = {"input_ids": torch.ones(2, 4, dtype=torch.long), "attention_mask": torch.ones(2, 4, dtype=torch.long)}
    leaky = Verdicts("right-padded-no-mask", "right-padded", "right-padded-no-mask")
    assert regroup(batch, 8, layout="auto", report=leaky).layout == "right-padded-no-mask"
    left = Verdicts("left-padded", "left-padded", "right-padded")
    assert regroup(batch, 8, layout="auto", report=left).layout == "right-padded"
    with pytest.raises(PadlessError, match="no layout is known to be exact"):
        regroup(batch, 8, layout="auto", report=Verdicts(None))
    assert regroup(batch, 8, layout="auto", report=Verdicts(None), unsafe=True).unsafe
    with pytest.raises(PadlessError, match=r"leaks: 0\.3 between sequences"):
        regroup(batch, 8, layout="packed", report=leaky)
    forced = regroup(batch, 8, layout="packed", report=leaky, unsafe=True)
    assert forced.unsafe
    assert not regroup(batch, 8, layout="padded", report=leaky, unsafe=True).unsafe
    assert "unsafe" in repr(forced)


def test_rows_that_come_one_by_one_are_regrouped_without_ever_being_padded() -> None:
    rows = [{"input_ids": list(range(1, n + 1)), "labels": list(range(1, n + 1))} for n in (3, 1, 4)]
    step = regroup(rows, 4)
    assert [m.inputs["input_ids"].tolist() for m in step] == [[[1, 2, 3, 4]], [[1, 2, 3]], [[1]]]
    assert step.restore([m.inputs["input_ids"] for m in step]).tolist() == [[1, 2, 3, 0], [1, 0, 0, 0], [1, 2, 3, 4]]
