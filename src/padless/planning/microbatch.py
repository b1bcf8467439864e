"""Micro-batches for the padded layout: [rows, width] rectangles under a token budget."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from padless.cost import DEFAULT_COST, CostModel
from padless.errors import choose
from padless.lengths import Lengths, as_ids, as_lengths, positive_int
from padless.plan import Plan, Sync
from padless.planning.items import Items, Rounding, make_items
from padless.planning.slots import Overlong, Slots, apply_overlong
from padless.shapes import combine_multiples, round_up

__all__ = ["METHODS", "microbatch"]

Method = Literal["fixed", "greedy", "balanced"]
METHODS = ("fixed", "greedy", "balanced")
Index = npt.NDArray[np.int64]


def microbatch(
    lengths: Lengths,
    token_budget: int,
    *,
    ranks: int = 1,
    method: Method = "balanced",
    cost: CostModel | None = None,
    multiple_of: int | tuple[int, ...] = 1,
    max_sequences: int | None = None,
    atoms: Any = None,
    overlong: Overlong = "error",
    microbatches_multiple_of: int = 1,
    sync: Sync = "microbatch",
) -> Plan:
    """Group the sequences of one optimizer step into padded micro-batches within a token budget.

    >>> plan = microbatch([900, 100, 120, 880, 110, 90], 2000)
    >>> [group.tolist() for group in plan]
    [[0, 3], [2, 4, 1, 5]]
    """
    choose("method", method, METHODS)
    choose("sync", sync, ("microbatch", "step"))
    array = as_lengths(lengths)  # (N,) or (N, F)
    budget = positive_int(token_budget, name="token_budget")
    ranks = positive_int(ranks, name="ranks")
    ids = None if atoms is None else as_ids(atoms, len(array), name="atoms")
    if max_sequences is not None:
        max_sequences = positive_int(max_sequences, name="max_sequences")
    multiple = combine_multiples(multiple_of)
    rounding = Rounding(multiple_of=multiple)
    every = positive_int(microbatches_multiple_of, name="microbatches_multiple_of")
    limit = rounding.largest(budget)
    slots = apply_overlong(array, limit, overlong=overlong, what=f"token_budget {budget}", atoms=ids)
    cap = max_sequences if max_sequences is not None else len(slots.held)
    model = cost or DEFAULT_COST
    if not len(slots.held):
        groups = [[np.empty(0, dtype=np.int64)] * ranks]
    elif method == "fixed":
        groups = _deal(_grow(make_items(slots, ids, rounding, by_length=False), budget, cap), ranks)
    elif method == "greedy":
        groups = _greedy(slots, ids, rounding, budget, cap, ranks)
    else:
        groups = _balanced(make_items(slots, ids, rounding), budget, cap, ranks, every, model)
    steps = round_up(len(groups), every)
    flat = [group for step in groups for group in step]
    flat += [np.empty(0, dtype=np.int64)] * (steps * ranks - len(flat))
    members = np.concatenate(flat)
    return Plan(
        layout="padded",
        method=method,
        ranks=ranks,
        steps=steps,
        lengths=array,
        order=members if slots.sequence is None else slots.sequence[members],
        offsets=np.concatenate([[0], np.cumsum([len(group) for group in flat])]).astype(np.int64),
        token_budget=budget,
        spans=None if slots.spans is None else slots.spans[members],
        multiple_of=multiple,
        max_sequences=max_sequences,
        atoms=ids,
        dropped=slots.dropped,
        truncated=slots.truncated,
        split=slots.split,
        alone=slots.alone,
        cost=model,
        sync=sync,
    )


def _grow(items: Items, budget: int, cap: int) -> list[Index]:
    """Fill micro-batches in the items' order: the next joins while rows x widest stays within the budget."""
    groups: list[Index] = []
    start, rows, width = 0, 0, np.zeros(items.widths.shape[1], dtype=np.int64)
    for i in range(len(items)):
        new_rows, new_width = rows + int(items.rows[i]), np.maximum(width, items.widths[i])
        if i > start and (
            items.over[i] or items.over[start] or new_rows > cap or new_rows * int(new_width.sum()) > budget
        ):
            groups.append(items.members[items.starts[start] : items.starts[i]])
            start, new_rows, new_width = i, int(items.rows[i]), items.widths[i]
        rows, width = new_rows, new_width
    groups.append(items.members[items.starts[start] :])
    return groups


