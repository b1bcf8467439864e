"""Packed micro-batches of several ranks share the work of a step."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from laws import check_plan_laws
from padless import CostModel
from padless.tensors.planning import PlanOptions, plan_for

OPTIONS = PlanOptions(
    token_budget=16_384,
    layout="packed-position-ids",
    method="balanced",
    cost=CostModel(per_microbatch=0, per_token=1, per_token_squared=1 / 24_576),
    multiple_of=1,
    sequence_multiple_of=1,
    max_sequences=None,
    overlong="error",
    microbatches_multiple_of=1,
    sync="microbatch",
    seed=0,
)


def test_packed_micro_batches_of_one_step_share_its_work_evenly() -> None:
    lengths = np.random.default_rng(0).lognormal(np.log(500), 0.8, 512).clip(8, 8192).astype(np.int64)
    plan = plan_for(lengths, OPTIONS, ranks=8)
    check_plan_laws(plan)
    assert plan.cost == OPTIONS.cost
    assert plan.makespan() <= 1.01 * float((lengths + np.square(lengths.astype(float)) / 24_576).sum()) / 8
    plain = plan_for(lengths, replace(OPTIONS, method="best-fit-decreasing"), ranks=8)
    assert len(plan) == len(plain)
    assert plan.makespan() < 0.97 * plain.makespan()
