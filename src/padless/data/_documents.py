"""Rows of token arrays put end to end, and the values that rows may hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from padless.data._rows import as_list
from padless.data._shards import IGNORED
from padless.data._spill import Documents
from padless.errors import PadlessError

__all__ = [
    "Array",
    "collect",
    "first_value",
    "int32",
    "is_lists",
    "is_numbers",
    "joined",
    "nothing",
    "numbers",
]

Array = npt.NDArray[Any]


def collect(
    ids: Sequence[Array],
    masks: Sequence[Array] | None,
    first_row: int,
    carried: Mapping[str, Sequence[Array]] | None = None,
) -> Documents:
    """Put rows end to end, leaving out empty ones."""
    lengths = np.array([len(row) for row in ids], dtype=np.int32)  # (B,)
    full = np.flatnonzero(lengths)
    flat = {"input_ids": _flat(ids, np.dtype(np.int32))}
    if masks is not None:
        marked = _flat(masks, np.dtype(np.bool_))
        flat["labels"] = np.where(marked, flat["input_ids"], np.int32(IGNORED))
    for name, rows in (carried or {}).items():
        flat[name] = _flat(rows, None)
    if "labels" in flat:
        flat["labels"] = flat["labels"].astype(np.int32)
    return Documents(
        lengths=lengths[full],
        rows=(full + first_row).astype(np.int64),
        columns=flat,
        read=len(ids),
        empty=len(ids) - len(full),
    )


def _flat(rows: Sequence[Array], dtype: np.dtype[Any] | None) -> Array:
    full = [row for row in rows if len(row)]
    if not full:
        return np.empty(0, dtype=dtype or np.int64)
    flat = np.concatenate(full)
    return flat if dtype is None else flat.astype(dtype, copy=False)


def joined(parts: Sequence[Documents]) -> Documents:
    """Documents of several batches behind one another."""
    parts = [part for part in parts if part.read]
    if not parts:
        return nothing()
    if len(parts) == 1:
        return parts[0]
    names = {name: None for part in parts for name in part.columns if len(part.lengths)}
    for part in parts:
        if len(part.lengths) and part.columns.keys() != names.keys():
            missing = ", ".join(sorted(names.keys() - part.columns.keys()))
            raise PadlessError(f"row {int(part.rows[0])} and following lack {missing}, which rows before or after have")
    full = [part for part in parts if len(part.lengths)] or parts[:1]
    return Documents(
        lengths=np.concatenate([part.lengths for part in full]),
        rows=np.concatenate([part.rows for part in full]),
        columns={name: np.concatenate([part.columns[name] for part in full]) for name in full[0].columns},
        read=sum(part.read for part in parts),
        empty=sum(part.empty for part in parts),
        bad=sum(part.bad for part in parts),
        left=tuple(sorted({name for part in parts for name in part.left})),
    )


def nothing(*, bad: int = 0) -> Documents:
    """No document, of ``bad`` rows that could not be read."""
    return Documents(
        lengths=np.empty(0, dtype=np.int32),
        rows=np.empty(0, dtype=np.int64),
        columns={"input_ids": np.empty(0, dtype=np.int32)},
        read=bad,
        bad=bad,
    )


def first_value(column: Any) -> Any:
    """The first value that is not null."""
    return next((value for value in as_list(column) if value is not None), None)


def is_lists(column: Any) -> bool:
    """Whether a column holds lists (of numbers, as far as its first value tells)."""
    value = first_value(column)
    return isinstance(value, list | tuple | np.ndarray) and (len(value) == 0 or not isinstance(value[0], str | Mapping))


def is_numbers(column: Any) -> bool:
    """Whether a column holds single numbers."""
    value = first_value(column)
    return isinstance(value, int | float | np.number) and not isinstance(value, bool)


def int32(row: Any, what: str = "token ids") -> Array:
    """One row of token ids."""
    values = np.asarray(() if row is None else row)
    if values.size == 0:
        return np.empty(0, dtype=np.int32)
    if values.dtype.kind not in "iu" or values.ndim != 1:
        raise PadlessError(f"{what} holds {values.dtype} of shape {values.shape}; expected one list of whole numbers")
    if values.min() < 0 or values.max() > np.iinfo(np.int32).max:
        bad = int(np.flatnonzero((values < 0) | (values > np.iinfo(np.int32).max))[0])
        raise PadlessError(f"{what}[{bad}] is {values[bad]}; a token id is between 0 and 2**31 - 1")
    return values.astype(np.int32, copy=False)


def numbers(row: Any, what: str) -> Array:
    """One row of a per-token column: int64 or float64."""
    values = np.asarray(() if row is None else row)
    if values.size == 0:
        return np.empty(0, dtype=np.int64)
    if values.dtype.kind not in "iufb" or values.ndim != 1:
        raise PadlessError(
            f"{what} holds {values.dtype} of shape {values.shape}; per-token columns hold one number for each token:"
            " leave the column out by name"
        )
    return values.astype(np.float64 if values.dtype.kind == "f" else np.int64)
