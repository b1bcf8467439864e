"""One optimizer step's batch as micro-batches under a token budget, and their outputs back in the caller's order."""

from __future__ import annotations

from typing import Any

from padless.cost import CostModel
from padless.errors import PadlessError, choose
from padless.plan import Plan, Sync
from padless.planning.microbatch import microbatch
from padless.tensors.fields import Fields
from padless.tensors.inputs import Responses
from padless.tensors.microbatches import MicroBatch, Regrouped
from padless.tensors.rows import read_rows

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
    max_sequences: int | None = None,
    process_group: Any = None,
    atoms: Any = None,
    overlong: str = "error",
    microbatches_multiple_of: int = 1,
    sync: Sync = "microbatch",
    responses: Responses = "sequence",
    plan: Plan | None = None,
) -> Regrouped:
    """Cut the batch of one optimizer step into micro-batches of at most ``token_budget`` padded tokens.

    >>> import torch
    >>> batch = {"input_ids": torch.tensor([[0, 7], [5, 6]]), "attention_mask": torch.tensor([[0, 1], [1, 1]])}
    >>> step = regroup(batch, 2)
    >>> [micro.inputs["input_ids"].tolist() for micro in step]
    [[[5, 6]], [[7]]]
    >>> step.restore([micro.inputs["input_ids"] for micro in step], span="sequence").tolist()
    [[0, 7], [5, 6]]
    """
    choose("responses", responses, ("sequence", "block"))
    rows = read_rows(batch, fields)
    lengths = rows.lengths
    if plan is None:
        if token_budget is None:
            raise PadlessError("token_budget is missing: give the most padded tokens of one micro-batch, or a plan")
        plan = microbatch(
            lengths,
            token_budget,
            method=method,  # type: ignore[arg-type]
            cost=cost,
            multiple_of=multiple_of,
            max_sequences=max_sequences,
            atoms=atoms,
            overlong=overlong,  # type: ignore[arg-type]
            microbatches_multiple_of=microbatches_multiple_of,
            sync=sync,
        )
    elif plan.lengths.shape != lengths.shape or (plan.lengths != lengths).any():
        raise PadlessError("the plan was made for other lengths than this batch has")
    return Regrouped(rows=rows, plan=plan, responses=responses)
