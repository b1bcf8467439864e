"""Where each document of the corpus lies on disk, for as long as it is not written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from padless.data._pack_plan import Packs
from padless.data._spill import Chunk

__all__ = ["Placed", "Places"]

Index = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """Packs whose pieces are found: (P,) arrays as in `padless.data._shards.ShardTask`, ``offsets`` (packs + 1,)."""

    chunk: npt.NDArray[np.int32]
    at: Index
    length: npt.NDArray[np.int32]
    document: Index
    file: npt.NDArray[np.int32]
    row: Index
    start: Index
    offsets: Index

    @classmethod
    def nothing(cls) -> Placed:
        """No pack."""
        short, long = np.empty(0, dtype=np.int32), np.empty(0, dtype=np.int64)
        offsets = np.zeros(1, dtype=np.int64)
        return cls(chunk=short, at=long, length=short, document=long, file=short, row=long, start=long, offsets=offsets)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def then(self, other: Placed) -> Placed:
        """These packs and the others behind them."""
        if not len(self):
            return other
        return Placed(
            chunk=np.concatenate([self.chunk, other.chunk]),
            at=np.concatenate([self.at, other.at]),
            length=np.concatenate([self.length, other.length]),
            document=np.concatenate([self.document, other.document]),
            file=np.concatenate([self.file, other.file]),
            row=np.concatenate([self.row, other.row]),
            start=np.concatenate([self.start, other.start]),
            offsets=np.concatenate([self.offsets, other.offsets[1:] + self.offsets[-1]]),
        )


@dataclass(slots=True)
class _Entry:
    """Documents of one chunk: all of them, or those that still wait (then ``kept`` is their places in the chunk)."""

    first: int
    at: npt.NDArray[np.int32]
    rows: Index
    chunk: int
    file: int
    first_row: int
    columns: Mapping[str, tuple[str, int]]
    kept: Index | None = None

    def find(self, place: Index) -> tuple[Index, Index]:
        """First token and row of the documents at ``place`` in the chunk."""
        where = place if self.kept is None else np.searchsorted(self.kept, place)
        return self.at[where].astype(np.int64), self.rows[where]


@dataclass(slots=True)
class Places:
    """Grows with each chunk that is read, shrinks with each window that is written."""

    entries: dict[int, _Entry] = field(default_factory=dict)
    firsts: list[int] = field(default_factory=lambda: [0])

    def add(self, chunk: Chunk) -> None:
        """Take in the next chunk."""
        lengths = chunk.lengths.astype(np.int64)
        self.entries[chunk.number] = _Entry(
            first=self.firsts[-1],
            at=(np.cumsum(lengths) - lengths).astype(np.int32),
            rows=chunk.rows,
            chunk=chunk.number,
            file=chunk.file,
            first_row=chunk.first_row,
            columns=chunk.columns,
        )
        self.firsts.append(self.firsts[-1] + len(lengths))

    def columns(self, chunk: int) -> Mapping[str, tuple[str, int]]:
        """Dtype and byte offset of each per-token column of a chunk."""
        return self.entries[chunk].columns

    def of(self, packs: Packs, start: int, stop: int) -> Placed:
        """Packs ``start`` to ``stop``, with the place of each of their pieces."""
        slots = slice(int(packs.offsets[start]), int(packs.offsets[stop]))
        document = packs.pieces.document[slots]  # (P,) place in the corpus
        chunk = np.searchsorted(np.array(self.firsts), document, side="right").astype(np.int64) - 1
        at, row, number = (np.empty(len(document), dtype=np.int64) for _ in range(3))
        file = np.empty(len(document), dtype=np.int32)
        by_chunk = np.argsort(chunk, kind="stable")
        cuts = np.flatnonzero(np.diff(chunk[by_chunk])) + 1
        for members in np.split(by_chunk, cuts):
            if not len(members):
                continue
            entry = self.entries[int(chunk[members[0]])]
            at[members], row[members] = entry.find(document[members] - entry.first)
            file[members] = entry.file
            number[members] = row[members] + entry.first_row
        first = packs.pieces.start[slots].astype(np.int64)
        return Placed(
            chunk=chunk.astype(np.int32),
            at=at + first,
            length=packs.pieces.length[slots],
            document=number,
            file=file,
            row=row,
            start=first,
            offsets=packs.offsets[start : stop + 1] - packs.offsets[start],
        )

    def forget(self, *, before: int, but: Index) -> None:
        """Drop documents before place ``before`` that do not wait (``but``, ascending)."""
        for number in [n for n, entry in self.entries.items() if entry.first < before]:
            entry = self.entries[number]
            stop = self.firsts[number + 1]
            low, high = np.searchsorted(but, [entry.first, stop])
            waits = but[low:high] - entry.first
            if stop > before:  # the rest of the chunk belongs to the next window
                waits = np.concatenate([waits, np.arange(before - entry.first, stop - entry.first)])
            at, rows = entry.find(waits)
            entry.at, entry.rows, entry.kept = at.astype(np.int32), rows, waits
