"""Pack strategies: sizes in, sequences pack by pack out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from padless.planning import lay_kernels, pack_kernels, sparse_kernels

__all__ = ["Histogram", "decreasing", "fewest_packs", "in_order", "read_only", "rest_best_fit"]

Index = npt.NDArray[np.int64]
Sizes = npt.NDArray[Any]
_NONE: Index = np.empty(0, dtype=np.int64)
_BLOCK = 1 << 14  # sequences in a block of packs, about


def _worth_a_table(largest: int, count: int) -> bool:
    """Whether tables of all values up to ``largest`` cost little time and memory beside ``count`` items."""
    return largest <= max(1 << 13, min(8 * count, max(1 << 18, count // 2)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Histogram:
    """How often each size occurs.

    Attributes:
        keys: (N,) where each item counts in ``counts``; read-only, so that kernels are compiled for one kind of array.
        counts: (L,) items of each key; a larger key is a larger size.
        sizes, numbers: (D,) the sizes that occur, ascending, and how often.
        table: whether keys are the sizes themselves.
    """

    keys: Sizes
    counts: Index
    sizes: Index
    numbers: Index
    table: bool

    @classmethod
    def of(cls, sizes: Sizes) -> Histogram:
        """Count positive ``sizes`` (N,)."""
        keys = read_only(sizes)
        longest = int(sizes.max())
        if _worth_a_table(longest, len(sizes)):
            counts = pack_kernels.count_lengths(keys, longest)  # (longest + 1,)
            distinct = np.flatnonzero(counts)
            return cls(keys=keys, counts=counts, sizes=distinct, numbers=counts[distinct], table=True)
        distinct, inverse, numbers = np.unique(sizes, return_inverse=True, return_counts=True)
        distinct, numbers = distinct.astype(np.int64), numbers.astype(np.int64)
        return cls(keys=read_only(inverse), counts=numbers, sizes=distinct, numbers=numbers, table=False)

    @property
    def total(self) -> int:
        """Tokens of all items."""
        return int(self.sizes @ self.numbers)


def read_only(array: Sizes) -> Sizes:
    """A view that cannot be written to: numba compiles anew for each kind of array, this one included."""
    view = array.view()
    view.flags.writeable = False
    return view


def decreasing(sizes: Sizes, room: int, *, best: bool, histogram: Histogram | None = None) -> tuple[Index, Index]:
    """Best- or first-fit-decreasing: (order (N,), offsets (packs + 1,)); none of ``sizes`` may exceed ``room``.

    ``histogram`` is that of ``sizes`` where it is known already.
    """
    found = histogram or Histogram.of(sizes)
    if best:
        records, packs = _best_fit(found, room, _NONE)
    else:
        # At most one pack stays half empty, so twice the tokens bound the packs.
        most = min(len(sizes), 2 * (found.total // room) + 2)
        records, packs = pack_kernels.first_fit(found.sizes, found.numbers, room, most)
    return _laid_out(found, records, packs)


def _best_fit(found: Histogram, room: int, opened: Index) -> tuple[Index, int]:
    """Records of best-fit-decreasing and how many packs; ``opened`` (m,) is the room left in packs that exist."""
    if found.table and _worth_a_table(room, len(found.keys)):
        return pack_kernels.best_fit(found.counts, room, opened)  # type: ignore[no-any-return]
    return sparse_kernels.best_fit_sparse(found.sizes, found.numbers, room, opened)  # type: ignore[no-any-return]


def _laid_out(found: Histogram, records: Index, packs: int, *, narrow: bool = True) -> tuple[Index, Index]:
    """The sequences of each pack, (order (N,), offsets (packs + 1,)): those of equal length are used in their order.

    ``narrow`` numbers of 32 bits wait for their turn in the memory of the order itself.
    """
    order, offsets = np.empty(len(found.keys), dtype=np.int64), np.empty(packs + 1, dtype=np.int64)
    bits = max(4, min(14, (_BLOCK * packs // len(found.keys)).bit_length() - 1))
    narrow = narrow and len(found.keys) < 1 << 31
    scratch, spread = (order.view(np.uint32), 2) if narrow else (np.empty_like(order), 1)
    starts, entries, before, pieces = lay_kernels.cut_blocks(records, packs, bits, spread)
    table = np.empty((len(found.counts), 2), dtype=np.uint32 if narrow else np.int64)
    lay_kernels.gather(found.keys, found.counts, pieces, table, scratch)
    lay_kernels.settle(records, starts, entries, before, bits, spread, scratch, order, offsets)
    return order, offsets


def in_order(sizes: Sizes, room: int, order: Index) -> tuple[Index, Index]:
    """Next-fit: sequences in ``order`` join the open pack, or close it and open another."""
    offsets = np.empty(len(order) + 1, dtype=np.int64)
    packs = pack_kernels.next_fit(read_only(sizes), order, room, offsets)
    return order, offsets[: packs + 1].copy()


def rest_best_fit(sizes: Sizes, room: int, opened: Index) -> tuple[Index, int]:
    """Best-fit-decreasing into packs with room left (m,), then new ones: (pack of each sequence (N,), packs)."""
    if not len(sizes):
        return np.empty(0, dtype=np.int64), len(opened)
    found = Histogram.of(sizes)
    records, packs = _best_fit(found, room, opened)
    order, offsets = _laid_out(found, records, packs)
    place = np.empty(len(sizes), dtype=np.int64)
    place[order] = np.repeat(np.arange(packs), np.diff(offsets))
    return place, packs


def fewest_packs(found: Histogram, room: int) -> int:
    """The Martello-Toth bound L2: no packing needs fewer packs.

    For every threshold t up to half the room: lengths over room - t share a pack with nothing that is t or longer,
    those over half of it not with each other; what of the rest does not fit beside these needs further packs.
    Between two lengths that occur the bound only grows with t, so they are the thresholds to try.
    """
    sizes = found.sizes  # (D,)
    number = np.concatenate([[0], np.cumsum(found.numbers)])  # (D + 1,) sequences shorter than each length
    tokens = np.concatenate([[0], np.cumsum(sizes * found.numbers)])
    half = int(np.searchsorted(sizes, room // 2, side="right"))  # lengths up to half the room
    fits = np.searchsorted(sizes, room - sizes[:half], side="right")  # (half,) lengths up to room - t
    beside, beside_tokens = number[fits] - number[half], tokens[fits] - tokens[half]  # over half, with t or more beside
    # Room beside them, taken pack by pack: their number times the room may be more than 64 bits hold.
    left = beside * (room - room // 2) - (beside_tokens - beside * (room // 2))
    small = tokens[half] - tokens[:half]  # (half,) at least t, at most half
    extra = np.maximum(0, -(-(small - left) // room))
    return int(number[-1] - number[half] + extra.max(initial=0))
