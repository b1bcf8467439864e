"""Reports about ranks in verl, against the planner that padless puts behind it."""

from __future__ import annotations

from padless import CostModel
from padless.integrations.verl_plan import Request, plan_ranks

CHEAP = CostModel(per_microbatch=0)


def test_e01_ranks_agree_on_the_number_of_micro_batches() -> None:
    """verl#6176, verl#6178: one rank needs three micro-batches and the other could do with two."""
    plans = plan_ranks([[10, 10, 10], [5, 5, 4]], Request(token_budget=10))
    assert [plan.steps for plan in plans] == [3, 3]
    assert sorted(plans[1].lengths[group].tolist() for group in plans[1]) == [[4], [5], [5]]


def test_e09_the_number_of_micro_batches_is_a_multiple_that_a_pipeline_asks_for() -> None:
    """verl#1617: eight rows of 5 in a budget of 10 need four micro-batches; a multiple of three makes six."""
    plan = plan_ranks([[5] * 8], Request(token_budget=10, count_multiple_of=3))[0]
    assert plan.steps == 6
    assert plan.rows.min() >= 1
    assert plan.group_tokens.max() <= 10


def test_e11_rows_of_a_group_stay_in_one_micro_batch() -> None:
    """verl#5438: pairs of rows for a reward model."""
    plan = plan_ranks([[5, 5, 3, 3, 4, 4, 2, 2]], Request(token_budget=12, group_size=2, cost=CHEAP))[0]
    for group in plan:
        assert len(group) == 2 * len({row // 2 for row in group.tolist()})
    assert plan.group_tokens.max() <= 12
    assert plan.steps >= 3
