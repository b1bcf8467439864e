"""Packs: rows of concatenated sequences within a capacity."""

from __future__ import annotations

import math
from collections.abc import Iterable
from numbers import Real
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from padless.cost import DEFAULT_COST, CostModel, check_cost
from padless.errors import PadlessError, choose, shown
from padless.lengths import MOST_TOKENS, IntArray, Lengths, as_ids, as_lengths, positive_int
from padless.plan import Plan
from padless.planning.items import Items, Rounding, make_items
from padless.planning.slots import Overlong, Slots, apply_overlong
from padless.shapes import combine_multiples, round_up

__all__ = ["BALANCE", "METHODS", "Balance", "Method", "pack"]

Method = Literal["next-fit", "random", "first-fit-decreasing", "best-fit-decreasing", "auto", "optimal"]
METHODS = ("next-fit", "random", "first-fit-decreasing", "best-fit-decreasing", "auto", "optimal")
Balance = Literal["none", "ranks", "work"]
BALANCE = ("none", "ranks", "work")
Index = npt.NDArray[np.int64]


def pack(
    lengths: Lengths,
    capacity: int,
    *,
    method: Method = "best-fit-decreasing",
    ranks: int = 1,
    multiple_of: int | Iterable[int] = 1,
    sequence_multiple_of: int | Iterable[int] = 1,
    atoms: Any = None,
    overlong: Overlong = "error",
    balance: Balance = "ranks",
    cost: CostModel | None = None,
    time_limit: float = 10.0,
    coarsen: int | None = None,
    seed: int = 0,
) -> Plan:
    """Concatenate sequences into packs of at most ``capacity`` tokens.

    Args:
        lengths: (N,) tokens.
        capacity: hard ceiling on the tokens of a pack, rounding included.
        method: ``"best-fit-decreasing"`` (longest first, into the fullest pack that holds it; its cost grows
            with the histogram of lengths, not with N), ``"first-fit-decreasing"`` (into the first), ``"next-fit"``
            (given order), ``"random"`` (next-fit on a seeded shuffle), ``"auto"`` (best-fit-decreasing, and where that
            needs over 0.2 % more packs than the bound, patterns found by linear programming on the histogram: seconds,
            not depending on the clock), ``"optimal"`` (the same, to the bound or the time limit, whichever is first).
        ranks: data-parallel ranks; packs are completed to a multiple of it by splitting, none is dropped.
        multiple_of: the tokens of a pack are rounded up to it.
        sequence_multiple_of: each sequence is rounded up to it (context parallelism).
        atoms: (N,) ids; sequences that share one stay in one pack.
        overlong: what happens to a sequence (or atom) over the capacity: ``"error"``, ``"truncate"``, ``"split"``
            (into pieces of the capacity, in order), ``"drop"``, or ``"alone"`` (in a pack by itself, over it).
        balance: ``"ranks"`` lays packs of similar cost side by side; ``"work"`` also deals the sequences anew, so that
            all packs cost alike in the same number of packs (or the multiple of ``ranks`` that is run anyway), as far
            as they leave some room, and where that is faster for the ranks; ``"none"`` does neither.
        cost: what a pack costs, for balance; with ``per_token_squared`` attention within sequences counts.
        time_limit: seconds after which ``"optimal"`` stops with the best packs found; ``math.inf`` leaves it to a limit
            on the work, so that the packs depend on the lengths alone.
        coarsen: unit in tokens to which ``"auto"`` and ``"optimal"`` round lengths up; by default they choose.
        seed: for ``"random"``.

    Returns:
        A `Plan` with layout ``"packed"``; ``lower_bound`` is a number of packs.

    Raises:
        PadlessError: bad input, or a sequence over the capacity with ``overlong="error"``.

    >>> plan = pack([7, 5, 4, 1], 10)
    >>> [group.tolist() for group in plan]
    [[0], [1, 2, 3]]
    >>> int(plan.lower_bound), plan.efficiency
    (2, 0.85)
    """
    choose("method", method, METHODS)
    choose("balance", balance, BALANCE)
    array = as_lengths(lengths)  # (N,)
    if array.ndim != 1:
        raise PadlessError(f"lengths has shape {array.shape}; a pack holds one field: plan each field on its own")
    budget = positive_int(capacity, name="capacity")
    ranks = positive_int(ranks, name="ranks")
    seed = positive_int(seed, name="seed", minimum=0)
    if not (isinstance(time_limit, Real) and time_limit > 0):
        raise PadlessError(f"time_limit={shown(time_limit)}; expected a positive number of seconds")
    ids = None if atoms is None else as_ids(atoms, len(array), name="atoms")
    each, whole = combine_multiples(sequence_multiple_of), combine_multiples(multiple_of)
    if each * len(array) > MOST_TOKENS:
        raise PadlessError(
            f"{len(array)} sequences, each rounded up to a multiple of {each}, may not fit 64 bits:"
            " lower sequence_multiple_of"
        )
    room = budget // whole * whole
    slots = _fitting(array, ids, room, each, overlong, budget)
    model = check_cost(cost) or DEFAULT_COST
    unit = None if coarsen is None else positive_int(coarsen, name="coarsen")
    order, offsets, bound = _packs(
        slots, ids, room, (each, whole), method, balance, ranks, model, seed, (time_limit, unit)
    )
    steps = (len(offsets) - 1) // ranks
    return Plan(
        layout="packed",
        method=method,
        ranks=ranks,
        steps=steps,
        lengths=array,
        order=order if slots.sequence is None else slots.sequence[order],
        offsets=offsets,
        token_budget=budget,
        spans=None if slots.spans is None else slots.spans[order],
        multiple_of=whole,
        sequence_multiple_of=each,
        atoms=ids,
        dropped=slots.dropped,
        truncated=slots.truncated,
        split=slots.split,
        alone=slots.alone,
        cost=model,
        lower_bound=float(bound),
        seed=seed,
    )


