"""Kernels for patterns: the least mix of them (column generation), and packs filled after it.

A pattern says how many sequences of each class of lengths share a pack. The relaxation, least total of patterns that
hold every sequence, is solved by the revised simplex method with an explicit inverse of the basis: a pivot costs
classes squared, and no round starts anew.
"""

# mypy: disable-error-code="no-any-return"
from __future__ import annotations

from typing import Any

import numpy as np

from padless.planning.kernels import jit

__all__ = ["fill", "improve", "invert", "lay"]

Array = Any
_EPS = 1e-7
_MANY = 20  # patterns that one pricing brings in at most


@jit
def _price(values: Array, sizes: Array, room: int, best: Array, choice: Array) -> None:
    """Unbounded knapsack: (room + 1,) best value within each room, and the class chosen there (-1: leave one unit)."""
    best[0] = 0.0
    for space in range(1, room + 1):
        top = best[space - 1]
        pick = -1
        for d in range(len(sizes)):
            if sizes[d] > space:
                break
            value = best[space - sizes[d]] + values[d]
            if value > top + 1e-12:
                top = value
                pick = d
        best[space] = top
        choice[space] = pick


@jit
def _valuable(values: Array, sizes: Array, room: int, best: Array, choice: Array, found: Array) -> int:
    """The most valuable pattern through each class, best first, those worth more than 1; how many are in ``found``."""
    through = np.empty(len(sizes))
    for d in range(len(sizes)):
        through[d] = -(values[d] + best[room - sizes[d]])
    number = 0
    for d in np.argsort(through, kind="mergesort"):
        if number == len(found) or -through[d] <= 1.0 + _EPS:
            break
        found[number, :] = 0
        found[number, d] = 1
        space = room - sizes[d]
        while space > 0:
            pick = choice[space]
            if pick < 0:
                space -= 1
            else:
                found[number, pick] += 1
                space -= sizes[pick]
        number += 1
    return number


@jit
def _entering(duals: Array, found: Array, number: int) -> tuple[int, float]:
    """The column that is worth the most beyond its cost: a pattern's place, or -2 - class to hold fewer of a class."""
    column, gain = -1, _EPS
    for j in range(number):
        worth = -1.0
        for d in range(len(duals)):
            if found[j, d]:
                worth += duals[d] * found[j, d]
        if worth > gain:
            column, gain = j, worth
    for d in range(len(duals)):
        if -duals[d] > gain:
            column, gain = -2 - d, -duals[d]
    return column, gain


@jit
def _image(inverse: Array, found: Array, column: int, moved: Array) -> None:
    """The column in terms of the basis, (D,)."""
    if column < 0:
        moved[:] = -inverse[:, -2 - column]
        return
    moved[:] = 0.0
    for d in range(len(moved)):
        if found[column, d]:
            for i in range(len(moved)):
                moved[i] += inverse[i, d] * found[column, d]


@jit
def _pivot(inverse: Array, times: Array, duals: Array, moved: Array, gain: float) -> int:
    """Let a column into the basis, where ``moved`` is its image: the row it takes, or -1 where none may leave."""
    row, least = -1, np.inf
    for i in range(len(moved)):
        if moved[i] > _EPS:
            ratio = times[i] / moved[i]
            if ratio < least - 1e-12 or (ratio < least + 1e-12 and moved[i] > moved[row]):
                row, least = i, min(ratio, least)
    if row < 0:
        return row
    step = times[row] / moved[row]
    for i in range(len(moved)):
        times[i] = max(0.0, times[i] - step * moved[i])
    times[row] = step
    inverse[row] /= moved[row]
    for i in range(len(moved)):
        if i != row and moved[i] != 0.0:
            for d in range(len(moved)):
                inverse[i, d] -= moved[i] * inverse[row, d]
    for d in range(len(moved)):
        duals[d] -= gain * inverse[row, d]
    return row


