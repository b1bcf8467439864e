"""`regroup` over a process group: agree, gather lengths, plan, exchange the rows that move."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from padless.errors import PadlessError
from padless.exchange import agree, fingerprint
from padless.plan import Plan
from padless.tensors.distributed import (
    World,
    empty_like,
    exchange_rows,
    gather_world,
    need_of,
    schema_of,
    synthetic_row,
)
from padless.tensors.microbatches import Regrouped
from padless.tensors.planning import PlanOptions, plan_digest, plan_for, plan_in_place
from padless.tensors.rows import Rows

__all__ = ["regroup_together"]

Prepare = Callable[[], tuple[Rows | None, PlanOptions, bool, Any]]


def regroup_together(prepare: Prepare, options: Mapping[str, Any], plan: Plan | None, process_group: Any) -> Regrouped:
    """Every rank calls this; every rank gets its micro-batches, or every rank raises."""
    group = process_group.get_group() if hasattr(process_group, "get_group") else process_group
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    rows, planning, unsafe, atoms, counts = _agree_on_rows(prepare, options, plan, group)
    if not counts.any():
        raise PadlessError("no rank has a row")
    stays = options["exchange"] == "never"
    world = gather_world(rows, counts, atoms, rank, group, responses=not stays)
    try:
        made = _plan(world, planning, plan, stays)
    except PadlessError as caught:
        where = ", ".join(f"{world.base[r]}.. on rank {r}" for r in range(ranks))
        raise PadlessError(f"{caught} (rows are counted over all ranks: {where})") from None
    shared: dict[str, Any] = {
        "home": rows,
        "plan": made,
        "layout": planning.layout,
        "responses": options["responses"],
        "dtype": options["dtype"],
        "unsafe": unsafe,
        "rank": rank,
        "world": world,
    }
    total = world.lengths.sum(axis=1)
    if stays:
        if not rows.count:
            return Regrouped(store=synthetic_row(rows), **shared)
        return Regrouped(store=rows, filler=int(total[world.own()].argmin()), **shared)
    filler = int(total.argmin())
    needs = [need_of(made, r, filler) for r in range(ranks)]
    store = exchange_rows(rows, world, needs)
    place = int(np.searchsorted(needs[rank], filler))
    return Regrouped(store=store, need=needs[rank], filler=min(place, store.count - 1), **shared)


def _agree_on_rows(
    prepare: Prepare, options: Mapping[str, Any], plan: Plan | None, group: Any
) -> tuple[Rows, PlanOptions, bool, Any, npt.NDArray[np.int64]]:
    """This rank's rows and how they are planned, once all ranks agree; and the number of rows of each rank (R,)."""
    told = dict(options) | {"plan": plan_digest(plan)}
    schema: dict[str, Any] = {}
    rows: Rows | None = None
    error: BaseException | None = None
    numbers = [0, 0, 0]
    try:
        rows, planning, unsafe, atoms = prepare()
        told["layout"] = planning.layout
        if rows is not None:
            schema = _schema(rows, atoms is not None, moves=options["exchange"] == "rows")
            numbers = [rows.count, fingerprint(schema), 1]
    except Exception as caught:  # whatever it is, the other ranks must hear of it
        error = caught
    table = agree(group, what="regroup", options=told if error is None else {}, error=error, numbers=numbers)
    counts, schemas, present = table.T
    if not present.any():
        raise PadlessError("no rank has a batch")
    if not present.all():
        rows, schema, atoms = _share_fields(rows, schema, atoms, int(present.argmax()), group)
    known = schemas[present > 0]
    if (known != known[0]).any():
        agree(group, what="regroup", options=schema, error=None)
    assert rows is not None  # given, or learnt
    return rows, planning, unsafe, atoms, counts


def _share_fields(
    rows: Rows | None, schema: dict[str, Any], atoms: Any, source: int, group: Any
) -> tuple[Rows, dict[str, Any], Any]:
    """A rank without a batch learns from rank ``source`` what its rows would look like; the others keep theirs."""
    given: list[Any] = [None]
    if rows is not None:
        device = next(iter(rows.streams.values())).size.device
        given = [(empty_like(rows, torch.device("cpu")), schema, atoms is not None, device.type)]
    dist.broadcast_object_list(given, src=dist.get_global_rank(group, source), group=group)
    if rows is not None:
        return rows, schema, atoms
    empty, schema, with_atoms, kind = given[0]
    if kind != "cpu":
        empty = empty_like(empty, torch.device(kind, torch.accelerator.current_device_index()))
    return empty, schema, np.empty(0, dtype=np.int64) if with_atoms else None


def _schema(rows: Rows, with_atoms: bool, *, moves: bool) -> dict[str, Any]:
    """What must be alike on all ranks that have a batch."""
    schema: dict[str, Any] = {"masks": list(rows.streams), "atoms given": with_atoms}
    if moves:
        schema["fields"] = schema_of(rows)
        _no_gradient(rows)
    return schema


def _plan(world: World, planning: PlanOptions, given: Plan | None, stays: bool) -> Plan:
    lengths = world.plan_lengths
    if given is not None:
        from padless.tensors.regroup import check_given

        made = check_given(given, lengths, planning, world.ranks)
        if stays:
            group = np.repeat(np.arange(len(made)), made.rows) % made.ranks
            owner = np.searchsorted(world.base, made.order, side="right") - 1
            moved = np.flatnonzero(group != owner)
            if len(moved):
                raise PadlessError(f"the plan moves row {made.order[moved[0]]} and exchange='never' keeps rows")
        return made
    if stays:
        return plan_in_place(lengths, world.base, planning, atoms=world.atoms)
    return plan_for(lengths, planning, ranks=world.ranks, atoms=world.atoms)


def _no_gradient(rows: Rows) -> None:
    for key, column in rows.columns.items():
        if getattr(column.value, "requires_grad", False):
            raise PadlessError(f"{key!r} requires a gradient, which does not follow rows to other ranks: detach it")
