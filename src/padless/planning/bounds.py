"""Lower bounds: what no plan under the same options can beat."""

from __future__ import annotations

import math

import numpy as np

from padless.planning import run_kernels
from padless.planning.problem import Problem

__all__ = ["makespan_bound"]


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
    prices = _Prices(problem)
    while steps * fixed + real / ranks < min(least, reached * (1 + 1e-9)) or least == math.inf:
        total = max(real, prices.least_total(steps * ranks, rounds)) if padding else real
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
        self._problem = problem
        self._known: dict[float, tuple[float, int]] = {}

    def least_total(self, groups: int, rounds: int) -> float:
        """Variable cost that at most ``groups`` runs cannot avoid."""
        low, high = 0.0, self._start()
        best = max(total - price * groups for price, (total, _) in self._known.items())
        for _ in range(rounds):
            price = 0.5 * (low + high)
            total, runs = self._solve(price)
            best = max(best, total - price * groups)
            low, high = (low, price) if runs <= groups else (price, high)
        return best

    def _start(self) -> float:
        """A price so high that more runs do not pay."""
        problem = self._problem
        self._solve(0.0)
        self._solve(float(problem.cost[0]))
        widest = float(problem.items.widths[0, 0])
        _, column, token, squared = map(float, problem.cost)
        return 2.0 * float(problem.limits[0]) * (token + squared * widest) + column * widest

    def _solve(self, price: float) -> tuple[float, int]:
        if price not in self._known:
            problem = self._problem
            starts = np.empty(len(problem.items) + 1, dtype=np.int64)
            relaxed = problem.limits.copy()
            relaxed[2] = 1
            total, runs = run_kernels.best_runs(
                price, np.inf, 1, 1, problem.cum, problem.items.widths, problem.items.over, problem.own,
                problem.cost, relaxed, starts,
            )  # fmt: skip
            self._known[price] = (total, runs)
        return self._known[price]


def _fewest_groups(problem: Problem) -> int:
    relaxed = problem.limits.copy()
    relaxed[2] = 1
    return int(
        run_kernels.fewest_runs(
            problem.cum, problem.items.widths, problem.items.over, problem.cost, relaxed, problem.single
        )
    )
