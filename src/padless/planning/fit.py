"""Pack strategies: sizes in, sequences pack by pack out."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from padless.planning import lay_kernels, pack_kernels

__all__ = ["TABLE", "decreasing", "fewest_packs", "in_order", "rest_best_fit"]

Index = npt.NDArray[np.int64]
Sizes = npt.NDArray[Any]
_NONE: Index = np.empty(0, dtype=np.int64)
TABLE = 1 << 26
"""Capacities up to here get a table of all rooms."""
_BLOCK = 1 << 14  # sequences in a block of packs, about


def decreasing(sizes: Sizes, room: int, *, best: bool, counts: Index | None = None) -> tuple[Index, Index]:
    """Best- or first-fit-decreasing: (order (N,), offsets (packs + 1,)); none of ``sizes`` may exceed ``room``.

    ``counts`` (longest + 1,) is the histogram of ``sizes`` where it is known already.
    """
    longest = int(sizes.max()) if counts is None else len(counts) - 1
    if longest > TABLE or (best and room > TABLE):
        return _by_place(*_sparse(sizes, room, best=best))
    if counts is None:
        counts = pack_kernels.count_lengths(sizes, longest)
    if best:
        records, packs = pack_kernels.best_fit(counts, room, _NONE)
    else:
        # At most one pack stays half empty, so twice the tokens bound the packs.
        most = min(len(sizes), 2 * (int(sizes.sum(dtype=np.int64)) // room) + 2)
        records, packs = pack_kernels.first_fit(counts, room, most)
    return _laid_out(sizes, counts, records, packs)


def _laid_out(sizes: Sizes, counts: Index, records: Index, packs: int, *, narrow: bool = True) -> tuple[Index, Index]:
    """The sequences of each pack, (order (N,), offsets (packs + 1,)): those of equal length are used in their order.

    ``narrow`` numbers of 32 bits wait for their turn in the memory of the order itself.
    """
    order, offsets = np.empty(len(sizes), dtype=np.int64), np.empty(packs + 1, dtype=np.int64)
    bits = max(4, min(14, (_BLOCK * packs // len(sizes)).bit_length() - 1))
    narrow = narrow and len(sizes) < 1 << 31
    scratch, spread = (order.view(np.uint32), 2) if narrow else (np.empty_like(order), 1)
    starts, entries, before, pieces = lay_kernels.cut_blocks(records, packs, bits, spread)
    table = np.empty((len(counts), 2), dtype=np.uint32 if narrow else np.int64)
    lay_kernels.gather(sizes, counts, pieces, table, scratch)
    lay_kernels.settle(records, starts, entries, before, bits, spread, scratch, order, offsets)
    return order, offsets


def in_order(sizes: Sizes, room: int, order: Index) -> tuple[Index, Index]:
    """Next-fit: sequences in ``order`` join the open pack, or close it and open another."""
    offsets = np.empty(len(order) + 1, dtype=np.int64)
    packs = pack_kernels.next_fit(sizes, order, room, offsets)
    return order, offsets[: packs + 1].copy()


def rest_best_fit(sizes: Sizes, room: int, opened: Index) -> tuple[Index, int]:
    """Best-fit-decreasing into packs with room left (m,), then new ones: (pack of each sequence (N,), packs)."""
    if not len(sizes):
        return np.empty(0, dtype=np.int64), len(opened)
    counts = pack_kernels.count_lengths(sizes, int(sizes.max()))
    records, packs = pack_kernels.best_fit(counts, room, opened)
    order, offsets = _laid_out(sizes, counts, records, packs)
    place = np.empty(len(sizes), dtype=np.int64)
    place[order] = np.repeat(np.arange(packs), np.diff(offsets))
    return place, packs


def _sparse(sizes: Sizes, room: int, *, best: bool) -> tuple[Index, int]:
    """Both rules for lengths too large for a table: open packs in a list, sorted by room left for best-fit."""
    from bisect import bisect_left, insort

    place = np.empty(len(sizes), dtype=np.int64)
    opened: list[tuple[int, int]] = []  # (room left, pack), ascending
    packs = 0
    for i in np.argsort(-sizes.astype(np.int64), kind="stable").tolist():
        size = int(sizes[i])
        if best:
            at = bisect_left(opened, (size, -1))
        else:
            at = next((k for k, (left, _) in enumerate(opened) if left >= size), len(opened))
        left, pack = opened.pop(at) if at < len(opened) else (room, packs)
        packs = max(packs, pack + 1)
        place[i] = pack
        if best:
            insort(opened, (left - size, pack))
        else:
            opened.insert(at, (left - size, pack))
    return place, packs


def _by_place(place: Index, packs: int) -> tuple[Index, Index]:
    counts = np.bincount(place, minlength=packs)
    return np.argsort(place, kind="stable").astype(np.int64), np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)


def fewest_packs(counts: Index, room: int) -> int:
    """The Martello-Toth bound L2: no packing of lengths with histogram ``counts`` (longest + 1,) needs fewer packs.

    For every threshold t up to half the room: lengths over room - t share a pack with nothing that is t or longer,
    those over half of it not with each other; what of the rest does not fit beside these needs further packs.
    """
    table = np.zeros(room + 1, dtype=np.int64)
    table[: len(counts)] = counts
    number = np.concatenate([[0], np.cumsum(table)])  # (room + 2,) sequences shorter than each length
    tokens = np.concatenate([[0], np.cumsum(table * np.arange(room + 1))])
    half = room // 2
    t = np.arange(half + 1)
    beside = number[room - t + 1] - number[half + 1]  # (half + 1,) over half, at most room - t
    beside_tokens = tokens[room - t + 1] - tokens[half + 1]
    small = tokens[half + 1] - tokens[t]  # (half + 1,) at least t, at most half
    extra = np.maximum(0, -(-(small - (beside * room - beside_tokens)) // room))
    return int((number[-1] - number[half + 1] + extra).max())
