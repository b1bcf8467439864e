"""Kernels of the search for one cap per kind of micro-step, when ranks meet in every micro-batch.

A step lasts as long as its slowest rank. Steps of several kinds, each with a cap of its own, fit runs that a
common cap cannot: two sequences of 7,000 tokens and one of 13,000 share a cap of 14,000 well, three of 5,000 need
another. For one field. Costs here leave the fixed part of a micro-batch out: ``room`` (T,) float64 is what each kind's
cap leaves for the rest, and ``slots`` (T,) int64 the runs that each kind can take.
"""

# mypy: disable-error-code="no-any-return"
from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from padless.planning.kernels import jit

__all__ = ["Found", "Rates", "Tries", "fill", "improve", "lowest", "search", "spread"]

Array = Any


class Rates(NamedTuple):
    """What a run that starts at item i costs and may hold, for I items from the longest to the shortest.

    Attributes:
        base: (I,) float64 cost of its columns.
        unit: (I,) float64 cost of one more sequence.
        each: (I,) float64, 1 / ``unit``.
        most: (I,) int64 sequences it may hold within the limits (those of the item itself where it runs alone).
        work: (I + 1,) float64 cost of the items before i, padding aside.
        cum: (I + 1,) int64 sequences before i.
        multiple: runs hold a multiple of so many sequences.
    """

    base: Array
    unit: Array
    each: Array
    most: Array
    work: Array
    cum: Array
    multiple: int


class Tries(NamedTuple):
    """Where the search starts: C numbers of steps, each under U upper limits.

    Attributes:
        ranks: runs of one step.
        fixed: cost of an empty micro-batch.
        caps: (C,) float64 the smallest common cap, ``fixed`` left out.
        kinds: (C,) int64 kinds of steps.
        slots: (C, T) int64 runs of each kind.
        tops: (U,) float64 what no cap may exceed.
        deltas: (D,) float64 how far apart caps are at the start.
        effort: elementary steps of `fill` for each number of steps and limit.
        trials: at most so many trials for each kind.
        within: a number of steps is given up where it is worse than the best by this factor.
        seed: of the random moves.
    """

    ranks: int
    fixed: float
    caps: Array
    kinds: Array
    slots: Array
    tops: Array
    deltas: Array
    effort: float
    trials: int
    within: float
    seed: int


class Found(NamedTuple):
    """The best of each number of steps and limit, E = C * U.

    Attributes:
        times: (E,) float64 time of the step, ``inf`` where nothing near the common cap is enough.
        rooms: (E, T) float64 what the caps leave for the rest.
        runs: (E,) int64 how many runs keep them.
        bounds: (E, G + 2) int64 bounds of those.
    """

    times: Array
    rooms: Array
    runs: Array
    bounds: Array


@jit
def fill(room: Array, slots: Array, rates: Any, starts: Array, used: Array) -> int:
    """Cut the items into runs, each in the kind of step it wastes the least of; runs, or -1 where items are left.

    Longest first: of the kinds with a slot left, the one whose cap is used best by real work, so that a
    run of awkward width lands where it fits, and short sequences, which fit anywhere, take what is left.
    ``starts`` gets the bounds, ``used`` (T,) the cost of each kind's costliest run. Stops where more is wasted than can
    be.
    """
    cum, work, multiple = rates.cum, rates.work, rates.multiple
    count, kinds = len(cum) - 1, len(room)
    plain = multiple == 1 and cum[count] == count  # every item is one sequence
    left = slots.copy()
    open_room = room.copy()
    share = np.empty(kinds)
    for t in range(kinds):
        share[t] = 1.0 / room[t] if room[t] > 0.0 else 0.0
    used[:] = 0.0
    spare = (room * slots).sum() * (1.0 + 1e-12) - work[count] if rates.unit[0] > 0.0 else np.inf
    i = g = 0
    while i < count and spare >= 0.0:
        base, each, before = rates.base[i], rates.each[i], work[i]
        chosen, rows, best = -1, 0, 0.0
        if plain:
            # No branches: which kind is best changes from run to run, and a guess that fails costs more than all this.
            most = float(min(rates.most[i], count - i))
            for t in range(kinds):
                n = int(max(min((open_room[t] - base) * each + 1e-9, most), 0.0))
                value = (work[i + n] - before) * share[t]
                better = value > best
                best = value if better else best
                chosen = t if better else chosen
                rows = n if better else rows
            furthest = i + rows
        else:
            furthest = i
            for t in range(kinds):
                j = _furthest(i, (open_room[t] - base) * each + 1e-9, rates)
                value = (work[j] - before) * share[t]
                if j > i and value > best:
                    chosen, furthest, best = t, j, value
            rows = cum[furthest] - cum[i]
        if chosen < 0:
            return -1
        left[chosen] -= 1
        if left[chosen] == 0:
            open_room[chosen] = -1.0
        used[chosen] = max(used[chosen], base + rows * rates.unit[i])
        spare -= room[chosen] - (work[furthest] - before)
        starts[g] = i
        g += 1
        i = furthest
    starts[g] = count
    return g if i == count else -1


