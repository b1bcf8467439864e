"""Rows of all ranks planned together, and moved to the ranks that compute them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from padless.exchange import as_bytes, from_bytes, gather_table, objects_from_bytes, objects_to_bytes, send_parts
from padless.plan import Plan
from padless.tensors.gather import select_objects
from padless.tensors.rows import Alignment, Column, Rows, Stream

__all__ = ["World", "empty_like", "exchange_rows", "gather_world", "need_of", "schema_of", "synthetic_row"]

Index = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class World:
    """The rows of all ranks: numbered rank by rank, in each rank's own order.

    ``lengths`` (M, F), ``holes`` (M, F) and ``lows`` (M, A), the first token of each response alignment; ``base``
    (R + 1,): rank r owns the rows from ``base[r]`` to ``base[r + 1]``.
    """

    lengths: Index
    holes: npt.NDArray[np.bool_]
    lows: Index
    atoms: Index | None
    base: Index
    rank: int
    group: Any

    @property
    def ranks(self) -> int:
        """Ranks of the group."""
        return len(self.base) - 1

    @property
    def plan_lengths(self) -> Index:
        """(M,), or (M, F) for several masks."""
        return self.lengths[:, 0] if self.lengths.shape[1] == 1 else self.lengths

    def own(self) -> slice:
        """This rank's rows."""
        return slice(int(self.base[self.rank]), int(self.base[self.rank + 1]))


def response_alignments(rows: Rows) -> list[Alignment]:
    """The alignments of response fields, in the order of the columns."""
    found = {id(c.alignment): c.alignment for c in rows.columns.values() if c.alignment and c.alignment.low is not None}
    return list(found.values())


def schema_of(rows: Rows) -> list[tuple[Any, ...]]:
    """What must be the same on ranks that exchange rows: keys, roles, dtypes and trailing shapes."""
    schema: list[tuple[Any, ...]] = []
    for key, column in rows.columns.items():
        value, role = column.value, column.field
        if role.span == "batch":
            schema.append((key, "batch"))
        elif isinstance(value, Tensor):
            kind = "response" if column.alignment is not None and column.alignment.low is not None else role.span
            schema.append((key, kind, str(value.dtype), tuple(value.shape[1:]), role.pad))
        else:
            schema.append((key, "objects"))
    return schema


def gather_world(rows: Rows, counts: Index, atoms: Index | None, rank: int, group: Any, *, responses: bool) -> World:
    """Gather lengths, holes, atoms, and where rows move response starts: one collective, a few integers per row."""
    streams = list(rows.streams.values())
    lows = (
        []
        if not responses
        else [torch.zeros_like(a.base) if a.low is None else a.low for a in response_alignments(rows)]
    )
    parts = [stream.lengths for stream in streams] + [stream.holes.astype(np.int64) for stream in streams]
    parts += [low.cpu().numpy() for low in lows]
    parts += [] if atoms is None else [atoms]
    table = gather_table(np.stack(parts, axis=1).astype(np.int64), counts, group)
    f = len(streams)
    return World(
        lengths=np.ascontiguousarray(table[:, :f]),
        holes=table[:, f : 2 * f] > 0,
        lows=table[:, 2 * f : 2 * f + len(lows)],
        atoms=None if atoms is None else np.ascontiguousarray(table[:, -1]),
        base=np.concatenate([[0], np.cumsum(counts)]),
        rank=rank,
        group=group,
    )


def need_of(plan: Plan, rank: int, filler: int) -> Index:
    """The rows that ``rank`` computes, ascending; with the filler row where it has an empty group."""
    group = np.repeat(np.arange(len(plan)), plan.rows)
    needed = plan.order[group % plan.ranks == rank]
    if (plan.rows.reshape(plan.steps, plan.ranks)[:, rank] == 0).any():
        needed = np.append(needed, filler)
    return np.unique(needed)


def exchange_rows(rows: Rows, world: World, needs: list[Index]) -> Rows:
    """Send every rank the rows it needs and keep the others; only rows that move travel, without their padding.

    Args:
        rows: this rank's own.
        world: the rows of all ranks.
        needs: for each rank, the rows that it computes, ascending.

    Returns:
        The rows of ``needs[world.rank]``, in that order.
    """
    own = world.own()
    columns = [column for column in rows.columns.values() if column.field.span != "batch"]
    alignments = response_alignments(rows)
    sent: list[list[Tensor]] = []
    kept: list[Any] = []
    for rank, need in enumerate(needs):
        mine = need[(need >= own.start) & (need < own.stop)] - own.start
        taken = [_take(column, rows, mine) for column in columns]
        if rank == world.rank:
            kept = taken
            sent.append([torch.empty(0, dtype=torch.uint8)] * len(columns))
        else:
            sent.append([as_bytes(part) if isinstance(part, Tensor) else objects_to_bytes(part) for part in taken])
    received = send_parts(sent, world.group)
    need = needs[world.rank]
    store = _empty_store(rows, world, need, alignments)
    made: dict[str, Column] = {}
    for c, column in enumerate(columns):
        parts = [kept[c] if r == world.rank else received[r][c] for r in range(world.ranks)]
        made[column.key] = _join(column, parts, world.rank, store)
    for column in rows.columns.values():
        made.setdefault(column.key, column)
    ordered = {key: made[key] for key in rows.columns}
    return Rows(len(need), store.streams, ordered, rows.rebuild)


@dataclass(frozen=True, slots=True, eq=False)
class _Store:
    streams: dict[str, Stream]
    alignments: dict[int, Alignment]


