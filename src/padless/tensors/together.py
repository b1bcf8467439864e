"""`regroup` over a process group: agree, gather lengths, plan, exchange the rows that move."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch.distributed as dist

from padless.errors import PadlessError
from padless.exchange import agree
from padless.plan import Plan
from padless.tensors.distributed import (
    World,
    exchange_rows,
    gather_world,
    need_of,
    response_alignments,
    schema_of,
    synthetic_row,
)
from padless.tensors.microbatches import Regrouped
from padless.tensors.planning import PlanOptions, plan_digest, plan_for, plan_in_place
from padless.tensors.rows import Rows

__all__ = ["regroup_together"]

Prepare = Callable[[], tuple[Rows, PlanOptions, bool, Any]]


def regroup_together(prepare: Prepare, options: Mapping[str, Any], plan: Plan | None, process_group: Any) -> Regrouped:
    """Every rank calls this; every rank gets its micro-batches, or every rank raises."""
    group = process_group.get_group() if hasattr(process_group, "get_group") else process_group
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    told = dict(options) | {"plan": plan_digest(plan)}
    error: BaseException | None = None
    try:
        rows, planning, unsafe, atoms = prepare()
        told |= {"layout": planning.layout, "masks": list(rows.streams), "atoms given": atoms is not None}
        if options["exchange"] == "rows":
            told["fields"] = schema_of(rows)
            _no_gradient(rows)
        numbers = [rows.count, len(response_alignments(rows)), max(s.segmented for s in rows.streams.values())]
    except Exception as caught:  # whatever it is, the other ranks must hear of it
        error, numbers = caught, [0, 0, 0]
    table = agree(group, what="regroup", options=told if error is None else {}, error=error, numbers=numbers)
    counts = table[:, 0]
    if not counts.any():
        raise PadlessError("no rank has a row")
    world = gather_world(rows, counts, atoms, rank, group)
    stays = options["exchange"] == "never"
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