@jit
def _furthest(i: int, fits: float, rates: Any) -> int:
    """Where a run from item i ends that may hold ``fits`` sequences; i where not even the item itself does."""
    cum, multiple = rates.cum, rates.multiple
    rest = cum[len(cum) - 1] - cum[i]
    own, most = cum[i + 1] - cum[i], min(rates.most[i], rest)
    if fits < own:
        return i
    n = most if fits >= most else int(fits)
    if multiple > 1 and rates.most[i] >= multiple and n < rest:
        n -= n % multiple
        if n == 0:
            return i
    return max(i + 1, np.searchsorted(cum, cum[i] + n, side="right") - 1)


@jit
def lowest(most: int, low: float, top: float, near: float, rates: Any, starts: Array) -> tuple[float, int]:
    """(room, runs) of the smallest common room, to ``near`` of it, with which ``most`` runs are enough.

    ``top`` must do, but has no influence on the result where less does; ``starts`` gets the bounds.
    """
    room, slots, used = np.empty(1), np.full(1, most), np.empty(1)
    low = max(low, rates.work[len(rates.work) - 1] / most if rates.unit[0] > 0.0 else 0.0)
    high = low
    while high < top:
        room[0] = high
        if fill(room, slots, rates, starts, used) >= 0:
            break
        low, high = high, min(top, 1.25 * high + 1.0)
    while high - low > near * high:
        room[0] = 0.5 * (low + high)
        if fill(room, slots, rates, starts, used) >= 0:
            high = room[0]
        else:
            low = room[0]
    room[0] = high
    return high, fill(room, slots, rates, starts, used)


@jit
def spread(room: Array, slots: Array, centre: float, delta: float, top: float, rates: Any) -> float:
    """Set ``room`` evenly around a centre, ``delta`` of it apart in all, as low as found: their weighted sum.

    ``inf`` where nothing near ``centre`` is enough. None is over ``top``.
    """
    kinds = len(room)
    starts = np.empty(slots.sum() + 2, dtype=np.int64)
    used, trial = np.empty(kinds), np.empty(kinds)
    low, high = 0.7 * centre, 1.3 * centre
    least = np.inf
    while high - low > 1e-3 * centre:
        middle = 0.5 * (low + high)
        for t in range(kinds):
            trial[t] = min(top, middle * (1.0 + delta * ((t + 0.5) / kinds - 0.5)))
        if fill(trial, slots, rates, starts, used) >= 0:
            high = middle
            total = (trial * slots).sum()
            if total < least:
                least = total
                room[:] = trial
        else:
            low = middle
    return least


