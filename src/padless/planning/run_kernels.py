"""Kernels on runs: consecutive stretches of items sorted from the longest to the shortest.

Arguments shared by all of them, for I items with F fields:
    cum (I + 1,) int64: sequences before each item.     wide (I, F) int64: rounded widths.
    over (I,) bool: runs alone, over the budget.          own (I + 1,) float64: cost before each item, padding aside.
    cost (4,) float64: per micro-batch, column, token, token squared.
    limits (3,) int64: token budget, most sequences of a run, multiple of sequences.
"""

# mypy: disable-error-code="no-any-return"
from __future__ import annotations

from typing import Any

import numpy as np

from padless.planning.kernels import jit

__all__ = ["best_runs", "cut", "fewest_runs", "least_variable", "lower_cap", "reach", "run_cost"]

Array = Any  # numba knows the types; see the module's docstring


@jit
def run_cost(i: int, j: int, cum: Array, wide: Array, cost: Array) -> float:
    """Cost of the run of items i .. j - 1, its fixed part included."""
    n = cum[j] - cum[i]
    width = 0.0
    square = 0.0
    for f in range(wide.shape[1]):
        widest = wide[i, f]
        if wide.shape[1] > 1:
            for k in range(i + 1, j):
                widest = max(widest, wide[k, f])
        width += widest
        square += float(widest) * widest
    return cost[0] + cost[1] * width + cost[2] * n * width + cost[3] * n * square


