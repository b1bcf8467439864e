"""Two gloo processes and options beside the defaults (`test_same_result` has these): the host's optimizer steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from support.ranks import run_ranks
from support.trainers import Outcome, assert_same_run

TWO: list[dict[str, Any]] = [
    {"run": "plain", "kind": "qwen2", "options": {"exchange": "never"}},
    {"run": "dpo", "kind": "qwen2", "options": {"pairs": "apart"}},
    {"run": "reward", "kind": "qwen2"},
    # Each rank divides by its own targets here: rows must stay where they are.
    {"run": "plain", "kind": "qwen2", "average_tokens_across_devices": False},
]


def compare(ranks: int, scenarios: list[dict[str, Any]], folder: Path) -> None:
    outcomes: list[list[tuple[Outcome, Outcome]]] = run_ranks(
        "support.trl_runs", "both", ranks, scenarios=scenarios, folder=str(folder), seconds=540
    )
    for at, scenario in enumerate(scenarios):
        for rank in range(ranks):
            host, ours = outcomes[rank][at]
            try:
                assert_same_run(host, ours)
            except AssertionError as error:
                raise AssertionError(f"{scenario}, rank {rank}: {error}") from None
        padded = [sum(outcomes[rank][at][which].padded_tokens for rank in range(ranks)) for which in (0, 1)]
        assert padded[1] < padded[0], f"{scenario}: {padded}"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_ranks_take_the_steps_of_the_host(tmp_path: Path) -> None:
    compare(2, TWO, tmp_path)
