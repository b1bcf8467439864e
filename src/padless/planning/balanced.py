"""Balanced micro-batches: the least modelled time of an optimizer step over ranks.

Every plan divides the sequences, sorted from the longest to the shortest, into contiguous runs. For one field and
without atoms nothing is lost by that: given any division, runs of the same sizes taken in sorted order are no
wider, one by one. What is left to choose is the runs' sizes and how they meet.

* One rank: dynamic programming, optimal.
* A few sequences: all divisions are tried, optimal. With several fields or atoms, all partitions.
* Ranks that meet in every micro-batch: for each number of micro-steps the smallest common cap, then a cap for
  each kind of step (`lockstep`).
* Ranks that meet at the end: runs of least total cost, and of common caps, spread over ranks.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from padless.planning import run_kernels, small_kernels
from padless.planning.grouping import Grouping, lay_out
from padless.planning.lockstep import common_caps, lockstep
from padless.planning.problem import Floats, Index, Problem, least_total, too_few

__all__ = ["balanced", "is_optimal"]

_SMALL = 11  # items for which every division into runs is tried
_TINY = 9  # items for which every partition is tried where runs may not suffice


def balanced(problem: Problem, *, seed: int = 0) -> Grouping:
    """The best plan found, over the order of the items or, for a few items of several fields or atoms, another."""
    problem = _with_reachable_multiple(problem)
    if _tries_partitions(problem) and (grouping := _best_partition(problem)) is not None:
        return grouping
    if problem.ranks == 1:
        return _finish(problem, least_total(problem))
    if _tries_cuts(problem):
        starts = np.empty(len(problem.items) + 1, dtype=np.int64)
        _, runs = small_kernels.every_cut(
            problem.ranks, problem.every, problem.fewest_rows, problem.lockstep,
            problem.cum, problem.items.widths, problem.cost, problem.limits, starts,
        )  # fmt: skip
        if runs == 0 and problem.limits[2] == 1:
            raise too_few(problem)
        if runs > 0:
            return _finish(problem, starts[: runs + 1])
    if not problem.lockstep:
        return _finish(problem, _spread_over_ranks(problem))
    return _finish(problem, lockstep(problem, seed))


def _with_reachable_multiple(problem: Problem) -> Problem:
    """A multiple of sequences gives way where atoms, or sequences that run alone, cannot keep it in order."""
    if problem.limits[2] == 1 or _runs_suffice(problem):
        return problem
    starts = np.empty(len(problem.items) + 2, dtype=np.int64)
    if run_kernels.cut(1e300, len(problem.items), *problem.arrays, starts) <= len(problem.items):
        return problem
    return replace(problem, limits=np.array([*problem.limits[:2], 1], dtype=np.int64))


def is_optimal(problem: Problem) -> bool:
    """Whether `balanced` proves that no other plan keeps the same options and takes less modelled time."""
    if problem.limits[2] > 1:  # where a multiple of sequences gives way is a matter of the order
        return False
    return _tries_partitions(problem) or (_runs_suffice(problem) and (problem.ranks == 1 or _tries_cuts(problem)))


def _runs_suffice(problem: Problem) -> bool:
    """Whether some optimal plan consists of runs of the sorted order."""
    return problem.one_field and problem.single and not problem.items.over.any()


def _tries_partitions(problem: Problem) -> bool:
    return len(problem.items) <= _TINY and not _runs_suffice(problem)


def _tries_cuts(problem: Problem) -> bool:
    return problem.one_field and len(problem.items) <= _SMALL and not problem.items.over.any()


def _best_partition(problem: Problem) -> Grouping | None:
    """All partitions of a few items are tried; None where none keeps a multiple of sequences, which then gives way."""
    count, items = len(problem.items), problem.items
    costs = np.empty(1 << count)
    small_kernels.group_costs(
        problem.fewest_rows, problem.cum, items.widths, items.over, problem.cost, problem.limits, costs
    )
    groups = np.empty(count, dtype=np.int64)
    fixed = float(problem.cost[0])
    _, sets = small_kernels.every_partition(
        problem.ranks, problem.every, problem.lockstep, fixed, problem.own, costs, groups
    )
    if sets == 0:
        if problem.limits[2] > 1:
            return None
        raise too_few(problem)
    held = (groups[:sets, None] >> np.arange(count)) & 1  # (G, I)
    order = np.nonzero(held)[1].astype(np.int64)  # (I,) items, group by group
    bounds = np.concatenate([[0], np.cumsum(held.sum(axis=1))]).astype(np.int64)  # (G + 1,)
    return _lay_out(problem, order, bounds, fixed + costs[groups[:sets]])


# --- ranks that meet at the end of the step


def _spread_over_ranks(problem: Problem) -> Index:
    """Of several sets of runs, the one whose slowest rank ends first."""
    sets = [least_total(problem, penalty=share * float(problem.cost[0]), every=1) for share in _shares(problem)]
    sets += [bounds for _, _, _, bounds in common_caps(problem)]
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
    if problem.lockstep or problem.ranks == 1:
        bounds = _share_out(problem, bounds)
    return _lay_out(problem, np.arange(len(problem.items), dtype=np.int64), bounds, problem.run_costs(bounds))


def _lay_out(problem: Problem, order: Index, bounds: Index, costs: Floats) -> Grouping:
    """Groups between ``bounds`` (G + 1,) of ``order`` over steps and ranks; ``costs`` (G,) are theirs."""
    if problem.lockstep or problem.ranks == 1:
        return lay_out(order, bounds, costs, problem.ranks, problem.steps_for(len(costs)))
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