def _empty_store(rows: Rows, world: World, need: Index, responses: list[Alignment]) -> _Store:
    """Streams and alignments of the rows ``need``, behind one another without padding."""
    streams, alignments = {}, {}
    for f, (key, stream) in enumerate(rows.streams.items()):
        lengths = world.lengths[need, f]
        size = torch.from_numpy(lengths).to(stream.size.device)
        zero = torch.zeros_like(size)
        streams[key] = Stream(key, lengths, size, zero, stream.width, world.holes[need, f], stream.segmented)
        whole = Alignment(key, size.cumsum(0) - size, None, stream.width)
        for column in rows.columns.values():
            alignment = column.alignment
            if alignment is not None and alignment.stream == key and alignment.low is None:
                alignments[id(alignment)] = whole
    for a, alignment in enumerate(responses):
        size = streams[alignment.stream].size
        low = torch.from_numpy(np.ascontiguousarray(world.lows[need, a])).to(size.device)
        count = (size - low).clamp(min=0)
        alignments[id(alignment)] = Alignment(alignment.stream, count.cumsum(0) - count - low, low, alignment.width)
    return _Store(streams, alignments)


def _take(column: Column, rows: Rows, mine: Index) -> Any:
    """One field of the rows ``mine``: tokens behind one another, entries per row, or objects."""
    if column.counts is not None:
        ends = np.cumsum(column.counts)
        place = ragged(ends[mine] - column.counts[mine], column.counts[mine])
        value = column.value.index_select(0, torch.from_numpy(place).to(column.value.device))
        return (column.counts[mine], value.cpu())
    if column.alignment is None:
        if isinstance(column.value, Tensor):
            return column.value.index_select(0, torch.from_numpy(mine).to(column.value.device))
        return select_objects(column.value, mine)
    alignment = column.alignment
    base = alignment.base.cpu().numpy()[mine]
    lengths = rows.streams[alignment.stream].lengths[mine]
    low = np.zeros_like(lengths) if alignment.low is None else alignment.low.cpu().numpy()[mine]
    place = ragged(base + low, np.maximum(lengths - low, 0))
    return column.value.index_select(0, torch.from_numpy(place).to(column.value.device))


def ragged(starts: Index, counts: Index) -> Index:
    """``starts[i], starts[i] + 1, ...``, ``counts[i]`` of each, behind one another: (sum of counts,).

    >>> ragged(np.array([10, 20]), np.array([2, 3]))
    array([10, 11, 20, 21, 22])
    """
    begins = np.cumsum(counts) - counts
    return np.repeat(starts - begins, counts) + np.arange(int(counts.sum()))


def _join(column: Column, parts: list[Any], rank: int, store: _Store) -> Column:
    """One field of all parts, in the order of the ranks; ``parts[rank]`` was never turned into bytes."""
    value = column.value
    if column.counts is not None or not isinstance(value, Tensor):
        loaded = [part if r == rank else objects_from_bytes(part) for r, part in enumerate(parts)]
        if column.counts is not None:
            counts = np.concatenate([part[0] for part in loaded])
            return replace(column, value=torch.cat([part[1] for part in loaded]).to(value.device), counts=counts)
        if isinstance(value, np.ndarray):
            return replace(column, value=np.concatenate(loaded))
        return replace(column, value=[item for part in loaded for item in part])
    rest = tuple(value.shape[1:])
    tensors = [
        part if r == rank else from_bytes([part], value.dtype, rest, value.device) for r, part in enumerate(parts)
    ]
    alignment = None if column.alignment is None else store.alignments[id(column.alignment)]
    return replace(column, value=torch.cat(tensors), alignment=alignment)


def empty_like(rows: Rows, device: torch.device) -> Rows:
    """No rows of the same fields, on ``device``: what a rank without a batch needs to know."""
    streams = {}
    none = torch.zeros(0, dtype=torch.int64, device=device)
    for key, stream in rows.streams.items():
        streams[key] = Stream(key, stream.lengths[:0], none, none, stream.width, stream.holes[:0], stream.segmented)
    alignments: dict[int, Alignment] = {}
    columns = {}
    for key, column in rows.columns.items():
        old = column.alignment
        new = None
        if old is not None:
            low = None if old.low is None else none
            new = alignments.setdefault(id(old), Alignment(old.stream, none, low, old.width))
        value = column.value
        if isinstance(value, Tensor) and column.field.span != "batch":
            value = value[:0].detach().to(device).clone()
        elif column.field.span != "batch":
            value = value[:0]
        columns[key] = replace(
            column, value=value, alignment=new, counts=None if column.counts is None else column.counts[:0]
        )
    return Rows(0, streams, columns, rows.rebuild)


def synthetic_row(rows: Rows) -> Rows:
    """One row of one token for a rank that has none: enough for a forward pass that counts for nothing."""
    streams = {
        key: Stream(
            key,
            np.ones(1, dtype=np.int64),
            torch.ones(1, dtype=torch.int64, device=stream.size.device),
            torch.zeros(1, dtype=torch.int64, device=stream.size.device),
            1,
            np.zeros(1, dtype=bool),
            False,
        )
        for key, stream in rows.streams.items()
    }
    columns = {}
    for key, column in rows.columns.items():
        value, alignment = column.value, column.alignment
        if alignment is not None:
            start = torch.zeros(1, dtype=torch.int64, device=alignment.base.device)
            low = None if alignment.low is None else start
            one = value.new_full((1, *value.shape[1:]), 1 if key in streams else 0)
            columns[key] = replace(column, value=one, alignment=Alignment(alignment.stream, start, low, 1))
        elif column.counts is not None:
            columns[key] = replace(column, counts=np.zeros(1, dtype=np.int64))
        elif column.field.span == "batch":
            columns[key] = column
        elif isinstance(value, Tensor):
            columns[key] = replace(column, value=value.new_zeros((1, *value.shape[1:])))
        else:
            columns[key] = replace(column, value=[None])
    return Rows(1, streams, columns, rows.rebuild)
