"""Kernels that decide exactly whether caps are enough, for few runs of few kinds.

Runs are taken from the longest item on. With so many runs of each kind used, whoever got further never has the harder
rest, because runs only get cheaper: the furthest item reached by each combination of counts is all there is to know.
"""

# mypy: disable-error-code="no-any-return"
from __future__ import annotations

from typing import Any

import numpy as np

from padless.planning.kernels import jit

__all__ = ["enough", "halve", "lower", "settle", "trace"]

Array = Any


@jit
def enough(room: Array, slots: Array, rates: Any, furthest: Array) -> bool:
    """Whether runs of these kinds can hold all items, each item one sequence.

    ``furthest`` (S,), S the product of ``slots`` + 1, gets the item that each combination of counts reaches.
    """
    kinds, count = len(room), len(rates.work) - 1
    if (room * slots).sum() * (1.0 + 1e-12) < rates.work[count]:
        return False
    sizes = np.empty(kinds + 1, dtype=np.int64)
    sizes[0] = 1
    for t in range(kinds):
        sizes[t + 1] = sizes[t] * (slots[t] + 1)
    held = np.zeros(kinds, dtype=np.int64)  # the combination's counts
    furthest[0] = 0
    for s in range(1, sizes[kinds]):
        t = 0
        while held[t] == slots[t]:
            held[t] = 0
            t += 1
        held[t] += 1
        best = 0
        for t in range(kinds):
            if held[t] > 0:
                i = furthest[s - sizes[t]]
                fits = (room[t] - rates.base[i]) * rates.each[i] + 1e-9
                j = i + int(max(min(fits, float(min(rates.most[i], count - i))), 0.0))
                best = max(best, j)
        if best >= count:
            furthest[s] = count
            return True
        furthest[s] = best
    return False


@jit
def _lowest(trial: Array, t: int, under: float, near: float, slots: Array, rates: Any, furthest: Array) -> int:
    """Bisect how low cap ``t`` of those that are enough can be, in place; how many checks that took."""
    over, done = trial[t], 0
    while over - under > near:
        trial[t] = 0.5 * (under + over)
        done += 1
        if enough(trial, slots, rates, furthest):
            over = trial[t]
        else:
            under = trial[t]
    trial[t] = over
    return done


@jit
def halve(room: Array, slots: Array, top: float, near: float, checks: int, rates: Any) -> int:
    """Set two caps of equally many runs to the least sum, to ``near`` of it; how many checks that took.

    Intervals of the larger cap are searched: where its upper end, with the smaller cap that would still be better than
    the best known sum at the lower end, is not enough, nothing between is. Where the upper end is better than what is
    known, both caps come down to the next corner.
    """
    furthest = np.empty((slots[0] + 1) * (slots[1] + 1), dtype=np.int64)
    trial = np.empty(2)
    best = room[0] + room[1]
    low, high = np.empty(64), np.empty(64)
    low[0], high[0] = rates.base[0] + rates.unit[0], min(top, best)  # the longest item is in one of them
    depth, done = 1, 0
    while depth > 0 and done < checks:
        depth -= 1
        a, b = low[depth], high[depth]
        tolerance = near * best
        trial[0], trial[1] = b, min(b, best - a - tolerance)
        if b < a or trial[1] < 0.0:
            continue
        done += 1
        if not enough(trial, slots, rates, furthest):
            continue
        trial[1] = min(b, best - b - tolerance)
        done += 1
        if trial[1] >= 0.0 and enough(trial, slots, rates, furthest):
            done += _lowest(trial, 1, max(0.0, trial[1] - 0.1 * best), 0.25 * tolerance, slots, rates, furthest)
            done += _lowest(trial, 0, a, 0.25 * tolerance, slots, rates, furthest)
            room[:] = trial
            best = trial[0] + trial[1]
        if b - a > 0.5 * tolerance and depth < 62:
            middle = 0.5 * (a + b)
            low[depth], high[depth] = middle, b
            low[depth + 1], high[depth + 1] = a, middle
            depth += 2
    return done


@jit
def lower(room: Array, slots: Array, top: float, near: float, checks: int, seed: int, rates: Any) -> int:
    """Lower caps in place, as far as they stay enough, and by pairs: one grows, another shrinks by more than that.

    Ends after so many checks; returns how many there were.
    """
    kinds, size = len(room), 1
    for t in range(kinds):
        size *= slots[t] + 1
    furthest = np.empty(size, dtype=np.int64)
    tolerance = near * room.sum() / kinds
    state = seed * 2654435761 % 2147483647 + 1
    trial = room.copy()
    done = failed = 0
    stride = 16.0 * tolerance
    turn = 0
    while done < checks:
        trial[:] = room
        if stride >= tolerance:  # one after the other first, in ever smaller strides
            t = turn % kinds
            turn += 1
            failed += 1
            if failed > kinds:
                failed, stride = 1, 0.25 * stride
        else:
            state = state * 48271 % 2147483647  # a Lehmer generator: the same draws everywhere
            t = state % kinds
            state = state * 48271 % 2147483647
            s = state % kinds
            state = state * 48271 % 2147483647
            share = state / 2147483647.0
            if s != t:
                grown = min(top, room[s] * (1.0 + 0.3 * share * share * share))
                trial[t] -= (grown - room[s]) * slots[s] / slots[t]
                trial[s] = grown
        step = max(stride, tolerance)
        while done < checks and trial[t] > step:
            trial[t] -= step
            done += 1
            if not enough(trial, slots, rates, furthest):
                break
            failed = 0
            room[:] = trial
            step *= 3.0
        if trial[t] <= step:
            done += 1
    return done


@jit
def trace(room: Array, slots: Array, rates: Any, bounds: Array) -> int:
    """Runs that keep caps which are `enough`: how many; ``bounds`` gets them. -1 where they are not enough."""
    kinds, count = len(room), len(rates.work) - 1
    size = 1
    for t in range(kinds):
        size *= slots[t] + 1
    furthest = np.full(size, -1, dtype=np.int64)
    if not enough(room, slots, rates, furthest):
        return -1
    last = 0
    while furthest[last] < count:
        last += 1
    # Backwards from the combination that reached the end; the same arithmetic finds where it came from.
    path = np.empty(slots.sum() + 1, dtype=np.int64)
    runs = 0
    while last > 0:
        rest, stride, came = last, 1, -1
        for t in range(kinds):
            if rest % (slots[t] + 1) > 0 and came < 0:
                i = furthest[last - stride]
                fits = (room[t] - rates.base[i]) * rates.each[i] + 1e-9
                j = i + int(max(min(fits, float(min(rates.most[i], count - i))), 0.0))
                if j >= furthest[last]:
                    came = last - stride
            rest //= slots[t] + 1
            stride *= slots[t] + 1
        last = came
        path[runs] = furthest[last]
        runs += 1
    for g in range(runs):
        bounds[g] = path[runs - 1 - g]
    bounds[runs] = count
    return runs


@jit
def settle(
    room: Array, slots: Array, top: float, near: float, checks: int, seed: int, rates: Any, bounds: Array
) -> int:
    """Lower caps in place all ways that there are, each for ``checks``, and `trace` the runs."""
    if len(slots) == 2:
        halve(room, slots, top, near, checks, rates)
    lower(room, slots, top, 0.5 * near, checks, seed, rates)
    return trace(room, slots, rates, bounds)
