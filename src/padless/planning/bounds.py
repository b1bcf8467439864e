"""Lower bounds: what no plan under the same options can beat."""

from __future__ import annotations

import math

import numpy as np

from padless.planning import run_kernels
from padless.planning.problem import Index, Problem

__all__ = ["makespan_bound"]

_PRICES = 400  # prices per run that are tried at most, for all numbers of steps together


def makespan_bound(problem: Problem, *, reached: float, padding: bool = True, rounds: int | None = None) -> float:
    """No plan takes less modelled time than this; ``reached`` is the time of the best one known.

    ``problem`` holds single sequences also where the plan keeps atoms together: that can only be easier.

    For K micro-steps on R ranks the step takes at least the mean over ranks, and also the longest item beside
    K - 1 fixed parts. The mean counts the padding that K * R contiguous runs within the budget cannot
    avoid: the least total of at most G runs is bounded from below by ``min(total + p * runs) - p * G`` for
    every price p >= 0 (Lagrange), where the minimum is a dynamic programme. Runs may be taken as
    contiguous for one field; with several fields, or without ``padding``, only real tokens are counted.
    """
    fixed, ranks, every = float(problem.cost[0]), problem.ranks, problem.every
    count = len(problem.items)
    longest = float(problem.run_costs(np.arange(count + 1)).max()) - fixed
    real = float(problem.own[-1])
    padding = padding and problem.one_field
    steps = problem.steps_for(_fewest_groups(problem) if padding else 1)
    rounds = rounds or (9 if count <= 10_000 else 4 if count <= 100_000 else 1)
    least = math.inf
    prices = _Prices(problem) if padding else None
    while steps * fixed + real / ranks < min(least, reached * (1 + 1e-9)) or least == math.inf:
        # A number of steps that is not the best one needs no better bound than what the best one takes.
        goal = (least - steps * fixed) * ranks if steps * fixed + longest < least else real
        total = real if prices is None else max(real, prices.least_total(steps * ranks, goal, rounds))
        least = min(least, max(steps * fixed + total / ranks, steps * fixed + longest))
        steps += every
        if steps > 100_000 * every or fixed == 0:
            break
    if fixed == 0:  # more steps cost nothing: only real work counts
        least = max(real / ranks, longest)
    # Steps not looked at cost at least `reached`; rounding errors of sums stay on the safe side.
    return min(least, reached)


class _Prices:
    """Dynamic programmes at several prices per run; each gives a bound for every number of runs."""

    def __init__(self, problem: Problem) -> None:
        self._own = problem.own
        self._arrays = problem.cum, problem.items.widths, problem.items.over, problem.cost, _without_multiple(problem)
        self._starts = np.empty(len(problem.items) + 1, dtype=np.int64)
        self._known = np.empty((_PRICES, 3))
        self._count = 0
        _, column, token, squared = map(float, problem.cost)
        widest = float(problem.items.widths[0, 0])
        # More than any run costs.
        self._highest = 2.0 * float(problem.limits[0]) * (token + squared * widest) + column * widest
        for price in (0.0, float(problem.cost[0])):
            self._known[self._count] = price, *self._solve(price)
            self._count += 1

    def least_total(self, groups: int, goal: float, rounds: int) -> float:
        """Variable cost that at most ``groups`` runs cannot avoid; no more than ``goal`` need be shown."""
        best, self._count = run_kernels.least_variable(
            groups, goal, rounds, self._highest, self._known, self._count, *self._arrays, self._starts
        )
        return float(best)

    def _solve(self, price: float) -> tuple[float, int]:
        cum, wide, over, cost, limits = self._arrays
        total, runs = run_kernels.best_runs(price, np.inf, 1, 1, cum, wide, over, self._own, cost, limits, self._starts)
        return float(total), int(runs)


def _fewest_groups(problem: Problem) -> int:
    items = problem.items
    return int(
        run_kernels.fewest_runs(
            problem.cum, items.widths, items.over, problem.cost, _without_multiple(problem), problem.single
        )
    )


def _without_multiple(problem: Problem) -> Index:
    """The limits, but that runs hold any number of sequences: that can only be easier."""
    relaxed = problem.limits.copy()
    relaxed[2] = 1
    return relaxed
