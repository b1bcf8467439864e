"""The inputs of one padded micro-batch, field by field."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from padless.tensors.gather import Cells, TokenIndex, gather_rows, gather_tokens, padded_cells
from padless.tensors.rows import Alignment, Rows

__all__ = ["Made", "Responses", "padded_inputs", "response_cells"]

Responses: TypeAlias = Literal["sequence", "block"]


@dataclass(frozen=True, slots=True, eq=False)
class Made:
    """Inputs like the caller's batch, and the cells that response fields took, by mask."""

    inputs: Any
    responses: dict[str, Cells]


def padded_inputs(
    rows: Rows,
    chosen: npt.NDArray[np.int64],
    cells: dict[str, Cells],
    responses: Responses,
    *,
    without: frozenset[str] = frozenset(),
) -> Made:
    """Gather all fields for the rows ``chosen`` (k,), whose tokens lie in ``cells`` (one entry per mask)."""
    index = {key: TokenIndex(held) for key, held in cells.items()}
    blocks: dict[str, TokenIndex] = {}
    on_device = next(iter(cells.values())).row[:, 0]
    leaves: dict[str, Any] = {}
    for key, column in rows.columns.items():
        if key in without:
            continue
        alignment = column.alignment
        if alignment is not None:
            held = index[alignment.stream]
            if column.field.span == "response" and responses == "block":
                if alignment.stream not in blocks:
                    blocks[alignment.stream] = TokenIndex(response_cells(held.cells, alignment))
                held = blocks[alignment.stream]
            leaves[key] = gather_tokens(column, held)
        elif column.field.span == "batch":
            leaves[key] = column.value
        else:
            leaves[key] = gather_rows(column, chosen, on_device)
    taken = {key: blocks[key].cells if key in blocks else index[key].cells for key in index}
    return Made(rows.rebuild(leaves, len(chosen)), taken)


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
