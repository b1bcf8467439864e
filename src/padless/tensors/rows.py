"""A batch read once: what its masks say, and each field as tokens of rows, ready to be gathered in any order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from padless.errors import PadlessError
from padless.lengths import IntArray
from padless.tensors.fields import Field, Fields, check_fields, field_for
from padless.tensors.tree import Rebuild, Shared, read_tree

__all__ = ["Alignment", "Column", "Rows", "Stream", "read_rows"]


@dataclass(frozen=True, slots=True, eq=False)
class Stream:
    """The rows of one mask: their lengths, and where they began in the caller's batch.

    ``lengths`` (N,) runs from the first to the last real token: a hole inside keeps its place. ``size`` is the same as
    a tensor on the mask's device, ``start`` (N,) the column of the first real token, ``width`` the columns of the
    mask, ``holes`` (N,) true where a row has zeros between its real tokens.
    """

    key: str
    lengths: npt.NDArray[np.int64]
    size: Tensor
    start: Tensor
    width: int
    holes: npt.NDArray[np.bool_]
    segmented: bool


@dataclass(frozen=True, slots=True, eq=False)
class Alignment:
    """Token j of row i is entry ``base[i] + j`` of a flat tensor, for ``low[i] <= j < length of row i``.

    ``width`` is the number of columns of the caller's tensor, where token j is entry ``place[i] + j``: the same
    entry, unless the caller's rows came without padding (``home`` (N,) says then where they would lie with it).
    """

    stream: str
    base: Tensor
    low: Tensor | None
    width: int
    home: Tensor | None = None

    @property
    def place(self) -> Tensor:
        """(N,) entries of the padded tensor that restored values are written to."""
        return self.base if self.home is None else self.home


@dataclass(frozen=True, slots=True, eq=False)
class Column:
    """One field. ``value`` is a flat tensor (T, ...) for fields of tokens, a tensor with the rows first, or a list."""

    key: str
    field: Field
    value: Any
    alignment: Alignment | None = None
    counts: npt.NDArray[np.int64] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """A batch read once. ``streams`` in the order in which the plan's length columns come."""

    count: int
    streams: dict[str, Stream]
    columns: dict[str, Column]
    rebuild: Rebuild

    @property
    def lengths(self) -> IntArray:
        """Tokens per row, (N,), or (N, F) with several masks."""
        parts = [stream.lengths for stream in self.streams.values()]
        return parts[0] if len(parts) == 1 else np.stack(parts, axis=1)

    @property
    def only_stream(self) -> Stream:
        """The one stream of a batch that is to be packed."""
        if len(self.streams) > 1:
            raise PadlessError(
                f"the batch has several masks ({', '.join(self.streams)}); a packed row holds fields of one:"
                " use layout='padded', or make one sequence of them first"
            )
        return next(iter(self.streams.values()))


def read_rows(batch: Any, fields: Fields | None = None) -> Rows:
    """Read ``batch``: its masks give lengths and alignment, its keys give roles.

    Raises:
        PadlessError: no mask, a tensor of unknown role, or a shape that contradicts a role; the key is named.
    """
    leaves, rebuild = read_tree(batch)
    check_fields(fields, leaves)
    roles = {key: _role(key, value, fields) for key, value in leaves.items()}
    masks = _masks(leaves, roles)
    if not masks:
        raise PadlessError(
            f"the batch has no attention_mask among its keys ({', '.join(map(repr, leaves))}); padding is read from a"
            " mask, never from token ids: add one, or name the mask in fields={...: Field(mask=KEY)}"
        )
    # Sorted, not in the order of the keys: ranks must lay out their lengths alike.
    _check_ids(leaves)
    streams = {key: read_stream(key, leaves[key]) for key in sorted(set(masks.values()))}
    counts = {key: len(stream.lengths) for key, stream in streams.items()}
    if len(set(counts.values())) > 1:
        raise PadlessError(f"the masks have different numbers of rows: {counts}")
    count = next(iter(counts.values()))
    reader = _Reader(count, streams, leaves)
    columns = {key: reader.column(key, leaves[key], roles[key], masks.get(key)) for key in sorted(leaves)}
    return Rows(count, streams, columns, rebuild)


def read_stream(key: str, mask: Any) -> Stream:
    """Lengths and alignment of a mask of shape (rows, columns); every value above 0 is a real token."""
    if not isinstance(mask, Tensor) or mask.ndim != 2 or mask.shape[1] == 0:
        what = f"shape {tuple(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__
        raise PadlessError(f"{key} is {what}; expected a mask tensor of shape (rows, columns)")
    if mask.is_floating_point():
        _check_whole(key, mask)
    size, start, facts = _edges_on_cpu(mask) if mask.device.type == "cpu" else _edges(mask)
    low, high = facts[-2:]
    if low < 0:
        raise PadlessError(f"{key} holds {low}; expected a mask of zeros and ones, not an additive mask")
    rows = mask.shape[0]
    lengths = np.ascontiguousarray(facts[:rows])
    return Stream(key, lengths, size, start, mask.shape[1], facts[rows : 2 * rows] != lengths, bool(high > 1))


