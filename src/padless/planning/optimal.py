"""Packs by linear programming: patterns of lengths, their best mix, and the proof of how good it is."""

# mypy: disable-error-code="no-any-return"
from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from padless.errors import PadlessError
from padless.planning.kernels import jit

__all__ = ["Patterns", "best_patterns", "optimal"]

Index = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Array = Any
_COLUMNS = 60  # new patterns in each round
_EXACT = 1024  # capacities up to here are not coarsened, unless told otherwise ...
_UNITS = 512  # ... larger ones to so many units
_SAMPLE = 2000  # packs of best-fit that serve as first patterns
_CLOSE = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Patterns:
    """A mix of patterns that covers (almost) all sequences.

    Attributes:
        sizes: (D,) distinct lengths, ascending, in units of ``unit`` tokens.
        patterns: (P, D) sequences of each length in a pack of each pattern.
        times: (P,) whole packs of each pattern.
        bound: no packing of lengths rounded up to ``unit`` needs fewer packs (a fraction, from the relaxation).
        finished: whether the relaxation was solved, or the time ended before.
    """

    sizes: Index
    patterns: Index
    times: Index
    bound: float
    finished: bool


@jit
def _price(values: Array, sizes: Array, room: int) -> tuple[Array, Array]:
    """Unbounded knapsack: (room + 1,) best value within each room, and the size chosen there (-1: leave one unit)."""
    best = np.zeros(room + 1)
    choice = np.full(room + 1, -1, dtype=np.int64)
    for space in range(1, room + 1):
        best[space] = best[space - 1]
        for d in range(len(sizes)):
            if sizes[d] > space:
                break
            value = best[space - sizes[d]] + values[d]
            if value > best[space] + 1e-12:
                best[space] = value
                choice[space] = d
    return best, choice


@jit
def _unroll(choice: Array, sizes: Array, space: int, pattern: Array) -> None:
    while space > 0:
        d = choice[space]
        if d < 0:
            space -= 1
        else:
            pattern[d] += 1
            space -= sizes[d]


def best_patterns(sizes: Index, counts: Index, room: int, first: Index, *, seconds: float) -> Patterns:
    """Column generation (Gilmore and Gomory): least total of patterns that cover the counts, relaxed to fractions.

    Each round solves the relaxation over the patterns known (SciPy's HiGHS), prices all others with its duals
    by a knapsack over the room, and adds the best pattern through each length. When no pattern is worth more
    than 1 the relaxation is optimal. At any time (duals x counts) / (best pattern's worth) bounds the
    packs from below (Farley), so that stopping early still proves something.

    Args:
        sizes, counts: (D,) distinct lengths ascending, and how many there are of each.
        room: the capacity.
        first: (P, D) patterns to start from, which together hold every length.
        seconds: time limit.
    """
    try:
        from scipy.optimize import linprog
        from scipy.sparse import csr_array
    except ImportError:
        raise PadlessError('method="optimal" needs SciPy: pip install "padless[optimal]"') from None
    deadline = time.perf_counter() + seconds
    patterns = np.unique(first, axis=0)  # (P, D)
    known = {row.tobytes() for row in patterns}
    bound, finished, mix = 0.0, False, np.zeros(len(patterns))
    while True:
        left = max(0.05, deadline - time.perf_counter())
        solved = linprog(
            np.ones(len(patterns)),
            A_ub=csr_array(-patterns.T.astype(np.float64)),
            b_ub=-counts.astype(np.float64),
            method="highs",
            options={"time_limit": left},
        )
        if solved.x is None or solved.status != 0:
            break
        mix = solved.x
        values = np.maximum(0.0, -solved.ineqlin.marginals)  # (D,) what one more sequence of each length costs
        best, choice = _price(values, sizes, room)
        bound = max(bound, float(values @ counts) / max(1.0, float(best[room])))
        if best[room] <= 1.0 + _CLOSE:
            finished = True
            break
        fresh = [row for row in _columns(values, sizes, room, best, choice) if row.tobytes() not in known]
        if not fresh or time.perf_counter() > deadline:
            break
        known.update(row.tobytes() for row in fresh)
        patterns = np.concatenate([patterns, np.stack(fresh)])
    patterns = patterns[: len(mix)]  # the last round may have ended without a solution
    times = np.floor(mix + 1e-9).astype(np.int64)
    used = times > 0
    return Patterns(sizes=sizes, patterns=patterns[used], times=times[used], bound=bound, finished=finished)


