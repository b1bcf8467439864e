"""Kernels of `lean`: the rows of one optimizer step, sorted from the longest, cut into runs.

Shared arguments, for n rows:
    cost: (per micro-batch, column, token, token squared), floats.
    rule: (token budget, most sequences of a run, ranks, what micro-steps and what widths are a multiple of), ints.
    items: (wide (n,) int64, unit (n,), each (n,), most (n,) int64, own (n + 1,)): rounded widths, cost of a row so
        wide, its reciprocal, rows that the limits allow a run that begins here, cost before each row, padding aside.
Caps and costs of runs leave the fixed cost of a micro-batch out.
"""

# mypy: disable-error-code="no-any-return"
from __future__ import annotations

from typing import Any

import numpy as np

from padless.planning.kernels import jit

__all__ = ["plan_step", "plan_steps"]

Array = Any
Items = Any
Rule = tuple[int, int, int, int, int]
Cost = tuple[float, float, float, float]

_KINDS = 4  # caps that differ
_SPREADS = (0.0, 0.8, 0.3, 1.3)  # how far apart they are tried, as a share of their mean
_HALVINGS = 4
_MISSES = 3
_EFFORT = 4  # runs that are placed in the search, for each row
_JUST_OVER = 1.0 + 1e-9


@jit
def _longest_first(lengths: Array) -> Array:
    """A stable order from the longest to the shortest, (n,): a radix sort of 8 bits at a time."""
    n = len(lengths)
    longest = 0
    for length in lengths:
        longest = max(longest, length)
    order, other = np.arange(n), np.empty(n, np.int64)
    places = np.empty(257, np.int64)
    shift = 0
    while longest >> shift > 0:
        for digit in range(257):
            places[digit] = 0
        for i in range(n):
            places[(longest - lengths[i] >> shift & 255) + 1] += 1
        for digit in range(256):
            places[digit + 1] += places[digit]
        for j in range(n):
            digit = longest - lengths[order[j]] >> shift & 255
            other[places[digit]] = order[j]
            places[digit] += 1
        order, other = other, order
        shift += 8
    return order


