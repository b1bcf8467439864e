"""Micro-batches for the padded layout: [rows, width] rectangles under a token budget."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from padless import shapes
from padless.cost import DEFAULT_COST, CostModel, check_cost
from padless.errors import PadlessError, choose
from padless.lengths import IntArray, Lengths, as_ids, as_lengths, positive_int
from padless.plan import Plan, Sync
from padless.planning.grouping import ORDERS, Grouping, Order, gather, reorder
from padless.planning.items import Items, Rounding, make_items
from padless.planning.slots import Overlong, Slots, apply_overlong

__all__ = ["METHODS", "Method", "choose_method", "microbatch"]

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
    multiple_of: int | Iterable[int] = 1,
    max_sequences: int | None = None,
    atoms: Any = None,
    overlong: Overlong = "error",
    microbatches_multiple_of: int = 1,
    sync: Sync = "microbatch",
    ladder: int | Any = None,
    min_sequences: int = 1,
    sequences_multiple_of: int = 1,
    order: Order | None = None,
    seed: int = 0,
) -> Plan:
    """Group the sequences of one optimizer step into padded micro-batches within a token budget.

    Args:
        lengths: (N,) tokens, or (N, F) for F fields padded apart: padded tokens are then rows x the sum of widths.
        token_budget: hard ceiling on the padded tokens of a micro-batch on one rank, rounding included.
        ranks: data-parallel ranks. All run equally many micro-batches; one without work runs an empty one.
        method: ``"balanced"`` minimises the modelled time of the step: optimal for one rank (dynamic
            programming), searched for several. ``"greedy"`` is the published rule on each rank's consecutive share
            (sort ascending, grow while rows x longest stays within the budget). ``"fixed"`` keeps the
            given order, ``max_sequences`` to a micro-batch, fewer where the budget ends first.
        cost: modelled time of a micro-batch; by default 500 tokens' worth plus its padded tokens.
        multiple_of: widths are rounded up to it; several are combined by their least common multiple.
        max_sequences: ceiling on the rows of a micro-batch.
        atoms: (N,) ids; sequences that share one stay together (preference pairs, sampling groups).
        overlong: what happens to a sequence (or atom) that does not fit: ``"error"``, ``"truncate"``,
            ``"split"`` (into pieces of the budget, in order), ``"drop"``, or ``"alone"`` (by itself, over the budget).
        microbatches_multiple_of: the micro-batches of each rank are a multiple of it (virtual pipelines).
        sync: whether ranks meet in every ``"microbatch"`` (FSDP, ZeRO-3, pipelines) or only at the end of the
            ``"step"`` (DDP without synchronisation in between).
        ladder: the only widths allowed, for compiled models; a number makes the best ladder of so many widths.
        min_sequences: floor on the rows of a micro-batch that is not empty (``"balanced"`` only).
        sequences_multiple_of: rows are a multiple of it, except where the budget holds fewer, or
            where the sequences end (``"balanced"`` only).
        order: how micro-steps follow one another: ``"largest-first"`` (default of ``"balanced"``: memory fails
            early), ``"smallest-first"``, ``"small-ends"`` (pipelines), ``"largest-then-random"``.
        seed: for ``order="largest-then-random"`` and the balanced search.

    Returns:
        A `Plan` with ``lower_bound`` (and so ``gap``) in units of the cost.

    Raises:
        PadlessError: bad input, a sequence over the budget with ``overlong="error"``, or options that cannot be kept.

    >>> plan = microbatch([900, 100, 120, 880, 110, 90], 2000)
    >>> [group.tolist() for group in plan]
    [[0, 3], [2, 4, 1, 5]]
    >>> plan.real_tokens, plan.padded_tokens, round(plan.gap, 3)
    (2200, 2280, 0.0)
    """
    choose_method(method)
    choose("sync", sync, ("microbatch", "step"))
    options = _read_options(
        lengths=as_lengths(lengths),
        token_budget=token_budget,
        ranks=ranks,
        atoms=atoms,
        multiple_of=multiple_of,
        ladder=ladder,
        max_sequences=max_sequences,
        every=microbatches_multiple_of,
        min_sequences=min_sequences,
        rows_multiple=sequences_multiple_of,
    )
    if method != "balanced" and (options.min_sequences > 1 or options.rows_multiple > 1):
        raise PadlessError(f"min_sequences and sequences_multiple_of need method='balanced'; method is {method!r}")
    slots = _fitting(options, overlong)
    model = check_cost(cost) or DEFAULT_COST
    if len(slots.held):
        grouping, items, bound = _group(options, slots, method, model, sync, seed)
        grouping = _ordered(grouping, items, model, method, order, seed)
        members, offsets = gather(grouping, items)
        steps = len(grouping.start)
    else:
        members, steps, bound = np.empty(0, dtype=np.int64), options.every, 0.0
        offsets = np.zeros(steps * options.ranks + 1, dtype=np.int64)
    return Plan(
        layout="padded",
        method=method,
        ranks=options.ranks,
        steps=steps,
        lengths=options.lengths,
        order=members if slots.sequence is None else slots.sequence[members],
        offsets=offsets,
        token_budget=options.budget,
        spans=None if slots.spans is None else slots.spans[members],
        multiple_of=options.rounding.multiple_of,
        ladder=options.rounding.ladder,
        max_sequences=options.max_sequences,
        min_sequences=options.min_sequences,
        microbatches_multiple_of=options.every,
        atoms=options.atoms,
        dropped=slots.dropped,
        truncated=slots.truncated,
        split=slots.split,
        alone=slots.alone,
        cost=model,
        sync=sync,
        lower_bound=bound,
        seed=seed,
    )


def choose_method(method: Any) -> str:
    """``method`` if it is one of `METHODS`."""
    if method == "lean":
        raise PadlessError(
            "method='lean' is one of padless.data.TokenBudgetSampler and PooledStream, which plan millions of"
            f" sequences; here choose one of {', '.join(map(repr, METHODS))}"
        )
    return choose("method", method, METHODS)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Options:
    lengths: IntArray
    budget: int
    ranks: int
    atoms: Index | None
    rounding: Rounding
    max_sequences: int | None
    every: int
    min_sequences: int
    rows_multiple: int


def _read_options(
    *, lengths: IntArray, token_budget: Any, ranks: Any, atoms: Any, multiple_of: Any, ladder: Any,
    max_sequences: Any, every: Any, min_sequences: Any, rows_multiple: Any,
) -> _Options:  # fmt: skip
    budget = positive_int(token_budget, name="token_budget")
    multiple = shapes.combine_multiples(multiple_of)
    least = positive_int(min_sequences, name="min_sequences")
    most = None if max_sequences is None else positive_int(max_sequences, name="max_sequences")
    if most is not None and most < least:
        raise PadlessError(f"min_sequences={least} is over max_sequences={most}; no micro-batch could hold both")
    return _Options(
        lengths=lengths,
        budget=budget,
        ranks=positive_int(ranks, name="ranks"),
        atoms=None if atoms is None else as_ids(atoms, len(lengths), name="atoms"),
        rounding=Rounding(multiple_of=multiple, ladder=_read_ladder(ladder, lengths, budget, multiple)),
        max_sequences=most,
        every=positive_int(every, name="microbatches_multiple_of"),
        min_sequences=least,
        rows_multiple=positive_int(rows_multiple, name="sequences_multiple_of"),
    )


def _read_ladder(ladder: Any, lengths: IntArray, budget: int, multiple: int) -> Index | None:
    if ladder is None:
        return None
    if isinstance(ladder, int | np.integer) and not isinstance(ladder, bool):
        fitting = np.minimum(lengths.ravel(), max(1, budget // multiple * multiple))
        return shapes.ladder(fitting[fitting > 0], int(ladder), multiple_of=multiple)
    widths = shapes.as_ladder(ladder)
    odd = widths[widths % multiple != 0]
    if len(odd):
        raise PadlessError(f"ladder holds {odd[0]}, which is not a multiple of multiple_of={multiple}")
    return widths


def _fitting(options: _Options, overlong: Overlong) -> Slots:
    """Apply the ``overlong`` policy; with atoms, what fits depends on how many rows must run together."""
    lengths, atoms, rounding = options.lengths, options.atoms, options.rounding
    what, way_out = rounding.limit_in_words(options.budget)
    rows = np.ones(len(lengths), dtype=np.int64)  # (N,) rows that must share the sequence's micro-batch
    inverse = np.arange(len(lengths))
    if atoms is not None:
        ids, inverse, counts = np.unique(atoms, return_inverse=True, return_counts=True)
        rows = counts[inverse]
        if options.max_sequences is not None and counts.max() > options.max_sequences:
            at = int(counts.argmax())
            raise PadlessError(
                f"atom {ids[at]} holds {counts[at]} sequences;"
                f" max_sequences={options.max_sequences} would tear it apart"
            )
        what += " for the rows of its atom"
    if lengths.ndim == 1:
        sizes, place = np.unique(rows, return_inverse=True)
        largest = np.array([rounding.largest(options.budget // int(size)) for size in sizes], dtype=np.int64)
        limit = int(largest[0]) if len(sizes) == 1 else largest[place]
        return apply_overlong(lengths, limit, overlong=overlong, what=what, atoms=atoms, way_out=way_out)
    widest = np.zeros((int(inverse.max()) + 1, lengths.shape[1]), dtype=np.int64)  # (atoms, F)
    np.maximum.at(widest, inverse, rounding.up(lengths))
    total = widest.sum(axis=1)[inverse]  # (N,) the atom's width
    return apply_overlong(lengths, options.budget // rows, overlong=overlong, what=what, atoms=atoms, total=total)


def _group(
    options: _Options, slots: Slots, method: Method, model: CostModel, sync: Sync, seed: int
) -> tuple[Grouping, Items, float]:
    """The groups, the items they hold, and the lower bound on the makespan."""
    from padless.planning import sequential
    from padless.planning.balanced import balanced, is_optimal
    from padless.planning.bounds import makespan_bound
    from padless.planning.problem import Problem

    most = options.max_sequences or len(slots.held)
    atoms, rounding = options.atoms, options.rounding
    given = make_items(slots, atoms, rounding, by_length=False)
    singles = make_items(slots, None, rounding)
    shared: dict[str, Any] = {
        "budget": options.budget, "ranks": options.ranks, "model": model, "lockstep": sync == "microbatch",
        "most": options.max_sequences, "every": options.every,
    }  # fmt: skip
    if method == "fixed":
        grouping = sequential.fixed(given, budget=options.budget, most=most, ranks=options.ranks)
    else:
        grouping = sequential.greedy(given, budget=options.budget, most=most, ranks=options.ranks)
    grouping, items = _complete(grouping, options.every), given
    reached = _time(grouping, items, model, sync)
    if method == "balanced":
        sorted_items = singles if atoms is None else make_items(slots, atoms, rounding)
        problem = Problem.of(
            sorted_items, fewest_rows=options.min_sequences, rows_multiple=options.rows_multiple, **shared
        )
        ours = balanced(problem, seed=seed)
        time = _time(ours, sorted_items, model, sync)
        free = options.min_sequences == options.rows_multiple == 1
        if not free or time <= reached:  # the published rule is a plan too, and never beats this one
            grouping, items, reached = ours, sorted_items, time
        if is_optimal(problem):
            return grouping, items, reached
    bound = makespan_bound(
        Problem.of(singles, **shared), reached=reached, padding=atoms is None or not len(slots.alone)
    )
    return grouping, items, bound


def _complete(grouping: Grouping, every: int) -> Grouping:
    """Empty micro-steps up to a multiple of ``every``."""
    missing = -len(grouping.start) % every
    if not missing:
        return grouping
    empty = np.zeros((missing, grouping.start.shape[1]), dtype=np.int64)
    return Grouping(
        order=grouping.order,
        start=np.concatenate([grouping.start, empty]),
        stop=np.concatenate([grouping.stop, empty]),
    )


def _group_costs(grouping: Grouping, items: Items, model: CostModel) -> npt.NDArray[np.float64]:
    """Modelled cost (K, R) of each group."""
    start, stop = grouping.start.ravel(), grouping.stop.ravel()  # (G,)
    held = np.flatnonzero(stop > start)
    by_place = held[np.argsort(start[held], kind="stable")]  # groups in the order of the items they hold
    widths = np.zeros((len(start), items.widths.shape[1]), dtype=np.int64)
    rows = np.zeros(len(start), dtype=np.int64)
    # Groups cover the order without gaps, so the starts alone cut it.
    widths[by_place] = np.maximum.reduceat(items.widths[grouping.order], start[by_place], axis=0)
    rows[by_place] = np.add.reduceat(items.rows[grouping.order], start[by_place])
    return model.padded(rows, widths).reshape(grouping.start.shape)


def _time(grouping: Grouping, items: Items, model: CostModel, sync: Sync) -> float:
    costs = _group_costs(grouping, items, model)
    return float(costs.max(axis=1).sum() if sync == "microbatch" else costs.sum(axis=0).max())


def _ordered(
    grouping: Grouping, items: Items, model: CostModel, method: Method, order: Order | None, seed: int
) -> Grouping:
    if order is not None:
        choose("order", order, ORDERS)
    elif method == "balanced":
        order = "largest-first"
    else:
        return grouping
    return reorder(grouping, _group_costs(grouping, items, model).max(axis=1), order, seed)