def _columns(values: Floats, sizes: Index, room: int, best: Floats, choice: Index) -> list[Index]:
    """The most valuable pattern through each length, best lengths first, those worth more than 1 only."""
    through = values + best[room - sizes]  # (D,)
    rows = []
    for d in np.argsort(-through, kind="stable")[:_COLUMNS]:
        if through[d] <= 1.0 + _CLOSE:
            break
        pattern = np.zeros(len(sizes), dtype=np.int64)
        pattern[d] = 1
        _unroll(choice, sizes, int(room - sizes[d]), pattern)
        rows.append(pattern)
    return rows


def optimal(sizes: npt.NDArray[Any], room: int, *, bound: int, seconds: float, unit: int | None) -> Any:
    """(order (N,), offsets (packs + 1,), bound): best-fit-decreasing where it is proven best, else rounded patterns.

    Args:
        sizes: (N,) lengths, none over ``room``.
        bound: a lower bound on the packs that is known already.
        seconds: time limit.
        unit: lengths are rounded up to it; None for 1 up to a room of 1,024, then for 512 units in all.
    """
    from padless.planning import fit

    best = fit.decreasing(sizes, room, best=True)
    if len(best[1]) - 1 == bound:
        return *best, bound
    unit = unit or (1 if room <= _EXACT else -(-room // _UNITS))
    coarse, coarse_room = -(-sizes.astype(np.int64) // unit), room // unit  # (N,) units
    if int(coarse.max()) > coarse_room:  # rounding would make the longest too long
        return *best, bound
    distinct, inverse, counts = np.unique(coarse, return_inverse=True, return_counts=True)
    found = best_patterns(
        distinct, counts.astype(np.int64), coarse_room, _first(distinct, inverse, best, coarse_room), seconds=seconds
    )
    if unit == 1:
        bound = max(bound, int(np.ceil(found.bound - 1e-6)))
    place, packs = _placed(found, inverse)
    rest = np.flatnonzero(place < 0)
    left = room - np.bincount(place[place >= 0], weights=sizes[place >= 0], minlength=packs).astype(np.int64)
    place[rest], packs = fit.rest_best_fit(sizes[rest], room, left)
    if packs >= len(best[1]) - 1:
        return *best, bound
    used, place = np.unique(place, return_inverse=True)
    down = np.argsort(-sizes.astype(np.int64), kind="stable")
    order = down[np.argsort(place[down], kind="stable")].astype(np.int64)
    return order, np.concatenate([[0], np.cumsum(np.bincount(place, minlength=len(used)))]).astype(np.int64), bound


def _first(sizes: Index, inverse: Index, best: tuple[Index, Index], room: int) -> Index:
    """Patterns to start from, (P, D): packs of one length only, and some of best-fit's that hold in units."""
    order, offsets = best
    rows = [np.diag(room // sizes)]
    packs = len(offsets) - 1
    for pack in np.unique(np.linspace(0, packs - 1, min(packs, _SAMPLE)).astype(np.int64)):
        row = np.bincount(inverse[order[offsets[pack] : offsets[pack + 1]]], minlength=len(sizes))
        if row @ sizes <= room:
            rows.append(row[None])
    return np.concatenate(rows).astype(np.int64)


def _placed(found: Patterns, inverse: Index) -> tuple[Index, int]:
    """Give each sequence a pack of the whole patterns, (N,), -1 where none is left; and how many packs there are."""
    place = np.full(len(inverse), -1, dtype=np.int64)
    first = np.concatenate([[0], np.cumsum(found.times)])  # (P + 1,)
    by_size = np.argsort(inverse, kind="stable")
    starts = np.searchsorted(inverse[by_size], np.arange(len(found.sizes) + 1))
    for d in range(len(found.sizes)):
        each = np.repeat(found.patterns[:, d], found.times)  # (packs,) sequences of this length in each pack
        wanted = np.repeat(np.arange(first[-1]), each)
        mine = by_size[starts[d] : starts[d + 1]][: len(wanted)]
        place[mine] = wanted[: len(mine)]
    return place, int(first[-1])
