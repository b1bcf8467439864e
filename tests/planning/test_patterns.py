"""Packs by patterns: the least mix against an enumeration, and what it saves at capacities that best-fit wastes."""

from __future__ import annotations

import math
import time
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from laws import check_plan_laws
from padless import pack
from padless.planning import pattern_kernels
from padless.planning.optimal import CLOSE, _least_mix
from support.lengths import data_folder

Lengths = npt.NDArray[np.int64]


def every_pattern(sizes: list[int], room: int) -> list[list[int]]:
    """All mixes of sizes within the room, by enumeration."""
    if not sizes:
        return [[]]
    return [
        [count, *rest]
        for count in range(room // sizes[0] + 1)
        for rest in every_pattern(sizes[1:], room - count * sizes[0])
    ]


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(st.integers(3, 30), st.integers(1, 500), min_size=1, max_size=6), st.integers(30, 60))
def test_the_mix_is_the_least_of_all_patterns(counts: dict[int, int], room: int) -> None:
    linprog = pytest.importorskip("scipy.optimize").linprog
    sizes = np.array(sorted(counts))
    number = np.array([counts[size] for size in sizes.tolist()])
    patterns, times, bound = _least_mix(sizes, number, room, 10**9, math.inf, close=1e-7)
    assert (patterns[times > 0] @ sizes <= room).all()
    assert (times @ patterns >= number - 1e-6).all()
    every = np.array(every_pattern(sizes.tolist(), room))
    least = linprog(np.ones(len(every)), A_ub=-every.T, b_ub=-number).fun
    assert times.sum() == pytest.approx(least, rel=1e-6)
    assert bound == pytest.approx(least, rel=1e-6)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 400_000))
def test_a_mix_that_is_not_finished_still_bounds_the_packs(seed: int, work: int) -> None:
    rng = np.random.default_rng(seed)
    sizes = np.unique(rng.integers(40, 500, 40))
    number = rng.integers(1, 100, len(sizes))
    _, times, bound = _least_mix(sizes, number, 1000, work, math.inf, close=1e-7)
    _, least, proven = _least_mix(sizes, number, 1000, 10**10, math.inf, close=1e-7)
    assert bound <= least.sum() * (1 + 1e-6) <= times.sum() * (1 + 2e-6)
    assert proven == pytest.approx(least.sum(), rel=1e-5)


def test_rounding_errors_of_many_pivots_are_cleared() -> None:
    rng = np.random.default_rng(0)
    sizes = np.unique(rng.integers(700, 4000, 60))
    number = rng.integers(1, 900, len(sizes))
    patterns, times, bound = _least_mix(sizes, number, 8192, 10**10, math.inf, close=1e-7)
    assert np.allclose(times @ patterns, np.maximum(number, times @ patterns), rtol=1e-9)
    assert times.sum() == pytest.approx(bound, rel=1e-6)


def articles(count: int, spread: float, capacity: int = 8192) -> Lengths:
    """Lengths of the wikitext articles, or alike, each drawn many times; those that fit."""
    folder = data_folder()
    if folder is None:
        kinds = np.random.default_rng(1).lognormal(np.log(3200), 0.45, 122).clip(50, 24_000).astype(np.int64)
    else:
        import gzip
        import json

        with gzip.open(folder / "wikitext2_articles.jsonl.gz") as file:
            kinds = np.array([len(json.loads(line)["text"]) // 4 for line in file])
    rng = np.random.default_rng(0)
    drawn = rng.choice(kinds, size=count) * np.exp(rng.normal(0, spread, count))
    lengths: Lengths = drawn.astype(np.int64).clip(1)
    return lengths[lengths <= capacity]


@pytest.mark.parametrize("spread", [0.0, 0.1])
def test_long_documents_fill_packs_of_8k_to_995_or_as_far_as_is_proven(spread: float) -> None:
    lengths = articles(30_000, spread)
    plan = pack(lengths, 8192, method="auto")
    check_plan_laws(plan)
    best_fit = pack(lengths, 8192)
    assert len(plan) < len(best_fit)
    assert plan.efficiency >= 0.995 or len(plan) <= plan.lower_bound * 1.001
    assert plan.efficiency > best_fit.efficiency + 0.002


@pytest.mark.parametrize("capacity", [4096, 16_384, 32_768, 131_072])
def test_narrow_lengths_are_packed_well_at_any_capacity(capacity: int) -> None:
    draw = np.random.default_rng(0).normal(0.22 * capacity, 0.033 * capacity, 5_000)
    lengths = draw.clip(1, capacity).astype(np.int64)
    plan = pack(lengths, capacity, method="auto")
    check_plan_laws(plan)
    assert plan.efficiency > 0.99
    assert pack(lengths, capacity).efficiency < 0.97


def test_auto_is_best_fit_where_that_is_near_the_bound() -> None:
    lengths = np.random.default_rng(0).lognormal(np.log(700), 1.4, 50_000).clip(10, 8192).astype(np.int64)
    best_fit = pack(lengths, 8192)
    assert len(best_fit) <= best_fit.lower_bound * (1 + CLOSE)
    plan = pack(lengths, 8192, method="auto")
    assert plan.order.tolist() == best_fit.order.tolist()


def test_auto_does_not_look_at_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = articles(3_000, 0.1)
    plan = pack(lengths, 8192, method="auto")
    clock = iter(range(0, 10**9, 10**6))
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    assert pack(lengths, 8192, method="auto", time_limit=1e-3) == plan
    assert pack(lengths, 8192, method="optimal", time_limit=math.inf) == pack(
        lengths, 8192, method="optimal", time_limit=math.inf
    )


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 300), min_size=1, max_size=300), st.integers(300, 700), st.integers(1, 40))
def test_any_lengths_are_packed_within_the_capacity_whatever_the_unit(
    lengths: list[int], capacity: int, unit: int
) -> None:
    for options in ({"method": "auto"}, {"method": "auto", "coarsen": unit}, {"method": "optimal", "coarsen": unit}):
        made: Any = options
        plan = pack(lengths, capacity, **made)
        check_plan_laws(plan)
        assert len(plan) <= len(pack(lengths, capacity))


def test_a_pattern_that_its_classes_cannot_fill_is_passed_over() -> None:
    counts = np.zeros(11, dtype=np.int64)
    counts[[4, 6]] = 1, 2
    one = np.array([4, 6])
    lengths, offsets = np.zeros(3, dtype=np.int32), np.zeros(4, dtype=np.int64)
    members, starts = np.array([1, 0]), np.array([0, 2])
    packs = pattern_kernels.fill(counts, one, one, one, members, starts, np.array([2]), 10, lengths, offsets, 0)
    assert packs == 1
    assert lengths[:2].tolist() == [6, 4]
    assert counts[[4, 6]].tolist() == [0, 1]
