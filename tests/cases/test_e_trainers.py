"""Ranks that disagree, as users of trainers met them; two gloo processes see all of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from padless import Plan
from padless.data import TokenBudgetSampler
from support.ranks import run_ranks

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank saw."""
    folder: Path = tmp_path_factory.mktemp("ranks")
    return run_ranks("support.case_ranks", "two", 2, folder=str(folder), seconds=280)


@pytest.mark.slow
def test_c02_ranks_with_unequal_targets_share_one_denominator(told: list[dict[str, Any]]) -> None:
    """transformers#34242, transformers#39395: sums 6 and 6 over 2 and 6 targets are 1.5, not 2.0."""
    for rank in told:
        assert rank["c02"] == [(pytest.approx(1.5), pytest.approx(1.5))]


@pytest.mark.slow
def test_e01_ranks_run_equally_many_micro_batches(told: list[dict[str, Any]]) -> None:
    """verl#6176: one rank needs three micro-batches; the other could do with two, and runs three."""
    assert told[0]["e01 never"] == [[10]] * 3
    assert sorted(told[1]["e01 never"]) == [[4], [5], [5]]
    moved = [micro for rank in told for micro in rank["e01 auto"]]
    assert len(told[0]["e01 auto"]) == len(told[1]["e01 auto"])
    assert sorted(n for micro in moved for n in micro) == [4, 5, 5, 10, 10, 10]
    assert all(len(micro) * max(micro) <= 10 for micro in moved)


@pytest.mark.slow
def test_e08_what_ranks_measured_apart_is_used_at_its_smallest(told: list[dict[str, Any]]) -> None:
    """llm-foundry#683: profiles say 240 and 200; both ranks use 200."""
    for budget, most in (rank["e08"] for rank in told):
        assert budget == 200
        assert most <= 200


@pytest.mark.slow
def test_k06_the_log_of_the_first_rank_shows_the_spread_over_ranks(told: list[dict[str, Any]]) -> None:
    """ArcticTraining#155: 18 tokens here and 4 there are 18 / 11 and 4 / 18."""
    spread = told[0]["k06"]
    assert spread["padless/imbalance_max_over_mean"] == pytest.approx(18 / 11)
    assert spread["padless/imbalance_min_over_max"] == pytest.approx(4 / 18)


def test_e07_whole_micro_batches_of_any_size_are_dealt_out() -> None:
    """accelerate#207, accelerate#679: batches of 3, 1, 2 and 4 rows; rank 0 takes the first and third."""
    sizes = [3, 1, 2, 4]
    plan = Plan(
        layout="padded",
        method="fixed",
        ranks=2,
        steps=2,
        lengths=np.full(10, 5),
        order=np.arange(10),
        offsets=np.concatenate([[0], np.cumsum(sizes)]),
        token_budget=20,
    )
    assert [[len(group) for group in plan.of_rank(rank)] for rank in range(2)] == [[3, 2], [1, 4]]
    lengths = np.random.default_rng(0).integers(3, 60, 100)
    ranks = [
        list(TokenBudgetSampler(lengths, token_budget=120, sequences_per_step=20, ranks=2, rank=rank))
        for rank in range(2)
    ]
    assert len(ranks[0]) == len(ranks[1])
    assert len({len(micro) for rank in ranks for micro in rank}) > 1
    seen = sorted({row for rank in ranks for micro in rank for row in micro})
    assert seen == list(range(100))
