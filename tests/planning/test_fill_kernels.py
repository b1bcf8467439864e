"""Micro-steps filled under caps, against the rule in plain Python; and the Lagrange bound against all divisions."""

from __future__ import annotations

from itertools import combinations, pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from padless.planning import run_kernels
from padless.planning.fill_kernels import Rates, fill, fill_pair

LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=12)
ROOMS = st.lists(st.tuples(st.integers(1, 120), st.integers(1, 120), st.integers(1, 3)), min_size=1, max_size=4)


def _rates(lengths: list[int], *, multiple: int = 1, budget: int = 80) -> Rates:
    wide = np.sort(np.array(lengths, dtype=np.float64))[::-1].copy()
    return Rates(
        base=np.zeros(len(wide)),
        unit=wide,
        each=1.0 / wide,
        most=(budget // wide).astype(np.int64),
        work=np.concatenate([[0.0], np.cumsum(wide)]),
        cum=np.arange(len(wide) + 1),
        multiple=multiple,
    )


def _by_the_rule(room: list[float], slots: list[int], rates: Rates) -> tuple[list[int], list[float]] | None:
    """(starts of the runs and the end, costliest run of each kind): each run where it wastes the smallest share."""
    left, used, starts, i, count = list(slots), [0.0] * len(room), [], 0, len(rates.base)
    while i < count:
        best, chosen, rows = 0.0, -1, 0
        for t, cap in enumerate(room):
            if left[t]:
                n = min(int(cap * rates.each[i] + 1e-9), int(rates.most[i]), count - i)
                value = (rates.work[i + n] - rates.work[i]) / cap
                if value > best * (1 + 1e-12):
                    best, chosen, rows = value, t, n
        if chosen < 0:
            return None
        left[chosen] -= 1
        used[chosen] = max(used[chosen], float(rows * rates.unit[i]))
        starts.append(i)
        i += rows
    return [*starts, count], used


@given(LENGTHS, ROOMS, st.sampled_from([1, 2]))
def test_two_sets_of_caps_side_by_side_are_filled_like_each_alone(
    lengths: list[int], rooms: list[tuple[int, int, int]], multiple: int
) -> None:
    rates, slots = _rates(lengths, multiple=multiple), np.array([n for _, _, n in rooms])
    pair = np.array([[a for a, _, _ in rooms], [b for _, b, _ in rooms]], dtype=np.float64)  # (2, T)
    starts, used = np.zeros((2, slots.sum() + 2), dtype=np.int64), np.zeros(pair.shape)
    both = fill_pair(pair, slots, rates, starts, used)
    for w in range(2):
        alone, its_used = np.zeros(slots.sum() + 2, dtype=np.int64), np.zeros(len(slots))
        runs = fill(pair[w], slots, rates, alone, its_used)
        assert runs == both[w]
        if runs >= 0:
            assert (alone[: runs + 1] == starts[w, : runs + 1]).all()
            assert (its_used == used[w]).all()


@given(LENGTHS, ROOMS)
def test_each_run_takes_the_kind_of_step_that_it_wastes_the_least_of(
    lengths: list[int], rooms: list[tuple[int, int, int]]
) -> None:
    rates, slots, room = _rates(lengths), [n for _, _, n in rooms], [float(a) for a, _, _ in rooms]
    starts, used = np.zeros(sum(slots) + 2, dtype=np.int64), np.zeros(len(slots))
    runs = fill(np.array(room), np.array(slots), rates, starts, used)
    expected = _by_the_rule(room, slots, rates)
    if expected is None:
        assert runs == -1
    else:
        assert starts[: runs + 1].tolist() == expected[0]
        assert used.tolist() == expected[1]


@given(st.lists(st.integers(1, 40), min_size=1, max_size=8), st.integers(1, 6), st.integers(40, 120))
def test_at_most_so_many_runs_never_cost_less_than_the_bound(lengths: list[int], groups: int, budget: int) -> None:
    wide = np.sort(np.array(lengths, dtype=np.int64))[::-1].copy()
    count = len(wide)
    costs = []
    for cuts in range(min(groups, count)):
        for inner in combinations(range(1, count), cuts):
            bounds = [0, *inner, count]
            pieces = [(int(wide[i]), j - i) for i, j in pairwise(bounds)]
            if all(width * rows <= budget for width, rows in pieces):
                costs.append(sum(width * rows for width, rows in pieces))
    arrays = (
        np.arange(count + 1), wide[:, None], np.zeros(count, dtype=bool), np.array([0.0, 0.0, 1.0, 0.0]),
        np.array([budget, 2**62, 1], dtype=np.int64),
    )  # fmt: skip
    starts, known = np.empty(count + 1, dtype=np.int64), np.empty((50, 3))
    cum, widths, over, cost, limits = arrays
    known[0] = 0.0, *run_kernels.best_runs(0.0, np.inf, 1, 1, cum, widths, over, np.empty(0), cost, limits, starts)
    bound, _ = run_kernels.least_variable(groups, np.inf, 20, 1e6, known, 1, *arrays, starts)
    exact = min(costs, default=np.inf)
    assert bound <= exact * (1 + 1e-9)
    # And it is the best that prices can show: the lower hull of (runs, least cost), at ``groups``.
    if costs and groups >= count:
        assert bound == sum(lengths)