def _deal(groups: list[Index], ranks: int) -> list[list[Index]]:
    steps = -(-len(groups) // ranks)
    groups = groups + [np.empty(0, dtype=np.int64)] * (steps * ranks - len(groups))
    return [groups[step * ranks : (step + 1) * ranks] for step in range(steps)]


def _greedy(
    slots: Slots, ids: Index | None, rounding: Rounding, budget: int, cap: int, ranks: int
) -> list[list[Index]]:
    """The published rule on each rank's share, a consecutive block of the given order."""
    given = make_items(slots, ids, rounding, by_length=False)
    bounds = np.linspace(0, len(given), ranks + 1).round().astype(np.int64)
    per_rank: list[list[Index]] = []
    for rank in range(ranks):
        lo, hi = int(bounds[rank]), int(bounds[rank + 1])
        if lo == hi:
            per_rank.append([])
            continue
        order = lo + np.argsort(given.widths[lo:hi].sum(axis=1), kind="stable")  # ascending
        rows = given.rows[order]
        members = np.concatenate([given.members[given.starts[i] : given.starts[i + 1]] for i in order])
        starts = np.concatenate([[0], np.cumsum(rows)])
        share = Items(rows=rows, widths=given.widths[order], members=members, starts=starts, over=given.over[order])
        per_rank.append(_grow(share, budget, cap))
    steps = max(map(len, per_rank))
    empty = np.empty(0, dtype=np.int64)
    return [[groups[step] if step < len(groups) else empty for groups in per_rank] for step in range(steps)]


def _balanced(items: Items, budget: int, cap: int, ranks: int, every: int, cost: CostModel) -> list[list[Index]]:
    """Equal cap: for each number of micro-steps, the smallest cap whose greedy cut needs no more runs."""
    best: tuple[float, list[Index]] | None = None
    fewest = len(_cut(items, budget, cap))
    first = round_up(-(-fewest // ranks), every)
    for steps in range(first, first + 8 * every, every):
        low, high = 1, budget
        while low < high:
            middle = (low + high) // 2
            if len(_cut(items, middle, cap)) <= steps * ranks:
                high = middle
            else:
                low = middle + 1
        runs = _cut(items, high, cap)
        widths = np.array([int(items.widths[start:stop].max(axis=0).sum()) for start, stop in runs])
        rows = np.array([int(items.rows[start:stop].sum()) for start, stop in runs])
        costs = cost.padded(rows, widths)
        order = np.argsort(-costs, kind="stable")
        total = float(costs[order][::ranks].sum()) + cost.per_microbatch * (steps - -(-len(runs) // ranks))
        if best is None or total < best[0]:
            best = (total, [items.members[items.starts[runs[i][0]] : items.starts[runs[i][1]]] for i in order])
    assert best is not None
    return _deal(best[1], ranks)


def _cut(items: Items, ceiling: int, cap: int) -> list[tuple[int, int]]:
    """Contiguous runs of the descending order, each as long as ``ceiling`` tokens and ``cap`` rows allow."""
    runs: list[tuple[int, int]] = []
    start, count = 0, len(items)
    while start < count:
        rows, width, stop = int(items.rows[start]), items.widths[start], start + 1
        while stop < count and not items.over[start]:
            more, wider = rows + int(items.rows[stop]), np.maximum(width, items.widths[stop])
            if more > cap or more * int(wider.sum()) > ceiling:
                break
            rows, width, stop = more, wider, stop + 1
        runs.append((start, stop))
        start = stop
    return runs