@jit
def invert(patterns: Array, costs: Array, counts: Array, inverse: Array, times: Array, duals: Array) -> bool:
    """Compute the basis' inverse, and what follows from it, anew (Gauss and Jordan): pivots add up rounding errors."""
    classes = len(counts)
    basis = patterns.T.astype(np.float64)
    inverse[:] = np.eye(classes)
    for d in range(classes):
        row = d + np.argmax(np.abs(basis[d:, d]))
        if abs(basis[row, d]) < 1e-9:
            return False
        if row != d:
            for other in range(classes):
                basis[d, other], basis[row, other] = basis[row, other], basis[d, other]
                inverse[d, other], inverse[row, other] = inverse[row, other], inverse[d, other]
        inverse[d] /= basis[d, d]
        basis[d] /= basis[d, d]
        for i in range(classes):
            factor = basis[i, d]
            if i != d and factor != 0.0:
                for other in range(d, classes):
                    basis[i, other] -= factor * basis[d, other]
                for other in range(classes):
                    inverse[i, other] -= factor * inverse[d, other]
    for i in range(classes):
        times[i] = max(0.0, (inverse[i] * counts).sum())
    duals[:] = 0.0
    for i in range(classes):
        if costs[i] > 0:
            duals += inverse[i]
    return True


@jit
def improve(
    sizes: Array, counts: Array, room: int, patterns: Array, costs: Array, inverse: Array, times: Array, duals: Array,
    known: Array, close: float, work: int,
) -> int:  # fmt: skip
    """Improve a mix of patterns in place: 1 when it is within ``close`` of the least one, 0 when ``work`` is done.

    Each round prices all patterns with the duals by a knapsack over the room, and lets the most valuable in. At any
    time (duals x counts) / (best pattern's worth) bounds the packs from below (Farley).

    Args:
        sizes, counts: (D,) size of each class, ascending, and how many sequences it has.
        patterns: (D, D) int32, the basis: sequences of each class in each pattern (-1: one less of it is held).
        costs: (D,) 1 for a pattern, 0 for holding more of a class than there is.
        inverse, times, duals: (D, D), (D,), (D,) the basis' inverse, how often each pattern is used, each class' price.
        known: (2,) total of ``times`` now, and the best bound so far.
        work: steps of the innermost loops, roughly; the result depends on it, not on the clock.
    """
    classes = len(sizes)
    best, choice = np.zeros(room + 1), np.full(room + 1, -1, dtype=np.int64)
    found = np.zeros((_MANY, classes), dtype=np.int32)
    moved = np.empty(classes)
    since = classes * 4 + 1
    while True:
        if since > 4 * classes:
            if not invert(patterns, costs, counts, inverse, times, duals):
                return 1
            since = 0
        values = np.maximum(0.0, duals)
        _price(values, sizes, room, best, choice)
        known[0] = (costs * times).sum()
        known[1] = max(known[1], (values * counts).sum() / max(1.0, best[room]))
        number = _valuable(values, sizes, room, best, choice, found)
        if known[0] - known[1] <= close * known[1]:
            return 1
        work -= classes * room
        pivots = 0
        while pivots < _MANY + classes:
            column, gain = _entering(duals, found, number)
            if column == -1:
                break
            _image(inverse, found, column, moved)
            row = _pivot(inverse, times, duals, moved, gain)
            if row < 0:
                return 1
            if column >= 0:
                patterns[row] = found[column]
                costs[row] = 1.0
            else:
                patterns[row] = 0
                patterns[row, -2 - column] = -1
                costs[row] = 0.0
            pivots += 1
            since += 1
            work -= classes * (classes + number)
        if pivots == 0:
            return 1
        if work <= 0:
            return 0


@jit
def _down(counts: Array, at: int, low: int) -> int:
    """The longest length from ``low`` to ``at`` that is left, or -1."""
    while at >= low and counts[at] == 0:
        at -= 1
    return at if at >= low else -1


@jit
def _near(counts: Array, low: int, high: int, at: int, left: int) -> int:
    """The length nearest to ``at`` from ``low`` to ``high`` that is left and fits, or -1."""
    for distance in range(high - low + 1):
        if low <= at - distance <= left and counts[at - distance] > 0:
            return at - distance
        if at + distance <= min(high, left) and counts[at + distance] > 0:
            return at + distance
    return -1


