"""Reported failures of loss normalisation, as tests."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from padless import accumulate
from padless.loss import Denominators, aggregate, denominators
from padless.windows import count_windows, windows
from support.forked import run_forked


def test_c01_micro_batches_of_unequal_size_give_the_token_mean() -> None:
    """torchtune#1875, mlx-lm#1413, OpenNMT-py#2209."""
    micros = [torch.tensor([[4.0]]), torch.tensor([[1.0, 1.0, 1.0]])]
    step = denominators([torch.ones_like(m) for m in micros])
    loss = sum(aggregate(m, torch.ones_like(m), denominators=step) for m in micros)
    assert float(loss) == 1.75
    assert float(torch.stack([m.mean() for m in micros]).mean()) == 2.5  # what went wrong


def test_c02_ranks_with_different_token_counts_average_to_the_token_mean() -> None:
    """transformers#34242, transformers#39395."""
    rank_values = [torch.full((1, 2), 3.0), torch.full((1, 6), 1.0)]
    step = Denominators(targets=8, sequences=2, ranks=2)
    scaled = [float(aggregate(v, torch.ones_like(v), denominators=step)) for v in rank_values]
    assert scaled == [1.5, 1.5]
    assert sum(scaled) / 2 == 1.5


def test_c04_a_short_last_window_uses_its_own_denominator() -> None:
    """pytorch-lightning#19987, transformers#39659, ms-swift#10084, LLaMA-Factory#10705."""
    model = nn.Linear(1, 1, bias=False)
    gradients, losses = [], []
    for window in windows([torch.ones(10, 1)] * 6, tokens=40, size=lambda rows: (len(rows), 1)):
        step = Denominators(targets=window.tokens, sequences=window.examples)
        run = accumulate(window.items, model)
        model.zero_grad()
        for rows in run:
            values = (model(rows)[:, 0] / model.weight[0, 0].detach())[None]  # every token's loss is 1
            run.backward(aggregate(values, torch.ones(1, 10), denominators=step))
        losses.append(float(run.loss))
        gradients.append(model.weight.grad.clone())
    assert losses == pytest.approx([1.0, 1.0])
    assert torch.allclose(gradients[0], gradients[1])


def test_c05_a_micro_batch_without_targets_adds_exactly_nothing() -> None:
    """Automodel#3796, OLMo-core#657, bergson#461, nanochat#623."""
    values = [torch.full((1, 5), float("nan"), requires_grad=True), torch.full((1, 5), 2.0, requires_grad=True)]
    masks = [torch.zeros(1, 5), torch.ones(1, 5)]
    step = denominators(masks)
    parts = [aggregate(v, m, denominators=step) for v, m in zip(values, masks, strict=True)]
    sum(parts).backward()
    assert [part.item() for part in parts] == [0.0, 2.0]
    assert all(torch.isfinite(v.grad).all() for v in values)
    empty = denominators([masks[0], masks[0]])
    assert empty == Denominators(targets=0, sequences=0)
    assert aggregate(values[0], masks[0], denominators=empty).item() == 0.0


@pytest.mark.parametrize("split", [[[0, 1, 2, 3]], [[0, 3], [1, 2]], [[3], [0, 1, 2]]])
def test_c06_fully_masked_samples_leave_the_mean(split: list[list[int]]) -> None:
    """NVIDIA-NeMo/RL#212."""
    values, mask = torch.tensor([[2.0], [4.0], [6.0], [99.0]]), torch.tensor([[1], [1], [1], [0]])
    step = denominators(mask)
    for mode in ("seq-mean-token-sum", "seq-mean-token-mean"):
        loss = sum(aggregate(values[rows], mask[rows], mode, denominators=step) for rows in split)
        assert float(loss) == pytest.approx(4.0)


def test_c08_a_skipped_micro_step_leaves_the_denominator() -> None:
    """prime-rl#1961."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    inputs = [torch.full((1, 3, 1), 2.0), torch.full((1, 3, 1), float("nan"))]
    step = Denominators(targets=6, sequences=2)
    run = accumulate(inputs, model, optimizer, denominators=step, skip_nonfinite=True)
    for rows in run:
        mask = torch.ones(1, 3)
        used = run.backward(aggregate(model(rows)[..., 0], mask, denominators=step), targets=denominators(mask))
        assert used == bool(torch.isfinite(rows).all())
    assert run.skipped == 1
    assert float(run.loss) == pytest.approx(2.0)  # 6 over the 3 tokens that are left, not over 6
    assert model.weight.item() == pytest.approx(1.0 - 2.0)


def test_c09_an_epoch_ends_without_entering_a_collective_for_an_empty_window() -> None:
    """transformers#35387."""
    assert count_windows([2, 2], 2) == 2  # 4 rows on 2 ranks, 1 each: 2 optimizer steps in an epoch
    assert run_forked("support.rank_loss", "two_epochs_of_windows", 2, seconds=60) == [4, 4]


def test_c10_windows_reach_a_token_or_example_target() -> None:
    """Megatron-Bridge#3432, LLaVA-OneVision-2#59, LLaMA-Factory#2299."""
    by_tokens = list(windows([40, 50, 30, 60, 20], tokens=100, size=lambda n: (n, 0)))
    assert [w.items for w in by_tokens] == [[40, 50, 30], [60, 20]]
    assert [w.tokens for w in by_tokens] == [120, 80]
    assert [w.complete for w in by_tokens] == [True, False]
    by_examples = list(windows([5, 4, 3, 6], examples=8, size=lambda n: (0, n)))
    assert [w.items for w in by_examples] == [[5, 4], [3, 6]]
    assert [w.examples for w in by_examples] == [9, 9]
    shortened = windows([40, 50, 30, 60, 20], tokens=100, size=lambda n: (n, 0), tail="drop")
    assert len(list(shortened)) == 1
    assert shortened.dropped == [60, 20]
