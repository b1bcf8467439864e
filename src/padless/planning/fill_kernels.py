"""Kernels that fill micro-steps of several kinds with runs, each kind under a cap of its own.

For one field. Costs leave the fixed part of a micro-batch out: ``room`` (T,) float64 is what each kind's cap leaves for
the rest, and ``slots`` (T,) int64 the runs that each kind can take.
"""

# mypy: disable-error-code="no-any-return"
from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from padless.planning.kernels import inlined, jit

__all__ = ["Rates", "copied", "fill", "fill_pair", "weighted"]

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


@jit
def fill(room: Array, slots: Array, rates: Any, starts: Array, used: Array) -> Any:
    """Cut the items into runs, each in the kind of step it wastes the least of; runs, or -1 where items are left.

    Longest first: of the kinds with a slot left, the one whose cap is used best by real work, so that a
    run of awkward width lands where it fits, and short sequences, which fit anywhere, take what is left.
    ``starts`` gets the bounds, ``used`` (T,) the cost of each kind's costliest run. Stops where more is wasted than can
    be.
    """
    if not _is_plain(rates.cum, rates.multiple):
        return _fill_of_many(room, slots, rates, starts, used)
    base, each, most, unit, work = rates.base, rates.each, rates.most, rates.unit, rates.work
    count = np.uint64(len(work) - 1)
    scratch = np.empty((3, len(slots)))
    left, open_room, share = scratch[0], scratch[1], scratch[2]
    _begin(room, slots, left, open_room, share, used)
    spare = _spare(room, slots, rates.unit, rates.work)
    i, g = np.uint64(0), np.uint64(0)
    while i < count and spare >= 0.0:
        kind, rows = _best_kind(i, count, open_room, share, base, each, most, work)
        if rows == 0:
            return -1
        left[kind] -= 1
        if left[kind] == 0:
            open_room[kind] = -1.0
        used[kind] = max(used[kind], base[i] + rows * unit[i])
        spare -= room[kind] - (work[i + rows] - work[i])
        starts[g] = i
        g += np.uint64(1)
        i += rows
    starts[g] = count
    return np.int64(g) if i == count else -1


@jit
def fill_pair(rooms: Array, slots: Array, rates: Any, starts: Array, used: Array) -> tuple[Any, Any]:
    """`fill` for two sets of caps, (2, T), with ``starts`` (2, G + 2) and ``used`` (2, T).

    Where a run begins hangs on the one before, and a processor waits for most of such a chain: two side by side take
    little longer than one.
    """
    if not _is_plain(rates.cum, rates.multiple):
        first = _fill_of_many(rooms[0], slots, rates, starts[0], used[0])
        return first, _fill_of_many(rooms[1], slots, rates, starts[1], used[1])
    base, each, most, unit, work = rates.base, rates.each, rates.most, rates.unit, rates.work
    count = np.uint64(len(work) - 1)
    room_a, room_b, starts_a, starts_b, used_a, used_b = rooms[0], rooms[1], starts[0], starts[1], used[0], used[1]
    scratch = np.empty((6, len(slots)))
    left_a, open_a, share_a = scratch[0], scratch[1], scratch[2]
    left_b, open_b, share_b = scratch[3], scratch[4], scratch[5]
    _begin(room_a, slots, left_a, open_a, share_a, used_a)
    _begin(room_b, slots, left_b, open_b, share_b, used_b)
    spare_a, spare_b = _spare(room_a, slots, unit, work), _spare(room_b, slots, unit, work)
    i, g, j, h = np.uint64(0), np.uint64(0), np.uint64(0), np.uint64(0)
    # The loop of `fill`, twice: a step shared by the three, inlined and given single arrays, was 3 to 6 times slower.
    while (i < count and spare_a >= 0.0) or (j < count and spare_b >= 0.0):
        if i < count and spare_a >= 0.0:
            kind, rows = _best_kind(i, count, open_a, share_a, base, each, most, work)
            if rows == 0:
                spare_a = -1.0
                continue
            left_a[kind] -= 1
            if left_a[kind] == 0:
                open_a[kind] = -1.0
            used_a[kind] = max(used_a[kind], base[i] + rows * unit[i])
            spare_a -= room_a[kind] - (work[i + rows] - work[i])
            starts_a[g] = i
            g += np.uint64(1)
            i += rows
        if j < count and spare_b >= 0.0:
            kind, rows = _best_kind(j, count, open_b, share_b, base, each, most, work)
            if rows == 0:
                spare_b = -1.0
                continue
            left_b[kind] -= 1
            if left_b[kind] == 0:
                open_b[kind] = -1.0
            used_b[kind] = max(used_b[kind], base[j] + rows * unit[j])
            spare_b -= room_b[kind] - (work[j + rows] - work[j])
            starts_b[h] = j
            h += np.uint64(1)
            j += rows
    starts_a[g] = count
    starts_b[h] = count
    return np.int64(g) if i == count else -1, np.int64(h) if j == count else -1


