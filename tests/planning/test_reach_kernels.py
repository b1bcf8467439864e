"""Which caps are enough for runs of the sorted sequences, against all ways of taking runs."""

from __future__ import annotations

from functools import cache
from itertools import product

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from padless.cost import CostModel
from padless.planning import reach_kernels
from padless.planning.fill_kernels import Rates

COSTS = st.sampled_from(
    [CostModel(), CostModel(per_microbatch=50, per_column=3), CostModel(per_microbatch=0, per_token_squared=0.01)]
)
LENGTHS = st.lists(st.integers(1, 40), min_size=2, max_size=9)


def _rates(lengths: list[int], cost: CostModel, *, budget: int = 80) -> Rates:
    wide = np.sort(np.array(lengths, dtype=np.float64))[::-1].copy()
    unit = wide * (cost.per_token + cost.per_token_squared * wide)
    return Rates(
        base=cost.per_column * wide,
        unit=unit,
        each=1.0 / unit,
        most=(budget // wide).astype(np.int64),
        work=np.concatenate([[0.0], np.cumsum(unit)]),
        cum=np.arange(len(wide) + 1),
        multiple=1,
    )


def _by_trying(room: np.ndarray, slots: np.ndarray, rates: Rates) -> bool:
    """Whether some sequence of runs, of any sizes, keeps the caps."""
    count = len(rates.base)

    @cache
    def rest(i: int, left: tuple[int, ...]) -> bool:
        if i == count:
            return True
        for t, free in enumerate(left):
            if not free:
                continue
            after = tuple(n - (k == t) for k, n in enumerate(left))
            for rows in range(1, min(int(rates.most[i]), count - i) + 1):
                if rates.base[i] + rows * rates.unit[i] <= room[t] * (1 + 1e-12) and rest(i + rows, after):
                    return True
        return False

    return rest(0, tuple(int(n) for n in slots))


def _size(slots: np.ndarray) -> int:
    return int(np.prod(slots + 1))


@given(LENGTHS, COSTS, st.lists(st.tuples(st.integers(1, 120), st.integers(1, 3)), min_size=1, max_size=3))
def test_caps_are_enough_exactly_where_some_runs_keep_them(
    lengths: list[int], cost: CostModel, kinds: list[tuple[int, int]]
) -> None:
    rates = _rates(lengths, cost)
    room, slots = np.array([float(r) for r, _ in kinds]), np.array([n for _, n in kinds])
    furthest = np.empty(_size(slots), dtype=np.int64)
    expected = _by_trying(room, slots, rates)
    assert reach_kernels.enough(room, slots, rates, furthest) == expected
    bounds = np.empty(int(slots.sum()) + 2, dtype=np.int64)
    runs = reach_kernels.trace(room, slots, rates, bounds)
    assert (runs >= 0) == expected
    if expected:
        _check_runs(bounds[: runs + 1], room, slots, rates)


def _check_runs(bounds: np.ndarray, room: np.ndarray, slots: np.ndarray, rates: Rates) -> None:
    """All items are held, within the limits, and costs fit the caps one by one."""
    assert bounds[0] == 0
    assert bounds[-1] == len(rates.base)
    rows = np.diff(bounds)
    assert (rows > 0).all()
    assert (rows <= rates.most[bounds[:-1]]).all()
    costs = np.sort(rates.base[bounds[:-1]] + rows * rates.unit[bounds[:-1]])[::-1]
    caps = np.sort(np.repeat(room, slots))[::-1][: len(costs)]
    assert len(costs) <= slots.sum()
    assert (costs <= caps * (1 + 1e-9) + 1e-6).all()


@given(LENGTHS, COSTS, st.integers(1, 3))
def test_two_caps_are_as_low_as_any(lengths: list[int], cost: CostModel, ranks: int) -> None:
    rates = _rates(lengths, cost)
    slots = np.array([ranks, ranks])
    runs = {
        float(rates.base[i] + rows * rates.unit[i])
        for i, most in enumerate(rates.most)
        for rows in range(1, min(int(most), len(lengths) - i) + 1)
    }
    sums = [a + b for a, b in product(sorted({0.0, *runs}), repeat=2) if a >= b]
    pairs = [np.array([a, b]) for a, b in product(sorted({0.0, *runs}), repeat=2) if a >= b]
    possible = [total for total, pair in zip(sums, pairs, strict=True) if _by_trying(pair, slots, rates)]
    if not possible:
        return
    top = max(runs)
    room = np.array([top, top])  # enough, or nothing is
    reach_kernels.halve(room, slots, top, 1e-3, 10_000, rates)
    assert _by_trying(room, slots, rates)
    assert room.sum() <= min(possible) * 1.0025 + 1e-6


@given(LENGTHS, COSTS, st.integers(2, 4), st.integers(1, 2), st.integers(0, 3), st.integers(0, 200))
def test_lowered_caps_stay_enough_and_never_cost_more(
    lengths: list[int], cost: CostModel, kinds: int, ranks: int, seed: int, checks: int
) -> None:
    rates = _rates(lengths, cost)
    slots = np.full(kinds, ranks)
    top = float((rates.base + rates.unit * np.minimum(rates.most, len(lengths))).max())
    room = np.full(kinds, top)
    if not _by_trying(room, slots, rates):
        return
    reach_kernels.lower(room, slots, top, 1e-3, checks, seed, rates)
    assert room.sum() <= top * kinds
    assert room.max() <= top
    assert _by_trying(room, slots, rates)
