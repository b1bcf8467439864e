"""The plan as a value: views, sums, storage, and the laws it checks on itself."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from padless import CostModel, PadlessError, Plan, microbatch, pack

LENGTHS = [30, 5, 12, 8, 21, 17, 3]


@pytest.fixture
def plan() -> Plan:
    return microbatch(LENGTHS, 64, ranks=2)


def test_groups_by_step_and_by_rank_are_the_same_groups(plan: Plan) -> None:
    groups = list(plan)
    for step in range(plan.steps):
        for rank in range(plan.ranks):
            assert plan.group(step, rank).tolist() == groups[step * plan.ranks + rank].tolist()
    assert [g.tolist() for g in plan.of_rank(1)] == [g.tolist() for g in groups[1::2]]


def test_a_group_that_is_not_there_is_named(plan: Plan) -> None:
    with pytest.raises(PadlessError, match="step=99, rank=0"):
        plan.group(99)


def test_arrays_cannot_be_written(plan: Plan) -> None:
    with pytest.raises(ValueError, match="read-only"):
        plan.order[0] = 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.ranks = 3  # type: ignore[misc]


def test_makespan_is_the_sum_of_slowest_ranks_or_the_slowest_sum(plan: Plan) -> None:
    costs = plan.group_costs().reshape(plan.steps, plan.ranks)
    assert plan.makespan() == costs.max(axis=1).sum()
    assert plan.makespan(sync="step") == costs.sum(axis=0).max() <= plan.makespan()
    free = CostModel(per_microbatch=0, per_token=1)
    assert plan.makespan(free, "step") >= plan.real_tokens / 2


def test_saved_and_loaded_plans_are_equal(tmp_path: Path) -> None:
    for made in (microbatch(LENGTHS, 20, overlong="split"), pack(LENGTHS, 40, ranks=3), microbatch([[3, 4]], 20)):
        made.save(tmp_path / "plan.npz")
        assert Plan.load(tmp_path / "plan.npz") == made
    assert made != microbatch([[3, 5]], 20)


def test_a_file_that_is_no_plan_is_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "other.npz", order=np.arange(3))
    with pytest.raises(PadlessError, match="is not a plan"):
        Plan.load(tmp_path / "other.npz")


BREAKS: list[tuple[dict[str, Any], str]] = [
    ({"order": np.array([0, 0, 1, 2, 3, 4, 5])}, "appears"),
    ({"order": np.array([0, 1, 2, 3, 4, 5, 9])}, "outside"),
    ({"offsets": np.array([0, 7])}, "offsets"),
    ({"token_budget": 10}, "the budget is 10"),
    ({"max_sequences": 1}, "at most 1"),
    ({"min_sequences": 7}, "at least 7"),
    ({"microbatches_multiple_of": 5}, "a multiple of 5"),
    ({"atoms": np.zeros(7, dtype=np.int64)}, "spread over groups"),
    ({"dropped": np.array([0])}, "sequence 0 appears 1 times"),
    ({"truncated": np.array([0])}, "holds no spans"),
]


@pytest.mark.parametrize(("change", "message"), BREAKS, ids=[next(iter(change)) for change, _ in BREAKS])
def test_each_broken_law_is_found_and_named(plan: Plan, change: dict[str, Any], message: str) -> None:
    plan.check()
    with pytest.raises(PadlessError, match=message):
        dataclasses.replace(plan, **change).check()


def test_pieces_that_do_not_follow_one_another_are_found() -> None:
    plan = microbatch([50], 20, overlong="split")
    spans = plan.spans.copy()  # type: ignore[union-attr]
    spans[0] += 1
    with pytest.raises(PadlessError, match="do not follow"):
        dataclasses.replace(plan, spans=spans).check()


def test_summaries_can_be_read_and_stored(plan: Plan) -> None:
    import json

    summary = json.loads(json.dumps(plan.to_dict(arrays=True)))
    assert summary["sequences"] == 7
    assert summary["order"] == plan.order.tolist()
    assert "occupancy" in repr(plan)
    assert "<table>" in plan._repr_html_()
    assert 0 <= plan.gap < 1
