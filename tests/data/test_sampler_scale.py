"""Millions of lengths: built at once, planned lazily, in little memory, on any number of ranks."""

from __future__ import annotations

import time
import tracemalloc

import numpy as np
import pytest

from padless.data import TokenBudgetSampler
from support.lengths import measured_lengths

BUDGET = 16_384


def many(count: int) -> np.ndarray:
    lengths = measured_lengths("mix_sft_general").astype(np.int32)
    return lengths[np.random.default_rng(0).integers(0, len(lengths), count)]


def build(lengths: np.ndarray, ranks: int = 8, grouping: str = "step") -> TokenBudgetSampler:
    return TokenBudgetSampler(
        lengths, token_budget=BUDGET, sequences_per_step=256, ranks=ranks, rank=0, grouping=grouping, method="lean"
    )


@pytest.mark.parametrize("grouping", ["step", "pool", "range"])
def test_a_sampler_of_two_million_lengths_starts_at_once_in_little_memory(grouping: str) -> None:
    lengths = many(2_000_000)
    next(iter(build(lengths[:50_000], grouping=grouping)))  # compile
    began = time.process_time()
    next(iter(build(lengths, grouping=grouping)))
    assert time.process_time() - began < 1.0
    tracemalloc.start()
    next(iter(build(lengths, grouping=grouping)))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak <= 3 * lengths.nbytes, "with the lengths themselves: 4 times"


def test_the_time_of_a_step_does_not_grow_with_the_ranks() -> None:
    lengths = many(320_000)

    def seconds_per_step(ranks: int) -> float:
        batches = iter(build(lengths, ranks))
        best, last = np.inf, 128
        for batch in batches:  # past the first steps, which are planned in smaller numbers
            if batch.step == last:
                break
        for _ in range(4):
            began, last = time.process_time(), last + 256  # whole numbers of what is planned at once
            for batch in batches:
                if batch.step == last:
                    break
            best = min(best, (time.process_time() - began) / 256)
        return best

    few, many_ranks = seconds_per_step(8), seconds_per_step(128)
    assert many_ranks < 3 * few


def test_occupancy_and_order_on_real_lengths() -> None:
    lengths = measured_lengths("mix_sft_general")
    told, epochs = {}, 8
    for grouping in ("pool", "range", "none"):
        sampler = TokenBudgetSampler(
            lengths, token_budget=BUDGET, sequences_per_step=256, ranks=8, rank=0, grouping=grouping, method="lean"
        )
        for _ in range(epochs):  # a correlation of few micro-batches would be noise
            list(sampler)
        told[grouping] = sampler.diagnostics
    for grouping in ("pool", "range"):
        assert told[grouping].occupancy >= 0.97
        assert abs(told[grouping].neighbour_correlation) <= 0.15
        assert told[grouping].step_size_spread < told["none"].step_size_spread
        assert told[grouping].sequences == epochs * len(lengths)


def test_only_the_widths_of_the_ladder_are_counted() -> None:
    lengths = np.random.default_rng(0).integers(1, 500, 600)
    ladder = [128, 256, 512]
    sampler = TokenBudgetSampler(lengths, token_budget=4096, sequences_per_step=64, ladder=ladder)
    padded = sum(len(b) * next(w for w in ladder if w >= b.lengths.max()) for b in sampler)
    assert sampler.diagnostics.padded_tokens == padded
