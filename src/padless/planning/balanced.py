"""Balanced micro-batches: the least modelled time of an optimizer step over ranks.

Every plan divides the sequences, sorted from the longest to the shortest, into contiguous runs. For one field and
without atoms nothing is lost by that: given any division, runs of the same sizes taken in sorted order are no
wider, one by one. What is left to choose is the runs' sizes and how they meet.

* One rank: dynamic programming, optimal.
* A few sequences: all divisions are tried, optimal.
* Ranks that meet in every micro-batch: for each number of micro-steps the smallest common cap, then a cap for
  each kind of step (`cap_kernels`).
* Ranks that meet at the end: runs of least total cost, and of common caps, spread over ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from padless.cost import CostModel
from padless.errors import PadlessError
from padless.planning import cap_kernels, run_kernels, small_kernels
from padless.planning.grouping import Grouping, lay_out
from padless.planning.items import Items
from padless.shapes import round_up

__all__ = ["Problem", "balanced"]

Index = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

_SMALL = 11  # items for which every division is tried
_KINDS = 12  # caps that are searched at once
_EFFORT = 2500  # elementary steps of the search for each item
_SEARCHED = 50_000  # items up to which caps are searched; beyond, common caps are within a fraction of a percent
_DELTAS = (0.1, 0.2, 0.35, 0.55, 0.8, 1.2)
_UNBOUNDED = 2**62


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Items and options of one optimizer step, as the kernels take them."""

    items: Items
    ranks: int
    every: int
    lockstep: bool
    fewest_rows: int
    cum: Index
    own: Floats
    cost: Floats
    limits: Index

    @classmethod
    def of(
        cls,
        items: Items,
        *,
        budget: int,
        ranks: int,
        model: CostModel,
        lockstep: bool = True,
        most: int | None = None,
        every: int = 1,
        fewest_rows: int = 1,
        rows_multiple: int = 1,
    ) -> Problem:
        """Bundle arrays; see `run_kernels` for their meaning."""
        wide = items.widths.astype(np.float64)  # (I, F)
        each = items.rows * (model.per_token * wide.sum(axis=1) + model.per_token_squared * np.square(wide).sum(axis=1))
        return cls(
            items=items,
            ranks=ranks,
            every=every,
            lockstep=lockstep,
            fewest_rows=fewest_rows,
            cum=np.concatenate([[0], np.cumsum(items.rows)]),
            own=np.concatenate([[0.0], np.cumsum(each)]),
            cost=np.array(
                [model.per_microbatch, model.per_column, model.per_token, model.per_token_squared], dtype=np.float64
            ),
            limits=np.array([budget, most or _UNBOUNDED, rows_multiple], dtype=np.int64),
        )

    @property
    def single(self) -> bool:
        """Whether every item is one sequence."""
        return bool(len(self.items.members) == len(self.items.rows))

    @property
    def one_field(self) -> bool:
        """Whether runs have one width."""
        return bool(self.items.widths.shape[1] == 1)

    @property
    def arrays(self) -> tuple[Any, ...]:
        """cum, wide, over, cost, limits, single."""
        return self.cum, self.items.widths, self.items.over, self.cost, self.limits, self.single

    @property
    def cap_arrays(self) -> tuple[Any, ...]:
        """cum, wide, over, own, cost, limits, single."""
        return self.cum, self.items.widths, self.items.over, self.own, self.cost, self.limits, self.single

    def run_costs(self, bounds: Index) -> Floats:
        """Cost (G,) of the runs between ``bounds`` (G + 1,)."""
        wide = np.maximum.reduceat(self.items.widths, bounds[:-1], axis=0).astype(np.float64)  # (G, F)
        rows = np.diff(self.cum[bounds])  # (G,)
        width, square = wide.sum(axis=1), np.square(wide).sum(axis=1)
        return np.asarray(self.cost[0] + self.cost[1] * width + rows * (self.cost[2] * width + self.cost[3] * square))

    def steps_for(self, runs: int) -> int:
        """Micro-steps that hold so many runs."""
        return round_up(max(1, -(-runs // self.ranks)), self.every)

    def lockstep_time(self, costs: Floats, steps: int) -> float:
        """Sum over steps of the slowest rank, runs sorted by cost; empty steps cost their fixed part."""
        slowest = np.sort(costs)[::-1][:: self.ranks]
        return float(slowest.sum()) + (steps - len(slowest)) * float(self.cost[0])


def balanced(problem: Problem, *, seed: int = 0) -> Grouping:
    """The best plan found; ``order`` is the items' own, so that bounds are places in it."""
    if problem.ranks == 1:
        return _finish(problem, _least_total(problem))
    if problem.one_field and len(problem.items) <= _SMALL and not problem.items.over.any():
        starts = np.empty(len(problem.items) + 1, dtype=np.int64)
        _, runs = small_kernels.every_cut(
            problem.ranks, problem.every, problem.fewest_rows, problem.lockstep,
            problem.cum, problem.items.widths, problem.cost, problem.limits, starts,
        )  # fmt: skip
        if runs == 0:
            raise _too_few(problem)
        return _finish(problem, starts[: runs + 1])
    if not problem.lockstep:
        return _finish(problem, _spread_over_ranks(problem))
    return _finish(problem, _lockstep(problem, seed))


def _too_few(problem: Problem) -> PadlessError:
    return PadlessError(
        f"no plan keeps at least {problem.fewest_rows} sequences in every micro-batch within the token budget"
        f" {problem.limits[0]}: raise the budget, or lower min_sequences"
    )


def _least_total(
    problem: Problem, penalty: float | None = None, cap: float = np.inf, every: int | None = None
) -> Index:
    """Bounds of the runs with the least total cost (dynamic programming)."""
    starts = np.empty(len(problem.items) + 1, dtype=np.int64)
    total, runs = run_kernels.best_runs(
        float(problem.cost[0]) if penalty is None else penalty,
        cap,
        problem.fewest_rows,
        (problem.every if every is None else every),
        problem.cum,
        problem.items.widths,
        problem.items.over,
        problem.own,
        problem.cost,
        problem.limits,
        starts,
    )
    if not np.isfinite(total):
        raise _too_few(problem)
    return starts[: runs + 1].copy()


# --- ranks that meet in every micro-batch


def _lockstep(problem: Problem, seed: int) -> Index:
    """Common caps for each number of steps, then a cap per kind of step."""
    candidates = _common_caps(problem)
    candidates.sort(key=lambda c: c[0])
    least, _, _, best = candidates[0]
    if not problem.one_field or problem.fewest_rows > 1 or len(problem.items) > _SEARCHED:
        return best
    starts = _spread_caps(problem, candidates[:3])
    groups = max(len(c[3]) for c in candidates[:3])
    effort = _EFFORT * len(problem.items)
    fills = int(effort / (groups * min(_KINDS, max(c[1] for c in candidates[:3]))))
    refined = [_improved(problem, k, caps, slots, max(20, fills // 5), seed) for _, k, caps, slots in starts[:3]]
    refined.sort(key=lambda r: r[0])
    for place, (_, steps, caps, slots) in enumerate(refined):
        if place == 0:
            _, steps, caps, slots = _improved(problem, steps, caps, slots, max(20, 2 * fills // 5), seed + 1)
        bounds = _filled(problem, caps, slots)
        reached = problem.lockstep_time(problem.run_costs(bounds), steps)
        if reached < least:
            least, best = reached, bounds
    return best


def _common_caps(problem: Problem) -> list[tuple[float, int, float, Index]]:
    """(time, steps, cap, bounds) for each number of steps worth trying: the smallest cap that needs no more runs."""
    total = float(problem.own[-1])
    first = problem.steps_for(_fewest(problem))
    # The widest run possible bounds the search from above, the costliest item from below.
    low = float(problem.run_costs(np.arange(len(problem.items) + 1)).max())
    high = max(low, float(problem.run_costs(_cut(problem, 1e300, len(problem.items))).max()))
    found: list[tuple[float, int, float, Index]] = []
    for steps in range(first, first + 16 * problem.every, problem.every):
        if found and steps * problem.cost[0] + total / problem.ranks >= min(c[0] for c in found):
            break
        cap = _smallest_cap(problem, steps * problem.ranks, low, high)
        bounds = _cut(problem, cap, steps * problem.ranks)
        found.append((problem.lockstep_time(problem.run_costs(bounds), steps), steps, cap, bounds))
        high = cap
    return found


def _fewest(problem: Problem) -> int:
    if problem.fewest_rows > 1:
        return len(_least_total(problem, penalty=_heavy(problem), every=1)) - 1
    return int(run_kernels.fewest_runs(*problem.arrays))


def _heavy(problem: Problem) -> float:
    """A penalty per run that outweighs all padding, so that the least total is the fewest runs."""
    return 1.0 + 4.0 * float(problem.run_costs(np.array([0, len(problem.items)])).sum())


def _cut(problem: Problem, cap: float, most: int) -> Index:
    if problem.fewest_rows > 1:
        return _least_total(problem, penalty=_heavy(problem), cap=cap, every=1)
    starts = np.empty(most + 2, dtype=np.int64)
    runs = run_kernels.cut(cap, most, *problem.arrays, starts)
    return starts[: runs + 1].copy()


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


def _spread_caps(
    problem: Problem, candidates: list[tuple[float, int, float, Index]]
) -> list[tuple[float, int, Floats, Index]]:
    """(time, steps, caps, slots), best first: common caps, and caps spread evenly around a centre."""
    found = []
    for value, steps, cap, _ in candidates:
        slots = _kinds(steps, problem.ranks)
        found.append((value, steps, np.full(len(slots), cap * (1 + 1e-9)), slots))
        top = _highest(problem, cap)
        for delta in _DELTAS if steps > 1 else ():
            caps = np.empty(len(slots))
            total = cap_kernels.spread(caps, slots, cap, delta, top, *problem.cap_arrays)
            if np.isfinite(total):
                found.append((total / problem.ranks, steps, caps, slots))
    found.sort(key=lambda c: c[0])
    return found


def _highest(problem: Problem, cap: float) -> float:
    """No run can cost more than a budget full of the longest item; caps above it would be spent for nothing."""
    width = float(problem.items.widths[0, 0])
    a, column, token, squared = map(float, problem.cost)
    return max(cap, a + column * width + float(problem.limits[0]) * (token + squared * width))


def _improved(
    problem: Problem, steps: int, caps: Floats, slots: Index, fills: int, seed: int
) -> tuple[float, int, Floats, Index]:
    caps = caps.copy()
    total = cap_kernels.improve(caps, slots, fills, seed + 1, _highest(problem, caps.max()), *problem.cap_arrays)
    return float(total) / problem.ranks, steps, caps, slots


def _filled(problem: Problem, caps: Floats, slots: Index) -> Index:
    starts = np.empty(int(slots.sum()) + 2, dtype=np.int64)
    left = np.empty(len(slots), dtype=np.int64)
    runs = cap_kernels.fill(caps, slots, *problem.cap_arrays, starts, left)
    return starts[: runs + 1].copy()


# --- ranks that meet at the end of the step


def _spread_over_ranks(problem: Problem) -> Index:
    """Of several sets of runs, the one whose slowest rank ends first."""
    sets = [_least_total(problem, penalty=share * float(problem.cost[0]), every=1) for share in _shares(problem)]
    sets += [bounds for _, _, _, bounds in _common_caps(problem)]
    return min(sets, key=lambda bounds: _spread(problem, problem.run_costs(bounds))[0])


def _shares(problem: Problem) -> tuple[float, ...]:
    return (1.0, 0.5, 2.0, 4.0) if len(problem.items) <= 20_000 else (1.0,)


def _spread(problem: Problem, costs: Floats) -> tuple[float, int, Index, Index]:
    """(time, steps, runs by descending cost, their ranks) with equally many micro-batches on every rank.

    Where counts bind (few runs to a rank), a further step of mostly empty micro-batches may pay.
    """
    first = problem.steps_for(len(costs))
    by_cost = np.argsort(-costs, kind="stable")  # (G,)
    rounds = int(min(200, 1 + 2e7 * problem.ranks / len(costs) ** 2))
    fixed = float(problem.cost[0])
    variable = costs[by_cost] - fixed
    floor = max(float(variable[0]), float(variable.sum()) / problem.ranks)
    best: tuple[float, int, Index] | None = None
    for steps in range(first, first + 4 * problem.every, problem.every):
        if best is not None and steps * fixed + floor >= best[0]:
            break
        place = np.empty(len(costs), dtype=np.int64)
        largest = float(small_kernels.assign(variable, np.full(problem.ranks, steps), rounds, place))
        if len(costs) <= _SMALL:
            largest = float(small_kernels.spread_least(variable, problem.ranks, steps, largest, place))
        time = steps * fixed + largest
        if best is None or time < best[0]:
            best = time, steps, place
    assert best is not None
    return best[0], best[1], by_cost, best[2]


# --- from runs to groups


def _finish(problem: Problem, bounds: Index) -> Grouping:
    """Give ranks without work some of their neighbours', where that costs nothing, and lay the runs out."""
    order = np.arange(len(problem.items), dtype=np.int64)
    if problem.lockstep or problem.ranks == 1:
        bounds = _share_out(problem, bounds)
        costs = problem.run_costs(bounds)
        return lay_out(order, bounds, costs, problem.ranks, problem.steps_for(len(costs)))
    costs = problem.run_costs(bounds)
    _, steps, by_cost, place = _spread(problem, costs)
    start = np.zeros((steps, problem.ranks), dtype=np.int64)
    stop = np.zeros((steps, problem.ranks), dtype=np.int64)
    divisible = problem.fewest_rows == problem.limits[2] == 1 and problem.cost[1] == 0  # pieces pay their columns
    for rank in range(problem.ranks):
        mine = by_cost[place == rank]  # descending cost
        pieces = [(int(bounds[g]), int(bounds[g + 1])) for g in mine]
        while len(pieces) < steps and divisible and pieces:
            at = max(range(len(pieces)), key=lambda k: pieces[k][1] - pieces[k][0])
            lo, hi = pieces[at]
            if hi - lo < 2:
                break
            pieces[at : at + 1] = [(lo, (lo + hi) // 2), ((lo + hi) // 2, hi)]
        for k, (lo, hi) in enumerate(pieces):
            start[k, rank], stop[k, rank] = lo, hi
    return Grouping(order=order, start=start, stop=stop)


def _share_out(problem: Problem, bounds: Index) -> Index:
    """Split runs of the last, incomplete step until each rank has one; for whole empty steps, where time allows."""
    if problem.fewest_rows > 1 or problem.limits[2] > 1:
        return bounds
    runs = len(bounds) - 1
    empty = problem.steps_for(runs) * problem.ranks - runs
    splits = _splits_of_last_step(problem, bounds, empty % problem.ranks)
    bounds = np.union1d(bounds, splits).astype(np.int64)
    steps = problem.steps_for(len(bounds) - 1)
    for _ in range(
        steps * problem.ranks - (len(bounds) - 1)
    ):  # whole steps without work, from microbatches_multiple_of
        costs = problem.run_costs(bounds)
        at = int(np.argmax(np.where(np.diff(bounds) > 1, costs, -1.0)))
        if bounds[at + 1] - bounds[at] < 2:
            break
        trial = np.insert(bounds, at + 1, (bounds[at] + bounds[at + 1] + 1) // 2)
        if problem.lockstep_time(problem.run_costs(trial), steps) > problem.lockstep_time(costs, steps) * (1 + 1e-12):
            break
        bounds = trial
    return bounds


def _splits_of_last_step(problem: Problem, bounds: Index, wanted: int) -> Index:
    """Places to split so that the last step's ranks all have work; pieces cost no more than what they are cut from."""
    last = np.argsort(-problem.run_costs(bounds), kind="stable")[
        -((len(bounds) - 1) % problem.ranks or problem.ranks) :
    ]
    pieces = [(int(bounds[g]), int(bounds[g + 1])) for g in last]
    splits = []
    for _ in range(wanted):
        at = max(range(len(pieces)), key=lambda k: pieces[k][1] - pieces[k][0])
        lo, hi = pieces[at]
        if hi - lo < 2:
            break
        pieces[at : at + 1] = [(lo, (lo + hi + 1) // 2), ((lo + hi + 1) // 2, hi)]
        splits.append((lo + hi + 1) // 2)
    return np.array(splits, dtype=np.int64)
