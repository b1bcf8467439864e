"""From micro-batches back to the caller's order, alignment and width."""

from __future__ import annotations

from torch import Tensor

from padless.errors import PadlessError, shown
from padless.tensors.gather import Cells
from padless.tensors.rows import Alignment, Rows

__all__ = ["find_alignment", "pick_tokens", "scatter_tokens"]


def find_alignment(rows: Rows, span: str, mask: str | None) -> Alignment:
    """The alignment of the caller's fields of ``span`` that follow ``mask``."""
    if mask is None:
        if len(rows.streams) > 1:
            raise PadlessError(
                f"the batch has several masks; name the one that the values follow: {list(rows.streams)}"
            )
        mask = next(iter(rows.streams))
    if mask not in rows.streams:
        raise PadlessError(f"mask={shown(mask)} is unknown; choose one of {list(rows.streams)}")
    for column in rows.columns.values():
        alignment = column.alignment
        if alignment is not None and alignment.stream == mask and column.field.span == span:
            return alignment
    raise PadlessError(
        f"the batch has no field of span {span!r} that follows {shown(mask)}: there is no width to restore"
    )


def pick_tokens(tensor: Tensor, cells: Cells, low: Tensor | None) -> Tensor:
    """Values (n, ...) of the real cells of a (B, W, ...) tensor, sequence after sequence."""
    if tensor.shape[:2] != cells.real.shape:
        raise PadlessError(
            f"an output has shape {tuple(tensor.shape)}; expected {tuple(cells.real.shape)} as its micro-batch,"
            " then any further axes"
        )
    keep = cells.real if low is None else cells.real & (cells.token >= low[cells.row])
    return tensor[keep.to(tensor.device)]


def scatter_tokens(tensor: Tensor, cells: Cells, alignment: Alignment, count: int, fill: float) -> Tensor:
    """Write the real cells of ``tensor`` into a fresh (count, width, ...) tensor; differentiable."""
    values = pick_tokens(tensor, cells, alignment.low)
    row = cells.row.expand_as(cells.token)
    keep = cells.real if alignment.low is None else cells.real & (cells.token >= alignment.low[row])
    return place_tokens(values, (alignment.place[row] + cells.token)[keep], alignment, count, fill)


def place_tokens(values: Tensor, places: Tensor, alignment: Alignment, count: int, fill: float) -> Tensor:
    """``values`` (n, ...) at flat ``places`` (n,) of a (count, width, ...) tensor that holds ``fill`` elsewhere."""
    blank = values.new_full((count * alignment.width, *values.shape[1:]), fill)
    blank.index_copy_(0, places.to(values.device), values)  # in place: nothing else has seen the blank tensor
    return blank.view(count, alignment.width, *values.shape[1:])
