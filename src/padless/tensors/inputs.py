"""The inputs of one micro-batch, field by field."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from padless.errors import PadlessError
from padless.tensors.attention import block_mask
from padless.tensors.boundaries import Boundaries
from padless.tensors.gather import Cells, TokenIndex, gather_rows, gather_tokens, packed_cells, padded_cells
from padless.tensors.layouts import boundary_inputs
from padless.tensors.rows import Alignment, Column, Rows

__all__ = ["Made", "Responses", "cells_of", "check_packable", "packed_inputs", "padded_inputs", "response_cells"]

Responses: TypeAlias = Literal["sequence", "block"]
Index = npt.NDArray[np.int64]

_NEEDED = re.compile(r"(^|[._])(input_ids|inputs_embeds|token_type_ids)$")
"""Fields of tokens that a forward pass reads, beside masks and positions."""


@dataclass(frozen=True, slots=True, eq=False)
class Made:
    """Inputs like the caller's batch, and the cells that response fields took, by mask."""

    inputs: Any
    responses: dict[str, Cells]


def padded_inputs(
    rows: Rows,
    chosen: Index,
    cells: dict[str, Cells],
    responses: Responses,
    *,
    drop_masks: bool = False,
    blank: bool = False,
) -> Made:
    """Gather all fields for the rows ``chosen`` (k,), whose tokens lie in ``cells`` (one entry per mask).

    With ``drop_masks``, masks without a hole are left out: rows that begin at column 0 are causal without one. With
    ``blank``, only what a forward pass needs is kept: targets, response masks and the like hold padding.
    """
    index = {key: TokenIndex(held) for key, held in cells.items()}
    blocks: dict[str, TokenIndex] = {}
    on_device = next(iter(cells.values())).row[:, 0]
    leaves: dict[str, Any] = {}
    for key, column in rows.columns.items():
        if drop_masks and key in rows.streams and not rows.streams[key].holes[chosen].any():
            continue
        alignment = column.alignment
        if alignment is not None:
            held = index[alignment.stream]
            if column.field.span == "response" and responses == "block":
                if alignment.stream not in blocks:
                    blocks[alignment.stream] = TokenIndex(response_cells(held.cells, alignment))
                held = blocks[alignment.stream]
            leaves[key] = _tokens(rows, column, held, blank)
        elif column.field.span == "batch":
            leaves[key] = column.value
        else:
            leaves[key] = gather_rows(column, chosen, on_device)
    taken = {key: blocks[key].cells if key in blocks else index[key].cells for key in index}
    return Made(rows.rebuild(leaves, len(chosen)), taken)


def _tokens(rows: Rows, column: Column, index: TokenIndex, blank: bool) -> Tensor:
    values = gather_tokens(column, index)
    role = column.field
    if not blank or column.key in rows.streams or role.pad == "count" or _NEEDED.search(column.key):
        return values
    return torch.full_like(values, role.pad)


def response_cells(cells: Cells, alignment: Alignment) -> Cells:
    """Cells (k, longest response) of the responses alone, each from column 0."""
    rows = cells.row[:, 0]
    if alignment.low is None:
        return cells
    size = cells.real.sum(1)  # (k,)
    first = cells.token[:, 0]
    begin = torch.maximum(alignment.low[rows], first)  # (k,)
    left = (first + size - begin).clamp(min=0)
    width = int(left.max()) if len(left) else 0
    return padded_cells(rows, begin, left, max(width, 1), full=False)


def cells_of(segments: Index, first: Index | None, boundaries: Boundaries) -> Cells:
    """Cells of packed rows: ``segments`` (S,) names the row of the store in each segment, -1 in a tail.

    ``first`` (S,) is the token each begins with, where a sequence was cut.
    """
    device = boundaries.device
    begins = np.flatnonzero(~boundaries.tail & (boundaries.lengths > 0))
    any_row = segments[begins[0]] if len(begins) else 0
    names = np.where(boundaries.tail, -1, np.cumsum(~boundaries.tail) - 1)
    rows = np.where(boundaries.tail, any_row, segments)
    arrays = np.stack([rows, boundaries.lengths, boundaries.held, names, rows * 0 if first is None else first])
    moved = torch.from_numpy(arrays).to(device, non_blocking=True)  # (5, S), one transfer
    return packed_cells(
        moved[0],
        None if first is None else moved[4],
        moved[1],
        moved[2],
        moved[3],
        (boundaries.rows, boundaries.width),
        full=bool((boundaries.lengths == boundaries.held).all()),
    )


