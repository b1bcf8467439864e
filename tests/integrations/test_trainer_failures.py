"""Ranks that disagree, hold a bad row or die: every rank says so, and none waits for ever."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from support.ranks import run_ranks
from support.trainers import assert_same_run


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_rank_hears_what_is_wrong_and_short_ranks_are_right(tmp_path: Path) -> None:
    for heard in run_ranks("support.failing_ranks", "told", 2, folder=str(tmp_path), seconds=540):
        for name, word in (
            ("different budgets", "token_budget"),
            ("different planners", "method"),
            ("a long row", "45"),
        ):
            assert heard[name].startswith("PadlessError"), (name, heard[name])
            assert word in heard[name], (name, heard[name])
        # One row on each rank and step: a rank may end up with a micro-batch of weight 0.
        assert_same_run(heard["single rows, host"], heard["single rows"])
        # transformers#35387: four rows, two ranks, two epochs are four optimizer steps, and no empty window.
        assert len(heard["epochs"].losses) == 4
        assert_same_run(heard["epochs, host"], heard["epochs"])


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_rank_that_dies_ends_the_others(tmp_path: Path) -> None:
    begun = time.monotonic()
    with pytest.raises(RuntimeError, match="this rank is broken"):
        run_ranks("support.failing_ranks", "die", 2, folder=str(tmp_path), seconds=540)
    assert time.monotonic() - begun < 540