@jit
def _items(lengths: Array, order: Array, rule: Rule, cost: Cost) -> Items:
    n = len(lengths)
    wide, most = np.empty(n, np.int64), np.empty(n, np.int64)
    unit, each, own = np.empty(n), np.empty(n), np.empty(n + 1)
    own[0] = 0.0
    multiple = rule[4]
    for i in range(n):
        width = lengths[order[i]]
        if multiple > 1:
            width = -(-width // multiple) * multiple
        wide[i] = width
        unit[i] = cost[2] * width + cost[3] * float(width) * width
        each[i] = 1.0 / unit[i] if unit[i] > 0.0 else 1e18
        most[i] = max(min(rule[0] // width, rule[1], n - i), 1)  # one row may be over the budget
        own[i + 1] = own[i] + unit[i]
    return wide, unit, each, most, own


@jit
def _fill(
    caps: Array, inverse: Array, room: Array, left: Array, items: Items, column: float, starts: Array, kinds: Array
) -> int:
    """Cut the rows into runs, each in the kind of micro-step whose cap real work fills best; their number, or -1.

    Longest first, as in `fill_kernels.fill`: a run of awkward width lands where it fits, and short rows, which fit
    anywhere, take what is left. ``room`` (T,) runs of each kind, ``left`` (T,) those that remain.
    """
    wide, _, each, most, own = items
    n, count = len(wide), len(caps)
    for t in range(count):
        left[t], inverse[t] = room[t], 1.0 / caps[t]
    i = runs = 0
    while i < n:
        ample = most[i]
        base = column * wide[i]
        chosen, behind, best = -1, i, -1.0
        for t in range(count):
            fits = (caps[t] * _JUST_OVER - base) * each[i]
            if left[t] == 0 or fits < 1.0:
                continue
            stop = i + (ample if fits >= ample else int(fits))
            use = (own[stop] - own[i]) * inverse[t]
            if use > best:
                chosen, behind, best = t, stop, use
        if chosen < 0:
            return -1
        left[chosen] -= 1
        starts[runs], kinds[runs] = i, chosen
        runs += 1
        i = behind
    starts[runs] = n
    return runs


@jit
def _lower_to_runs(caps: Array, items: Items, column: float, starts: Array, kinds: Array, runs: int) -> None:
    """Set each kind's cap to what its costliest run costs."""
    wide, unit = items[0], items[1]
    for t in range(len(caps)):
        caps[t] = 0.0
    for run in range(runs):
        i = starts[run]
        value = column * wide[i] + (starts[run + 1] - i) * unit[i]
        caps[kinds[run]] = max(caps[kinds[run]], value)


@jit
def _cheapest(items: Items, limit: int, budget: int, price: float, column: float, starts: Array) -> int:
    """Runs of the least total cost when each costs ``price`` more, bounds in ``starts``; their number.

    best[j] = min over i of best[i] + price + column * wide[i] + (j - i) * unit[i]. Units fall as i grows, so the best i
    never moves back as j grows, and neither does the first i that the limits allow: only those in between are tried.
    """
    wide, unit = items[0], items[1]
    n = len(wide)
    best, back = np.empty(n + 1), np.empty(n + 1, np.int64)
    best[0] = 0.0
    first = 0
    for j in range(1, n + 1):
        while first < j - 1 and (j - first > limit or (j - first) * wide[first] > budget):
            first += 1
        lowest, at = np.inf, first
        for i in range(first, j):
            total = best[i] + column * wide[i] + (j - i) * unit[i]
            if total < lowest:
                lowest, at = total, i
        best[j] = lowest + price
        back[j] = first = at
    runs, j = 0, n
    while j > 0:
        j = back[j]
        runs += 1
    j = n
    for run in range(runs, -1, -1):
        starts[run] = j
        if run:
            j = back[j]
    return runs


@jit
def _costliest_first(items: Items, column: float, starts: Array, stops: Array, runs: int) -> tuple[Array, Array]:
    """(order of the runs (runs,), their costs (runs,)) from the costliest; equal ones in their order. A shell sort."""
    value, order = np.empty(runs), np.empty(runs, np.int64)
    for run in range(runs):
        i = starts[run]
        value[run] = column * items[0][i] + (stops[run] - i) * items[1][i]
        order[run] = run
    for gap in (701, 301, 132, 57, 23, 10, 4, 1):
        for at in range(gap, runs):
            held, mine, j = value[at], order[at], at
            while j >= gap and (value[j - gap] < held or (value[j - gap] == held and order[j - gap] > mine)):
                value[j], order[j] = value[j - gap], order[j - gap]
                j -= gap
            value[j], order[j] = held, mine
    return order, value


@jit
def _best_split(start: int, stop: int, highest: float, items: Items, column: float) -> tuple[float, int]:
    """(what it saves, where) of the best split of a run whose second part costs at most ``highest``; (0, 0) if none."""
    wide, unit = items[0], items[1]
    most, place = 0.0, 0
    for i in range(start + 1, stop):
        value = (stop - i) * unit[i] + column * wide[i]
        saved = (stop - i) * unit[start] - value
        if saved > most and value <= highest:
            most, place = saved, i
    return most, place


@jit
def _split(caps: Array, left: Array, items: Items, column: float, starts: Array, stops: Array, runs: int) -> int:
    """Split runs where ranks are idle, the most padding first, if the second part is within a free cap; the number."""
    wide, unit = items[0], items[1]
    free, highest = 0, 0.0
    for t in range(len(caps)):
        free += left[t]
        if left[t] > 0:
            highest = max(highest, caps[t])
    saved, place = np.zeros(runs + free), np.zeros(runs + free, np.int64)
    for run in range(runs):
        saved[run], place[run] = _best_split(starts[run], stops[run], highest, items, column)
    while free > 0:
        chosen = 0
        for run in range(1, runs):
            if saved[run] > saved[chosen]:
                chosen = run
        if saved[chosen] <= 0.0:
            break
        at, stop = place[chosen], stops[chosen]
        value = (stop - at) * unit[at] + column * wide[at]
        kind = -1
        for t in range(len(caps)):
            if left[t] > 0 and caps[t] >= value and (kind < 0 or caps[t] < caps[kind]):
                kind = t
        if kind >= 0:
            left[kind] -= 1
            free -= 1
            starts[runs], stops[runs] = at, stop
            stops[chosen] = at
            highest = 0.0
            for t in range(len(caps)):
                if left[t] > 0:
                    highest = max(highest, caps[t])
            saved[runs], place[runs] = _best_split(at, stop, highest, items, column)
            runs += 1
        saved[chosen], place[chosen] = _best_split(starts[chosen], stops[chosen], highest, items, column)
    return runs


@jit
def _search(
    steps: int,
    goal: float,
    items: Items,
    ranks: int,
    column: float,
    top: float,
    starts: Array,
    out: tuple[Array, Array],
) -> tuple[float, int, int]:
    """(sum of caps, runs, effort) of the least found below ``goal`` for so many micro-steps; runs in ``out``.

    (inf, 0, effort) where none is below it; ``effort`` counts the runs that were placed in trials.
    Caps lie evenly around a centre, as low as bisection finds, the first never below the longest row.
    """
    wide, unit, own = items[0], items[1], items[4]
    count = min(steps, _KINDS)
    room, left, unused = np.empty(count, np.int64), np.empty(count, np.int64), np.empty(count, np.int64)
    caps, inverse, least = np.empty(count), np.empty(count), np.empty(count)
    for t in range(count):
        room[t] = ((t + 1) * steps // count - t * steps // count) * ranks
    kinds = np.empty(len(wide) + 1, np.int64)
    longest = column * wide[0] + unit[0]
    best, found, effort = np.inf, 0, 0
    for spread in _SPREADS:
        if count == 1 and spread > 0.0:
            break
        low, high = own[len(wide)] / (steps * ranks), min(top, min(goal, best) / steps * 0.9995)
        for trial in range(_HALVINGS):
            centre = high if trial == 0 else 0.6 * low + 0.4 * high
            for t in range(count):
                caps[t] = centre * (1.0 + spread * (0.5 - (t + 0.5) / count))
            caps[0] = max(caps[0], longest)
            runs = _fill(caps, inverse, room, left, items, column, starts, kinds)
            effort += steps * ranks
            if runs < 0:
                if trial == 0:
                    break
                low = centre
                continue
            _lower_to_runs(caps, items, column, starts, kinds, runs)
            total = 0.0
            for t in range(count):
                total += caps[t] * (room[t] // ranks)
            high = min(centre, total / steps) if spread == 0.0 else centre
            if total < min(best, goal):
                best, found = total, runs
                for t in range(count):
                    least[t], unused[t] = caps[t], left[t]
                for run in range(runs):
                    out[0][run], out[1][run] = starts[run], starts[run + 1]
    if found:
        found = _split(least, unused, items, column, out[0], out[1], found)
    return best, found, effort


@jit
def _runs(items: Items, rule: Rule, cost: Cost, starts: Array, stops: Array) -> tuple[int, int]:
    """(micro-steps, runs), and where each of the runs starts and stops, (n,) each."""
    wide, unit, most, own = items[0], items[1], items[3], items[4]
    ranks, every, fixed, column = rule[2], rule[3], cost[0], cost[1]
    n = len(wide)
    if n <= ranks:
        for i in range(n):
            starts[i], stops[i] = i, i + 1
        return every, n
    best, steps, runs = np.inf, 0, 0
    trial = np.empty(n + 1, np.int64), np.empty(n + 1, np.int64)
    if ranks <= 2:  # the sum of costs is all that counts, or nearly
        runs = _cheapest(items, rule[1], rule[0], fixed if ranks == 1 else 0.7 * fixed, column, trial[0])
        for run in range(runs):
            starts[run], stops[run] = trial[0][run], trial[0][run + 1]
        steps = -(-runs // (ranks * every)) * every
        if ranks == 1:
            return steps, runs
        best = steps * fixed
        value = _costliest_first(items, column, starts, stops, runs)[1]
        for run in range(0, runs, ranks):
            best += value[run]
    i = fewest = 0
    top = 1e-9
    while i < n:
        i += most[i]
        fewest += 1
    for i in range(n):
        top = max(top, column * wide[i] + most[i] * unit[i])
    at, misses, scratch = -(-fewest // (ranks * every)) * every, 0, np.empty(n + 1, np.int64)
    at = max(at, steps * 3 // 4 // every * every)
    effort = 0
    while misses < _MISSES and effort < _EFFORT * n and at * fixed + own[n] / ranks < best:
        total, found, placed = _search(at, best - at * fixed, items, ranks, column, top, scratch, trial)
        effort += placed if runs else 0
        if found:
            best, steps, runs, misses = total + at * fixed, at, found, 0
            for run in range(found):
                starts[run], stops[run] = trial[0][run], trial[1][run]
        elif runs:
            misses += 1
        if at * ranks >= n:
            break
        at += every * max(1, at // (5 * every))
    return steps, runs


@jit
def plan_step(lengths: Array, rule: Rule, cost: Cost, order: Array, offsets: Array, padded: Array) -> int:
    """Micro-steps K of one step; ``lengths`` (n,) -> ``order`` (n,), ``offsets`` and ``padded`` of K * ranks groups."""
    n, ranks = len(lengths), rule[2]
    ranked = _longest_first(lengths)
    items = _items(lengths, ranked, rule, cost)
    starts, stops = np.empty(n, np.int64), np.empty(n, np.int64)
    steps, runs = _runs(items, rule, cost, starts, stops)
    by_cost = _costliest_first(items, cost[1], starts, stops, runs)[0]
    at = 0
    offsets[0] = 0
    for g in range(steps * ranks):
        padded[g] = 0
        if g < runs:
            start, stop = starts[by_cost[g]], stops[by_cost[g]]
            for i in range(start, stop):
                order[at] = ranked[i]
                at += 1
            padded[g] = (stop - start) * items[0][start]
        offsets[g + 1] = at
    return steps


@jit
def plan_steps(
    lengths: Array,
    members: Array,
    bounds: Array,
    rule: Rule,
    cost: Cost,
    order: Array,
    offsets: Array,
    padded: Array,
    told: Array,
) -> None:
    """`plan_step` for the steps between ``bounds`` (B + 1,) in ``members`` (S,), places in ``lengths``.

    ``order`` (S,); ``offsets`` and ``padded``, a row for each step; ``told`` (B, 3): micro-steps, tokens, and the
    place of the shortest sequence.
    """
    for step in range(len(bounds) - 1):
        start, stop = bounds[step], bounds[step + 1]
        held = np.empty(stop - start, np.int64)
        tokens, shortest = 0, 0
        for i in range(stop - start):
            held[i] = lengths[members[start + i]]
            tokens += held[i]
            if held[i] < held[shortest]:
                shortest = i
        told[step, 0] = plan_step(held, rule, cost, order[start:stop], offsets[step], padded[step])
        told[step, 1], told[step, 2] = tokens, shortest