def _is_positions(column: Column) -> bool:
    """True for position ids of shape (rows, columns), by which models tell packed sequences apart."""
    return column.alignment is not None and column.field.pad == "count" and column.value.ndim == 1


def _restarted(values: Tensor, column: Column, cells: Cells, boundaries: Boundaries) -> Tensor:
    """Positions (B, T) that restart with every segment: the later piece of a split sequence must not go on counting."""
    assert column.alignment is not None
    place = torch.arange(values.shape[1], device=values.device).expand_as(values)
    begin = place - (boundaries.position_ids - boundaries.start).to(values.device)  # (B, T) where the segment begins
    base = column.alignment.base[cells.row].clamp(0, max(len(column.value) - 1, 0)).to(column.value.device)
    restarted: Tensor = values - values.gather(1, begin) + column.value[base]
    return restarted


def check_packable(rows: Rows, layout: str) -> None:
    """Refuse rows that ``layout`` cannot hold: several masks, rows packed already, holes where no mask goes along."""
    stream = rows.only_stream
    if stream.segmented:
        raise PadlessError(f"{stream.key!r} numbers segments: its rows are packed already; split them into rows first")
    if stream.holes.any() and not layout.startswith("packed-block-mask"):
        raise PadlessError(
            f"row {int(stream.holes.argmax())} has zeros between its real tokens, and {layout!r} carries no mask:"
            " use layout='padded' or a 'packed-block-mask' layout"
        )
    for key, column in rows.columns.items():
        if not _is_positions(column) or not rows.count or not len(column.value):
            continue
        assert column.alignment is not None
        held = stream.lengths > 0
        starts = column.value[column.alignment.base.clamp(max=len(column.value) - 1)].cpu().numpy()  # (N,)
        odd = np.flatnonzero(held & (starts != starts[held.argmax()]))
        if len(odd):
            raise PadlessError(
                f"{key!r} begins at {starts[odd[0]]} in row {odd[0]} and at {starts[held.argmax()]} in row"
                f" {held.argmax()}: in a packed row one sequence could go on where the one before ends. Leave the key"
                " out: positions are made here, or make them from the mask"
            )


def packed_inputs(
    rows: Rows,
    chosen: Index,
    cells: Cells,
    boundaries: Boundaries,
    layout: str,
    *,
    dtype: torch.dtype,
    blank: bool = False,
) -> Any:
    """Gather all fields of packed rows that hold the rows ``chosen`` (k,), with the boundary data of ``layout``."""
    stream = rows.only_stream
    holed = stream.holes[chosen]
    index = TokenIndex(cells)
    on_device = torch.from_numpy(chosen).to(stream.size.device)
    leaves: dict[str, Any] = {}
    keys: Tensor | None = None
    begins = cells.real & (boundaries.position_ids == boundaries.start)  # (B, T) first tokens
    for key, column in rows.columns.items():
        role = column.field
        if key == stream.key:
            keys = gather_tokens(column, index) if holed.any() else None
        elif column.alignment is not None:
            values = _tokens(rows, column, index, blank)
            if _is_positions(column):
                values = _restarted(values, column, cells, boundaries)
            leaves[key] = values if role.first is None else values.masked_fill(begins, role.first)
        elif role.span == "batch":
            leaves[key] = column.value
        else:
            leaves[key] = gather_rows(column, chosen, on_device)
    parent = stream.key.rpartition(".")[0]
    prefix = f"{parent}." if parent else ""
    leaves.setdefault(f"{prefix}position_ids", boundaries.position_ids)
    leaves.update({prefix + key: value for key, value in boundary_inputs(layout, boundaries).items()})
    if layout.startswith("packed-block-mask"):
        kind: Literal["bool", "additive"] = "bool" if layout.endswith("bool") else "additive"
        seen = None if keys is None else (keys > 0) | ~cells.real
        leaves[prefix + "attention_mask"] = block_mask(boundaries.segment_ids, kind=kind, dtype=dtype, keys=seen)
    # A cache makes transformers drop the boundaries that position ids carry.
    leaves[prefix + "use_cache"] = False
    return rows.rebuild(leaves, None)
