"""One optimizer step's batch as micro-batches under a token budget, and their outputs back in the caller's order."""

from __future__ import annotations

from typing import Any, Literal

import torch

from padless.cost import CostModel
from padless.errors import PadlessError, choose
from padless.lengths import as_ids
from padless.plan import Plan, Sync
from padless.tensors.fields import Fields
from padless.tensors.inputs import Responses, check_packable
from padless.tensors.layouts import LayoutVerdicts, choose_layout, is_packed, warn_unverified
from padless.tensors.microbatches import MicroBatch, Regrouped
from padless.tensors.planning import PlanOptions, plan_for
from padless.tensors.rowlist import is_row_list, read_row_list
from padless.tensors.rows import Rows, read_rows

__all__ = ["MicroBatch", "Regrouped", "regroup"]


def regroup(
    batch: Any,
    token_budget: int | None = None,
    *,
    layout: str = "padded",
    method: str = "balanced",
    cost: CostModel | None = None,
    fields: Fields | None = None,
    multiple_of: int | tuple[int, ...] = 1,
    sequence_multiple_of: int | tuple[int, ...] = 1,
    max_sequences: int | None = None,
    ladder: Any = None,
    process_group: Any = None,
    exchange: Literal["rows", "never"] = "rows",
    sync: Sync = "microbatch",
    atoms: Any = None,
    overlong: str = "error",
    microbatches_multiple_of: int = 1,
    responses: Responses = "sequence",
    plan: Plan | None = None,
    report: LayoutVerdicts | None = None,
    unsafe: bool = False,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Regrouped:
    """Cut the batch of one optimizer step into micro-batches of at most ``token_budget`` padded tokens.

    Rows move only inside the step: with the step's denominators (`padless.loss`), loss and gradients are those of the
    sequences one at a time. Micro-batches are made when iterated over, as often as asked for.

    Args:
        batch: dict (nested or not) or TensorDict with ``attention_mask`` (N, W), padded on either side or both; or a
            list of rows without padding. With a process group, None on a rank that has no rows.
        token_budget: ceiling on the padded tokens of one micro-batch on one rank.
        layout: ``"padded"``, ``"packed"``, a full name from `padless.tensors.LAYOUTS`, or ``"auto"`` with ``report``.
        method: a method of `padless.microbatch`, or of `padless.pack` for packed layouts.
        cost: what a micro-batch costs, for ``"balanced"``.
        fields: roles of keys beside the well-known ones: `Field` values or a preset such as ``rlhf()``.
        multiple_of: widths are rounded up to it.
        sequence_multiple_of: in packed rows, each sequence is rounded up to it.
        max_sequences: ceiling on the rows of one micro-batch.
        ladder: the only widths allowed, for compiled models: widths, or how many of them.
        process_group: plan the rows of all ranks together. Every rank calls this, with the same options.
        exchange: ``"rows"`` moves rows to the ranks that compute them; ``"never"`` keeps them where they are and only
            plans a common number of micro-batches.
        sync: whether ranks meet in every micro-batch (FSDP, ZeRO-3) or only at the end of the step (DDP).
        atoms: one id per row; rows of the same id, on any rank, stay in one micro-batch.
        overlong: what happens to a row over the budget: ``"error"``, ``"truncate"``, ``"split"``, ``"drop"``,
            ``"alone"``.
        microbatches_multiple_of: the number of micro-batches is a multiple of it.
        responses: ``"sequence"``: response fields land at their row's response. ``"block"``: they keep columns of
            their own (padded layouts).
        plan: use this plan for these lengths instead of making one.
        report: verdicts on layouts, from `padless.verify.check_layouts`. A layout that it does not allow is refused.
            Packed rows without a report warn (``UserWarning``, once per process): nothing here knows the model.
        unsafe: use such a layout all the same; it stays visible as ``Regrouped.unsafe``. Without a report: pack, and
            do not warn.
        dtype: of additive masks.
        seed: of randomised packing.

    Raises:
        PadlessError: bad input, on every rank of the group where there is one.

    >>> import torch
    >>> batch = {"input_ids": torch.tensor([[0, 7], [5, 6]]), "attention_mask": torch.tensor([[0, 1], [1, 1]])}
    >>> step = regroup(batch, 2)
    >>> [micro.inputs["input_ids"].tolist() for micro in step]
    [[[5, 6]], [[7]]]
    >>> step.restore([micro.inputs["input_ids"] for micro in step], span="sequence").tolist()
    [[0, 7], [5, 6]]
    """
    how = {"exchange": exchange, "responses": responses, "dtype": dtype, "unsafe": unsafe}
    planning: dict[str, Any] = {
        "token_budget": token_budget,
        "method": method,
        "cost": cost,
        "multiple_of": multiple_of,
        "sequence_multiple_of": sequence_multiple_of,
        "max_sequences": max_sequences,
        "ladder": ladder,
        "overlong": overlong,
        "microbatches_multiple_of": microbatches_multiple_of,
        "sync": sync,
        "seed": seed,
    }

    def prepare() -> tuple[Rows | None, PlanOptions, bool, Any]:
        choose("responses", responses, ("sequence", "block"))
        choose("exchange", exchange, ("rows", "never"))
        name, against = choose_layout(layout, report, unsafe=unsafe)
        plans = PlanOptions(layout=name, **planning)
        if batch is None and process_group is not None:
            return None, plans, against, None
        rows = read_row_list(batch, fields) if is_row_list(batch) else read_rows(batch, fields)
        if is_packed(name):
            check_packable(rows, name)
        ids = None if atoms is None else as_ids(atoms, rows.count, name="atoms")
        return rows, plans, against, ids

    if isinstance(layout, str):
        warn_unverified(layout, report, unsafe=unsafe)
    if process_group is not None:
        from padless.tensors.together import regroup_together

        return regroup_together(prepare, {**how, **planning, "layout": layout}, plan, process_group)
    rows, options, against, ids = prepare()
    if rows is None or not rows.count:
        raise PadlessError("the batch has no rows")
    made = plan_for(rows.lengths, options, atoms=ids) if plan is None else check_given(plan, rows.lengths, options, 1)
    return Regrouped(
        home=rows,
        store=rows,
        plan=made,
        layout=options.layout,
        responses=responses,
        dtype=dtype,
        unsafe=against,
        filler=int(rows.lengths.reshape(rows.count, -1).sum(axis=1).argmin()),
    )


def check_given(plan: Plan, lengths: Any, options: PlanOptions, ranks: int) -> Plan:
    """A plan that the caller made, if it fits this batch."""
    if plan.lengths.shape != lengths.shape or (plan.lengths != lengths).any():
        raise PadlessError(
            f"the plan was made for {len(plan.lengths)} sequences of other lengths than the batch's {len(lengths)}"
        )
    if plan.ranks != ranks:
        raise PadlessError(f"the plan is for {plan.ranks} ranks; this regrouping has {ranks}")
    if (plan.layout == "packed") != is_packed(options.layout):
        raise PadlessError(f"the plan's layout is {plan.layout!r}; layout={options.layout!r} was asked for")
    return plan