def _edges(mask: Tensor) -> tuple[Tensor, Tensor, npt.NDArray[np.int64]]:
    """Lengths and first columns (N,) on the device; lengths, real tokens and the extremes on the host, one array."""
    width = mask.shape[1]
    real = mask > 0  # (N, W)
    column = torch.arange(width, device=mask.device, dtype=torch.int32)  # (W,)
    first = torch.where(real, column, width).amin(1)  # (N,)
    last = torch.where(real, column, -1).amax(1)  # (N,)
    size = (last - first + 1).clamp(min=0).long()
    start = torch.where(size > 0, first, 0).long()
    extremes = _numeric(mask).aminmax() if mask.numel() else (torch.zeros((), device=mask.device),) * 2
    edges = torch.stack([extremes[0], extremes[1]]).to(torch.int64)
    facts: npt.NDArray[np.int64] = torch.cat([size, real.sum(1), edges]).cpu().numpy()  # the one transfer
    return size, start, facts


def _edges_on_cpu(mask: Tensor) -> tuple[Tensor, Tensor, npt.NDArray[np.int64]]:
    """The same in NumPy, which stops at the first hit of a row and counts bits: several times faster on the CPU."""
    real = (mask > 0).numpy()  # (N, W)
    count = np.count_nonzero(real, axis=1)  # (N,)
    first = real.argmax(axis=1)
    last = real.shape[1] - 1 - real[:, ::-1].argmax(axis=1)
    size = np.where(count > 0, last - first + 1, 0)
    extremes = [int(edge) for edge in _numeric(mask).aminmax()] if mask.numel() else [0, 0]
    facts = np.concatenate([size, count, extremes]).astype(np.int64)
    return torch.from_numpy(size), torch.from_numpy(np.where(count > 0, first, 0)), facts


def _check_whole(key: str, mask: Tensor) -> None:
    odd = (~mask.isfinite() | (mask < 0) | (mask != mask.round())).nonzero()  # (K, 2)
    if not len(odd):
        return
    row, column = odd[0].tolist()
    value = mask[row, column].item()
    additive = ", not an additive mask" if value < 0 else ": weights of tokens belong under a key of their own"
    raise PadlessError(
        f"{key} holds {value:g} at row {row}, column {column}; expected a mask of zeros and ones{additive}"
    )


def _check_ids(leaves: dict[str, Any]) -> None:
    for key, value in leaves.items():
        named = key.rpartition(".")[2].endswith("input_ids") and isinstance(value, Tensor)
        if named and value.is_floating_point() and value.numel():  # PyTorch makes an empty tensor of floats
            raise PadlessError(
                f"{key!r} has dtype {value.dtype}; token ids are integers: give it as .long(), or name it"
                " 'inputs_embeds' if it holds embeddings"
            )


def _numeric(mask: Tensor) -> Tensor:
    return mask.view(torch.uint8) if mask.dtype == torch.bool else mask


def _role(key: str, value: Any, fields: Fields | None) -> Field:
    role = field_for(key, fields)
    if isinstance(value, Shared):
        return Field(span="batch")
    if role is not None:
        return role
    if value is None or isinstance(value, str | bytes | bool | int | float):
        return Field(span="batch")
    if isinstance(value, Tensor) and value.ndim == 0:
        return Field(span="batch")
    if isinstance(value, list | tuple) or (isinstance(value, np.ndarray) and value.dtype == object):
        return Field(span="row")
    shape = f" of shape {tuple(value.shape)}" if hasattr(value, "shape") else f" ({type(value).__name__})"
    raise PadlessError(
        f"the role of {key!r}{shape} is unknown: say what it is aligned to with fields={{{key!r}: Field(span=...)}}"
        " (sequence, response, row, flat or batch), or take it out of the batch"
    )


def _masks(leaves: dict[str, Any], roles: dict[str, Field]) -> dict[str, str]:
    """The mask that each field of tokens follows: the one beside it, or the one at the top."""
    masks = {}
    for key, role in roles.items():
        if role.span not in ("sequence", "response") or leaves[key] is None:
            continue
        beside = ".".join([*key.split(".")[:-1], role.mask])
        if beside in leaves or role.mask in leaves:
            masks[key] = beside if beside in leaves else role.mask
        elif role.mask != "attention_mask":
            raise PadlessError(f"{key!r} follows the mask {role.mask!r}, which is not in the batch: add it")
    if masks and len(masks) < sum(roles[key].span in ("sequence", "response") for key in leaves):
        lost = [k for k in leaves if roles[k].span in ("sequence", "response") and k not in masks]
        lost = [k for k in lost if leaves[k] is not None]
        if lost:
            raise PadlessError(f"{lost[0]!r} follows the mask 'attention_mask', which is not in the batch: add it")
    return masks