@inlined
def _best_kind(
    i: int, count: int, open_room: Array, share: Array, base: Array, each: Array, most: Array, work: Array
) -> tuple[Any, Any]:
    """The kind that a run from item ``i`` uses best, and the sequences it holds; 0 where it fits none.

    Indices are unsigned: with signed ones each access is checked for counting from the end.
    """
    empty, slope, before = base[i], each[i], work[i]
    limit = float(min(most[i], np.int64(count - i)))
    kind: Any = np.uint64(0)
    rows, best = np.uint64(0), 0.0
    # No branches: which kind is best changes from run to run, and a guess that fails costs more than all this.
    for t in range(np.uint64(len(open_room))):
        n = np.uint64(np.int64(max(min((open_room[t] - empty) * slope + 1e-9, limit), 0.0)))
        value = (work[i + n] - before) * share[t]
        better = value > best
        best = value if better else best
        kind = t if better else kind
        rows = n if better else rows
    return kind, rows


@inlined
def _is_plain(cum: Array, multiple: int) -> bool:
    """Whether every item is one sequence, and runs hold any number of them."""
    return multiple == 1 and cum[len(cum) - 1] == len(cum) - 1


@inlined
def _begin(room: Array, slots: Array, left: Array, open_room: Array, share: Array, used: Array) -> None:
    """Nothing is filled: runs left of each kind, their caps while there are any, and the caps' inverse."""
    for t in range(len(room)):
        left[t] = slots[t]
        open_room[t] = room[t]
        share[t] = 1.0 / room[t] if room[t] > 0.0 else 0.0
        used[t] = 0.0


@inlined
def weighted(room: Array, slots: Array) -> float:
    """Sum of the caps, each as often as it has slots. (Array expressions take seconds to compile, for their errors.)"""
    total = 0.0
    for t in range(len(room)):
        total += room[t] * slots[t]
    return total


@inlined
def copied(source: Array, target: Array, count: int) -> None:
    """Set the first ``count`` of ``target``."""
    for k in range(count):
        target[k] = source[k]


@inlined
def _spare(room: Array, slots: Array, unit: Array, work: Array) -> float:
    """What may be wasted in all."""
    return weighted(room, slots) * (1.0 + 1e-12) - work[len(work) - 1] if unit[0] > 0.0 else np.inf


@jit
def _fill_of_many(room: Array, slots: Array, rates: Any, starts: Array, used: Array) -> int:
    """`fill` where items are several sequences, or runs hold a multiple of them."""
    cum, work = rates.cum, rates.work
    count = len(work) - 1
    scratch = np.empty((3, len(slots)))
    left, open_room, share = scratch[0], scratch[1], scratch[2]
    _begin(room, slots, left, open_room, share, used)
    spare = _spare(room, slots, rates.unit, rates.work)
    i = g = 0
    while i < count and spare >= 0.0:
        chosen, furthest, best = -1, i, 0.0
        for t in range(len(room)):
            j = _furthest(i, (open_room[t] - rates.base[i]) * rates.each[i] + 1e-9, rates)
            value = (work[j] - work[i]) * share[t]
            if j > i and value > best:
                chosen, furthest, best = t, j, value
        if chosen < 0:
            return -1
        left[chosen] -= 1
        if left[chosen] == 0:
            open_room[chosen] = -1.0
        used[chosen] = max(used[chosen], rates.base[i] + (cum[furthest] - cum[i]) * rates.unit[i])
        spare -= room[chosen] - (work[furthest] - work[i])
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
