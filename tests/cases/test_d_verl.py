"""Reports about budgets in verl, against the planner that padless puts behind it."""

from __future__ import annotations

from padless.integrations.verl_plan import Request, plan_ranks


def test_d01_an_average_is_only_a_lower_bound_of_the_number_of_micro_batches() -> None:
    """verl#7553, verl#6735: eight rows of 7 tokens and a limit of 8 need eight micro-batches, not ceil(56 / 8)."""
    plan = plan_ranks([[7] * 8], Request(token_budget=8))[0]
    assert plan.steps == 8
    assert plan.group_tokens.max() == 7


def test_d08_rows_are_judged_by_their_own_length_not_by_the_width_they_were_padded_to() -> None:
    """verl#3088: rows of 5 and 6 tokens in a mask 40 wide fit a budget of 16 together."""
    plan = plan_ranks([[5, 6]], Request(token_budget=16))[0]
    assert plan.steps == 1
    assert plan.real_tokens == 11
    assert plan.padded_tokens == 12
