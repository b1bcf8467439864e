"""Rows that come one by one, without padding: a list of dicts, or of token lists."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from padless.errors import PadlessError
from padless.tensors.fields import Field, Fields, check_fields, field_for
from padless.tensors.rows import Alignment, Column, Rows, Stream

__all__ = ["is_row_list", "read_row_list"]


def is_row_list(batch: Any) -> bool:
    """True for a list or tuple: rows one by one."""
    return isinstance(batch, list | tuple)


def read_row_list(rows: Sequence[Any], fields: Fields | None = None) -> Rows:
    """Read rows given one by one: dicts of per-token values with ``input_ids``, or the token ids alone.

    A field of span ``"response"`` may be shorter than its row: it lands at the row's last tokens (log-probabilities of
    n - 1 predicted tokens, say). A row of no tokens keeps its slot.
    """
    if not len(rows):
        raise PadlessError("there are no rows")
    named: list[Mapping[str, Any]] = [row if isinstance(row, Mapping) else {"input_ids": row} for row in rows]
    keys = list(named[0])
    for i, row in enumerate(named):
        if set(row) != set(keys):
            raise PadlessError(f"row {i} has the keys {sorted(row)}; row 0 has {sorted(keys)}: give every row the same")
    if "input_ids" not in keys:
        raise PadlessError(f"the rows have no input_ids among their keys ({', '.join(map(repr, keys))})")
    check_fields(fields, keys)
    lengths = np.array([len(row["input_ids"]) for row in named], dtype=np.int64)
    size = torch.from_numpy(lengths)
    zero = torch.zeros_like(size)
    holes = np.zeros(len(rows), dtype=bool)
    stream = Stream("attention_mask", lengths, size, zero, max(int(lengths.max()), 1), holes, False)
    padded = torch.arange(len(rows)) * stream.width  # where each row would begin
    whole = Alignment(stream.key, size.cumsum(0) - size, None, stream.width, padded)
    columns = {key: _column(key, [row[key] for row in named], stream, whole, fields) for key in keys}
    if "attention_mask" not in columns:  # every token given is a real one
        ones = torch.ones(int(lengths.sum()), dtype=torch.int64)
        columns["attention_mask"] = Column("attention_mask", Field(), ones, whole)
    elif bool((columns["attention_mask"].value <= 0).any()):
        raise PadlessError("a row's attention_mask has zeros; rows that come one by one hold real tokens only")
    return Rows(len(rows), {stream.key: stream}, columns, _rebuild)


def _rebuild(leaves: dict[str, Any], rows: int | None) -> dict[str, Any]:
    return leaves


def _column(key: str, values: list[Any], stream: Stream, whole: Alignment, fields: Fields | None) -> Column:
    role = field_for(key, fields)
    if role is None:
        per_token = hasattr(values[0], "__len__") and not isinstance(values[0], str | bytes)
        if per_token:
            raise PadlessError(
                f"the role of {key!r} is unknown: say what it is aligned to with fields={{{key!r}: Field(span=...)}}"
            )
        return Column(key, Field(span="row"), values)
    if role.span in ("row", "batch", "flat"):
        if role.span == "flat":
            raise PadlessError(f"{key!r} lies flat; rows that come one by one hold entries of their own: make it a row")
        return Column(key, Field(span="row"), torch.stack(values) if _stackable(values) else values)
    tensors = [value if isinstance(value, Tensor) else torch.as_tensor(value) for value in values]
    given = np.array([len(tensor) for tensor in tensors], dtype=np.int64)
    wrong = np.flatnonzero(given > stream.lengths if role.span == "response" else given != stream.lengths)
    if len(wrong):
        i = int(wrong[0])
        raise PadlessError(
            f"row {i}: {key!r} has {given[i]} entries and input_ids {stream.lengths[i]}; a field of span {role.span!r}"
            f" {'holds no more' if role.span == 'response' else 'holds as many'}"
        )
    if key == "input_ids" and any(tensor.is_floating_point() for tensor in tensors if len(tensor)):
        raise PadlessError(f"{key!r} holds fractions; token ids are integers: give them as such")
    # Axes of one row: its tokens come first, whatever the axis in a batch.
    flat = torch.cat([tensor for tensor in tensors if len(tensor)] or tensors[:1])
    role = Field(span=role.span, pad=role.pad, first=role.first)
    if role.span == "sequence":
        return Column(key, role, flat, whole)
    count = torch.from_numpy(given)
    low = stream.size - count
    width = max(int(given.max()), 1)
    padded = torch.arange(len(given)) * width - low
    return Column(key, role, flat, Alignment(stream.key, count.cumsum(0) - count - low, low, width, padded))


def _stackable(values: list[Any]) -> bool:
    return all(isinstance(value, Tensor) and value.shape == values[0].shape for value in values)
