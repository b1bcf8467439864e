"""Rows of packed files, taken apart into their documents again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from padless.errors import PadlessError

__all__ = ["PER_DOCUMENT", "split_packs"]

PER_DOCUMENT = ("document_ids", "source_files", "source_rows", "source_starts")
"""Columns of a packed file with one entry for each document (see `padless.data.packing`)."""


def split_packs(rows: Sequence[Any]) -> Sequence[Any]:
    """One row for each document of rows that have ``seq_lengths``; other rows stay as they are.

    Raises:
        PadlessError: lengths that do not add up to the row's tokens (row and column are named).

    >>> split_packs([{"input_ids": [1, 2, 3], "seq_lengths": [1, 2], "document_ids": [7, 4]}])
    [{'input_ids': array([1]), 'document_ids': 7}, {'input_ids': array([2, 3]), 'document_ids': 4}]
    """
    if not any(isinstance(row, Mapping) and row.get("seq_lengths") is not None for row in rows):
        return rows
    found: list[Any] = []
    for i, row in enumerate(rows):
        if not isinstance(row, Mapping) or row.get("seq_lengths") is None:
            found.append(row)
            continue
        lengths = np.asarray(row["seq_lengths"], dtype=np.int64)
        found.extend(_documents(row, lengths, i))
    return found


def _documents(row: Mapping[str, Any], lengths: Any, number: int) -> list[dict[str, Any]]:
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if len(ends) else 0
    documents: list[dict[str, Any]] = [{} for _ in lengths]
    for key, value in row.items():
        if key == "seq_lengths":
            continue
        values = value if hasattr(value, "shape") else np.asarray(value)
        expected = len(lengths) if key in PER_DOCUMENT else total
        if not values.ndim or len(values) != expected:
            held = len(values) if values.ndim else "no"
            raise PadlessError(
                f"row {number}: {key!r} has {held} entries; seq_lengths names {len(lengths)} documents with {total}"
                " tokens together: remove the column, or mend it"
            )
        for document, start, stop in zip(documents, (ends - lengths).tolist(), ends.tolist(), strict=True):
            document[key] = values[start:stop]
        if key in PER_DOCUMENT:
            for document, one in zip(documents, values.tolist(), strict=True):
                document[key] = one
    return documents
