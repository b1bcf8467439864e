"""Reported problems with token budgets, as planning cases."""

from __future__ import annotations

import numpy as np
import pytest

from laws import check_plan_laws
from padless import PadlessError, microbatch, pack


def test_d01_the_count_follows_from_the_limit_not_from_the_average() -> None:
    """verl#7553, verl#6735."""
    plan = pack([7] * 8, 8)
    assert len(plan) == 8
    assert plan.group_tokens.max() == 7
    assert len(microbatch([7] * 8, 8)) == 8


def test_d02_the_padding_a_batch_causes_is_charged() -> None:
    """data#788."""
    plan = microbatch([100, 10, 10, 10, 100], 150, method="fixed")
    assert [group.tolist() for group in plan] == [[0], [1, 2, 3], [4]]
    assert plan.group_tokens.tolist() == [100, 30, 100]


def test_d04_padded_and_packed_batches_are_judged_by_their_own_cost() -> None:
    """lhotse#640, lhotse#1145."""
    assert pack([7, 8, 9, 11], 36).group_tokens.tolist() == [35]
    plan = microbatch([7, 8, 9, 11], 36)
    assert len(plan) == 2
    assert plan.group_tokens.max() <= 36


def test_d05_over_budget_items_follow_a_policy_chosen_up_front() -> None:
    """fairseq#2063."""
    lengths = [10, 513, 20]
    for plan in (microbatch, pack):
        with pytest.raises(PadlessError, match=r"length 513 at index 1 exceeds .* 512"):
            plan(lengths, 512)
        dropped = plan(lengths, 512, overlong="drop")
        assert sorted(dropped.order.tolist()) == [0, 2]
        assert dropped.dropped.tolist() == [1]
        cut = plan(lengths, 512, overlong="truncate")
        held = dict(zip(cut.order.tolist(), cut.slot_lengths.tolist(), strict=True))
        assert held == {0: 10, 1: 512, 2: 20}
        alone = plan(lengths, 512, overlong="alone")
        assert [1] in [group.tolist() for group in alone]
        assert alone.alone.tolist() == [1]
        check_plan_laws(alone)


def test_d06_a_length_equal_to_the_capacity_fits_and_one_more_does_not() -> None:
    """OpenRLHF#1280, slime#866."""
    assert len(pack([20], 2 * 10)) == 1
    with pytest.raises(PadlessError, match="21 at index 0 exceeds capacity 20"):
        pack([21], 2 * 10)


def test_d07_no_rank_is_left_empty_by_an_item_that_fits_nowhere() -> None:
    """trl#6092."""
    plan = microbatch([12, 3, 12], 10, ranks=2, overlong="alone")
    check_plan_laws(plan)
    assert sorted(plan.order.tolist()) == [0, 1, 2]
    with pytest.raises(PadlessError, match="length 12 at index 0"):
        microbatch([12, 3, 12], 10, ranks=2)


def test_d09_a_cap_on_rows_and_the_token_budget_both_hold() -> None:
    """speechbrain#1881."""
    plan = microbatch([1] * 200, 80, method="fixed", max_sequences=64)
    assert plan.rows.tolist() == [64, 64, 64, 8]
    assert microbatch([1] * 200, 80, max_sequences=64).rows.max() <= 64


def test_d10_a_row_multiple_shrinks_a_batch_but_never_starves_it() -> None:
    """fairseq#808."""
    plan = microbatch([200] * 14, 1536, sequences_multiple_of=8)
    assert plan.rows.tolist() == [7, 7]
    assert plan.group_tokens.max() == 1400
    assert microbatch([100] * 16, 1536, sequences_multiple_of=8).rows.tolist() == [8, 8]


def test_d12_the_boundary_value_is_legal_and_added_tokens_count() -> None:
    """fairseq#1772."""
    lengths = np.array([1023, 1024]) + 1
    plan = pack(lengths, 1024, overlong="drop")
    assert plan.order.tolist() == [0]
    assert plan.dropped.tolist() == [1]


def test_d13_splitting_works_for_any_length() -> None:
    """torchtune#1697."""
    plan = pack([30] * 10 + [61], 60, overlong="split")
    check_plan_laws(plan)
    assert len(plan) == 7
    assert plan.real_tokens == 361
    assert sorted(plan.group_tokens.tolist()) == [1, 60, 60, 60, 60, 60, 60]
    pieces = pack([150], 60, overlong="split")
    assert [int(stop - start) for start, stop in pieces.spans[np.argsort(pieces.spans[:, 0])]] == [60, 60, 30]


def test_d14_the_costliest_batch_runs_first_and_the_rest_stay_shuffled() -> None:
    """crossfit#18, deepspeech.pytorch#68, ms-swift#10111."""
    lengths = np.random.default_rng(0).integers(1, 60, 60)
    first = microbatch(lengths, 180, order="largest-then-random", seed=1)
    other = microbatch(lengths, 180, order="largest-then-random", seed=2)
    costs = first.group_costs()
    assert costs[0] == costs.max() == other.group_costs()[0]
    assert sorted(costs) == sorted(other.group_costs())
    assert costs.tolist() != other.group_costs().tolist()
