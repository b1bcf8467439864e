"""The boundaries of packed rows, once, in every form that a consumer asks for."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from padless.errors import PadlessError

__all__ = ["Boundaries", "ContextShard", "boundaries_of"]

Index = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Boundaries:
    """Segments of ``rows`` packed rows of ``width`` columns, behind one another.

    A segment is a sequence (with its own rounding), or the one tail of a row. The segments of all rows cover the whole
    buffer, so that no kernel leaves a cell uninitialised.

    Attributes:
        lengths: (S,) tokens of each segment; 0 for a tail and for an empty sequence.
        held: (S,) columns of each segment, rounding included; zero-length sequences keep their slot.
        tail: (S,) true for tails.
        rows: packed rows, B.
        width: columns of each row, T.
        start: the first position of every sequence.
        device: where tensors are made.
    """

    lengths: Index
    held: Index
    tail: npt.NDArray[np.bool_]
    rows: int
    width: int
    start: int = 0
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @property
    def sequences(self) -> int:
        """Sequences, empty ones included."""
        return int((~self.tail).sum())

    @property
    def max_length(self) -> int:
        """The longest segment, tails included, as kernels size their grids."""
        return int(self.held.max(initial=0))

    @property
    def cu_seqlens(self) -> Tensor:
        """(S + 1,) int32 offsets of the segments in the flattened rows."""
        return self._offsets(self.held)

    @property
    def position_ids(self) -> Tensor:
        """(B, T) int64: positions restart with every segment."""
        begins = np.repeat(np.cumsum(self.held) - self.held, self.held)
        return self._grid(np.arange(self.rows * self.width) - begins + self.start)

    @property
    def document_ids(self) -> Tensor:
        """(B, T) int64: the sequence of each cell, counted over all rows; -1 in tails."""
        names = np.where(self.tail, -1, np.cumsum(~self.tail) - 1)
        return self._grid(np.repeat(names, self.held))

    @property
    def segment_ids(self) -> Tensor:
        """(B, T) int64: like ``document_ids``, with a number for each tail: nothing attends over its edge."""
        return self._grid(np.repeat(np.arange(len(self.held)), self.held))

    @property
    def seq_idx(self) -> Tensor:
        """(B, T) int32: the segment of each cell, counted from 0 in each row."""
        ids = self.segment_ids
        return (ids - ids[:, :1]).to(torch.int32) if self.width else ids.to(torch.int32)

    def flash_kwargs(self) -> dict[str, Any]:
        """What transformers passes on to variable-length attention kernels."""
        offsets, longest = self.cu_seqlens, self.max_length
        return {
            "cu_seq_lens_q": offsets,
            "cu_seq_lens_k": offsets,
            "max_length_q": longest,
            "max_length_k": longest,
        }

    def packed_seq_params(self) -> dict[str, Any]:
        """Fields of Megatron Core's ``PackedSeqParams``: offsets of the tokens, and of the columns they are given."""
        offsets = self._offsets(np.where(self.tail, self.held, self.lengths))
        padded = self.cu_seqlens
        return {
            "qkv_format": "thd",
            "cu_seqlens_q": offsets,
            "cu_seqlens_kv": offsets,
            "cu_seqlens_q_padded": padded,
            "cu_seqlens_kv_padded": padded,
            "max_seqlen_q": self.max_length,
            "max_seqlen_kv": self.max_length,
        }

    def context_parallel(self, size: int, rank: int, *, contiguous: bool = False) -> ContextShard:
        """The share of context-parallel rank ``rank`` of ``size``.

        By default each segment is cut into 2 x size chunks and a rank takes one from either end, so that causal work
        is equal; segments then need a multiple of 2 x size columns (``sequence_multiple_of``). ``contiguous`` cuts each
        row into ``size`` equal parts instead.
        """
        if not 0 <= rank < size:
            raise PadlessError(f"rank={rank}; expected one of the {size} context-parallel ranks")
        place = np.arange(self.rows * self.width).reshape(self.rows, self.width)
        if contiguous:
            if self.width % size:
                raise PadlessError(f"{self.width} columns do not split over {size} ranks: set multiple_of={size}")
            part = self.width // size
            return ContextShard(index=self._to(place[:, rank * part : (rank + 1) * part].ravel()), whole=self)
        chunks = 2 * size
        odd = np.flatnonzero(self.held % chunks)
        if len(odd):
            raise PadlessError(
                f"segment {odd[0]} has {self.held[odd[0]]} columns, no multiple of 2 x {size} context-parallel ranks:"
                f" set sequence_multiple_of={chunks} and multiple_of={chunks}"
            )
        chunk = np.repeat(self.held // chunks, self.held)  # (B * T,)
        begins = np.repeat(np.cumsum(self.held) - self.held, self.held)
        number = (place.ravel() - begins) // np.maximum(chunk, 1)
        return ContextShard(
            index=self._to(np.flatnonzero((number == rank) | (number == chunks - 1 - rank))), whole=self
        )

    def _offsets(self, sizes: Index) -> Tensor:
        return self._to(np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32))

    def _grid(self, values: npt.NDArray[Any]) -> Tensor:
        return self._to(values.reshape(self.rows, self.width))

    def _to(self, values: npt.NDArray[Any]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(self.device, non_blocking=True)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ContextShard:
    """The cells of one context-parallel rank.

    Offsets stay those of the whole rows (``whole.packed_seq_params()``): attention needs the global boundaries.

    Attributes:
        index: (n,) cells of the flattened rows, ascending.
        whole: the boundaries of the whole rows.
    """

    index: Tensor
    whole: Boundaries

    def take(self, tensor: Tensor) -> Tensor:
        """This rank's part of a (B, T, ...) tensor, as (1, n, ...)."""
        flat = tensor.flatten(0, 1)
        return flat.index_select(0, self.index.to(flat.device))[None]

    @property
    def seq_idx(self) -> Tensor:
        """(1, n) int32: the segment of each cell, by its number in the whole rows."""
        return self.take(self.whole.segment_ids).to(torch.int32)

    @property
    def cu_seqlens(self) -> Tensor:
        """(S + 1,) int32 offsets of the segments' parts within this shard."""
        parts = torch.bincount(self.seq_idx[0], minlength=len(self.whole.held))
        return torch.cat([parts.new_zeros(1), parts.cumsum(0)]).to(torch.int32)

    @property
    def position_ids(self) -> Tensor:
        """(1, n): the position of each cell in its sequence."""
        return self.take(self.whole.position_ids)


def boundaries_of(
    lengths: Index,
    groups: list[Index],
    *,
    each: int = 1,
    width: int | None = None,
    multiple_of: int = 1,
    start: int = 0,
    device: torch.device | None = None,
) -> tuple[Boundaries, Index]:
    """Boundaries of rows that hold the sequences of ``groups``, and the sequence in each segment (-1 for a tail).

    ``lengths`` (N,) of all sequences; ``each`` rounds every sequence; ``width`` is the rows' width, by default that
    of the longest, rounded up to ``multiple_of``.
    """
    from padless.shapes import round_up

    held = round_up(lengths.astype(np.int64), each)
    used = np.array([int(held[group].sum()) for group in groups], dtype=np.int64)
    wide = round_up(int(used.max(initial=0)), multiple_of) if width is None else width
    if used.max(initial=0) > wide:
        row = int(used.argmax())
        raise PadlessError(f"row {row} holds {used[row]} tokens; pad_to={wide} is too short for it")
    tails = wide - used  # (B,)
    members = np.concatenate(
        [np.append(group, -1) if tail else group for group, tail in zip(groups, tails, strict=True)]
    )
    members = members.astype(np.int64)
    tail = members < 0
    sizes = np.where(tail, 0, lengths[members]) if len(lengths) else np.zeros(len(members), dtype=np.int64)
    columns = np.where(tail, 0, held[members]) if len(lengths) else np.zeros(len(members), dtype=np.int64)
    columns[tail] = tails[tails > 0]
    made = Boundaries(
        lengths=sizes,
        held=columns,
        tail=tail,
        rows=len(groups),
        width=wide,
        start=start,
        device=device or torch.device("cpu"),
    )
    return made, members
