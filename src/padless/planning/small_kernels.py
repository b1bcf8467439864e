"""Kernels that try everything, for steps of a few items, and the assignment of runs to ranks."""

# mypy: disable-error-code="no-any-return"
from __future__ import annotations

from typing import Any

import numpy as np

from padless.planning.kernels import jit

__all__ = ["assign", "every_cut", "every_partition", "group_costs", "spread_least"]

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
def group_costs(
    fewest_rows: int, cum: Array, wide: Array, over: Array, cost: Array, limits: Array, costs: Array
) -> None:
    """``costs`` (2 ** I,) gets the cost of each set of items, fixed part aside; ``inf`` where a limit is broken.

    A multiple of sequences gives way as for runs: where the budget holds fewer, and in the set of the last item.
    """
    count, fields = wide.shape
    costs[0] = np.inf
    for mask in range(1, 1 << count):
        n = items = width = 0
        alone = False
        square = 0.0
        for i in range(count):
            if (mask >> i) & 1:
                n += cum[i + 1] - cum[i]
                items += 1
                alone = alone or over[i]
        for f in range(fields):
            widest = 0
            for i in range(count):
                if (mask >> i) & 1:
                    widest = max(widest, wide[i, f])
            width += widest
            square += float(widest) * widest
        legal = n >= fewest_rows and (not alone if items > 1 else True)
        if not alone:
            legal = legal and n <= limits[1] and n * width <= limits[0]
        if limits[2] > 1 and n % limits[2] != 0 and not (mask >> (count - 1)) & 1:
            legal = legal and n < limits[2] and min(limits[1], limits[0] // width) < limits[2]
        costs[mask] = cost[1] * width + n * (cost[2] * width + cost[3] * square) if legal else np.inf


@jit
def every_partition(
    ranks: int, every: int, lockstep: bool, fixed: float, own: Array, costs: Array, groups: Array
) -> tuple[float, int]:
    """The best of all partitions of the items into sets: (makespan, sets); ``groups`` gets the sets as masks.

    ``costs`` as `group_costs` leaves them. Of equally fast partitions one with the most sets is taken. The first
    item that has no set yet begins the next one, so that each partition is met once.
    """
    count = len(own) - 1
    real = np.zeros(len(costs))  # what the items of each set cost without padding
    for i in range(count):
        real[1 << i : 2 << i] = real[: 1 << i] + own[i + 1] - own[i]
    rest = np.empty(count + 1, dtype=np.int64)
    others = np.empty(count + 1, dtype=np.int64)
    open_ = np.zeros(count + 1, dtype=np.bool_)
    chosen, place = np.empty(count, dtype=np.int64), np.empty(count, dtype=np.int64)
    held, before = np.empty(count), np.zeros(count + 1)
    least, sets, d = np.inf, 0, 0
    rest[0], open_[0] = (1 << count) - 1, True
    others[0] = rest[0] & (rest[0] - 1)
    while d >= 0:
        if not open_[d]:
            d -= 1
            continue
        first = rest[d] & -rest[d]
        mask = first | others[d]
        open_[d] = others[d] != 0
        others[d] = (others[d] - 1) & (rest[d] ^ first)
        held[d], chosen[d] = costs[mask], mask
        before[d + 1] = before[d] + costs[mask]
        steps = (d + ranks) // ranks
        steps = -(-steps // every) * every
        left = rest[d] ^ mask
        if costs[mask] == np.inf or (before[d + 1] + real[left]) / ranks + steps * fixed > least * (1 + 1e-12):
            continue
        if left != 0:
            d += 1
            rest[d], others[d], open_[d] = left, left & (left - 1), True
            continue
        value = _best_meeting(np.sort(held[: d + 1])[::-1], ranks, every, lockstep, fixed, steps, least, place)
        if value < least * (1 - 1e-12) or (value <= least * (1 + 1e-12) and d + 1 > sets):
            least, sets = min(least, value), d + 1
            groups[: d + 1] = chosen[: d + 1]
    return least, sets


@jit
def _best_meeting(
    costs: Array, ranks: int, every: int, lockstep: bool, fixed: float, steps: int, bound: float, place: Array
) -> float:
    """Makespan of runs with descending ``costs``; where ranks meet at the end, what is over ``bound`` counts as inf."""
    if lockstep:
        return _lockstep(costs, ranks) + steps * fixed
    least = np.inf
    most = -(-len(costs) // every) * every
    while steps <= most:
        limit = min(least, bound * (1 + 1e-12)) - steps * fixed
        if costs[0] < limit:
            found = spread_least(costs, ranks, steps, limit, place)
            if found < limit:
                least = found + steps * fixed
        steps += every
    return least


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
