"""Where sequences begin in packed rows, in the forms that models and kernels read; and lengths out of masks."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from padless.errors import PadlessError
from padless.lengths import as_lengths, positive_int

__all__ = [
    "cu_seqlens",
    "document_ids",
    "lengths_from_mask",
    "position_ids",
    "positions_from_mask",
    "segment_lengths",
    "seq_idx",
]


def lengths_from_mask(mask: Tensor) -> Tensor:
    """Tokens per row (N,) from the first to the last real one; a hole between them counts, any value above 0 is real.

    >>> lengths_from_mask(torch.tensor([[0, 1, 0, 1, 0], [1, 1, 1, 0, 0], [0, 0, 0, 0, 0]])).tolist()
    [3, 3, 0]
    """
    from padless.tensors.rows import read_stream

    return read_stream("mask", mask).size


def segment_lengths(mask: Tensor) -> list[list[int]]:
    """Lengths of the segments of each row of a segment-numbered mask, (1, 1, 2, 2, 2, 0) say.

    >>> segment_lengths(torch.tensor([[1, 1, 2, 2, 2, 0]]))
    [[2, 3]]
    """
    result = []
    for row in mask.cpu().numpy():
        numbers = row[row > 0]
        cuts = np.flatnonzero(np.diff(numbers)) + 1
        result.append(np.diff(np.concatenate([[0], cuts, [len(numbers)]])).tolist() if len(numbers) else [])
    return result


def positions_from_mask(mask: Tensor, *, start: int = 0) -> Tensor:
    """Position ids (N, W) of padded rows: they count from ``start`` at the first real token, on either side.

    Holes keep their place. In a segment-numbered mask positions restart with every segment. Padding on the left holds
    ``start``; on the right positions go on counting.

    >>> positions_from_mask(torch.tensor([[0, 0, 1, 1, 1], [1, 1, 2, 2, 0]])).tolist()
    [[0, 0, 0, 1, 2], [0, 1, 0, 1, 2]]
    """
    column = torch.arange(mask.shape[1], device=mask.device).expand_as(mask)  # (N, W)
    real = mask > 0
    begun = real.cumsum(1) > 0
    first = (~begun).sum(1, keepdim=True)  # (N, 1)
    before = torch.cat([mask[:, :1], mask[:, :-1]], dim=1)
    restarts = real & (mask > before) & (before > 0) & (column > 0)
    begin = torch.where(restarts, column, 0).cummax(1).values
    return (column - torch.maximum(begin, first)).clamp(min=0) + start


def position_ids(lengths: Any, *, pad_to: int | None = None, start: int = 0) -> Tensor:
    """Position ids (1, T) of a packed row: they restart at ``start`` with every sequence, and once for the tail.

    >>> position_ids([3, 2], pad_to=8).tolist()
    [[0, 1, 2, 0, 1, 0, 1, 2]]
    """
    held = _segments(lengths, pad_to)
    begins = torch.repeat_interleave(held.cumsum(0) - held, held)
    return (torch.arange(int(held.sum())) - begins + start)[None]


def document_ids(lengths: Any, *, pad_to: int | None = None) -> Tensor:
    """The sequence of each cell (1, T) of a packed row, counted from 0; -1 in the tail.

    >>> document_ids([3, 0, 2], pad_to=6).tolist()
    [[0, 0, 0, 2, 2, -1]]
    """
    held = _segments(lengths, pad_to)
    names = torch.arange(len(held))
    if pad_to is not None:
        names[-1] = -1
    return torch.repeat_interleave(names, held)[None]


def seq_idx(lengths: Any, *, pad_to: int | None = None) -> Tensor:
    """Sequence index (1, T), int32, as the Mamba-2 kernels read it; the tail has one of its own.

    >>> seq_idx([2, 2]).tolist()
    [[0, 0, 1, 1]]
    """
    held = _segments(lengths, pad_to)
    return torch.repeat_interleave(torch.arange(len(held), dtype=torch.int32), held)[None]


def cu_seqlens(
    lengths_or_positions: Any, *, pad_to: int | None = None, entries: int | None = None, empty: bool = True
) -> Tensor:
    """Offsets (sequences + 1,), int32, of the sequences of packed rows; they always start at 0.

    Args:
        lengths_or_positions: tokens per sequence, or position ids of shape (rows, T). In positions a sequence begins
            with every row and wherever a position does not grow; where they start does not matter.
        pad_to: length of the buffer: a tail becomes one more sequence, so that no kernel leaves it uninitialised.
        entries: repeat the last offset up to this many entries: one shape for compiled models.
        empty: keep sequences without tokens, as equal offsets.

    >>> cu_seqlens([3, 0, 2], pad_to=8).tolist()
    [0, 3, 3, 5, 8]
    >>> cu_seqlens(torch.tensor([[0, 1, 2, 0, 1], [0, 1, 0, 1, 2]])).tolist()
    [0, 3, 5, 7, 10]
    """
    if isinstance(lengths_or_positions, Tensor) and lengths_or_positions.ndim == 2:
        positions = lengths_or_positions
        begins = torch.ones_like(positions, dtype=torch.bool)
        begins[:, 1:] = positions[:, 1:] <= positions[:, :-1]
        offsets = begins.flatten().nonzero()[:, 0]  # (sequences,)
        offsets = torch.cat([offsets, offsets.new_tensor([positions.numel()])])
    else:
        held = _segments(lengths_or_positions, pad_to)
        held = held if empty else held[held > 0]
        if pad_to is not None and empty and not held[-1]:
            held = held[:-1]  # no tail
        offsets = torch.cat([held.new_zeros(1), held.cumsum(0)])
    if entries is not None:
        missing = positive_int(entries, name="entries") - len(offsets)
        if missing < 0:
            raise PadlessError(f"entries={entries}; these sequences need {len(offsets)} offsets: allow more entries")
        offsets = torch.cat([offsets, offsets[-1:].expand(missing)])
    return offsets.to(torch.int32)


def _segments(lengths: Any, pad_to: int | None) -> Tensor:
    """Lengths (sequences,), and with ``pad_to`` one more for the tail, 0 where there is none."""
    held: npt.NDArray[np.int64] = as_lengths(lengths, minimum=0).astype(np.int64)
    if pad_to is not None:
        tail = positive_int(pad_to, name="pad_to") - int(held.sum())
        if tail < 0:
            raise PadlessError(f"pad_to={pad_to}; the sequences hold {int(held.sum())} tokens")
        held = np.append(held, tail)
    return torch.from_numpy(held)
