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

from padless.planning.fill_kernels import copied, fill, fill_pair, weighted
from padless.planning.kernels import inlined, jit

__all__ = ["Found", "Tries", "common", "improve", "lowest", "search", "spread", "step_time"]

Array = Any


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
        shares: (2,) float64 of the effort with which what has come so far is followed, one after the other.
        within: (3,) float64, an entry is given up where it is worse than the best by these factors: before its next
            start is tried, and before it is followed the first and the second time.
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
    shares: Array
    within: Array
    seed: int


class Found(NamedTuple):
    """The best of each number of steps and limit, E = C * U.

    Attributes:
        times: (E,) float64 time of the step, ``inf`` where nothing near the common cap is enough or it was given up.
        rooms: (E, T) float64 what the caps leave for the rest.
        runs: (E,) int64 how many runs keep them.
        bounds: (E, G + 2) int64 bounds of those.
    """

    times: Array
    rooms: Array
    runs: Array
    bounds: Array


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
def step_time(bounds: Array, runs: int, steps: int, ranks: int, fixed: float, rates: Any) -> float:
    """Sum over steps of the slowest rank's cost, ``runs`` runs sorted by cost; a step without runs costs ``fixed``."""
    costs = np.empty(runs)
    for g in range(runs):
        rows = rates.cum[bounds[g + 1]] - rates.cum[bounds[g]]
        costs[g] = rates.base[bounds[g]] + rows * rates.unit[bounds[g]]
    costs.sort()
    total = steps * fixed
    for g in range(runs - 1, -1, -ranks):
        total += costs[g]
    return total


@jit
def common(
    ranks: int, fixed: float, steps: Array, low: float, top: float, near: float, rates: Any,
    times: Array, caps: Array, runs: Array, bounds: Array,
) -> int:  # fmt: skip
    """The smallest common cap for each number of steps (C,); how many were looked at.

    Ends where real work and fixed parts alone take longer than the best so far. ``times`` (C,) gets the time of the
    step, ``inf`` where even ``top`` is not enough, ``caps`` (C,) the caps, ``runs`` (C,) and ``bounds`` (C, G + 2)
    their runs.
    """
    least = np.inf
    for c in range(len(steps)):
        if steps[c] * fixed + rates.work[len(rates.work) - 1] / ranks >= least:
            return c
        caps[c], runs[c] = lowest(steps[c] * ranks, low, top, near, rates, bounds[c])
        times[c] = np.inf
        if runs[c] > 0:
            times[c] = step_time(bounds[c], runs[c], steps[c], ranks, fixed, rates)
        least = min(least, times[c])
    return len(steps)


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
            total = weighted(trial, slots)
            if total < least:
                least = total
                copied(trial, room, kinds)
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
    starts = np.empty((2, slots.sum() + 2), dtype=np.int64)
    used, trials = np.empty((2, kinds)), np.empty((2, kinds))
    current = room.copy()
    state = seed * 2654435761 % 2147483647 + 1
    least = weighted(room, slots)
    fine = 2e-5 * least / slots.sum()
    patience = 16 * kinds + 16
    done = runs = succeeded = 0
    while done < fills:
        if done - succeeded >= patience:
            succeeded = done
            for k in range(kinds):
                state = state * 48271 % 2147483647
                share = state / 2147483647.0
                current[k] = min(top, room[k] * (1.0 + 0.15 * share * share))
        # Most trials are in vain: the next one is tried along with each, and counts only where the first one is.
        t, state = _draw(trials[0], current, slots, fine, top, state)
        w, ahead = 0, done + 1 < min(fills, succeeded + patience)
        if ahead:
            next_t, next_state = _draw(trials[1], current, slots, fine, top, state)
            found, next_found = fill_pair(trials, slots, rates, starts, used)
        else:
            found = fill(trials[0], slots, rates, starts[0], used[0])
        done += 1
        if ahead and (found < 0 or trials[0, t] <= 0.0):
            done += 1
            w, t, state, found = 1, next_t, next_state, next_found
        stride = fine
        while found >= 0 and trials[w, t] > 0.0:
            succeeded = done
            for k in range(kinds):
                current[k] = min(trials[w, k], used[w, k] * (1.0 + 1e-12) + 1e-12)
            total = weighted(current, slots)
            if total < least:
                least, runs = total, found
                copied(current, room, kinds)
                copied(starts[w], bounds, runs + 1)
            if done == fills:
                break
            stride *= 3.0
            copied(current, trials[w], kinds)
            trials[w, t] = current[t] - stride
            done += 1
            found = fill(trials[w], slots, rates, starts[w], used[w])
    return runs


