"""Micro-batches of ranks that keep their own rows and run the same number of them.

verl hands every data-parallel rank its rows before it plans, so rows cannot change ranks here; what is
chosen together is the number of micro-batches and their sizes. NumPy only.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from padless.cost import DEFAULT_COST, CostModel
from padless.errors import PadlessError
from padless.plan import Plan
from padless.planning import microbatch
from padless.shapes import round_up

__all__ = ["Order", "Request", "makespan", "plan_ranks"]

Index = npt.NDArray[np.int64]
Order = Literal["largest-first", "small-ends"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What verl asks of its planner, and the user's options.

    Attributes:
        token_budget: ceiling on rows x width of one micro-batch, rounding included.
        multiple_of: widths are rounded up to it by the engine.
        group_size: this many consecutive rows stay together (``force_group_size``).
        at_least: fewest micro-batches (``min_num_micro_batch``).
        count_multiple_of: the number of micro-batches is a multiple of it (``num_batches_divided_by``).
        max_sequences: most rows of one micro-batch, or ``None``.
        overlong: a row over the budget: ``"error"``, or ``"alone"`` in a micro-batch of its own.
        order: ``"largest-first"``, or ``"small-ends"`` for pipelines (less idle time at both ends).
        cost: what the plan minimises.
    """

    token_budget: int
    multiple_of: int = 1
    group_size: int = 1
    at_least: int = 1
    count_multiple_of: int = 1
    max_sequences: int | None = None
    overlong: Literal["error", "alone"] = "error"
    order: Order = "largest-first"
    cost: CostModel = DEFAULT_COST


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ranks:
    """The items (rows, or groups of rows that stay together) of R ranks, widest first.

    Attributes:
        widths: (R, I + 1) rounded widths, descending; 0 past a rank's last item.
        counts: (R,) items of each rank.
        items: per rank (I_r,) the item in each place of ``widths``.
        over: (R,) how many of a rank's items (the widest ones) exceed the budget and run alone.
    """

    widths: Index
    counts: Index
    items: list[Index]
    over: Index


def plan_ranks(lengths: Sequence[Any], request: Request) -> list[Plan]:
    """One plan of K micro-batches for each rank, K the same for all and no micro-batch empty.

    Ranks that know each other's lengths derive the same plans with no further communication. The
    modelled time is the sum over micro-steps of the slowest rank: under FSDP and pipelines ranks
    meet in every micro-batch. For each K, the smallest common ceiling is searched for which every
    rank's rows, longest first, fill at most K micro-batches; the ceilings of single micro-steps
    are then lowered while the rows still fit, and the K with the least modelled time is kept.

    Args:
        lengths: per rank (N_r,) tokens of its rows, in the order the rank holds them.
        request: the budget and the options.

    Returns:
        Per rank a `Plan` of one rank and K steps over its own rows.

    Raises:
        PadlessError: a row over the budget (rank and index are named), rows that cannot be grouped
            as asked, or fewer groups of rows than micro-batches.

    >>> plans = plan_ranks([[900, 100, 120], [500, 480, 90]], Request(token_budget=1000))
    >>> [[group.tolist() for group in plan] for plan in plans]
    [[[0], [1, 2]], [[1, 2], [0]]]
    """
    arrays = [np.asarray(rank, dtype=np.int64) for rank in lengths]  # per rank (N_r,)
    ranks = _sort(arrays, request)
    filled = _fill(ranks, request, np.full(int(ranks.counts.max()), request.token_budget))  # (I + 1, R)
    needed = int((np.diff(filled, axis=0) > 0).sum(axis=0).max())
    first = round_up(max(needed, request.at_least, 1), request.count_multiple_of)
    most = int(ranks.counts.min())
    if first > most:
        _refuse_count(first, needed, most, ranks, request)
    best = _single_rank(arrays[0], request) if len(arrays) == 1 else None
    if best is None:
        best = _search(ranks, request, first, most)
    plans = [_as_plan(array, groups, request) for array, groups in zip(arrays, best, strict=True)]
    return [plan.check() for plan in plans]


