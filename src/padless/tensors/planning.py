"""From a batch's lengths and the caller's options to one plan, the same on every rank."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from padless.cost import CostModel
from padless.errors import PadlessError
from padless.lengths import IntArray
from padless.plan import Plan, Sync
from padless.planning.microbatch import microbatch
from padless.planning.pack import pack
from padless.tensors.layouts import is_packed

__all__ = ["PlanOptions", "plan_digest", "plan_for", "plan_in_place"]

Index = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """What `regroup` hands to the planners."""

    token_budget: int | None
    layout: str
    method: str
    cost: CostModel | None
    multiple_of: int | tuple[int, ...]
    sequence_multiple_of: int | tuple[int, ...]
    max_sequences: int | None
    overlong: str
    microbatches_multiple_of: int
    sync: Sync
    seed: int
    ladder: Any = None


def plan_for(lengths: IntArray, options: PlanOptions, *, ranks: int = 1, atoms: Any = None, every: int = 0) -> Plan:
    """One plan for ``lengths`` (N,) or (N, F) over ``ranks``; ``every`` overrides ``microbatches_multiple_of``."""
    if options.token_budget is None:
        raise PadlessError("token_budget is missing: give the most padded tokens of one micro-batch, or a plan")
    if not is_packed(options.layout):
        if options.sequence_multiple_of != 1:
            raise PadlessError("sequence_multiple_of rounds sequences inside packed rows; padded rows have multiple_of")
        return microbatch(
            lengths,
            options.token_budget,
            ranks=ranks,
            method=options.method,  # type: ignore[arg-type]
            cost=options.cost,
            multiple_of=options.multiple_of,
            max_sequences=options.max_sequences,
            atoms=atoms,
            overlong=options.overlong,  # type: ignore[arg-type]
            microbatches_multiple_of=every or options.microbatches_multiple_of,
            sync=options.sync,
            ladder=options.ladder,
        )
    if options.ladder is not None:
        raise PadlessError("ladder limits the widths of padded micro-batches; packed rows have multiple_of")
    if options.max_sequences is not None:
        raise PadlessError("max_sequences limits padded micro-batches; packed rows are limited by token_budget alone")
    made = pack(
        lengths,
        options.token_budget,
        method="best-fit-decreasing" if options.method == "balanced" else options.method,  # type: ignore[arg-type]
        balance="work" if options.method == "balanced" else "ranks",
        cost=options.cost,
        ranks=ranks,
        multiple_of=options.multiple_of,
        sequence_multiple_of=options.sequence_multiple_of,
        atoms=atoms,
        overlong=options.overlong,  # type: ignore[arg-type]
        seed=options.seed,
    )
    return with_steps(
        made,
        -(-made.steps // (every or options.microbatches_multiple_of)) * (every or options.microbatches_multiple_of),
    )


def with_steps(plan: Plan, steps: int) -> Plan:
    """The same plan with empty micro-steps behind it, up to ``steps``."""
    if steps == plan.steps:
        return plan
    more = np.full((steps - plan.steps) * plan.ranks, plan.offsets[-1])
    return replace(plan, steps=steps, offsets=np.concatenate([plan.offsets, more]), lower_bound=0.0)


def plan_in_place(lengths: IntArray, base: Index, options: PlanOptions, *, atoms: Index | None = None) -> Plan:
    """One plan in which every row stays on its rank: each rank's rows alone, then a common number of micro-steps.

    ``base`` (R + 1,) says which rows each rank owns. Micro-batches are laid in order of cost, so that those that run
    side by side cost alike.
    """
    ranks = len(base) - 1
    if options.ladder is not None:  # one for all: a number would make each rank its own
        options = replace(options, ladder=plan_for(lengths, options).ladder)
    shares = [slice(int(base[r]), int(base[r + 1])) for r in range(ranks)]
    plans = [_share(lengths, atoms, share, options, every=0) for share in shares]
    steps = max(plan.steps for plan in plans if plan is not None)
    for r, plan in enumerate(plans):
        if plan is not None and plan.steps != steps:
            finer = _share(lengths, atoms, shares[r], options, every=steps)
            assert finer is not None
            plans[r] = finer if finer.steps == steps else with_steps(plan, steps)
    return _interleave(lengths, atoms, plans, base, steps)


def _share(lengths: IntArray, atoms: Index | None, share: slice, options: PlanOptions, *, every: int) -> Plan | None:
    if share.start == share.stop:
        return None
    ids = None if atoms is None else atoms[share]
    return plan_for(lengths[share], options, ranks=1, atoms=ids, every=every)


def _interleave(lengths: IntArray, atoms: Index | None, plans: list[Plan | None], base: Index, steps: int) -> Plan:
    """Plans of single ranks as one: micro-step s holds the s-th dearest group of every rank."""
    order: list[Index] = []
    spans: list[Index] = []
    sizes = np.zeros((steps, len(plans)), dtype=np.int64)
    by_cost = [None if plan is None else np.argsort(-plan.group_costs(), kind="stable") for plan in plans]
    for step in range(steps):
        for r, plan in enumerate(plans):
            if plan is None:
                continue
            ranked = by_cost[r]
            assert ranked is not None
            slots = plan.slots(int(ranked[step]))
            order.append(plan.order[slots] + base[r])
            sizes[step, r] = len(order[-1])
            whole = lengths[order[-1]]
            if plan.spans is not None:
                spans.append(plan.spans[slots])
            elif whole.ndim == 1:
                spans.append(np.stack([np.zeros_like(whole), whole], axis=1))
    first = next(plan for plan in plans if plan is not None)
    named: dict[str, Any] = {
        name: np.concatenate([getattr(plan, name) + base[r] for r, plan in enumerate(plans) if plan is not None])
        for name in ("dropped", "truncated", "split", "alone")
    }
    cut = any(plan is not None and plan.spans is not None for plan in plans)
    return replace(
        first,
        ranks=len(plans),
        steps=steps,
        lengths=lengths,
        order=np.concatenate(order),
        offsets=np.concatenate([[0], np.cumsum(sizes.ravel())]),
        spans=np.concatenate(spans) if cut else None,
        atoms=atoms,
        lower_bound=0.0,
        **named,
    )


def plan_digest(plan: Plan | None) -> str | None:
    """A short text that differs where plans do."""
    if plan is None:
        return None
    digest = hashlib.blake2b(digest_size=8)
    for part in (plan.order, plan.offsets, plan.lengths, plan.spans):
        if part is not None:
            digest.update(np.ascontiguousarray(part).tobytes())
    return f"{plan.layout}, {plan.steps} x {plan.ranks}, {digest.hexdigest()}"
