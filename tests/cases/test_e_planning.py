"""Reported problems with ranks, as planning cases."""

from __future__ import annotations

import numpy as np

from laws import check_plan_laws
from padless import CostModel, microbatch, pack
from padless.planning.balance import partition


def test_e01_all_ranks_run_equally_many_micro_batches() -> None:
    """verl#6176, verl#5747."""
    plan = pack([10, 10, 10, 5, 5, 4], 10, ranks=2)
    assert [len(plan.of_rank(rank)) for rank in range(2)] == [plan.steps] * 2
    assert (plan.rows > 0).all()
    assert plan.group_tokens.max() <= 10


def test_e03_every_rank_derives_the_same_plan_and_takes_its_own_part() -> None:
    """audio#3068, Automodel#3473."""
    lengths = list(range(1, 13))
    for seed in range(3):
        plans = [microbatch(lengths, 12, ranks=3, seed=seed) for _ in range(3)]
        assert plans[0] == plans[1] == plans[2]
        seen = [i for rank, plan in enumerate(plans) for group in plan.of_rank(rank) for i in group.tolist()]
        assert sorted(seen) == list(range(12))
        assert len({len(plan.of_rank(rank)) for rank, plan in enumerate(plans)}) == 1


def test_e04_counts_that_ranks_do_not_divide_are_normal() -> None:
    """miles#1356, verl#4152."""
    lengths = np.random.default_rng(0).integers(1, 500, 206)
    place = partition(lengths, 4, equal_counts=True)
    assert sorted(np.bincount(place).tolist(), reverse=True) == [52, 52, 51, 51]
    sums = np.bincount(place, weights=lengths)
    assert sums.max() / sums.mean() < 1.01
    assert sorted(np.bincount(partition(lengths[:10], 4, equal_counts=True)).tolist(), reverse=True) == [3, 3, 2, 2]


def test_e05_packs_beyond_a_multiple_of_the_ranks_are_not_thrown_away() -> None:
    """open-instruct#1271."""
    plan = pack([6] * 10, 10, ranks=4)
    check_plan_laws(plan)
    assert len(plan) == 12
    assert int((plan.rows > 0).sum()) == 10
    assert len(plan.order) == 10
    assert not len(plan.dropped)


def test_e06_an_odd_number_of_batches_is_completed_with_batches_of_no_weight() -> None:
    """lhotse#646, accelerate#776."""
    plan = microbatch([10] * 5, 10, ranks=2)
    assert plan.steps == 3
    assert sorted(plan.rows.tolist()) == [0, 1, 1, 1, 1, 1]


def test_e09_the_number_of_micro_batches_can_be_forced_to_a_multiple() -> None:
    """verl#1617."""
    plan = microbatch([5] * 8, 10, microbatches_multiple_of=3)
    assert plan.steps == 6
    assert (plan.rows > 0).all()
    assert plan.group_tokens.max() <= 10
    few = microbatch([5], 10, microbatches_multiple_of=3)
    assert few.rows.tolist().count(0) == 2


def test_e10_work_is_balanced_by_a_cost_not_only_by_tokens() -> None:
    """slime#2017, verl#2452, SkyRL#204."""
    lengths = np.array([8, 4, 4, 4, 4])
    place = partition(lengths**2, 2)
    assert np.bincount(place, weights=lengths**2).tolist() == [64, 64]
    tokens = np.bincount(partition(lengths, 2), weights=lengths)
    assert sorted(tokens.tolist()) == [12, 12]
    cost = CostModel(per_microbatch=0, per_token=0, per_token_squared=1)
    assert pack(lengths, 16, ranks=2, cost=cost, balance="work").group_costs().max() == 64


def test_e11_rows_that_belong_together_stay_together_and_no_rank_stays_empty() -> None:
    """verl#5438, trl#7328."""
    lengths, atoms = [5, 5, 3, 3, 4, 4, 2, 2], [0, 0, 1, 1, 2, 2, 3, 3]
    plan = pack(lengths, 12, atoms=atoms)
    check_plan_laws(plan)
    assert len(plan) == 3
    padded = microbatch(lengths, 12, atoms=atoms, ranks=4)
    check_plan_laws(padded)
    assert (padded.rows > 0).all()