def makespan(plans: Sequence[Plan], cost: CostModel | None = None) -> float:
    """Modelled time of ranks that meet in every micro-batch: the sum of the slowest rank's costs."""
    costs = np.stack([plan.group_costs(cost) for plan in plans])  # (R, K)
    return float(costs.max(axis=0).sum())


def _sort(arrays: list[Index], request: Request) -> _Ranks:
    size = request.group_size
    widths, items, over = [], [], []
    for rank, array in enumerate(arrays):
        if len(array) == 0:
            raise PadlessError(f"rank {rank} has no rows: every data-parallel rank needs at least one")
        if len(array) % size:
            raise PadlessError(
                f"rank {rank} has {len(array)} rows, not a multiple of force_group_size={size}:"
                " rows that stay together must come in whole groups"
            )
        if array.min() < 1:
            raise PadlessError(
                f"row {int(array.argmin())} of rank {rank} has {array.min()} tokens; at least 1 is needed"
            )
        wide = round_up(array.reshape(-1, size).max(axis=1), request.multiple_of)  # (I_r,)
        too_long = np.flatnonzero(wide * size > request.token_budget)
        if len(too_long) and request.overlong == "error":
            _refuse_length(rank, array, int(too_long[0]), int(wide[too_long[0]]), request)
        if request.max_sequences is not None and size > request.max_sequences:
            raise PadlessError(f"max_sequences={request.max_sequences} is below force_group_size={size}")
        order = np.argsort(-wide, kind="stable")
        widths.append(wide[order])
        items.append(order)
        over.append(len(too_long))
    counts = np.array([len(w) for w in widths], dtype=np.int64)
    table = np.zeros((len(arrays), int(counts.max()) + 1), dtype=np.int64)
    for rank, wide in enumerate(widths):
        table[rank, : len(wide)] = wide
    return _Ranks(widths=table, counts=counts, items=items, over=np.array(over, dtype=np.int64))


