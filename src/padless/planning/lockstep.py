"""Ranks that meet in every micro-batch: common caps for each number of micro-steps, then a cap per kind of step.

A step lasts as long as its slowest rank, so K steps with caps of their own are filled with runs, and the sum of the
caps is what counts. The smallest common cap is found by bisection; `cap_kernels` spread it and exchange from there.
"""

from __future__ import annotations

import numpy as np

from padless.errors import PadlessError
from padless.planning import cap_kernels, run_kernels
from padless.planning.cap_kernels import Rates
from padless.planning.problem import Floats, Index, Problem, least_total

__all__ = ["Common", "common_caps", "lockstep", "rates_of"]

_KINDS = 12  # caps that are searched at once
_EFFORT = 2900  # elementary steps of the search for each item, 2 to 4 ns each
_SEARCHED = 50_000  # items up to which caps are searched; beyond, common caps are within a fraction of a percent
_FLOOR = 650_000  # at least so many in all
_TRIALS = 350  # at most so many trials for each kind
_FEW = 1500  # items up to which four numbers of steps are searched, two beyond
_DELTAS = (0.2, 0.4, 0.8)
_LEAST = 20  # trials of each start at least
Common = tuple[float, int, float, Index]  # time, steps, cap, bounds of the runs
_Caps = tuple[float, int, Floats, Index, Index]  # time, steps, room (T,), slots (T,), bounds of the runs


def lockstep(problem: Problem, seed: int) -> Index:
    """Bounds of the runs: the best of common caps and of caps found by search."""
    rates = rates_of(problem) if problem.one_field and problem.fewest_rows == 1 else None
    candidates = common_caps(problem, rates)
    least, _, _, best = candidates[0]
    if rates is None or len(problem.items) > _SEARCHED:
        return best
    found = _spread_caps(problem, rates, candidates[: 4 if len(problem.items) <= _FEW else 2])
    if not found:  # nothing near the common caps is enough
        return best
    kinds, runs = max(len(c[2]) for c in found), max(c[3].sum() for c in found)
    fills = min(_TRIALS * kinds, max(_FLOOR, _EFFORT * len(problem.items)) / ((kinds + 6) * runs))
    # How good a start is says little about where it leads: all are followed a little, three further, one to the end.
    for survivors, share in ((len(found), 0.25), (3, 0.25), (1, 0.5)):
        effort = max(_LEAST, int(share * fills / survivors))
        found = [_improved(problem, rates, start, effort, seed + survivors) for start in found[:survivors]]
        found.sort(key=lambda c: c[0])
    for _, steps, _, _, bounds in found:
        reached = problem.lockstep_time(problem.run_costs(bounds), steps)
        if reached < least:
            least, best = reached, bounds
    return best


def common_caps(problem: Problem, rates: Rates | None = None) -> list[Common]:
    """For each number of steps worth trying the smallest cap that needs no more runs; ``rates`` make it faster."""
    total, fixed = float(problem.own[-1]), float(problem.cost[0])
    first = problem.steps_for(_fewest(problem))
    # The widest run possible bounds the search from above, the costliest item from below.
    low = float(problem.run_costs(np.arange(len(problem.items) + 1)).max())
    widest = _cut(problem, 1e300, len(problem.items))
    high = max(low, float(problem.run_costs(widest).max())) if len(widest) > 1 else low
    top = high
    found: list[Common] = []
    for steps in range(first, first + 16 * problem.every, problem.every):
        if found and steps * fixed + total / problem.ranks >= min(c[0] for c in found):
            break
        if rates is None:
            high = _smallest_cap(problem, steps * problem.ranks, low, high)
            bounds = _cut(problem, high, steps * problem.ranks)
        else:
            starts = np.empty(steps * problem.ranks + 1, dtype=np.int64)
            room, runs = cap_kernels.lowest(
                steps * problem.ranks, low - fixed, top - fixed, _near(problem), rates, starts
            )
            high, bounds = room + fixed, starts[: runs + 1]
            if runs < 0:  # rounding: what ``top`` was taken from always does
                high, bounds = top, _cut(problem, 1e300, len(problem.items))
        if 1 < len(bounds) <= steps * problem.ranks + 1:
            found.append((problem.lockstep_time(problem.run_costs(bounds), steps), steps, high, bounds))
    if not found:  # a floor on rows, or their multiple, may need more runs than were counted
        bounds = least_total(problem, every=1)
        steps, costs = problem.steps_for(len(bounds) - 1), problem.run_costs(bounds)
        found.append((problem.lockstep_time(costs, steps), steps, float(costs.max()), bounds))
    return sorted(found, key=lambda c: c[0])


