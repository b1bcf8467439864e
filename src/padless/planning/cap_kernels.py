"""Kernels of the search for one cap per kind of micro-step, when ranks meet in every micro-batch.

A step lasts as long as its slowest rank. Steps of several kinds, each with a cap of its own, fit runs that a
common cap cannot: two sequences of 7,000 tokens and one of 13,000 share a cap of 14,000 well, three of 5,000 need
another. Arguments as in `run_kernels`, for one field; ``caps`` (T,) float64, and ``slots`` (T,) int64, the runs that
each kind can take.
"""

# mypy: disable-error-code="no-any-return"
from __future__ import annotations

from typing import Any

import numpy as np

from padless.planning.kernels import jit

__all__ = ["fill", "improve", "spread"]

Array = Any


@jit
def fill(
    caps: Array,
    slots: Array,
    cum: Array,
    wide: Array,
    over: Array,
    own: Array,
    cost: Array,
    limits: Array,
    single: bool,
    starts: Array,
    left: Array,
) -> int:
    """Cut the items into runs, each in the kind of step it wastes the least of; runs, or -1 where items are left.

    Longest first: of the kinds with a slot left, the one whose cap is used best by real work, so that a
    run of awkward width lands where it fits, and short sequences, which fit anywhere, take what is left.
    """
    count, kinds, multiple = len(wide), len(caps), limits[2]
    left[:] = slots
    i = g = 0
    while i < count:
        width = wide[i, 0]
        base = cost[0] + cost[1] * width
        unit = width * (cost[2] + cost[3] * width)
        each = 1.0 / unit if unit > 0 else 1e18
        rows = cum[i + 1] - cum[i]
        most = rows if over[i] else min(limits[1], limits[0] // width)
        ample = most if cum[count] - cum[i] > most else cum[count] - cum[i]
        chosen, furthest, least = -1, i, 2.0
        for t in range(kinds):
            fits = (caps[t] - base) * each + 1e-9
            if left[t] == 0 or fits < rows:
                continue
            n = ample if fits >= ample else int(fits)
            if multiple > 1 and most >= multiple and n < cum[count] - cum[i]:
                n -= n % multiple
                if n == 0:
                    continue
            j = i + n if single else max(i + 1, np.searchsorted(cum, cum[i] + n, side="right") - 1)
            waste = 1.0 - (own[j] - own[i]) / max(caps[t] - cost[0], 1e-300)
            if waste < least:
                chosen, furthest, least = t, j, waste
        if chosen < 0:
            return -1
        left[chosen] -= 1
        starts[g] = i
        g += 1
        i = furthest
    starts[g] = count
    return g


@jit
def spread(
    caps: Array,
    slots: Array,
    base: float,
    delta: float,
    top: float,
    cum: Array,
    wide: Array,
    over: Array,
    own: Array,
    cost: Array,
    limits: Array,
    single: bool,
) -> float:
    """Set ``caps`` evenly around a centre, ``delta`` of it apart in all, as low as found: their weighted sum.

    The fixed part is not scaled. ``inf`` where nothing near ``base`` is enough.
    """
    kinds = len(caps)
    starts = np.empty(slots.sum() + 2, dtype=np.int64)
    left = np.empty(kinds, dtype=np.int64)
    trial = np.empty(kinds)
    fixed = cost[0]
    low, high = 0.7 * (base - fixed), 1.3 * (base - fixed)
    least = np.inf
    for _ in range(11):
        middle = 0.5 * (low + high)
        for t in range(kinds):
            trial[t] = fixed + min(top - fixed, middle * (1.0 + delta * ((t + 0.5) / kinds - 0.5)))
        if fill(trial, slots, cum, wide, over, own, cost, limits, single, starts, left) >= 0:
            high = middle
            total = (trial * slots).sum()
            if total < least:
                least = total
                caps[:] = trial
        else:
            low = middle
    return least


@jit
def improve(
    caps: Array,
    slots: Array,
    fills: int,
    seed: int,
    top: float,
    cum: Array,
    wide: Array,
    over: Array,
    own: Array,
    cost: Array,
    limits: Array,
    single: bool,
) -> float:
    """Lower the weighted sum of ``caps`` in place by pairs: one cap grows a little, another shrinks as far as it can.

    Ends after about ``fills`` trials.
    """
    kinds = len(caps)
    starts = np.empty(slots.sum() + 2, dtype=np.int64)
    left = np.empty(kinds, dtype=np.int64)
    before = np.empty(kinds)
    total = (caps * slots).sum()
    state = seed * 2654435761 % 2147483647 + 1
    fine = 2e-5 * total / slots.sum()
    number = used = 0
    while used < fills:
        state = state * 48271 % 2147483647  # a Lehmer generator: the same draws everywhere
        t = state % kinds
        state = state * 48271 % 2147483647
        s = state % kinds
        state = state * 48271 % 2147483647
        share = state / 2147483647.0
        before[:] = caps
        if number < kinds:
            t = s = number
        number += 1
        grown = 0.0
        if s != t:
            caps[s] = min(top, caps[s] + (caps[s] - cost[0]) * 0.5 * share * share * share)
            grown = (caps[s] - before[s]) * slots[s]
        high = before[t] - grown / slots[t] - fine  # any higher and nothing is gained
        caps[t] = high
        used += 1
        if high <= cost[0] or fill(caps, slots, cum, wide, over, own, cost, limits, single, starts, left) < 0:
            caps[:] = before
            continue
        # Gains are small as a rule: stride down from the top, twice as far each time, then halve.
        low, stride = cost[0], 4.0 * fine
        while high - low > fine:
            caps[t] = max(high - stride, 0.5 * (low + high))
            used += 1
            if fill(caps, slots, cum, wide, over, own, cost, limits, single, starts, left) >= 0:
                high = caps[t]
                stride *= 2.0
            else:
                low = caps[t]
        caps[t] = high
        total = (caps * slots).sum()
    return total
