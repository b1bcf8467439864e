"""Cells of a micro-batch and the tokens they hold: one index per alignment, one ``index_select`` per field."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from padless.tensors.rows import Alignment, Column

__all__ = ["Cells", "gather_rows", "gather_tokens", "packed_cells", "padded_cells", "select_objects"]

Index = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Cells:
    """What the cells (B, W) of a micro-batch hold.

    ``row`` (B, W) or (B, 1): the row of the store. ``token`` (B, W): the token of that row; padding repeats the last
    one. ``place``, of a shape that broadcasts to it: the same, if the row went on for ever. ``real`` (B, W): false on
    padding. ``document`` (B, W) or (B, 1): which of the micro-batch's sequences.
    """

    row: Tensor
    token: Tensor
    place: Tensor
    real: Tensor
    document: Tensor
    full: bool

    @property
    def over(self) -> Tensor:
        """(B, W): how far behind the last token a cell lies; 0 where it is real."""
        return self.place - self.token

    @property
    def document_ids(self) -> Tensor:
        """(B, W): the sequence of each cell, counted from 0, and -1 on padding."""
        return torch.where(self.real, self.document, -1)


def padded_cells(rows: Tensor, first: Tensor | None, size: Tensor, width: int, *, full: bool) -> Cells:
    """Cells of a rectangle: sequence i fills ``size[i]`` columns of row i, from its token ``first[i]`` on.

    ``rows``, ``first`` and ``size`` are (k,); ``full`` says that every size equals the width.
    """
    column = torch.arange(width, device=rows.device)  # (w,)
    last = (size - 1).clamp(min=0)[:, None]  # (k, 1)
    token = torch.minimum(column, last)  # (k, w)
    document = torch.arange(len(rows), device=rows.device)[:, None]  # (k, 1)
    real = column < size[:, None]
    if first is not None:
        column, token = column + first[:, None], token + first[:, None]
    return Cells(rows[:, None], token, column, real, document, full)


def packed_cells(
    rows: Tensor, first: Tensor | None, size: Tensor, held: Tensor, names: Tensor, shape: tuple[int, int], *, full: bool
) -> Cells:
    """Cells of packed rows of ``shape`` (B, T): segment s takes ``held[s]`` columns, its ``size[s]`` tokens first.

    All arguments are (S,). ``names`` numbers the sequences and is -1 for a tail, whose size is 0 and whose ``rows``
    entry may be any row. The sum of ``held`` is B x T.
    """
    total = shape[0] * shape[1]
    segment = torch.repeat_interleave(held, output_size=total)  # (B * T,)
    place = torch.arange(total, device=rows.device) - (held.cumsum(0) - held)[segment]
    last = (size - 1).clamp(min=0)[segment]
    token = torch.minimum(place, last)
    real = place < size[segment]
    if first is not None:
        place, token = place + first[segment], token + first[segment]
    return Cells(
        row=rows[segment].view(shape),
        token=token.view(shape),
        place=place.view(shape),
        real=real.view(shape),
        document=names[segment].view(shape),
        full=full,
    )


class TokenIndex:
    """The flat index of a micro-batch's cells, computed once per alignment and device."""

    def __init__(self, cells: Cells) -> None:
        self.cells = cells
        self._known: dict[tuple[int, torch.device], tuple[Tensor, Tensor | None]] = {}

    def of(self, alignment: Alignment, device: torch.device, entries: int) -> tuple[Tensor, Tensor | None]:
        """Flat index (B * W,) and, unless every cell is real, a mask (B, W) of padding."""
        key = (id(alignment), device)
        if key not in self._known:
            cells = self.cells
            index = alignment.base[cells.row] + cells.token  # (B, W)
            padding: Tensor | None = None if cells.full else ~cells.real
            if alignment.low is not None:
                before = cells.token < alignment.low[cells.row]
                padding = before if padding is None else before.logical_or_(padding)
            # What no real cell reads may point outside: a response's cells before it, an empty row at the end.
            index = index.clamp_(0, max(entries - 1, 0))
            self._known[key] = (index.flatten().to(device), None if padding is None else padding.to(device))
        return self._known[key]


def gather_tokens(column: Column, index: TokenIndex) -> Tensor:
    """The tokens of one field in the cells of a micro-batch; padding holds the field's ``pad``."""
    flat, alignment, role = column.value, column.alignment, column.field
    assert alignment is not None
    shape = index.cells.real.shape
    values: Tensor
    place, padding = index.of(alignment, flat.device, flat.shape[0])
    if not flat.shape[0]:
        values = flat.new_full((*shape, *flat.shape[1:]), 0 if role.pad == "count" else role.pad)
    else:
        values = flat.index_select(0, place).view(*shape, *flat.shape[1:])  # (B, W, ...)
        if padding is not None:
            trailing = (...,) + (None,) * (values.ndim - 2)
            if role.pad == "count":
                values = values + index.cells.over.to(values)[trailing]
            else:
                spread = padding if values.ndim == 2 else padding[trailing]
                values = values.masked_fill_(spread, role.pad)  # fresh from the selection above
    if (role.batch_axis, role.axis) == (0, 1):
        return values
    placed: Tensor = values.movedim((0, 1), (role.batch_axis, role.axis))
    return placed


def gather_rows(column: Column, rows: Index, rows_on_device: Tensor) -> Any:
    """A field of one entry per row, or of ``counts`` flat entries per row, for the rows named (k,)."""
    if column.counts is not None:
        return _gather_flat(column, rows)
    if isinstance(column.value, Tensor):
        picked: Tensor = column.value.index_select(0, rows_on_device.to(column.value.device))
        return picked.movedim(0, column.field.batch_axis)
    return select_objects(column.value, rows)


def select_objects(values: Any, rows: Index) -> Any:
    """Objects of the rows named, in the container they came in."""
    if isinstance(values, np.ndarray):
        return values[rows]
    picked = [values[i] for i in rows.tolist()]
    return tuple(picked) if isinstance(values, tuple) else picked


def _gather_flat(column: Column, rows: Index) -> Tensor | None:
    """Flat entries of the rows named; None where they have none, as models expect of a batch without images."""
    assert column.counts is not None
    ends = np.cumsum(column.counts)  # (N,)
    counts = column.counts[rows]  # (k,)
    total = int(counts.sum())
    if not total:
        return None
    shift = np.repeat(ends[rows] - column.counts[rows] - (np.cumsum(counts) - counts), counts)  # (total,)
    index = torch.from_numpy(shift + np.arange(total))
    value: Tensor = column.value
    picked: Tensor = value.index_select(0, index.to(value.device))
    return picked