def _fill(ranks: _Ranks, request: Request, ceilings: Sequence[int] | Index) -> Index:
    """Where each rank's micro-steps start, (K + 1, R): each takes the widest rows that its ceiling holds."""
    who = np.arange(len(ranks.counts))
    most = _most_items(ranks, request)
    starts = np.zeros((len(ceilings) + 1, len(who)), dtype=np.int64)
    for step, ceiling in enumerate(ceilings):
        start = starts[step]
        take = _take(ranks.widths[who, start], start, ranks.over, int(ceiling) // request.group_size, most)
        starts[step + 1] = np.minimum(start + take, ranks.counts)
    return starts


def _most_items(ranks: _Ranks, request: Request) -> int:
    most = int(ranks.widths.shape[1])
    return most if request.max_sequences is None else min(most, request.max_sequences // request.group_size)


def _take(widths: Index, start: Index | int, over: Index, room: int, most: int) -> Index:
    """Items of each rank in a micro-batch whose widest is ``widths`` (R,); one over the budget runs alone."""
    take = np.minimum(np.maximum(room // np.maximum(widths, 1), 1), most)  # (R,)
    return np.asarray(np.where(start < over, 1, take))


def _intervals(starts: Index) -> list[tuple[int, int]]:
    return [(int(a), int(b)) for a, b in itertools.pairwise(starts) if b > a]


def _search(ranks: _Ranks, request: Request, first: int, most: int) -> list[list[Index]]:
    """The best number of micro-batches and their members, per rank."""
    best: tuple[float, list[list[tuple[int, int]]]] | None = None
    worse, ceiling = 0, request.token_budget
    for steps in range(first, most + 1, request.count_multiple_of):
        ceiling = _equal_ceiling(ranks, request, steps, ceiling)
        runs = _with_steps(ranks, request, steps, ceiling)
        total = _makespan(ranks, request, runs)
        if best is None or total < best[0]:
            best, worse = (total, runs), 0
        else:
            worse += 1
            if worse == 4 or request.cost.per_microbatch * steps >= best[0]:
                break
    assert best is not None
    return [_members(ranks, request, rank, runs) for rank, runs in enumerate(best[1])]


def _equal_ceiling(ranks: _Ranks, request: Request, steps: int, high: int) -> int:
    """The smallest ceiling, the same for all micro-steps, under which every rank's rows fit ``steps`` of them."""
    low = 1
    while low < high:
        middle = (low + high) // 2
        if bool((_fill(ranks, request, np.full(steps, middle))[-1] == ranks.counts).all()):
            high = middle
        else:
            low = middle + 1
    return high


def _with_steps(ranks: _Ranks, request: Request, steps: int, ceiling: int) -> list[list[tuple[int, int]]]:
    """Exactly ``steps`` runs for each rank, each micro-step's ceiling as low as the later ones allow."""
    reach = _reach(ranks, request, steps, ceiling)
    who = np.arange(len(ranks.counts))
    most = _most_items(ranks, request)
    starts = np.zeros((steps + 1, len(who)), dtype=np.int64)
    for step in range(steps):
        start = starts[step]
        widths = ranks.widths[who, start]  # (R,)
        needed = np.maximum(reach[steps - 1 - step] - start, 0)  # (R,) items that the later micro-steps cannot hold
        room = min(int((widths * needed).max()), ceiling // request.group_size)  # over-long rows run alone
        take = _take(widths, start, ranks.over, room, most)
        starts[step + 1] = np.minimum(start + np.where(start < ranks.counts, take, 0), ranks.counts)
    return [_split(_intervals(starts[:, rank]), ranks.widths[rank], steps) for rank in range(len(who))]


def _reach(ranks: _Ranks, request: Request, steps: int, ceiling: int) -> Index:
    """(K + 1, R): the first place from which m micro-steps of one ceiling hold the rest of a rank's items."""
    who = np.arange(len(ranks.counts))
    most, places = _most_items(ranks, request), ranks.widths.shape[1]
    reach = np.tile(ranks.counts, (steps + 1, 1))
    needed = np.zeros((len(who), places), dtype=np.int64)  # micro-steps from each place on
    for place in range(places - 2, -1, -1):
        take = _take(ranks.widths[:, place], place, ranks.over, ceiling // request.group_size, most)
        after = np.minimum(place + take, ranks.counts)
        needed[:, place] = np.where(place < ranks.counts, 1 + needed[who, after], 0)
        here = np.minimum(needed[:, place], steps)
        holds = (needed[:, place] <= steps) & (place < ranks.counts)
        reach[here[holds], who[holds]] = place
    return np.minimum.accumulate(reach, axis=0)


def _split(runs: list[tuple[int, int]], widths: Index, steps: int) -> list[tuple[int, int]]:
    """Cut runs where the cut saves the most padding until there are ``steps`` of them."""
    runs = list(runs)
    while len(runs) < steps:
        best = (-1, 0, 0)
        for place, (start, stop) in enumerate(runs):
            if stop - start < 2:
                continue
            cuts = np.arange(start + 1, stop)
            saved = (widths[start] - widths[cuts]) * (stop - cuts)  # (cuts,)
            at = int(saved.argmax())
            if saved[at] > best[0]:
                best = (int(saved[at]), place, int(cuts[at]))
            elif saved[at] == best[0] == 0 and stop - start > runs[best[1]][1] - runs[best[1]][0]:
                best = (0, place, start + (stop - start) // 2)
        _, place, cut = best
        start, stop = runs[place]
        runs[place : place + 1] = [(start, cut), (cut, stop)]
    return runs


def _costs(ranks: _Ranks, request: Request, rank: int, runs: list[tuple[int, int]]) -> npt.NDArray[np.float64]:
    rows = np.array([stop - start for start, stop in runs], dtype=np.int64) * request.group_size
    return request.cost.padded(rows, ranks.widths[rank][[start for start, _ in runs]])


def _makespan(ranks: _Ranks, request: Request, runs: list[list[tuple[int, int]]]) -> float:
    costs = np.stack([-np.sort(-_costs(ranks, request, rank, mine)) for rank, mine in enumerate(runs)])  # (R, K)
    return float(costs.max(axis=0).sum())


def _members(ranks: _Ranks, request: Request, rank: int, runs: list[tuple[int, int]]) -> list[Index]:
    """The rows of each micro-batch, costliest first, each group's rows in their given order."""
    size = request.group_size
    order = np.argsort(-_costs(ranks, request, rank, runs), kind="stable")
    groups = []
    for place in order:
        start, stop = runs[place]
        first = np.sort(ranks.items[rank][start:stop])[:, None] * size  # (items, 1)
        groups.append((first + np.arange(size)).ravel())
    return groups


def _single_rank(lengths: Index, request: Request) -> list[list[Index]] | None:
    """With one rank the general planner does it, unless its plan misses a count that it was not asked for."""
    plan = microbatch(
        lengths,
        request.token_budget,
        cost=request.cost,
        multiple_of=request.multiple_of,
        max_sequences=request.max_sequences,
        atoms=None if request.group_size == 1 else np.arange(len(lengths)) // request.group_size,
        overlong=request.overlong,
    )
    if plan.steps < request.at_least or plan.steps % request.count_multiple_of or not plan.rows.all():
        return None
    costs = plan.group_costs()
    return [[np.sort(plan.group(int(step))) for step in np.argsort(-costs, kind="stable")]]


def _as_plan(lengths: Index, groups: list[Index], request: Request) -> Plan:
    if request.order == "small-ends":
        groups = groups[::2][::-1] + groups[1::2]
    alone = np.flatnonzero(round_up(lengths, request.multiple_of) * request.group_size > request.token_budget)
    if len(alone) and request.group_size > 1:
        alone = np.flatnonzero(np.isin(np.arange(len(lengths)) // request.group_size, alone // request.group_size))
    return Plan(
        layout="padded",
        method="balanced",
        ranks=1,
        steps=len(groups),
        lengths=lengths,
        order=np.concatenate(groups).astype(np.int64),
        offsets=np.concatenate([[0], np.cumsum([len(group) for group in groups])]).astype(np.int64),
        token_budget=request.token_budget,
        multiple_of=request.multiple_of,
        max_sequences=request.max_sequences,
        atoms=None if request.group_size == 1 else np.arange(len(lengths)) // request.group_size,
        alone=alone,
        cost=request.cost,
    )


def _refuse_length(rank: int, array: Index, item: int, width: int, request: Request) -> None:
    size = request.group_size
    row = item * size + int(array[item * size : (item + 1) * size].argmax())
    what = f"row {row} of rank {rank} has {array[row]} tokens"
    if size > 1:
        what += f" and its group of {size} rows stays together, {size * width} padded tokens"
    elif width != array[row]:
        what += f", {width} with rounding"
    raise PadlessError(
        f"{what}: over the token budget {request.token_budget}. Raise max_token_len_per_gpu (actor, rollout.log_prob"
        " and ref have their own), shorten prompts or responses, or set PADLESS_VERL_OVERLONG=alone"
    )


def _refuse_count(first: int, needed: int, most: int, ranks: _Ranks, request: Request) -> None:
    short = int(ranks.counts.argmin())
    why = [f"the budget of {request.token_budget} padded tokens needs {needed}"]
    if request.at_least > 1:
        why.append(f"at least {request.at_least} are asked for")
    if request.count_multiple_of > 1:
        why.append(f"their number must be a multiple of {request.count_multiple_of}")
    raise PadlessError(
        f"{first} micro-batches are needed on every rank ({'; '.join(why)}), but rank {short} has only {most} "
        f"{'rows' if request.group_size == 1 else f'groups of {request.group_size} rows'}:"
        " raise the token budget or give each rank more rows"
    )