@jit
def _pair(counts: Array, low: Array, high: Array, first: int, second: int, left: int) -> tuple[int, int]:
    """Two lengths of two classes that fill ``left`` best, (-1, -1) where none fit."""
    found, other = -1, -1
    for length in range(min(high[first], left - 1), low[first] - 1, -1):
        if counts[length] == 0:
            continue
        if found > 0 and length + high[second] <= found + other:
            break
        counts[length] -= 1
        beside = _down(counts, min(high[second], left - length), low[second])
        counts[length] += 1
        if beside > 0 and length + beside > found + other:
            found, other = length, beside
            if found + other == left:
                break
    return found, other


@jit
def fill(
    counts: Array, low: Array, high: Array, middle: Array, members: Array, starts: Array, times: Array, room: int,
    lengths: Array, offsets: Array, packs: int,
) -> int:  # fmt: skip
    """Fill packs after patterns with lengths that are left, and take these from ``counts``: packs filled so far.

    All but two lengths of a pack come from the middle of their class; the last two are the pair of their classes
    that fills the pack best. A pattern for which its classes have too little left is passed over.

    Args:
        counts: (room + 1,) sequences of each length that are left.
        low, high, middle: (D,) shortest, longest and typical length of each class.
        members, starts: the classes of each pattern, the longest first, end to end; (P + 1,).
        times: (P,) packs of each pattern.
        lengths, offsets: where the lengths of each pack go; the first ``packs`` are filled already.
    """
    for p in range(len(times)):
        for _ in range(times[p]):
            begin = at = offsets[packs]
            left = room
            for m in range(starts[p], starts[p + 1]):
                c = members[m]
                if m == starts[p + 1] - 2:
                    length, other = _pair(counts, low, high, c, members[m + 1], left)
                    if length > 0:
                        lengths[at], lengths[at + 1] = length, other
                        counts[length] -= 1
                        counts[other] -= 1
                        at += 2
                    break
                length = (
                    _near(counts, low[c], high[c], middle[c], left)
                    if starts[p + 1] - starts[p] > 1
                    else _down(counts, min(high[c], left), low[c])
                )
                if length < 0:
                    break
                lengths[at] = length
                counts[length] -= 1
                left -= length
                at += 1
            if at - begin == starts[p + 1] - starts[p]:
                packs += 1
                offsets[packs] = at
            else:
                for k in range(begin, at):
                    counts[lengths[k]] += 1
    return packs


@jit
def lay(
    sizes: Array, counts: Array, lengths: Array, filled: Array, records: Array, order: Array, offsets: Array
) -> None:
    """``order`` (N,) and ``offsets`` (packs + 1,) of packs filled with ``lengths`` and then by ``records`` of best-fit.

    Sequences of equal length are used in their order. ``counts`` is the histogram of all ``sizes`` (N,).
    """
    packs = len(offsets) - 1
    offsets[:] = 0
    for pack in range(len(filled) - 1):
        offsets[pack + 1] = filled[pack + 1] - filled[pack]
    for k in range(len(records)):
        for pack in range(records[k, 1], records[k, 1] + records[k, 2]):
            offsets[pack + 1] += records[k, 3]
    for pack in range(packs):
        offsets[pack + 1] += offsets[pack]
    place = np.zeros(len(counts) + 1, dtype=np.int64)  # where the next sequence of each length stands
    for length in range(len(counts)):
        place[length + 1] = place[length] + counts[length]
    following = place[:-1].copy()
    by_length = np.empty(len(sizes), dtype=np.uint32)
    for i in range(len(sizes)):
        by_length[place[sizes[i]]] = i
        place[sizes[i]] += 1
    at = offsets[:-1].copy()
    for pack in range(len(filled) - 1):
        for k in range(filled[pack], filled[pack + 1]):
            order[at[pack]] = by_length[following[lengths[k]]]
            following[lengths[k]] += 1
            at[pack] += 1
    for k in range(len(records)):
        length = records[k, 0]
        for pack in range(records[k, 1], records[k, 1] + records[k, 2]):
            for _ in range(records[k, 3]):
                order[at[pack]] = by_length[following[length]]
                following[length] += 1
                at[pack] += 1
