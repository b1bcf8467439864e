"""The laws that every plan obeys, checked on the plan itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from padless.errors import PadlessError

if TYPE_CHECKING:
    from padless.plan import Plan

__all__ = ["check_plan"]


def check_plan(plan: Plan) -> None:
    """Raise `PadlessError` naming the first broken law: shape, nothing lost, budget, row ceiling, atoms."""
    _check_shape(plan)
    _check_nothing_lost(plan)
    _check_budget(plan)
    _check_atoms(plan)


def _check_shape(plan: Plan) -> None:
    groups = plan.steps * plan.ranks
    if len(plan.offsets) != groups + 1:
        raise PadlessError(
            f"the plan has {len(plan.offsets)} offsets; {plan.steps} steps x {plan.ranks} ranks need {groups + 1}"
        )
    if plan.offsets[0] != 0 or plan.offsets[-1] != len(plan.order) or (np.diff(plan.offsets) < 0).any():
        raise PadlessError(f"the plan's offsets do not cut its {len(plan.order)} slots into consecutive groups")
    if plan.steps % plan.microbatches_multiple_of:
        raise PadlessError(
            f"the plan has {plan.steps} micro-steps; a multiple of {plan.microbatches_multiple_of} is asked for"
        )
    if plan.spans is not None and plan.spans.shape != (len(plan.order), 2):
        raise PadlessError(f"the plan's spans have shape {plan.spans.shape}; expected ({len(plan.order)}, 2)")


def _check_nothing_lost(plan: Plan) -> None:
    count = len(plan.lengths)
    if len(plan.order) and (plan.order.min() < 0 or plan.order.max() >= count):
        raise PadlessError(f"the plan names a sequence outside 0..{count - 1}")
    expected = np.ones(count, dtype=np.int64)
    expected[plan.dropped] = 0
    pieces = np.bincount(plan.order, minlength=count)  # (N,)
    whole = np.ones(count, dtype=bool)
    whole[plan.split] = False
    wrong = np.flatnonzero(whole & (pieces != expected))
    if len(wrong):
        raise PadlessError(
            f"sequence {wrong[0]} appears {pieces[wrong[0]]} times in the plan; expected {expected[wrong[0]]}"
        )
    if plan.spans is None:
        if len(plan.split) or len(plan.truncated):
            raise PadlessError("the plan names split or truncated sequences but holds no spans")
        return
    _check_spans(plan, whole)


def _check_spans(plan: Plan, whole: npt.NDArray[np.bool_]) -> None:
    """Pieces of a sequence follow one another without gap or overlap and reach its end, unless it was truncated."""
    assert plan.spans is not None
    start, stop = plan.spans[:, 0], plan.spans[:, 1]
    by_piece = np.lexsort((start, plan.order))
    order, start, stop = plan.order[by_piece], start[by_piece], stop[by_piece]
    first = np.ones(len(order), dtype=bool)
    first[1:] = order[1:] != order[:-1]
    last = np.ones(len(order), dtype=bool)
    last[:-1] = first[1:]
    before = np.where(first, 0, np.concatenate([[0], stop[:-1]]))
    broken = np.flatnonzero((start != before) | (stop <= start))
    if len(broken):
        raise PadlessError(f"the pieces of sequence {order[broken[0]]} do not follow one another")
    cut = np.zeros(len(plan.lengths), dtype=bool)
    cut[plan.truncated] = True
    ends_at = plan.lengths[order]
    short = np.flatnonzero(last & (stop != ends_at) & ~cut[order])
    if len(short):
        raise PadlessError(f"sequence {order[short[0]]} loses tokens but is not named as truncated")


def _check_budget(plan: Plan) -> None:
    tokens, rows = plan.group_tokens, plan.rows
    may_exceed = np.zeros(len(plan), dtype=bool)
    if len(plan.alone):
        flagged = np.isin(plan.order, plan.alone)
        held = np.flatnonzero(rows > 0)
        may_exceed[held] = np.logical_and.reduceat(flagged, plan.offsets[held])
        may_exceed &= rows == 1 if plan.atoms is None else _holds_one_atom(plan)
    over = np.flatnonzero((tokens > plan.token_budget) & ~may_exceed)
    if len(over):
        g = int(over[0])
        raise PadlessError(f"group {g} holds {tokens[g]} padded tokens; the budget is {plan.token_budget}")
    short = np.flatnonzero((rows > 0) & (rows < plan.min_sequences))
    if len(short):
        g = int(short[0])
        raise PadlessError(f"group {g} holds {rows[g]} sequences; at least {plan.min_sequences} are asked for")
    if plan.max_sequences is not None and len(rows) and rows.max() > plan.max_sequences:
        g = int(rows.argmax())
        raise PadlessError(f"group {g} holds {rows[g]} sequences; at most {plan.max_sequences} are allowed")


def _holds_one_atom(plan: Plan) -> npt.NDArray[np.bool_]:
    """Whether all sequences of each group share their atom, (G,)."""
    assert plan.atoms is not None
    ids, held = plan.atoms[plan.order], np.flatnonzero(plan.rows > 0)
    one = np.ones(len(plan), dtype=bool)
    starts = plan.offsets[held]
    one[held] = np.minimum.reduceat(ids, starts) == np.maximum.reduceat(ids, starts)
    return one


def _check_atoms(plan: Plan) -> None:
    if plan.atoms is None:
        return
    groups = np.repeat(np.arange(len(plan)), plan.rows)  # (S,)
    ids = plan.atoms[plan.order]  # (S,)
    by_id = np.argsort(ids, kind="stable")
    ids, groups = ids[by_id], groups[by_id]
    apart = np.flatnonzero((ids[1:] == ids[:-1]) & (groups[1:] != groups[:-1]))
    if len(apart):
        raise PadlessError(f"atom {ids[apart[0]]} is spread over groups {groups[apart[0]]} and {groups[apart[0] + 1]}")
