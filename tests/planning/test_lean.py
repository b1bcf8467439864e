"""The fast planner of one step: legal plans, and close to the thorough one."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from padless import CostModel, Plan
from padless.planning.lean import lean_groups, lean_steps
from support.lengths import measured_lengths


def plan_of(lengths: Any, budget: int, **options: Any) -> Plan:
    chosen = {"ranks": 1, "multiple_of": 1, "max_sequences": None, "every": 1, "cost": CostModel(), **options}
    array = np.asarray(lengths)
    steps, order, offsets, padded = lean_groups(array, budget, **chosen)
    plan = Plan(
        layout="padded", method="lean", ranks=chosen["ranks"], steps=steps, lengths=array, order=order, offsets=offsets,
        token_budget=budget, multiple_of=chosen["multiple_of"], max_sequences=chosen["max_sequences"],
        cost=chosen["cost"],
    )  # fmt: skip
    assert (plan.group_tokens == padded).all()
    assert steps % chosen["every"] == 0
    return plan


@settings(max_examples=200)
@given(
    st.lists(st.integers(1, 60), min_size=1, max_size=80),
    st.integers(1, 9),
    st.sampled_from([1, 4, 7]),
    st.sampled_from([None, 1, 3]),
    st.integers(1, 3),
    st.sampled_from([
        CostModel(), CostModel(per_microbatch=5), CostModel(per_microbatch=20, per_column=3, per_token_squared=0.1),
        CostModel(per_microbatch=1, per_token=0, per_column=2),
    ]),
)  # fmt: skip
def test_every_lean_plan_keeps_the_laws(
    lengths: list[int], ranks: int, multiple: int, most: int | None, every: int, cost: CostModel
) -> None:
    plan = plan_of(lengths, 64, ranks=ranks, multiple_of=multiple, max_sequences=most, every=every, cost=cost)
    plan.check()


@settings(max_examples=60)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=8), st.integers(0, 60))
def test_on_one_rank_no_cut_of_the_sorted_lengths_costs_less(lengths: list[int], overhead: int) -> None:
    cost, budget = CostModel(per_microbatch=overhead), 80
    found = plan_of(lengths, budget, cost=cost).makespan()
    ordered = sorted(lengths, reverse=True)
    best = np.inf
    for pattern in range(2 ** (len(ordered) - 1)):
        cuts = [0, *(i + 1 for i in range(len(ordered) - 1) if pattern >> i & 1), len(ordered)]
        runs = [(stop - start, ordered[start]) for start, stop in pairwise(cuts)]
        if all(rows * width <= budget for rows, width in runs):
            best = min(best, sum(float(cost.seconds(rows, width)) for rows, width in runs))
    assert found == pytest.approx(best)


@pytest.mark.parametrize(
    ("ranks", "size", "slower"), [(1, 256, 1.001), (8, 256, 1.06), (8, 1024, 1.05), (64, 1024, 1.05)]
)
def test_lean_plans_are_nearly_as_fast_as_thorough_ones(ranks: int, size: int, slower: float) -> None:
    from padless.planning.microbatch import microbatch

    lengths = measured_lengths("mix_sft_general")
    lengths = lengths[lengths <= 16_384]
    rng = np.random.default_rng(0)
    ratios = []
    for _ in range(6):
        step = rng.choice(lengths, size, replace=False)
        thorough = microbatch(step, 16_384, ranks=ranks).makespan()
        ratios.append(plan_of(step, 16_384, ranks=ranks).makespan() / thorough)
    assert np.mean(ratios) < slower


@pytest.mark.parametrize("ranks", [1, 2, 5, 40])
@pytest.mark.parametrize("kind", [np.int32, np.int64])
def test_steps_planned_at_once_are_those_planned_one_at_a_time(ranks: int, kind: Any) -> None:
    rng = np.random.default_rng(ranks)
    lengths = rng.integers(1, 900, 200).astype(kind)
    members = rng.permutation(200)
    bounds = np.array([0, 70, 71, 140, 200])
    options: dict[str, Any] = {
        "ranks": ranks, "multiple_of": 8, "max_sequences": None, "every": 2, "cost": CostModel(per_microbatch=50),
    }  # fmt: skip
    many = lean_steps(lengths, members, bounds, 2000, **options)
    for b, (start, stop) in enumerate(pairwise(bounds.tolist())):
        held = lengths[members[start:stop]]
        steps, order, offsets, padded = lean_groups(held, 2000, **options)
        assert many.steps[b] == steps
        assert (many.order[start:stop] == order).all()
        assert (many.offsets[b, : len(offsets)] == offsets).all()
        assert (many.padded[b, : len(padded)] == padded).all()
        assert many.tokens[b] == held.sum()
        assert held[many.shortest[b]] == held.min()