@jit
def improve(room: Array, slots: Array, fills: int, seed: int, top: float, rates: Any, bounds: Array) -> int:
    """Lower the weighted sum of ``room`` in place by pairs: one cap grows a little, another shrinks by more than that.

    Where that works it shrinks further, three times as much each time. After every success all caps come down to
    what their runs cost. After many trials in vain all caps grow a little, each by its own amount, and come down again
    another way; the best sum is kept. Ends after ``fills`` trials. ``bounds`` gets the runs that kept the caps; how
    many they are is returned, 0 where no trial succeeded.
    """
    kinds = len(room)
    starts = np.empty(slots.sum() + 2, dtype=np.int64)
    used, trial, current = np.empty(kinds), np.empty(kinds), room.copy()
    state = seed * 2654435761 % 2147483647 + 1
    least = total = (room * slots).sum()
    fine = 2e-5 * total / slots.sum()
    done = runs = succeeded = 0
    while done < fills:
        if done - succeeded >= 16 * kinds + 16:
            succeeded = done
            for k in range(kinds):
                state = state * 48271 % 2147483647
                share = state / 2147483647.0
                current[k] = min(top, room[k] * (1.0 + 0.15 * share * share))
        state = state * 48271 % 2147483647  # a Lehmer generator: the same draws everywhere
        t = state % kinds
        state = state * 48271 % 2147483647
        s = state % (kinds + 1)  # the last: none grows
        state = state * 48271 % 2147483647
        share = state / 2147483647.0
        trial[:] = current
        high = current[t]
        if s != t and s < kinds:
            trial[s] = min(top, current[s] * (1.0 + 0.3 * share * share * share))
            high -= (trial[s] - current[s]) * slots[s] / slots[t]
        stride = fine
        while done < fills:
            trial[t] = high - stride
            done += 1
            found = fill(trial, slots, rates, starts, used) if trial[t] > 0.0 else -1
            if found < 0:
                break
            succeeded = done
            for k in range(kinds):
                trial[k] = min(trial[k], used[k] * (1.0 + 1e-12) + 1e-12)
            current[:] = trial
            total = (current * slots).sum()
            if total < least:
                least, runs = total, found
                room[:] = current
                bounds[: runs + 1] = starts[: runs + 1]
            high = current[t]
            stride *= 3.0
    return runs


@jit
def _fills(tries: Any, kinds: int, runs: int) -> int:
    return int(min(tries.trials * kinds, tries.effort / ((kinds + 6) * runs)))


@jit
def search(tries: Any, rates: Any, found: Any) -> None:
    """Look for the least sum of caps for each number of steps under each limit; ``found`` gets the results.

    How good a start says little about where it leads: all starts of an entry are followed a little, then the best one
    of each entry further. What an entry gets does not depend on the others, and one limit is what the longest item
    needs: a larger budget then takes nothing away from what a smaller one found.
    """
    limits = len(tries.tops)
    for e in range(len(found.times)):
        c, top = e // limits, tries.tops[e % limits]
        kinds = tries.kinds[c]
        slots = tries.slots[c, :kinds]
        runs = slots.sum()
        room, held, used = np.empty(kinds), np.empty(runs + 2, dtype=np.int64), np.empty(kinds)
        found.times[e], found.runs[e] = np.inf, 0
        fills = _fills(tries, kinds, runs) // (2 * len(tries.deltas))
        for d in range(len(tries.deltas)):
            if top < tries.caps[c] or kinds == 1:  # a single cap is known already
                break
            if spread(room, slots, tries.caps[c], tries.deltas[d], top, rates) == np.inf:
                continue
            before = fill(room, slots, rates, held, used)
            after = improve(room, slots, max(20, fills), tries.seed + d, min(2.0 * room.max(), top), rates, held)
            time = (room * slots).sum() / tries.ranks + runs // tries.ranks * tries.fixed
            if time < found.times[e]:
                found.times[e], found.runs[e] = time, after if after > 0 else before
                found.rooms[e, :kinds] = room
                found.bounds[e, : found.runs[e] + 1] = held[: found.runs[e] + 1]
    least = found.times.min()
    for e in range(len(found.times)):
        c, top = e // limits, tries.tops[e % limits]
        kinds = tries.kinds[c]
        if found.times[e] > tries.within * least or found.runs[e] == 0:
            continue
        slots, room = tries.slots[c, :kinds], found.rooms[e, :kinds]
        runs = slots.sum()
        fills = _fills(tries, kinds, runs)
        seed, highest = tries.seed + len(tries.deltas), min(2.0 * room.max(), top)
        after = improve(room, slots, max(20, fills), seed, highest, rates, found.bounds[e])
        if after > 0:
            found.runs[e] = after
            found.times[e] = (room * slots).sum() / tries.ranks + runs // tries.ranks * tries.fixed
