"""Roll left padding to the right and cut what every row leaves empty; and put it back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from padless.errors import PadlessError, choose
from padless.lengths import positive_int
from padless.shapes import combine_multiples, round_up
from padless.tensors.fields import Fields
from padless.tensors.gather import Cells, padded_cells
from padless.tensors.inputs import Responses, padded_inputs
from padless.tensors.restore import find_alignment, scatter_tokens
from padless.tensors.rows import Rows, read_rows

__all__ = ["Compacted", "compact"]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Compacted:
    """A batch without common padding.

    Attributes:
        batch: like the caller's: each row begins at column 0 and the width is that of the longest row.
        lengths: (N,) tokens per row, or (N, F) with F masks.
        truncated: rows that ``max_length`` cut.
    """

    batch: Any
    lengths: npt.NDArray[np.int64]
    truncated: npt.NDArray[np.int64]
    _rows: Rows
    _cells: dict[str, Cells]
    _responses: dict[str, Cells]

    def restore(self, tensor: Tensor, *, span: str = "sequence", mask: str | None = None, fill: float = 0) -> Tensor:
        """Put per-token values of the compacted batch back to the caller's alignment and width.

        Args:
            tensor: (N, w, ...) aligned like ``batch``; for ``span="row"`` (N, ...), returned as it is.
            span: what the values are aligned to and the result shall be aligned to.
            mask: which mask's columns they follow, where the batch has several.
            fill: what positions without a token receive.
        """
        choose("span", span, ("sequence", "response", "row"))
        if span == "row":
            return tensor
        alignment = find_alignment(self._rows, span, mask)
        held = self._responses if span == "response" else self._cells
        return scatter_tokens(tensor, held[alignment.stream], alignment, self._rows.count, fill)


def compact(
    batch: Any,
    *,
    fields: Fields | None = None,
    multiple_of: int | tuple[int, ...] = 1,
    max_length: int | None = None,
    keep: Literal["first", "last"] = "first",
    responses: Responses = "sequence",
) -> Compacted:
    """Roll every row to the left and cut the columns that no row uses.

    Padding is read from the mask. A row runs from its first to its last real token; a hole in between keeps its place
    and its zero in the mask. All fields of tokens move alike, each with its own fill value.

    Args:
        batch: dict (nested or not) or TensorDict with ``attention_mask`` (N, W).
        fields: roles of keys beside the well-known ones; see `padless.tensors.Field` and the presets.
        multiple_of: the width is rounded up to it.
        max_length: longest row to keep, in tokens; what it cuts is named in ``truncated``.
        keep: which end of a longer row stays.
        responses: ``"sequence"``: response fields land at their row's response, in the columns of the sequence.
            ``"block"``: they keep columns of their own, as many as the longest response.

    Raises:
        PadlessError: no mask, or a tensor whose role is unknown (its key is named).

    >>> batch = {"input_ids": torch.tensor([[0, 0, 7], [0, 5, 6]])}
    >>> batch["attention_mask"] = torch.tensor([[0, 0, 1], [0, 1, 1]])
    >>> small = compact(batch)
    >>> small.batch["input_ids"].tolist()
    [[7, 0], [5, 6]]
    >>> small.restore(small.batch["input_ids"]).tolist()
    [[0, 0, 7], [0, 5, 6]]
    """
    choose("keep", keep, ("first", "last"))
    choose("responses", responses, ("sequence", "block"))
    rows = read_rows(batch, fields)
    if not rows.count:
        raise PadlessError("the batch has no rows")
    multiple = combine_multiples(multiple_of)
    limit = None if max_length is None else positive_int(max_length, name="max_length")
    everyone = np.arange(rows.count)
    cells: dict[str, Cells] = {}
    truncated = np.zeros(rows.count, dtype=bool)
    for key, stream in rows.streams.items():
        lengths, size, first = stream.lengths, stream.size, None
        if limit is not None and lengths.max() > limit:
            truncated |= lengths > limit
            first = (size - limit).clamp(min=0) if keep == "last" else None
            lengths, size = np.minimum(lengths, limit), size.clamp(max=limit)
        width = round_up(max(int(lengths.max()), 1), multiple)
        index = torch.arange(rows.count, device=size.device)
        cells[key] = padded_cells(index, first, size, width, full=bool((lengths == width).all()))
    made = padded_inputs(rows, everyone, cells, responses)
    return Compacted(
        batch=made.inputs,
        lengths=np.asarray(rows.lengths, dtype=np.int64),
        truncated=np.flatnonzero(truncated),
        _rows=rows,
        _cells=cells,
        _responses=made.responses,
    )
