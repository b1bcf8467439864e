"""Kernels that try everything, for steps of a few items, and the assignment of runs to ranks."""

# mypy: disable-error-code="no-any-return"
from __future__ import annotations

from typing import Any

import numpy as np

from padless.planning.kernels import jit

__all__ = ["assign", "every_cut", "spread_least"]

Array = Any


@jit
def _lockstep(costs: Array, ranks: int) -> float:
    """Runs sorted by cost, ``ranks`` to a step: the sum of each step's slowest."""
    ordered = np.sort(costs)
    total = 0.0
    g = len(ordered) - 1
    while g >= 0:
        total += ordered[g]
        g -= ranks
    return total


@jit
def spread_least(costs: Array, ranks: int, most: int, bound: float, chosen: Array) -> float:
    """Least possible largest sum when runs go to ``ranks`` ranks, ``most`` at most on each; ``bound`` if none is lower.

    ``chosen`` (G,) gets the rank of each run.
    Walks all ways to put runs into unlabelled ranks (restricted growth strings), up to the bound.
    """
    count = len(costs)
    place = np.full(count, -1, dtype=np.int64)
    sums = np.zeros(ranks)
    held = np.zeros(ranks, dtype=np.int64)
    g = 0
    while g >= 0:
        if place[g] >= 0:
            sums[place[g]] -= costs[g]
            held[place[g]] -= 1
        opened = 0
        for r in range(ranks):
            if held[r] > 0:
                opened = r + 1
        r = place[g] + 1
        while r < ranks and r <= opened and (held[r] >= most or sums[r] + costs[g] >= bound):
            r += 1
        if r >= ranks or r > opened:
            place[g] = -1
            g -= 1
            continue
        place[g] = r
        sums[r] += costs[g]
        held[r] += 1
        if g == count - 1:
            bound = sums.max()  # and on to the next rank for the last run
            chosen[:count] = place
        else:
            g += 1
    return bound


@jit
def every_cut(
    ranks: int,
    every: int,
    fewest_rows: int,
    lockstep: bool,
    cum: Array,
    wide: Array,
    cost: Array,
    limits: Array,
    starts: Array,
) -> tuple[float, int]:
    """The best of all 2 ** (I - 1) divisions into runs (one field): (makespan, runs), bounds in ``starts``."""
    count = len(wide)
    least, runs_of_least = np.inf, 0
    bounds = np.empty(count + 1, dtype=np.int64)
    costs = np.empty(count)
    place = np.empty(count, dtype=np.int64)
    for mask in range(1 << (count - 1)):
        g, i, legal = 0, 0, True
        for j in range(1, count + 1):
            if j < count and not (mask >> (j - 1)) & 1:
                continue
            n, width = cum[j] - cum[i], wide[i, 0]
            most = min(limits[1], limits[0] // width)
            multiple = limits[2]
            if n < fewest_rows or (j - i > 1 and n > most):
                legal = False
                break
            if multiple > 1 and n % multiple != 0 and j < count and not (n < multiple and most < multiple):
                legal = False
                break
            costs[g] = cost[1] * width + n * width * (cost[2] + cost[3] * width)
            bounds[g] = i
            g += 1
            i = j
        if not legal:
            continue
        steps = -(-g // ranks)
        steps = -(-steps // every) * every
        if lockstep:
            value = _lockstep(costs[:g], ranks) + steps * cost[0]
            if value < least:
                least, runs_of_least = value, g
                starts[:g] = bounds[:g]
        else:
            while steps <= -(-g // every) * every and steps * cost[0] < least:
                bound = least - steps * cost[0]
                value = spread_least(costs[:g], ranks, steps, bound, place)
                if value < bound:
                    least, runs_of_least = value + steps * cost[0], g
                    starts[:g] = bounds[:g]
                steps += every
    starts[runs_of_least] = count
    return least, runs_of_least


@jit
def assign(costs: Array, most: Array, rounds: int, place: Array) -> float:
    """Spread runs over ranks, at most ``most`` (R,) on each; ``place`` (G,) gets the ranks, the largest sum returns.

    ``costs`` (G,) descending. Longest first onto the least loaded rank with a slot; then runs of the fullest rank are
    exchanged with runs (or empty slots) of others for as long as that lowers the larger of the two sums.
    """
    count, ranks = len(costs), len(most)
    sums = np.zeros(ranks)
    held = np.zeros(ranks, dtype=np.int64)
    for g in range(count):
        chosen = -1
        for r in range(ranks):
            if held[r] < most[r] and (chosen < 0 or sums[r] < sums[chosen]):
                chosen = r
        place[g] = chosen
        sums[chosen] += costs[g]
        held[chosen] += 1
    for _ in range(rounds):
        full = np.argmax(sums)
        best, one, other, to = 0.0, -1, -1, -1
        for a in range(count):
            if place[a] != full:
                continue
            for b in range(count):
                r = place[b]
                difference = costs[a] - costs[b]
                if r == full or difference <= 0.0:
                    continue
                gain = min(difference, sums[full] - sums[r] - difference)
                if gain > best + 1e-12 * sums[full]:
                    best, one, other, to = gain, a, b, r
            for r in range(ranks):
                if r == full or held[r] >= most[r]:
                    continue
                gain = min(costs[a], sums[full] - sums[r] - costs[a])
                if gain > best + 1e-12 * sums[full]:
                    best, one, other, to = gain, a, -1, r
        if one < 0:
            break
        moved = costs[one] - (costs[other] if other >= 0 else 0.0)
        sums[full] -= moved
        sums[to] += moved
        place[one] = to
        if other >= 0:
            place[other] = full
        else:
            held[full] -= 1
            held[to] += 1
    return sums.max()