class _Reader:
    """Turns the values of a batch into columns; fields with the same alignment share one object."""

    def __init__(self, count: int, streams: dict[str, Stream], leaves: dict[str, Any]) -> None:
        self.count, self.streams, self.leaves = count, streams, leaves
        self.alignments: dict[tuple[str, str, int], Alignment] = {}

    def column(self, key: str, value: Any, role: Field, mask: str | None) -> Column:
        if isinstance(value, Shared):
            return Column(key, role, value.value)
        if value is None or role.span == "batch":
            return Column(key, Field(span="batch"), value)
        if role.span == "row":
            return self._row(key, value, role)
        if not isinstance(value, Tensor):
            raise PadlessError(f"{key!r} is a {type(value).__name__}; a field of span {role.span!r} is a tensor")
        if role.span == "flat":
            return self._flat(key, value, role)
        assert mask is not None
        return self._tokens(key, value, role, self.streams[mask])

    def _row(self, key: str, value: Any, role: Field) -> Column:
        size = value.shape[role.batch_axis] if isinstance(value, Tensor) else len(value)
        if size != self.count:
            raise PadlessError(f"{key!r} has {size} entries; the batch has {self.count} rows")
        if isinstance(value, Tensor):
            return Column(key, role, value.movedim(role.batch_axis, 0))
        if isinstance(value, np.ndarray) and value.dtype != object:
            return Column(key, role, torch.from_numpy(value))
        return Column(key, role, value)

    def _flat(self, key: str, value: Tensor, role: Field) -> Column:
        assert role.counts is not None
        if role.counts not in self.leaves:
            raise PadlessError(f"{key!r} needs the number of its entries per row under {role.counts!r}: add it")
        counts = np.asarray(self.leaves[role.counts], dtype=np.int64).reshape(-1)
        if len(counts) != self.count or counts.sum() != value.shape[0] or (counts < 0).any():
            raise PadlessError(
                f"{role.counts!r} counts {counts.sum()} entries in {len(counts)} rows; {key!r} has {value.shape[0]}"
                f" entries and the batch {self.count} rows"
            )
        return Column(key, role, value, counts=counts)

    def _tokens(self, key: str, value: Tensor, role: Field, stream: Stream) -> Column:
        if value.ndim <= max(role.axis, role.batch_axis):
            raise PadlessError(
                f"{key!r} has shape {tuple(value.shape)}; its role puts rows on axis {role.batch_axis} and columns on"
                f" axis {role.axis}"
            )
        rows, columns = value.shape[role.batch_axis], value.shape[role.axis]
        fits = columns == stream.width if role.span == "sequence" else columns <= stream.width
        dims = 2 if key.rpartition(".")[2] == "position_ids" and role.axis == 1 else None
        if rows != self.count or not fits or (dims is not None and value.ndim != dims):
            raise PadlessError(self._misfit(key, value, role, stream))
        flat = value.movedim((role.batch_axis, role.axis), (0, 1)).flatten(0, 1)  # (N * W, ...)
        return Column(key, role, flat, self._alignment(role, stream, columns))

    def _misfit(self, key: str, value: Tensor, role: Field, stream: Stream) -> str:
        """Which of two shapes is odd: the mask's, where the tokens it is for and others agree against it."""
        shape, mask = tuple(value.shape), (self.count, stream.width)
        name = stream.key.removesuffix("attention_mask") + "input_ids"
        ids = self.leaves.get(name)
        if isinstance(ids, Tensor) and ids.ndim == 2 and tuple(ids.shape) != mask:
            return (
                f"{stream.key!r} has shape {mask}, but {name!r} has {tuple(ids.shape)}: a mask has one"
                " entry for each token, padding included"
            )
        beside = f"{key!r} has shape {shape}, but {stream.key!r} has {mask}"
        rows, columns = value.shape[role.batch_axis], value.shape[role.axis]
        if value.ndim > 2 and key.rpartition(".")[2] == "position_ids":
            return f"{beside}: positions of several axes need fields={{{key!r}: padless.tensors.MROPE}}"
        if rows != self.count and self.count not in shape:
            return f"{beside}: {rows} rows (axis {role.batch_axis}) for {self.count}; give one for each"
        if rows != self.count:
            return (
                f"{beside}: {rows} rows (axis {role.batch_axis}) for {self.count}. Give one for each, or name the axes"
                f" with fields={{{key!r}: Field(batch_axis=..., axis=...)}}"
            )
        what = "one column for each of the mask's" if role.span == "sequence" else "no more columns than the mask"
        return (
            f"{beside}: {columns} columns (axis {role.axis}) for {stream.width}; span {role.span!r} takes {what}."
            f" Give these, or, if it is aligned to something else, say so with fields={{{key!r}: Field(span=...)}}"
        )

    def _alignment(self, role: Field, stream: Stream, columns: int) -> Alignment:
        """Responses are the last columns of the sequence; one as wide as the sequence is aligned to it."""
        lead = stream.width - columns  # columns of the mask before the field begins
        name = (stream.key, "response" if lead else "sequence", columns)
        if name not in self.alignments:
            row = torch.arange(self.count, device=stream.start.device) * columns  # (N,)
            low = (lead - stream.start).clamp(min=0) if lead else None
            self.alignments[name] = Alignment(stream.key, row + stream.start - lead, low, columns)
        return self.alignments[name]
