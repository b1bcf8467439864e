"""Which documents share a pack: the whole corpus at once, or window by window with what fits badly carried over."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from padless.planning.pack import Method, pack
from padless.planning.slots import Overlong, apply_overlong

__all__ = ["WINDOW", "Fate", "Packs", "Pieces", "plan_windows"]

Index = npt.NDArray[np.int64]

WINDOW = 16_000_000
"""Documents planned at once; a larger corpus is planned in windows (about 80 bytes of memory each)."""

_FULL = 0.995  # a pack emptier than this may wait for the next window
_CARRY = 8  # at most one in so many of a window's pieces waits


@dataclass(frozen=True, slots=True, kw_only=True)
class Pieces:
    """Documents, or parts of documents that were too long.

    Attributes:
        document: (P,) int64 place of the document in the corpus.
        start: (P,) int32 first token of the piece.
        length: (P,) int32 its tokens.
    """

    document: Index
    start: npt.NDArray[np.int32]
    length: npt.NDArray[np.int32]

    def __len__(self) -> int:
        return len(self.document)

    def take(self, places: Index) -> Pieces:
        """The pieces at ``places``, in that order."""
        return Pieces(document=self.document[places], start=self.start[places], length=self.length[places])

    def then(self, other: Pieces) -> Pieces:
        """These pieces and the others behind them."""
        return Pieces(
            document=np.concatenate([self.document, other.document]),
            start=np.concatenate([self.start, other.start]),
            length=np.concatenate([self.length, other.length]),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Fate:
    """What the ``overlong`` policy did: documents and tokens. Fates add with ``+``."""

    dropped: int = 0
    dropped_tokens: int = 0
    truncated: int = 0
    truncated_tokens: int = 0
    split: int = 0

    def __add__(self, other: Fate) -> Fate:
        return Fate(
            dropped=self.dropped + other.dropped,
            dropped_tokens=self.dropped_tokens + other.dropped_tokens,
            truncated=self.truncated + other.truncated,
            truncated_tokens=self.truncated_tokens + other.truncated_tokens,
            split=self.split + other.split,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Packs:
    """The finished packs of one window.

    Attributes:
        pieces: in order; pack p holds ``offsets[p]`` to ``offsets[p + 1]``.
        fate: what the ``overlong`` policy did in this window.
        waiting: (W,) int64 documents of which a piece waits for the next window, ascending.
        planned: documents planned so far, those that wait included.
    """

    pieces: Pieces
    offsets: Index
    fate: Fate
    waiting: Index
    planned: int

    def __len__(self) -> int:
        return len(self.offsets) - 1


def plan_windows(
    lengths: Iterable[npt.NDArray[np.int32]],
    capacity: int,
    *,
    method: Method = "auto",
    overlong: Overlong = "error",
    window: int = WINDOW,
    seed: int | None = 0,
) -> Iterator[Packs]:
    """Pack a corpus of any size. The result depends on the lengths and the options, not on how they are cut.

    Args:
        lengths: the documents' tokens, in corpus order, in arrays of any size.
        capacity: tokens that a pack holds at most.
        window: documents planned at once. Of every window but the last, the emptiest packs are taken
            apart and their documents wait for the next.
        seed: packs of a window are put in random order, so that neighbours do not resemble each other; ``None``
            keeps the planner's order.

    Yields:
        The packs of one window; together they hold every document that ``overlong`` keeps, once.

    >>> [packs] = plan_windows([np.array([5, 5, 3], np.int32)], 10, seed=None)
    >>> packs.pieces.document, packs.offsets
    (array([0, 1, 2]), array([0, 2, 3]))
    """
    waiting = _no_pieces()
    first = 0
    windows = _windows(lengths, window)
    current = next(windows, None)
    number = 0
    while current is not None:
        following = next(windows, None)
        pieces, fate = _cut(current, first, capacity, overlong)
        first += len(current)
        most = None if following is None else window // _CARRY
        rng = None if seed is None else np.random.default_rng([seed, number])
        pieces = pieces if not len(waiting) else waiting.then(pieces)
        packed, offsets, waiting = _pack(pieces, capacity, method, most=most, rng=rng)
        del pieces  # a window's arrays are large; only the packed ones are needed while its shards are written
        yield Packs(pieces=packed, offsets=offsets, fate=fate, waiting=np.unique(waiting.document), planned=first)
        current, number = following, number + 1


def _no_pieces() -> Pieces:
    return Pieces(
        document=np.empty(0, dtype=np.int64), start=np.empty(0, dtype=np.int32), length=np.empty(0, dtype=np.int32)
    )


def _windows(lengths: Iterable[npt.NDArray[np.int32]], window: int) -> Iterator[npt.NDArray[np.int32]]:
    """Arrays of exactly ``window`` lengths, the last one shorter."""
    held: list[npt.NDArray[np.int32]] = []
    count = 0
    for part in lengths:
        while count + len(part) >= window:
            cut = window - count
            yield np.concatenate([*held, part[:cut]])
            held, count, part = [], 0, part[cut:]
        if len(part):
            held.append(part)
            count += len(part)
    if count:
        yield np.concatenate(held)


def _cut(lengths: npt.NDArray[np.int32], first: int, capacity: int, overlong: Overlong) -> tuple[Pieces, Fate]:
    slots = apply_overlong(lengths, capacity, overlong=overlong, what=f"capacity {capacity}")
    held = np.asarray(slots.held, dtype=np.int32)  # (P,)
    document = np.arange(len(lengths)) if slots.sequence is None else np.asarray(slots.sequence)  # (P,)
    start = np.zeros(len(held), dtype=np.int32) if slots.spans is None else slots.spans[:, 0].astype(np.int32)
    fate = Fate(
        dropped=len(slots.dropped),
        dropped_tokens=int(lengths[slots.dropped].sum(dtype=np.int64)),
        truncated=len(slots.truncated),
        truncated_tokens=int(lengths[slots.truncated].sum(dtype=np.int64)) - capacity * len(slots.truncated),
        split=len(slots.split),
    )
    return Pieces(document=document + first, start=start, length=held), fate


def _pack(
    pieces: Pieces, capacity: int, method: Method, *, most: int | None, rng: np.random.Generator | None
) -> tuple[Pieces, Index, Pieces]:
    """Packed pieces, their offsets, and at most ``most`` pieces that wait (``None`` in the last window: none)."""
    if not len(pieces):
        return pieces, np.zeros(1, dtype=np.int64), pieces
    # Without a time limit the packs depend on the lengths alone, so that a resumed run finds the same ones.
    plan = pack(pieces.length, capacity, method=method, time_limit=math.inf)
    order, rows = plan.order, plan.rows
    offsets = plan.offsets if rows.all() else np.concatenate([[0], np.cumsum(rows[rows > 0])]).astype(np.int64)
    packs = np.arange(len(offsets) - 1)
    waits = packs[:0]
    if most is not None:
        filled = np.add.reduceat(pieces.length[order], offsets[:-1], dtype=np.int64)  # (packs,)
        emptiest = np.argsort(filled, kind="stable")
        waits = emptiest[(filled[emptiest] < _FULL * capacity) & (np.cumsum(np.diff(offsets)[emptiest]) <= most)]
        packs = np.delete(packs, waits)
    carried = pieces.take(np.sort(order[_places(offsets, waits)]))
    if rng is not None:
        packs = rng.permutation(packs)
    rows = np.diff(offsets)[packs]
    packed = pieces.take(order[_places(offsets, packs)])
    return packed, np.concatenate([[0], np.cumsum(rows)]).astype(np.int64), carried


def _places(offsets: Index, packs: Index) -> Index:
    """Slots of the chosen packs, in that order."""
    rows = np.diff(offsets)[packs]  # (C,)
    ends = np.cumsum(rows)
    places: Index = np.arange(int(ends[-1]) if len(ends) else 0)
    places += np.repeat(offsets[:-1][packs] - (ends - rows), rows)
    return places
