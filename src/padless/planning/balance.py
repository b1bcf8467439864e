"""Equal work: sequences over ranks, and packs that cost alike."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from padless.cost import CostModel
from padless.errors import PadlessError
from padless.lengths import positive_int

__all__ = ["evened", "partition"]

Index = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
_SHARES = (0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.65, 0.6, 0.5, 0.3, 0.0)  # of the tokens, which are dealt by their squares
_CLOSE = 0.0005  # packs that cost so much more than the mean are even enough


def partition(work: Any, parts: int, *, equal_counts: bool = False, rounds: int = 1000) -> Index:
    """Divide items into ``parts`` so that the largest part has as little work as possible.

    Longest first onto the least loaded part, then items of the fullest part are exchanged with others' for as
    long as that helps. Work is any cost of a sequence: its tokens, or ``a * length + length ** 2``.

    Args:
        work: (N,) non-negative numbers.
        parts: how many parts, at least 1.
        equal_counts: part sizes differ by at most one (otherwise counts are free).
        rounds: exchanges at most.

    Returns:
        (N,) int64, the part of each item.

    >>> partition([64, 16, 16, 16, 16], 2).tolist()
    [0, 1, 1, 1, 1]
    """
    from padless.planning.small_kernels import assign

    try:
        array = np.asarray(work, dtype=np.float64)
    except (TypeError, ValueError):
        array = np.empty(0)
    if array.ndim != 1 or not len(array) or not (np.isfinite(array).all() and array.min() >= 0):
        raise PadlessError("work must be a non-empty list of finite numbers, none negative")
    parts = positive_int(parts, name="parts")
    rounds = positive_int(rounds, name="rounds", minimum=0)
    most = np.full(parts, len(array), dtype=np.int64)  # (parts,)
    if equal_counts:
        most = np.diff(np.arange(parts + 1, dtype=np.int64) * len(array) // parts)[::-1].copy()
    down = np.argsort(-array, kind="stable")  # (N,)
    placed = np.empty(len(array), dtype=np.int64)
    assign(array[down], most, rounds, placed)
    result = np.empty(len(array), dtype=np.int64)
    result[down] = placed
    return result


def evened(sizes: Any, squares: Floats, room: int, packs: int, cost: CostModel, given: Index) -> tuple[Index, Index]:
    """Deal items anew so that ``packs`` packs cost alike, none over ``room``: (order (N,), offsets (packs + 1,)).

    Long sequences, most of the squares, are dealt by squares, short ones by tokens, or best-fit where packs
    are too full for that: as many by squares as leave the short ones enough room. Then sequences of the costliest
    packs are exchanged with others' until all are within 0.05 % of the mean, or nothing helps.

    Args:
        sizes, squares: (N,) tokens of each item, and its sum of squared lengths.
        room: tokens that a pack may hold.
        packs: how many packs, at least as many as ``given`` has.
        cost: what a pack costs; its fixed part plays no role.
        given: (N,) the pack of each item in a legal plan, kept as it is where nothing is found.
    """
    from padless.planning.even_kernels import level

    down = np.argsort(-sizes, kind="stable").astype(np.int64)  # (N,)
    held, square = sizes[down].astype(np.int64), squares[down]  # (N,)
    work = (cost.per_column + cost.per_token) * held + cost.per_token_squared * square
    place = _dealt(held, square if cost.per_token_squared else np.zeros(len(square)), room, packs)
    if place is None:
        place = given[down]
    goal = float(work.sum()) / packs * (1 + _CLOSE)
    level(held, work, room, packs, goal, min(300 * len(held), 100_000_000), place)
    order = down[np.argsort(place, kind="stable")]  # longest first within each pack
    counts = np.bincount(place)
    return order, np.concatenate([[0], np.cumsum(counts[counts > 0])]).astype(np.int64)


def _dealt(held: Index, squares: Floats, room: int, packs: int) -> Index | None:
    """A pack for each of the items (N,), which are sorted by falling size; None where no deal fits."""
    from padless.planning.even_kernels import deal
    from padless.planning.fit import rest_best_fit

    tokens = np.cumsum(held)  # (N,)
    place = np.empty(len(held), dtype=np.int64)
    for share in _SHARES if squares.any() else (0.0,):
        longs = int(np.searchsorted(tokens, share * float(tokens[-1]), side="right"))
        if deal(held, squares, room, packs, longs, place):
            return place
        if deal(held[:longs], squares[:longs], room, packs, longs, place):
            left = np.full(packs, room, dtype=np.int64)
            np.subtract.at(left, place[:longs], held[:longs])
            place[longs:], needed = rest_best_fit(held[longs:], room, left)
            if needed <= packs:
                return place
    return None