@jit
def _draw(trial: Array, current: Array, slots: Array, fine: float, top: float, state: int) -> tuple[int, int]:
    """Set ``trial`` to caps of which one shrinks, by ``fine`` more than another may grow: which, and the next state."""
    kinds = len(trial)
    state = state * 48271 % 2147483647  # a Lehmer generator: the same draws everywhere
    t = state % kinds
    state = state * 48271 % 2147483647
    s = state % (kinds + 1)  # the last: none grows
    state = state * 48271 % 2147483647
    share = state / 2147483647.0
    copied(current, trial, kinds)
    if s != t and s < kinds:
        trial[s] = min(top, current[s] * (1.0 + 0.3 * share * share * share))
        trial[t] -= (trial[s] - current[s]) * slots[s] / slots[t]
    trial[t] -= fine
    return t, state


@jit
def _fills(tries: Any, kinds: int, runs: int) -> int:
    return int(min(tries.trials * kinds, tries.effort / ((kinds + 6) * runs)))


@jit
def search(tries: Any, rates: Any, found: Any) -> None:
    """Look for the least sum of caps for each number of steps under each limit; ``found`` gets the results.

    How good a start says little about where it leads: all starts of an entry are followed a little, then the best one
    of each entry further. Entries that fall behind the best are given up, the sooner the further. But for that, what an
    entry gets does not depend on the others, and one limit is what the longest item needs: a larger budget then takes
    nothing away from what a smaller one found.
    """
    entries, starts = len(found.times), len(tries.deltas)
    found.times[:] = np.inf
    found.runs[:] = 0
    for d in range(starts):
        least = found.times.min()
        for e in range(entries):
            if d == 0 or found.times[e] <= tries.within[0] * least:
                _start(e, d, 1.0 / (2 * starts), tries, rates, found)
    for k in range(len(tries.shares)):
        _follow(tries.shares[k], tries.within[k + 1], starts + k, tries, rates, found)
    for e in range(entries):
        if found.runs[e] > 0:
            steps = tries.slots[e // len(tries.tops)].sum() // tries.ranks
            found.times[e] = step_time(found.bounds[e], found.runs[e], steps, tries.ranks, tries.fixed, rates)


@inlined
def _start(e: int, d: int, share: float, tries: Any, rates: Any, found: Any) -> None:
    """Follow start ``d`` of entry ``e`` for a share of its effort; kept where it is better than what the entry has."""
    c, top = e // len(tries.tops), tries.tops[e % len(tries.tops)]
    kinds = tries.kinds[c]
    if top < tries.caps[c] or kinds == 1:  # a single cap is known already
        return
    slots = tries.slots[c, :kinds]
    runs = slots.sum()
    room, held, used = np.empty(kinds), np.empty(runs + 2, dtype=np.int64), np.empty(kinds)
    if spread(room, slots, tries.caps[c], tries.deltas[d], top, rates) == np.inf:
        return
    before = fill(room, slots, rates, held, used)
    fills = max(20, int(share * _fills(tries, kinds, runs)))
    after = improve(room, slots, fills, tries.seed + d, min(2.0 * room.max(), top), rates, held)
    time = weighted(room, slots) / tries.ranks + runs // tries.ranks * tries.fixed
    if time < found.times[e]:
        found.times[e], found.runs[e] = time, after if after > 0 else before
        copied(room, found.rooms[e], kinds)
        copied(held, found.bounds[e], found.runs[e] + 1)


@inlined
def _follow(share: float, within: float, turn: int, tries: Any, rates: Any, found: Any) -> None:
    """Improve for a share of the effort what is not worse than the best by more than ``within``."""
    least = found.times.min()
    for e in range(len(found.times)):
        c, top = e // len(tries.tops), tries.tops[e % len(tries.tops)]
        kinds = tries.kinds[c]
        if found.times[e] > within * least or found.runs[e] == 0 or share == 0.0:
            continue
        slots, room = tries.slots[c, :kinds], found.rooms[e, :kinds]
        runs = slots.sum()
        fills = max(20, int(share * _fills(tries, kinds, runs)))
        after = improve(room, slots, fills, tries.seed + turn, min(2.0 * room.max(), top), rates, found.bounds[e])
        if after > 0:
            found.runs[e] = after
            found.times[e] = weighted(room, slots) / tries.ranks + runs // tries.ranks * tries.fixed