def _fitting(array: IntArray, ids: Index | None, room: int, each: int, overlong: Overlong, budget: int) -> Slots:
    """Apply the ``overlong`` policy to sequences, or to whole atoms."""
    what = f"capacity {budget}"
    limit = room // each * each
    if ids is None:
        return apply_overlong(array, limit, overlong=overlong, what=what)
    _, inverse, counts = np.unique(ids, return_inverse=True, return_counts=True)
    rows = counts[inverse]  # (N,)
    total = np.zeros(len(counts), dtype=np.int64)
    np.add.at(total, inverse, round_up(array.astype(np.int64), each))
    # Within its atom a sequence may use what the others leave; cut atoms share the room equally.
    fits = total[inverse] <= limit
    limits = np.where(
        fits, array, np.minimum(array - (overlong not in ("truncate", "split")), limit // rows // each * each)
    )
    return apply_overlong(array, limits, overlong=overlong, what=f"{what} together with its atom", atoms=ids)


def _packs(
    slots: Slots, ids: Index | None, room: int, multiples: tuple[int, int], method: Method, balance: Balance,
    ranks: int, model: CostModel, seed: int, limits: tuple[float, int | None],
) -> tuple[Index, Index, int]:  # fmt: skip
    """Slots pack by pack (S,), pack bounds (K * R + 1,), and a lower bound on the packs."""
    each, whole = multiples
    held = slots.held if each == 1 else round_up(slots.held.astype(np.int64), each)  # (S,)
    if not len(held):
        return np.empty(0, dtype=np.int64), np.zeros(ranks + 1, dtype=np.int64), 0
    items = None if ids is None else make_items(slots, ids, Rounding(), by_length=False)
    sizes = held if items is None else np.add.reduceat(held[items.members].astype(np.int64), items.starts[:-1])  # (I,)
    alone = np.empty(0, dtype=np.int64)
    if len(slots.alone):
        over = np.zeros(len(held), dtype=bool)
        over[slots.alone] = True
        alone = np.flatnonzero(over if items is None else items.over)
    order, offsets, bound = _without_alone(sizes, alone, room, method, seed, limits)
    if balance != "none":
        squares = _squares(slots, items) if model.per_token_squared or balance == "work" else np.zeros(0)
        best = _beside_equals(order, offsets, sizes, squares, model, ranks, whole)
        if balance == "work":
            even = _even_work(order, offsets, len(alone), sizes, squares, room, model, ranks)
            best = min(_beside_equals(*even, sizes, squares, model, ranks, whole), best, key=lambda found: found[2])
        order, offsets, _ = best
    missing = -(len(offsets) - 1) % ranks
    offsets = np.concatenate([offsets, np.full(missing, offsets[-1])]) if missing else offsets
    if items is not None:
        order, offsets = _expand(order, offsets, items)
    return order, offsets, bound + len(alone)


def _without_alone(
    sizes: npt.NDArray[Any], alone: Index, room: int, method: Method, seed: int, limits: tuple[float, int | None]
) -> tuple[Index, Index, int]:
    """Pack what fits; items that run alone come first, each in a pack of its own."""
    if not len(alone):
        return _strategy(sizes, room, method, seed, limits)
    kept = np.delete(np.arange(len(sizes), dtype=np.int64), alone)
    first = np.arange(len(alone) + 1, dtype=np.int64)
    if not len(kept):
        return alone, first, 0
    order, offsets, bound = _strategy(sizes[kept], room, method, seed, limits)
    return np.concatenate([alone, kept[order]]), np.concatenate([first[:-1], offsets + len(alone)]), bound


def _strategy(
    sizes: npt.NDArray[Any], room: int, method: Method, seed: int, limits: tuple[float, int | None]
) -> tuple[Index, Index, int]:
    from padless.planning import fit

    histogram = fit.Histogram.of(sizes)
    room = min(room, histogram.total)  # a pack that holds all is large enough: nothing grows with the capacity
    bound = fit.fewest_packs(histogram, room)
    if method in ("auto", "optimal"):
        from padless.planning.optimal import CLOSE, optimal

        close, seconds = (CLOSE, math.inf) if method == "auto" else (0.0, limits[0])
        return optimal(sizes, room, bound=bound, seconds=seconds, unit=limits[1], close=close)
    if method in ("best-fit-decreasing", "first-fit-decreasing"):
        return *fit.decreasing(sizes, room, best=method == "best-fit-decreasing", histogram=histogram), bound
    given = np.arange(len(sizes), dtype=np.int64)
    if method == "random":
        given = np.random.default_rng(seed).permutation(given)
    return *fit.in_order(sizes, room, given), bound


def _squares(slots: Slots, items: Items | None) -> npt.NDArray[np.float64]:
    """Sum of squared lengths of each item, (I,): the attention within its sequences."""
    square = np.square(slots.held.astype(np.float64))
    return square if items is None else np.add.reduceat(square[items.members], items.starts[:-1])


def _even_work(
    order: Index, offsets: Index, alone: int, sizes: npt.NDArray[Any], squares: npt.NDArray[np.float64], room: int,
    model: CostModel, ranks: int,
) -> tuple[Index, Index]:  # fmt: skip
    """Deal all items anew but those of the first ``alone`` packs; over as many packs as the ranks run anyway."""
    from padless.planning.balance import evened

    if alone == len(offsets) - 1:
        return order, offsets
    place = np.empty(len(order), dtype=np.int64)  # (I,)
    place[order] = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
    kept = np.flatnonzero(place >= alone)
    packs = min(round_up(len(offsets) - 1, ranks) - alone, len(kept))
    held = sizes[kept]
    room = min(room, int(held.sum(dtype=np.int64)))
    order_of_kept, bounds = evened(held, squares[kept], room, packs, model, place[kept] - alone)
    return np.concatenate([order[:alone], kept[order_of_kept]]), np.concatenate([np.arange(alone), alone + bounds])


def _complete(offsets: Index, ranks: int) -> Index:
    """Halve the packs of most items until their number is a multiple of ``ranks``, as far as packs can be halved."""
    missing = -(len(offsets) - 1) % ranks
    while missing:
        counts = np.diff(offsets)
        largest = np.argsort(-counts, kind="stable")[:missing]
        largest = largest[counts[largest] > 1]
        if not len(largest):
            break
        offsets = np.sort(np.concatenate([offsets, offsets[largest] + counts[largest] // 2]))
        missing = -(len(offsets) - 1) % ranks
    return offsets


def _beside_equals(
    order: Index, offsets: Index, sizes: npt.NDArray[Any], squares: npt.NDArray[np.float64], model: CostModel,
    ranks: int, whole: int,
) -> tuple[Index, Index, float]:  # fmt: skip
    """Packs for all ranks, by descending cost, so that those of one micro-step cost alike; and the time of all steps.

    The time is that of the slowest of each step, without what is fixed; 0 for one rank, whose packs stay as they are.
    """
    offsets = _complete(offsets, ranks)
    if ranks == 1:
        return order, offsets, 0.0
    from padless.planning import fit, lay_kernels

    tokens = np.zeros(len(offsets) - 1, dtype=np.int64)  # (G,)
    lay_kernels.sums(order, offsets, fit.read_only(sizes), tokens)
    cost = (model.per_column + model.per_token) * round_up(tokens, whole)
    if model.per_token_squared:
        square = np.zeros(len(tokens))
        lay_kernels.sums(order, offsets, squares, square)
        cost = cost + model.per_token_squared * square
    down = np.argsort(-cost, kind="stable")  # (G,)
    moved, bounds = np.empty_like(order), np.empty_like(offsets)
    lay_kernels.rearrange(order, offsets, down, moved, bounds)
    return moved, bounds, float(cost[down[::ranks]].sum())


def _expand(order: Index, offsets: Index, items: Items) -> tuple[Index, Index]:
    """From atoms to their sequences."""
    rows = items.rows[order]
    before = np.concatenate([[0], np.cumsum(rows)])
    at = np.repeat(items.starts[order] - before[:-1], rows) + np.arange(len(items.members))
    return items.members[at], before[offsets]