def _near(problem: Problem) -> float:
    return 1e-4 if len(problem.items) <= _SEARCHED else 1e-5


def _fewest(problem: Problem) -> int:
    if problem.fewest_rows > 1:
        return len(least_total(problem, penalty=_heavy(problem), every=1)) - 1
    return int(run_kernels.fewest_runs(*problem.arrays))


def _heavy(problem: Problem) -> float:
    """A penalty per run that outweighs all padding, so that the least total is the fewest runs."""
    return 1.0 + 4.0 * float(problem.run_costs(np.array([0, len(problem.items)])).sum())


def _cut(problem: Problem, cap: float, most: int) -> Index:
    if problem.fewest_rows > 1:
        return least_total(problem, penalty=_heavy(problem), cap=cap, every=1)
    starts = np.empty(most + 2, dtype=np.int64)
    runs = run_kernels.cut(cap, most, *problem.arrays, starts)
    return starts[: runs + 1 if runs <= most else 0].copy()  # none where so many runs are not enough


def _smallest_cap(problem: Problem, most: int, low: float, high: float) -> float:
    if problem.fewest_rows == 1:
        return float(run_kernels.lower_cap(most, low, high, *problem.arrays))
    while high - low > 1e-4 * high:
        middle = 0.5 * (low + high)
        try:
            enough = len(_cut(problem, middle, most)) - 1 <= most
        except PadlessError:
            enough = False
        low, high = (low, middle) if enough else (middle, high)
    return high


def _kinds(steps: int, ranks: int) -> Index:
    """Slots (T,) of each kind of step: every step a kind of its own while there are few."""
    kinds = min(steps, _KINDS)
    per_kind = (np.arange(1, kinds + 1) * steps) // kinds - (np.arange(kinds) * steps) // kinds
    return np.asarray(per_kind * ranks, dtype=np.int64)


def rates_of(problem: Problem) -> Rates:
    """Tables for the kernels; for one field."""
    _, column, token, squared = map(float, problem.cost)
    wide = problem.items.widths[:, 0]  # (I,)
    unit = wide * (token + squared * wide)
    most = np.minimum(problem.limits[1], problem.limits[0] // wide)
    return Rates(
        base=column * wide,
        unit=unit,
        each=1.0 / np.maximum(unit, 1e-18),
        most=np.where(problem.items.over, problem.items.rows, most),
        work=problem.own if problem.own[-1] > 0 else problem.cum.astype(np.float64),
        cum=problem.cum,
        multiple=int(problem.limits[2]),
    )


def _spread_caps(problem: Problem, rates: Rates, candidates: list[Common]) -> list[_Caps]:
    """Best first: common caps, and caps spread evenly around a centre."""
    fixed = float(problem.cost[0])
    found: list[_Caps] = []
    for value, steps, cap, bounds in candidates:
        slots = _kinds(steps, problem.ranks)
        if steps == 1:
            found.append((value, steps, np.full(len(slots), cap - fixed), slots, bounds))
            continue
        for delta in _DELTAS:
            room = np.empty(len(slots))
            total = cap_kernels.spread(room, slots, cap - fixed, delta, _highest(rates), rates)
            if np.isfinite(total):
                filled = _filled(room, slots, rates)
                found.append((total / problem.ranks + steps * fixed, steps, room, slots, filled))
    found.sort(key=lambda c: c[0])
    return found


def _highest(rates: Rates) -> float:
    """No run costs more; caps above it would be spent for nothing."""
    return float((rates.base + rates.unit * np.minimum(rates.most, rates.cum[-1])).max())


def _improved(problem: Problem, rates: Rates, start: _Caps, fills: int, seed: int) -> _Caps:
    _, steps, room, slots, before = start
    room, bounds = room.copy(), np.empty(int(slots.sum()) + 2, dtype=np.int64)
    runs = cap_kernels.improve(room, slots, fills, seed + 1, min(2.0 * room.max(), _highest(rates)), rates, bounds)
    value = float((room * slots).sum()) / problem.ranks + steps * float(problem.cost[0])
    return value, steps, room, slots, bounds[: runs + 1] if runs else before


def _filled(room: Floats, slots: Index, rates: Rates) -> Index:
    starts = np.empty(int(slots.sum()) + 2, dtype=np.int64)
    runs = cap_kernels.fill(room, slots, rates, starts, np.empty(len(room)))
    return starts[: runs + 1].copy()
