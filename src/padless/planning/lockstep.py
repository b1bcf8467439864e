"""Ranks that meet in every micro-batch: common caps for each number of micro-steps, then a cap per kind of step.

A step lasts as long as its slowest rank, so K steps with caps of their own are filled with runs, and the sum of the
caps is what counts. The smallest common cap is found by bisection; `cap_kernels` spread it and exchange from there. For
few steps of few ranks `reach_kernels` decide exactly what caps can hold, and lower them further.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from padless.errors import PadlessError
from padless.planning import cap_kernels, reach_kernels, run_kernels
from padless.planning.cap_kernels import Found, Tries
from padless.planning.fill_kernels import Rates
from padless.planning.problem import Floats, Index, Problem, least_total

__all__ = ["Common", "common_caps", "lockstep", "rates_of"]

_KINDS = 12  # caps that are searched at once
_SEARCHED = 50_000  # items up to which caps are searched; beyond, common caps are within a fraction of a percent
_FEW = 1500  # items up to which four numbers of steps are searched under two limits; beyond, two under one
_EFFORT = 2900  # elementary steps of the search for each item, 2 to 4 ns each
_FLOOR = 650_000  # for so many at least
_SHARES = 7.0, 11.0, 2.6  # the effort divided by this is for a number of steps: up to _CALM items, up to _FEW, beyond
_TRIALS = 350  # at most so many trials for each kind
_DELTAS = (0.2, 0.4, 0.8)
_WITHIN = 1.02  # numbers of steps that are worse by more are given up
_CALM = 240  # items up to which there is time to follow each of them to the end
_STATES = 6000  # combinations of counts up to which caps are lowered exactly
_EXACT = 60_000  # elementary steps of that for each number of steps and limit; up to three times as much for few items
_NEAR = 1e-3  # of the caps' sum: what is worth lowering
Common = tuple[float, int, float, Index]  # time, steps, cap, bounds of the runs


def lockstep(problem: Problem, seed: int) -> Index:
    """Bounds of the runs: the best of common caps and of caps found by search."""
    rates = rates_of(problem) if problem.one_field and problem.fewest_rows == 1 else None
    candidates = common_caps(problem, rates)
    least, _, _, best = candidates[0]
    if rates is None or len(problem.items) > _SEARCHED:
        return best
    few = len(problem.items) <= _FEW
    tries = _tries(problem, rates, candidates[: 4 if few else 2], few=few, seed=seed)
    for time, bounds in _searched(rates, tries, _exact_states(problem)):
        if time < least:
            least, best = time, bounds
    return best


def common_caps(problem: Problem, rates: Rates | None = None) -> list[Common]:
    """For each number of steps worth trying the smallest cap that needs no more runs; ``rates`` make it faster."""
    first = problem.steps_for(_fewest(problem))
    steps = np.arange(first, first + 16 * problem.every, problem.every)  # (C,)
    # The widest run possible bounds the search from above, the costliest item from below.
    low = float(problem.run_costs(np.arange(len(problem.items) + 1)).max())
    widest = _cut(problem, 1e300, len(problem.items))
    top = max(low, float(problem.run_costs(widest).max())) if len(widest) > 1 else low
    found = _caps(problem, steps, low, top) if rates is None else _caps_by_rates(problem, rates, steps, low, top)
    if not found:  # a floor on rows, or their multiple, may need more runs than were counted
        bounds = least_total(problem, every=1)
        needed, costs = problem.steps_for(len(bounds) - 1), problem.run_costs(bounds)
        found.append((problem.lockstep_time(costs, needed), needed, float(costs.max()), bounds))
    return sorted(found, key=lambda c: c[0])


def _caps_by_rates(problem: Problem, rates: Rates, steps: Index, low: float, top: float) -> list[Common]:
    fixed, shape = float(problem.cost[0]), (len(steps), int(steps[-1]) * problem.ranks + 2)
    times, caps, runs = np.empty(len(steps)), np.empty(len(steps)), np.empty(len(steps), dtype=np.int64)
    bounds = np.empty(shape, dtype=np.int64)
    near = 1e-4 if len(problem.items) <= _SEARCHED else 1e-5
    looked = cap_kernels.common(
        problem.ranks, fixed, steps, low - fixed, top - fixed, near, rates, times, caps, runs, bounds
    )
    return [
        (float(times[c]), int(steps[c]), float(caps[c]) + fixed, bounds[c, : runs[c] + 1])
        for c in range(looked)
        if np.isfinite(times[c])
    ]


def _caps(problem: Problem, steps: Index, low: float, high: float) -> list[Common]:
    total, fixed = float(problem.own[-1]), float(problem.cost[0])
    found: list[Common] = []
    for needed in map(int, steps):
        if found and needed * fixed + total / problem.ranks >= min(c[0] for c in found):
            break
        high = _smallest_cap(problem, needed * problem.ranks, low, high)
        bounds = _cut(problem, high, needed * problem.ranks)
        if 1 < len(bounds) <= needed * problem.ranks + 1:
            found.append((problem.lockstep_time(problem.run_costs(bounds), needed), needed, high, bounds))
    return found


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


def _kinds(steps: int, ranks: int) -> Index:
    """Slots (T,) of each kind of step: every step a kind of its own while there are few."""
    kinds = min(steps, _KINDS)
    per_kind = (np.arange(1, kinds + 1) * steps) // kinds - (np.arange(kinds) * steps) // kinds
    return np.asarray(per_kind * ranks, dtype=np.int64)


def _highest(rates: Rates) -> float:
    """No run costs more; caps above it would be spent for nothing."""
    return float((rates.base + rates.unit * np.minimum(rates.most, rates.cum[-1])).max())


def _tries(problem: Problem, rates: Rates, candidates: list[Common], *, few: bool, seed: int) -> Tries:
    fixed, count = float(problem.cost[0]), len(problem.items)
    calm = count <= _CALM
    each = [_kinds(steps, problem.ranks) for _, steps, _, _ in candidates]
    slots = np.zeros((len(each), max(map(len, each))), dtype=np.int64)  # (C, T)
    for held, per_kind in zip(slots, each, strict=True):
        held[: len(per_kind)] = per_kind
    tops = [_highest(rates)]
    longest = float(rates.base[0] + rates.unit[0])
    if few and longest < tops[0]:
        tops.append(longest)
    return Tries(
        ranks=problem.ranks,
        fixed=fixed,
        caps=np.array([cap - fixed for _, _, cap, _ in candidates]),
        kinds=np.array([len(per_kind) for per_kind in each]),
        slots=slots,
        tops=np.array(tops),
        deltas=np.array(_DELTAS),
        effort=max(_FLOOR, _EFFORT * count) / _SHARES[0 if calm else 1 if few else 2],
        trials=_TRIALS,
        shares=np.array([1.0, 0.0] if calm else [0.4, 0.6]),
        within=np.array([np.inf, _WITHIN, 1.0] if calm else [1.04, _WITHIN, 1.008]),
        seed=seed,
    )


def _exact_states(problem: Problem) -> int:
    """Combinations of counts up to which caps are lowered exactly; none where items are not one sequence each."""
    plain = problem.limits[2] == 1 and problem.single and not problem.items.over.any()
    return _STATES if plain else 0


def _searched(rates: Rates, tries: Tries, states: int) -> Iterator[tuple[float, Index]]:
    """(time, bounds of the runs) of what was found for each number of steps and limit."""
    entries, most = len(tries.caps) * len(tries.tops), int(tries.slots.sum(axis=1).max())
    found = Found(
        times=np.empty(entries),
        rooms=np.empty((entries, tries.slots.shape[1])),
        runs=np.empty(entries, dtype=np.int64),
        bounds=np.empty((entries, most + 2), dtype=np.int64),
    )
    cap_kernels.search(tries, rates, found)
    for e in np.flatnonzero(found.times <= _WITHIN * found.times.min()):
        c, top = divmod(int(e), len(tries.tops))
        if found.runs[e] == 0:  # nothing was found for any
            return
        yield float(found.times[e]), found.bounds[e, : found.runs[e] + 1].copy()
        slots = tries.slots[c, : tries.kinds[c]]
        # Each step must be a kind of its own: kinds of several steps cost as many caps.
        if int(slots.max()) == tries.ranks and float(np.prod(slots + 1.0)) <= states:
            bounds = _lowered(found.rooms[e, : len(slots)], slots, rates, float(tries.tops[top]), seed=tries.seed)
            if len(bounds):
                time = cap_kernels.step_time(bounds, len(bounds) - 1, len(slots), tries.ranks, tries.fixed, rates)
                yield float(time), bounds


def _lowered(room: Floats, slots: Index, rates: Rates, top: float, *, seed: int) -> Index:
    """Bounds of runs whose caps were lowered exactly, as far as the effort goes; none where rounding forbids them."""
    few = min(3.0, max(1.0, 256 / len(rates.base)))
    checks = int(few * _EXACT / (float(np.prod(slots + 1.0)) * len(slots) + 200))
    bounds = np.empty(int(slots.sum()) + 2, dtype=np.int64)
    runs = reach_kernels.settle(room, slots, top, _NEAR, checks, seed, rates, bounds)
    return bounds[: max(0, runs + 1)]
