"""Rows concatenated without padding, with their boundaries; and back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from padless.errors import PadlessError, choose
from padless.lengths import as_lengths
from padless.shapes import combine_multiples
from padless.tensors.boundaries import Boundaries, boundaries_of
from padless.tensors.fields import Fields
from padless.tensors.gather import Cells
from padless.tensors.inputs import cells_of, check_packable, packed_inputs
from padless.tensors.layouts import packed_layout
from padless.tensors.restore import find_alignment, pick_tokens, scatter_tokens
from padless.tensors.rowlist import is_row_list, read_row_list
from padless.tensors.rows import Rows, read_rows

__all__ = ["Flattened", "flatten", "unflatten"]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Flattened:
    """Packed rows and what `unflatten` needs to undo them.

    Attributes:
        inputs: model inputs of shape (B, T): fields of tokens, position ids, and the boundary data of the layout.
        boundaries: where sequences begin, in every form that consumers read.
        lengths: (N,) tokens of each row given, empty ones included.
        order: (N,) the row in each slot of the packed rows.
    """

    inputs: Any
    boundaries: Boundaries
    lengths: npt.NDArray[np.int64]
    order: npt.NDArray[np.int64]
    _rows: Rows
    _cells: Cells
    _listed: bool

    @property
    def document_ids(self) -> Tensor:
        """(B, T): the row given that each cell belongs to, -1 on padding."""
        names = torch.from_numpy(self.order).to(self._cells.real.device)
        return torch.where(self._cells.real, names[self._cells.document.clamp(min=0)], -1)


def flatten(
    batch_or_rows: Any,
    *,
    fields: Fields | None = None,
    layout: str = "packed-position-ids",
    pad_to: int | None = None,
    multiple_of: int | tuple[int, ...] = 1,
    sequence_multiple_of: int | tuple[int, ...] = 1,
    position_start: int = 0,
    groups: Sequence[Any] | None = None,
    dtype: torch.dtype = torch.float32,
) -> Flattened:
    """Concatenate rows into packed rows: (1, T), or (B, T) with one packed row per group.

    Positions restart with every sequence, the label of each sequence's first token becomes -100, every field of tokens
    moves alike, and no two-dimensional mask remains: an all-ones mask makes models forget the boundaries.

    Args:
        batch_or_rows: a padded batch with its mask, or a list of rows without padding (dicts, or token ids).
        fields: roles of keys beside the well-known ones.
        layout: which boundary data ``inputs`` holds; one of `padless.tensors.PACKED_LAYOUTS`.
        pad_to: columns of a packed row; what remains is one tail segment, without targets.
        multiple_of: without ``pad_to``, columns are rounded up to it.
        sequence_multiple_of: every sequence is rounded up to it (2 x context-parallel ranks, say).
        position_start: the first position of every sequence (2 for RoBERTa-like models).
        groups: which rows share a packed row; by default all.
        dtype: of an additive mask.

    >>> packed = flatten([{"input_ids": [1, 2, 3], "labels": [1, 2, 3]}, {"input_ids": [4, 5], "labels": [4, 5]}])
    >>> packed.inputs["labels"].tolist(), packed.inputs["position_ids"].tolist()
    ([[-100, 2, 3, -100, 5]], [[0, 1, 2, 0, 1]])
    >>> [row.tolist() for row in unflatten(packed.inputs["input_ids"], packed)]
    [[1, 2, 3], [4, 5]]
    """
    listed = is_row_list(batch_or_rows)
    rows = read_row_list(batch_or_rows, fields) if listed else read_rows(batch_or_rows, fields)
    chosen = packed_layout(layout)
    check_packable(rows, chosen)
    stream = rows.only_stream
    members = [np.arange(rows.count)] if groups is None else [_group(group, rows.count) for group in groups]
    order = np.concatenate(members)
    if len(np.unique(order)) != len(order):
        raise PadlessError("groups name a row more than once")
    boundaries, segments = boundaries_of(
        stream.lengths,
        members,
        each=combine_multiples(sequence_multiple_of),
        width=pad_to,
        multiple_of=combine_multiples(multiple_of),
        start=position_start,
        device=stream.size.device,
    )
    cells = cells_of(segments, None, boundaries)
    inputs = packed_inputs(rows, order, cells, boundaries, chosen, dtype=dtype)
    return Flattened(
        inputs=inputs,
        boundaries=boundaries,
        lengths=stream.lengths,
        order=order,
        _rows=rows,
        _cells=cells,
        _listed=listed,
    )


def unflatten(tensor: Tensor, flattened: Flattened, *, span: str = "sequence", fill: float = 0) -> Any:
    """Per-token values (B, T, ...) of packed rows in the shape that `flatten` was given.

    Returns:
        A tensor (N, W, ...) in the batch's own alignment with ``fill`` on padding; or, where rows came one by one, a
        list of tensors (length, ...), empty for empty rows.
    """
    choose("span", span, ("sequence", "response"))
    alignment = find_alignment(flattened._rows, span, None)
    if not flattened._listed:
        return scatter_tokens(tensor, flattened._cells, alignment, flattened._rows.count, fill)
    values = pick_tokens(tensor, flattened._cells, alignment.low)
    sizes = flattened.lengths if alignment.low is None else flattened.lengths - alignment.low.numpy()
    parts = torch.split(values, sizes[flattened.order].tolist())
    result: list[Tensor] = [tensor.new_empty((0, *tensor.shape[2:]))] * flattened._rows.count
    for row, part in zip(flattened.order.tolist(), parts, strict=True):
        result[row] = part
    return result


def _group(group: Any, count: int) -> npt.NDArray[np.int64]:
    members: npt.NDArray[np.int64] = as_lengths(group, minimum=0, name="groups").astype(np.int64)
    if members.max() >= count:
        raise PadlessError(f"groups name row {members.max()}; there are {count} rows")
    return members
