"""Laws of the loss: no split and no number of ranks changes it; nothing to train on gives 0; masked NaN stays out."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from padless import PadlessError
from padless.loss import (
    MODES,
    Denominators,
    aggregate,
    denominators,
    router_load,
    router_loss,
    shift_labels,
    target_mask,
)

seeds = st.integers(0, 1 << 30)


def by_hand(values: np.ndarray, mask: np.ndarray, mode: str) -> float:
    sums, counts = (values * mask).sum(1), mask.sum(1)
    kept = counts > 0
    if not kept.any():
        return 0.0
    if mode == "token-mean":
        return float(sums.sum() / counts.sum())
    if mode == "seq-mean-token-mean":
        return float((sums[kept] / counts[kept]).mean())
    return float(sums[kept].mean() / (5.0 if mode.endswith("norm") else 1.0))


def draw(seed: int) -> tuple[np.random.Generator, Tensor, Tensor]:
    rng = np.random.default_rng(seed)
    shape = (int(rng.integers(1, 8)), int(rng.integers(1, 9)))
    values = torch.from_numpy(rng.normal(size=shape))
    mask = torch.from_numpy((rng.random(shape) < rng.random()).astype(np.int64))
    return rng, values, mask


@given(seeds, st.sampled_from(MODES), st.integers(1, 4))
@settings(max_examples=100)
def test_parts_over_any_split_and_ranks_add_up_to_the_definition(seed: int, mode: Any, ranks: int) -> None:
    rng, values, mask = draw(seed)
    step = denominators(mask)
    step = Denominators(targets=step.targets, sequences=step.sequences, ranks=ranks)
    rank_of = rng.integers(0, ranks, len(values))
    norm = 5.0 if mode.endswith("norm") else None
    losses = []
    for rank in range(ranks):
        own = np.flatnonzero(rank_of == rank)
        pieces = np.split(own, np.sort(rng.integers(0, len(own) + 1, 2)))
        parts = [aggregate(values[p], mask[p], mode, denominators=step, norm=norm) for p in pieces]
        losses.append(float(sum(parts)))
    expected = by_hand(values.numpy(), mask.numpy(), mode)
    assert np.mean(losses) == pytest.approx(expected, abs=1e-12)  # gradients are averaged over ranks, so losses are
    assert float(aggregate(values, mask, mode, norm=norm)) == pytest.approx(expected, abs=1e-12)


@given(seeds, st.sampled_from(MODES))
@settings(max_examples=60)
def test_packed_rows_give_what_padded_rows_give(seed: int, mode: Any) -> None:
    rng, values, mask = draw(seed)
    rows, width = values.shape
    lengths = rng.integers(1, width + 1, rows)
    inside = torch.arange(width) < torch.from_numpy(lengths)[:, None]
    mask = mask * inside
    ids = torch.arange(rows)[:, None].expand(rows, width)
    tail = torch.full((2,), -1)
    packed = [torch.cat([part[inside], tail.to(part)])[None] for part in (values, mask, ids)]
    norm = 5.0 if mode.endswith("norm") else None
    got = aggregate(packed[0], packed[1].clamp(min=0), mode, document_ids=packed[2], norm=norm)
    assert float(got) == pytest.approx(by_hand(values.numpy(), mask.numpy(), mode), abs=1e-12)
    assert denominators(packed[1].clamp(min=0), document_ids=packed[2]) == denominators(mask)
    # Two packed rows that number their documents on their own.
    cut = rows // 2
    halves = [torch.full((2, rows * width), -1) for _ in range(3)]
    halves = [half.to(part) for half, part in zip(halves, (values, mask, ids), strict=True)]
    for row, group in enumerate((slice(0, cut), slice(cut, rows))):
        for half, part in zip(halves, (values, mask, ids), strict=True):
            held = part[group][inside[group]]
            half[row, : len(held)] = held if part is not ids else held - (cut if row else 0)
    wanted = halves[1].clamp(min=0)
    assert float(aggregate(halves[0], wanted, mode, document_ids=halves[2], norm=norm)) == pytest.approx(float(got))


def test_a_split_sequence_keeps_its_mean_when_told_its_targets() -> None:
    values, mask = torch.tensor([[1.0, 2.0, 6.0], [4.0, 0.0, 0.0]]), torch.tensor([[1, 1, 1], [1, 0, 0]])
    step = denominators(mask)
    whole = aggregate(values, mask, "seq-mean-token-mean", denominators=step)
    pieces = [(values[:, :2], mask[:, :2]), (values[:1, 2:], mask[:1, 2:])]
    counts = [torch.tensor([3.0, 1.0]), torch.tensor([3.0])]
    parts = [
        aggregate(v, m, "seq-mean-token-mean", denominators=step, targets_per_sequence=n)
        for (v, m), n in zip(pieces, counts, strict=True)
    ]
    assert float(sum(parts)) == pytest.approx(float(whole))


@pytest.mark.parametrize("mode", MODES)
def test_a_step_without_targets_gives_zero_and_zero_gradients(mode: Any) -> None:
    values = torch.full((2, 3), float("nan"), requires_grad=True)
    norm = 5.0 if mode.endswith("norm") else None
    loss = aggregate(values, torch.zeros(2, 3), mode, norm=norm)
    loss.backward()
    assert loss.item() == 0.0
    assert torch.equal(values.grad, torch.zeros(2, 3))


def test_what_is_masked_may_hold_anything() -> None:
    values = torch.tensor([[1.0, float("inf"), float("nan")]], requires_grad=True)
    loss = aggregate(values, torch.tensor([[True, False, False]]))
    loss.backward()
    assert loss.item() == 1.0
    assert values.grad.tolist() == [[1.0, 0.0, 0.0]]


def test_half_precision_is_summed_in_float32() -> None:
    values = torch.ones(1, 4096, dtype=torch.bfloat16)
    loss = aggregate(values, torch.ones(1, 4096))
    assert loss.dtype == torch.float32
    assert loss.item() == 1.0


def test_weights_count_as_they_weigh() -> None:
    values, weights = torch.tensor([[2.0, 4.0]]), torch.tensor([[0.5, 1.5]])
    assert denominators(weights) == Denominators(targets=2, sequences=1)
    assert aggregate(values, weights).item() == pytest.approx(3.5)


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: aggregate(torch.ones(1, 2), torch.ones(1, 3)), "the mask"),
        (lambda: aggregate(torch.ones(1, 2), torch.ones(1, 2), "mean"), "mode='mean' is unknown"),
        (lambda: aggregate(torch.ones(1, 2), torch.ones(1, 2), "seq-mean-token-sum-norm"), "norm"),
        (lambda: aggregate(torch.ones(1, 2), torch.ones(1, 2), norm=3.0), "norm"),
        (
            lambda: aggregate(torch.ones(1, 2), torch.ones(1, 2), MODES[1], document_ids=torch.ones(2, 1)),
            "document_ids",
        ),
        (lambda: denominators([torch.ones(1, 2)], document_ids=[]), "document_ids"),
        (lambda: Denominators(targets=1, sequences=1) + Denominators(targets=1, sequences=1, ranks=2), "ranks"),
        (lambda: router_loss([torch.ones(1, 2)], torch.ones(1, 1), top_k=1), "load="),
    ],
)
def test_what_does_not_fit_is_refused(call: Any, named: str) -> None:
    with pytest.raises(PadlessError, match=named):
        call()


@given(seeds)
def test_targets_are_counted_after_the_shift_on_whichever_side_padding_lies(seed: int) -> None:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 7, 4)
    labels = [torch.from_numpy(rng.integers(-1, 9, n)) for n in lengths]
    labels = [torch.where(part < 0, -100, part) for part in labels]
    expected = sum(int((part[1:] != -100).sum()) for part in labels)
    right = torch.stack([torch.nn.functional.pad(part, (0, 8 - len(part)), value=5) for part in labels])
    left = torch.stack([torch.nn.functional.pad(part, (8 - len(part), 0), value=5) for part in labels])
    column = torch.arange(8)
    size = torch.from_numpy(lengths)[:, None]
    assert int(target_mask(right, (column < size).long()).sum()) == expected
    assert int(target_mask(left, (column >= 8 - size).long()).sum()) == expected
    packed, ids = torch.cat(labels)[None], torch.repeat_interleave(torch.arange(4), size[:, 0])[None]
    assert int(target_mask(packed, document_ids=ids).sum()) == expected
    assert int((shift_labels(packed, document_ids=ids) != -100).sum()) == expected


def test_the_router_loss_of_a_whole_step_is_transformers_own_and_exact_under_regrouping() -> None:
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    torch.manual_seed(0)
    rows, width, experts, top_k = 6, 5, 4, 2
    logits = [torch.randn(rows, width, experts, requires_grad=True) for _ in range(3)]
    mask = torch.arange(width) < torch.tensor([5, 2, 3, 1, 4, 5])[:, None]
    flat = tuple(layer.reshape(-1, experts) for layer in logits)
    reference = load_balancing_loss_func(flat, experts, top_k, mask.long())
    expected = torch.autograd.grad(reference, logits)
    groups = [[0, 3], [1], [2, 4, 5]]
    pieces = [([layer[group] for layer in logits], mask[group]) for group in groups]
    loads = [router_load(part, held, top_k=top_k) for part, held in pieces]
    load = loads[0] + loads[1] + loads[2]
    parts = [router_loss(part, held, top_k=top_k, load=load) for part, held in pieces]
    total = parts[0] + parts[1] + parts[2]
    torch.testing.assert_close(total, reference)
    for got, right in zip(torch.autograd.grad(total, logits), expected, strict=True):
        torch.testing.assert_close(got, right)
    whole = router_loss(logits, mask, top_k=top_k, tokens=float(mask.sum()))
    torch.testing.assert_close(whole, reference)
    own = sum(router_loss(part, held, top_k=top_k, tokens=float(mask.sum())) for part, held in pieces)
    assert (own - reference).abs().item() > 1e-3  # each micro-batch's own product of means is another loss
