"""Packs by linear programming: the best mix of patterns of lengths, packs filled after it, and how good that is."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from padless.planning import fit, pack_kernels, pattern_kernels

__all__ = ["CLOSE", "optimal"]

Index = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

CLOSE = 0.002
"""``method="auto"`` keeps the packs of best-fit where they are at most this share over the bound."""

_LOOSE, _EXACT = 2e-4, 1e-7  # share by which a mix may be over the least one
_SINGLE = 200  # up to so many distinct lengths are a class each ...
_UNITS = (2048, 8192)  # ... with so many units of the capacity, one after the other;
_FEW = 10_000  # where there are so few sequences that a pack matters, to the end
_CLASSES = ((160, 2048, 0.0), (160, 2048, 0.1), (96, 8192, 0.0), (160, 8192, 0.0))
"""More distinct lengths are put into so many classes, with so many units, of lengths over such a share of a pack."""
_PROVE = 1024  # "optimal" also takes up to so many apart, at capacities up to this
_LEVELS = 3  # what a mix of patterns leaves over is mixed again
_CHUNK = 20_000_000  # steps of work between looks at the clock, about 40 ms
_WORK = (50_000_000, 2_000_000_000, 30_000)  # steps for a loose mix at least, at most, and for each sequence ...
_PROOF = 5_000_000_000  # ... and for an exact one


@dataclass(frozen=True, slots=True, kw_only=True)
class _Classes:
    """Lengths put together.

    Attributes:
        low, high, middle: (D,) shortest, longest, mean length of each class, ascending.
        sizes: (D,) what a sequence of the class takes, in units.
        room: units of a pack.
        proves: whether the least mix bounds the packs: every length is a class, and a unit is a token.
    """

    low: Index
    high: Index
    middle: Index
    sizes: Index
    room: int
    proves: bool


@dataclass(slots=True)
class _Filled:
    """Packs filled so far: their lengths (T,) and offsets (packs + 1,), and the histogram of what is left."""

    lengths: npt.NDArray[np.int32]
    offsets: Index
    left: Index
    packs: int = 0

    def rooms(self, room: int) -> Index:
        """(packs,) tokens that each pack has left."""
        used = self.lengths[: self.offsets[self.packs]]
        cum = np.concatenate([[0], np.cumsum(used, dtype=np.int64)])
        return room - np.diff(cum[self.offsets[: self.packs + 1]])


@dataclass(slots=True)
class _Best:
    """The fewest packs found: filled ones, then records of best-fit for the rest; ``None`` is best-fit alone."""

    packs: int
    bound: int
    lengths: npt.NDArray[np.int32] | None = None
    filled: Index = field(default_factory=lambda: np.zeros(1, dtype=np.int64))
    records: Index | None = None


def optimal(
    sizes: npt.NDArray[Any], room: int, *, bound: int, seconds: float, unit: int | None, close: float = 0.0
) -> tuple[Index, Index, int]:
    """(order (N,), offsets (packs + 1,), bound): best-fit-decreasing where that is near its bound, else by patterns.

    Column generation (Gilmore and Gomory) on the histogram of lengths finds how often each pattern is used in the
    least mix. Whole patterns are filled with sequences, what is left is mixed again, and best-fit packs the last few.
    Where there are too many lengths, classes of neighbouring lengths stand for them: the mix is that of their means,
    and each pack is completed by the pair of lengths that fills it best.

    Args:
        sizes: (N,) lengths, none over ``room``.
        bound: a lower bound on the packs that is known already.
        seconds: time limit; without one (``math.inf``) the result depends on the lengths alone.
        unit: lengths are rounded up to it instead; a class is what rounds to the same.
        close: packs at most this share over the bound are good enough; 0 goes on, and tries to prove the bound.
    """
    best_fit = fit.decreasing(sizes, room, best=True)
    best = _Best(packs=len(best_fit[1]) - 1, bound=bound)
    enough = math.floor(bound * (1.0 + close))
    if best.packs <= enough or room > 1 << 24:
        return *best_fit, bound
    deadline = time.perf_counter() + seconds
    counts = np.zeros(room + 1, dtype=np.int64)
    found = pack_kernels.count_lengths(sizes, int(sizes.max()))
    counts[: len(found)] = found
    for classes, nearness in _ways(counts, room, unit, prove=close == 0):
        _attempt(best, counts, classes, room, deadline, nearness)
        if best.packs <= max(enough, best.bound) or time.perf_counter() > deadline:
            break
    if best.lengths is None:
        return *best_fit, best.bound
    order, offsets = np.empty(len(sizes), dtype=np.int64), np.empty(best.packs + 1, dtype=np.int64)
    pattern_kernels.lay(sizes, counts, best.lengths, best.filled, best.records, order, offsets)
    return order, offsets, best.bound


def _ways(counts: Index, room: int, unit: int | None, *, prove: bool) -> Iterator[tuple[_Classes, float]]:
    """Classes to try, one after the other, and how close to its least each mix is to come."""
    lengths = np.flatnonzero(counts)  # (L,) distinct lengths, ascending
    apart = np.arange(len(lengths))
    if unit is not None:
        yield _classes(counts, lengths, -(-lengths // unit), room, unit, whole=True), _EXACT if prove else _LOOSE
        return
    if len(lengths) <= _SINGLE:
        for units in _UNITS:
            yield _classes(counts, lengths, apart, room, -(-room // units), whole=True), _LOOSE
        if prove or counts.sum() <= _FEW:
            yield _classes(counts, lengths, apart, room, -(-room // _UNITS[-1]), whole=True), _EXACT
        return
    prove = prove and room <= _PROVE and len(lengths) <= _PROVE
    if prove and len(lengths) <= _PROVE // 2:
        for close in (_LOOSE, _EXACT):  # what is left over may come out better either way
            yield _classes(counts, lengths, apart, room, 1, whole=True), close
    for number, units, shortest in _CLASSES:
        mixed = lengths[lengths > shortest * room]  # shorter ones fill up in the end
        if len(mixed):
            width = -(-int(mixed[-1] - mixed[0] + 1) // number)
            yield _classes(counts, mixed, (mixed - mixed[0]) // width, room, -(-room // units), whole=False), _LOOSE
    if prove and len(lengths) > _PROVE // 2:
        yield _classes(counts, lengths, apart, room, 1, whole=True), _EXACT


def _classes(counts: Index, lengths: Index, kind: Index, room: int, unit: int, *, whole: bool) -> _Classes:
    """Classes of the distinct ``lengths`` (L,) that are of one ``kind`` (L,), non-decreasing."""
    first = np.flatnonzero(np.diff(kind, prepend=-1))  # (D,)
    number = counts[lengths]
    mean = np.add.reduceat(number * lengths, first) / np.add.reduceat(number, first)
    low, high = lengths[first], lengths[np.append(first[1:], len(lengths)) - 1]
    middle = np.clip(np.rint(mean).astype(np.int64), low, high)
    # Lengths that stand for themselves must fit, so they are rounded up; means are met on average.
    sizes = -(-high // unit) if whole else np.maximum(1, np.rint(mean / unit).astype(np.int64))
    units = room // unit
    return _Classes(
        low=low,
        high=high,
        middle=middle,
        sizes=np.minimum(sizes, units),
        room=units,
        proves=whole and unit == 1 and len(first) == len(lengths),
    )


def _attempt(best: _Best, counts: Index, classes: _Classes, room: int, deadline: float, close: float) -> None:
    """Pack by the least mix of patterns of ``classes``; ``best`` takes it where that needs fewer packs."""
    total = int(counts.sum())
    work = _PROOF if close == _EXACT else min(max(_WORK[0], _WORK[2] * total), _WORK[1])
    filled = _Filled(
        lengths=np.empty(total, dtype=np.int32), offsets=np.zeros(total + 1, dtype=np.int64), left=counts.copy()
    )
    for level in range(_LEVELS):
        number = _left_of(filled.left, classes)
        mixed = number > 0
        if not mixed.any():
            break
        patterns, used, bound = _least_mix(
            classes.sizes[mixed], number[mixed], classes.room, work >> 2 * level, deadline, close=close
        )
        if level == 0 and classes.proves:
            best.bound = max(best.bound, math.ceil(bound - 1e-6))
        before = filled.packs
        members, starts, times = _whole(patterns, used, number[mixed])
        filled.packs = pattern_kernels.fill(
            filled.left, classes.low[mixed], classes.high[mixed], classes.middle[mixed], members, starts, times, room,
            filled.lengths, filled.offsets, before,
        )  # fmt: skip
        records, packs = pack_kernels.best_fit(filled.left, room, filled.rooms(room))
        if packs < best.packs:
            best.packs, best.records = packs, records
            best.filled = filled.offsets[: filled.packs + 1].copy()
            best.lengths = filled.lengths
        if filled.packs == before or packs <= best.bound or time.perf_counter() > deadline:
            break


def _left_of(left: Index, classes: _Classes) -> Index:
    """(D,) sequences of each class that are left."""
    cum = np.concatenate([[0], np.cumsum(left)])
    number: Index = cum[classes.high + 1] - cum[classes.low]
    return number


def _least_mix(
    sizes: Index, number: Index, room: int, work: int, deadline: float, *, close: float
) -> tuple[npt.NDArray[np.int32], Floats, float]:
    """Patterns (P, D), how often each is used (P,), and a bound on the packs: the relaxation to fractions.

    It starts from patterns of one class each, and ends at the least mix, after so much ``work``, or in time.
    """
    classes = len(sizes)
    each = room // sizes  # (D,)
    patterns = np.diag(each).astype(np.int32)
    costs, duals = np.ones(classes), 1.0 / each
    inverse, times = np.diag(duals), number / each
    known = np.zeros(2)
    while work > 0:
        chunk = min(work, _CHUNK)
        done = pattern_kernels.improve(sizes, number, room, patterns, costs, inverse, times, duals, known, close, chunk)
        work -= chunk
        if done or time.perf_counter() > deadline:
            break
    if not np.isfinite(times).all():  # rounding errors got out of hand: nothing is lost but the attempt
        times = np.zeros(classes)
    return patterns, times * (costs > 0), float(known[1]) if np.isfinite(known[1]) else 0.0


def _whole(patterns: npt.NDArray[np.int32], times: Floats, number: Index) -> tuple[Index, Index, Index]:
    """Patterns as lists of classes, the longest first, (members, starts), and how often each is used as a whole.

    Fractions are rounded down, then up again from the largest on, for as long as the classes have enough sequences.
    """
    whole = np.floor(times + 1e-9).astype(np.int64)  # (P,)
    left = number - whole @ patterns
    for p in np.argsort(whole - times, kind="stable"):
        if times[p] - whole[p] < 0.3:
            break
        if (patterns[p] <= left).all():
            whole[p] += 1
            left -= patterns[p]
    used = np.flatnonzero(whole)
    down = np.arange(patterns.shape[1])[::-1]
    lists = [np.repeat(down, patterns[p][::-1]) for p in used]
    starts = np.concatenate([[0], np.cumsum([len(one) for one in lists])]).astype(np.int64)
    members = np.concatenate(lists) if lists else np.empty(0, dtype=np.int64)
    return members, starts, whole[used]
