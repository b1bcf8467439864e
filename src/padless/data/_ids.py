"""Documents of rows that hold token ids already, with every other per-token column."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from padless.data._documents import Array, collect, int32, is_lists, numbers
from padless.data._rows import Columns, as_list
from padless.data._spill import Documents
from padless.errors import PadlessError

__all__ = ["documents_from_ids"]

_MASKS = ("completion_mask", "assistant_masks", "loss_mask")


def documents_from_ids(columns: Columns, name: str, first_row: int, leave_out: Sequence[str]) -> Documents:
    """Documents of rows whose ids are column ``name``; columns of lists in ``leave_out`` need not be per token."""
    if not isinstance(columns[name], list):
        found = _from_arrow(columns, name, first_row, leave_out)
        if found is not None:
            return found
    ids = [int32(row, f"row {first_row + i}: {name}") for i, row in enumerate(as_list(columns[name]))]
    keep: list[Array] | None = None
    mask_name = name.replace("input_ids", "attention_mask")
    if mask_name in columns:  # padding that the rows carry is not part of a document
        keep = [np.array(row or (), dtype=bool) for row in as_list(columns[mask_name])]
        _same_lengths(keep, ids, mask_name, first_row)
    carried: dict[str, list[Array]] = {}
    left: list[str] = []
    for other, column in columns.items():
        if other in (name, mask_name, "position_ids", "seq_lengths"):
            continue
        if other in leave_out or not is_lists(column):
            left.append(other)
            continue
        carried[other] = [numbers(row, f"row {first_row + i}: {other}") for i, row in enumerate(as_list(column))]
        _same_lengths(carried[other], ids, other, first_row)
    if keep is not None:
        ids = [row[kept] for row, kept in zip(ids, keep, strict=True)]
        carried = {k: [row[kept] for row, kept in zip(v, keep, strict=True)] for k, v in carried.items()}
    masks = None
    if "labels" not in carried:
        given = [carried[mask] for mask in _MASKS if mask in carried]
        if given:
            masks = [np.logical_and.reduce([m != 0 for m in rows]) for rows in zip(*given, strict=True)]
    return replace(collect(ids, masks, first_row, carried), left=tuple(left))


def _from_arrow(columns: Columns, name: str, first_row: int, leave_out: Sequence[str]) -> Documents | None:
    """The same without a Python object for each token; ``None`` where a row asks for a closer look."""
    taken = (name, name.replace("input_ids", "attention_mask"), "position_ids", "seq_lengths")
    found = _arrow_rows(columns[name])
    if found is None or taken[1] in columns or any(mask in columns for mask in _MASKS):
        return None
    lengths, ids = found
    if len(ids) and (ids.dtype.kind not in "iu" or ids.min() < 0 or ids.max() > np.iinfo(np.int32).max):
        return None
    carried: dict[str, Array] = {"input_ids": ids.astype(np.int32, copy=False)}
    left: list[str] = []
    for other, column in columns.items():
        if other in taken:
            continue
        if other in leave_out or not hasattr(column.type, "value_type"):
            left.append(other)
            continue
        rows = _arrow_rows(column)
        if rows is None or not np.array_equal(rows[0], lengths):
            return None
        wide = np.int32 if other == "labels" else np.float64 if rows[1].dtype.kind == "f" else np.int64
        carried[other] = rows[1].astype(wide, copy=False)
    full = np.flatnonzero(lengths)
    return Documents(
        lengths=lengths[full].astype(np.int32),
        rows=(full + first_row).astype(np.int64),
        columns=carried,
        read=len(lengths),
        empty=len(lengths) - len(full),
        left=tuple(left),
    )


def _arrow_rows(column: Any) -> tuple[npt.NDArray[np.int64], Array] | None:
    """Lengths (B,) and values (T,) of an Arrow column of lists of numbers without nulls."""
    import pyarrow as pa
    import pyarrow.compute as pc

    kind = column.type
    lists = pa.types.is_list(kind) or pa.types.is_large_list(kind)
    if not lists or not (pa.types.is_integer(kind.value_type) or pa.types.is_floating(kind.value_type)):
        return None
    values = column.flatten()
    if column.null_count or values.null_count:
        return None
    return np.asarray(pc.list_value_length(column), dtype=np.int64), values.to_numpy(zero_copy_only=False)


def _same_lengths(rows: Sequence[Array], ids: Sequence[Array], name: str, first_row: int) -> None:
    for i, (row, tokens) in enumerate(zip(rows, ids, strict=True)):
        if len(row) != len(tokens):
            raise PadlessError(
                f"row {first_row + i}: {name} has {len(row)} entries for {len(tokens)} tokens; only per-token columns"
                f" can be packed: leave {name!r} out by name, or mend it"
            )