@jit
def _reach_one_field(
    i: int, cap: float, cum: Array, wide: Array, over: Array, cost: Array, limits: Array, single: bool
) -> int:
    """`reach` for one field: the first item is the widest, so the number of rows follows by division."""
    width = wide[i, 0]
    count = len(wide)
    own = cum[i + 1] - cum[i]
    room = cap - cost[0] - cost[1] * width
    unit = width * (cost[2] + cost[3] * width)
    fits = 1e18 if unit <= 0 else room / unit + 1e-9
    if fits < own or room < -1e-9:
        return i
    if over[i]:
        return i + 1
    most = min(limits[1], limits[0] // width)
    n = most if fits >= most else int(fits)
    multiple = limits[2]
    if multiple > 1 and most >= multiple and cum[count] - cum[i] > n:
        if n < multiple:
            return i
        n -= n % multiple
    if single:
        return min(count, i + max(n, 1))
    j = np.searchsorted(cum, cum[i] + n, side="right") - 1
    return min(count, max(j, i + 1))


@jit
def reach(i: int, cap: float, cum: Array, wide: Array, over: Array, cost: Array, limits: Array, single: bool) -> int:
    """The furthest j such that the run i .. j - 1 costs at most ``cap`` and keeps the limits; i where none does."""
    if wide.shape[1] == 1:
        return _reach_one_field(i, cap, cum, wide, over, cost, limits, single)
    count, fields, multiple = len(wide), wide.shape[1], limits[2]
    widest = wide[i].copy()
    best = i
    for j in range(i, count):
        width = 0.0
        square = 0.0
        for f in range(fields):
            widest[f] = max(widest[f], wide[j, f])
            width += widest[f]
            square += float(widest[f]) * widest[f]
        n = cum[j + 1] - cum[i]
        if j > i and (over[j] or over[i] or n > limits[1] or n * width > limits[0]):
            break
        if cost[0] + cost[1] * width + cost[2] * n * width + cost[3] * n * square > cap * (1 + 1e-12):
            break
        if n % multiple == 0 or n < multiple or j + 1 == count:
            best = j + 1
    return best


@jit
def cut(
    cap: float,
    most: int,
    cum: Array,
    wide: Array,
    over: Array,
    cost: Array,
    limits: Array,
    single: bool,
    starts: Array,
) -> int:
    """Runs when each reaches as far as ``cap`` allows, bounds in ``starts``; most + 1 where that is not enough."""
    i, g, count = 0, 0, len(wide)
    while i < count:
        if g == most:
            return most + 1
        j = reach(i, cap, cum, wide, over, cost, limits, single)
        if j == i:
            return most + 1
        starts[g] = i
        g += 1
        i = j
    starts[g] = count
    return g


@jit
def fewest_runs(cum: Array, wide: Array, over: Array, cost: Array, limits: Array, single: bool) -> int:
    """Runs needed when only the limits bind: the fewest there are, for one field without atoms."""
    i, g = 0, 0
    while i < len(wide):
        i = max(i + 1, reach(i, 1e300, cum, wide, over, cost, limits, single))
        g += 1
    return g


@jit
def lower_cap(
    most: int, low: float, high: float, cum: Array, wide: Array, over: Array, cost: Array, limits: Array, single: bool
) -> float:
    """The smallest cap (to 1e-5 of it) at which `cut` needs at most ``most`` runs; ``high`` must do."""
    starts = np.empty(most + 2, dtype=np.int64)
    while high - low > 1e-5 * high:
        middle = 0.5 * (low + high)
        if cut(middle, most, cum, wide, over, cost, limits, single, starts) <= most:
            high = middle
        else:
            low = middle
    return high


@jit
def best_runs(
    penalty: float,
    cap: float,
    fewest_rows: int,
    every: int,
    cum: Array,
    wide: Array,
    over: Array,
    own: Array,
    cost: Array,
    limits: Array,
    starts: Array,
) -> tuple[float, int]:
    """Contiguous runs of the least total cost by dynamic programming, bounds in ``starts``: (total, runs).

    A run costs its variable part plus ``penalty``; none may cost more than ``cap`` (fixed part included) or
    hold fewer than ``fewest_rows``. The number of runs is completed to a multiple of ``every`` with empty ones,
    which cost ``penalty`` too. ``inf`` where no division keeps the limits.

    best[j, m] is the least cost of the first j items in a number of runs that is m modulo ``every``. Going
    back from j, a run's tokens only grow: the loop ends at the budget, or where even perfect packing
    of what is left could not win any more.
    """
    count, fields = wide.shape
    if fields == 1 and every == 1 and fewest_rows == 1 and limits[2] == 1:
        return _best_runs_one_field(penalty, cap, cum, wide, over, cost, limits, starts)
    best = np.full((count + 1, every), np.inf)
    back = np.full((count + 1, every), -1, dtype=np.int64)
    best[0, 0] = 0.0
    widest = np.zeros(fields, dtype=np.int64)
    for j in range(1, count + 1):
        widest[:] = 0
        worst = np.inf  # the worst of best[j, :]; nothing above it is of use
        for i in range(j - 1, -1, -1):
            width = 0
            square = 0.0
            for f in range(fields):
                widest[f] = max(widest[f], wide[i, f])
                width += widest[f]
                square += float(widest[f]) * widest[f]
            n = cum[j] - cum[i]
            if j - i > 1 and (over[i] or over[j - 1] or n > limits[1] or n * width > limits[0]):
                break
            value = cost[1] * width + cost[2] * n * width + cost[3] * n * square
            if own[i] + value + penalty >= worst or value + cost[0] > cap:
                break
            if n < fewest_rows or not _keeps_multiple(i, j, n, cum, wide, limits):
                continue
            for m in range(every):
                total = best[i, m] + value + penalty
                to = (m + 1) % every
                if total < best[j, to]:
                    best[j, to] = total
                    back[j, to] = i
            worst = best[j].max()
    last, least = 0, np.inf
    for m in range(every):
        total = best[count, m] + penalty * ((every - m) % every)
        if total < least:
            last, least = m, total
    if least == np.inf:
        return least, 0
    return least, _walk_back(last, every, back, starts)


@jit
def _best_runs_one_field(
    penalty: float, cap: float, cum: Array, wide: Array, over: Array, cost: Array, limits: Array, starts: Array
) -> tuple[float, int]:
    """`best_runs` for one field without constraints on counts.

    Ending run i' .. j - 1 at i instead, for i' < i < j, splits it in two, so best[i] is at most
    best[i'] + penalty + the cost of i' .. i - 1. Hence no start before i can lead to less than best[i] plus i's
    width on the rows i .. j - 1: what a start further back can save is one penalty, and the loop ends there.
    """
    count = len(wide)
    best = np.full(count + 1, np.inf)
    back = np.zeros((count + 1, 1), dtype=np.int64)
    best[0] = 0.0
    budget, most = limits[0], limits[1]
    for j in range(1, count + 1):
        least, chosen = np.inf, -1
        for i in range(j - 1, -1, -1):
            width = wide[i, 0]
            n = cum[j] - cum[i]
            if j - i > 1 and (n * width > budget or n > most or over[i]):
                break
            value = n * width * (cost[2] + cost[3] * width)
            if best[i] + value >= least:
                break
            value += cost[1] * width
            if value + cost[0] > cap:
                break
            if best[i] + value + penalty < least:
                least, chosen = best[i] + value + penalty, i
        if chosen >= 0:
            best[j], back[j, 0] = least, chosen
    if best[count] == np.inf:
        return np.inf, 0
    return best[count], _walk_back(0, 1, back, starts)


@jit
def least_variable(
    groups: int, goal: float, rounds: int, highest: float, known: Array, count: int,
    cum: Array, wide: Array, over: Array, cost: Array, limits: Array, starts: Array,
) -> tuple[float, int]:  # fmt: skip
    """Variable cost that at most ``groups`` runs of one field cannot avoid, from below; and how many prices are known.

    With a price for each run, the least total of all runs is a dynamic programme, and less ``price * groups`` it is a
    lower bound for every price. The best price lies between the dearest that leaves too many runs and the cheapest that
    does not: where the two lines ``total + (price' - price) * runs`` meet, until the programme finds nothing below them
    (Kelley's cutting planes). Ends early at ``goal``, or after ``rounds`` programmes.

    ``known`` (P, 3) holds ``count`` prices with their totals and runs, price 0 among them, and gets further ones. At
    ``highest`` more runs do not pay.
    """
    best = -np.inf
    for k in range(count):
        best = max(best, known[k, 1] - known[k, 0] * groups)
    for _ in range(rounds):
        left = right = -1
        for k in range(count):
            if known[k, 2] > groups:
                if left < 0 or known[k, 0] > known[left, 0]:
                    left = k
            elif right < 0 or known[k, 0] < known[right, 0]:
                right = k
        if left < 0 or best >= goal or count == len(known):
            break
        price, meet = highest, np.inf
        if right >= 0:
            of_left = known[left, 1] - known[left, 0] * known[left, 2]
            of_right = known[right, 1] - known[right, 0] * known[right, 2]
            price = (of_right - of_left) / (known[left, 2] - known[right, 2])
            meet = of_left + price * known[left, 2]
        if price <= known[left, 0] or (right >= 0 and price >= known[right, 0]):  # one of the two is the best price
            break
        total, runs = _best_runs_one_field(price, np.inf, cum, wide, over, cost, limits, starts)
        known[count, 0], known[count, 1], known[count, 2] = price, total, runs
        count += 1
        best = max(best, total - price * groups)
        if total >= meet - 1e-12 * abs(meet):
            break
    return best, count


@jit
def _keeps_multiple(i: int, j: int, n: int, cum: Array, wide: Array, limits: Array) -> bool:
    """A multiple of sequences; or fewer than one multiple where no more fits, or where the sequences end."""
    if limits[2] == 1 or n % limits[2] == 0 or j == len(wide):
        return True
    width = 0
    for f in range(wide.shape[1]):
        width += wide[i, f]
    return n < limits[2] and min(limits[1], limits[0] // width) < limits[2]


@jit
def _walk_back(last: int, every: int, back: Array, starts: Array) -> int:
    g, j, m = 0, len(back) - 1, last
    while j > 0:
        starts[g] = j
        g += 1
        j, m = back[j, m], (m - 1) % every
    starts[g] = 0
    for k in range((g + 1) // 2):
        starts[k], starts[g - k] = starts[g - k], starts[k]
    return g
