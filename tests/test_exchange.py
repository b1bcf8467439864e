"""Regrouping over four gloo ranks: everything returns to its owner, and nobody is left waiting."""

from __future__ import annotations

from typing import Any

import pytest

from padless.exchange import fingerprint
from support.forked import run_forked
from support.rank_exchange import ROWS


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    return run_forked("support.rank_exchange", "everything", 4, seconds=240)


@pytest.mark.slow
@pytest.mark.parametrize("exchange", ["rows", "never"])
def test_ranks_derive_the_same_plan_and_run_every_row_once_in_as_many_micro_batches(
    found: list[dict[str, Any]], exchange: str
) -> None:
    parts = [result[exchange] for result in found]
    assert len({part["steps"] for part in parts}) == 1
    assert all(part["plan"] == parts[0]["plan"] for part in parts)
    assert all(len(part["weights"]) == part["steps"] for part in parts)
    names = [name for part in parts for name in part["uid"]]
    assert sorted(names) == sorted(f"{rank}.{i}" for rank, count in enumerate(ROWS) for i in range(count))
    if exchange == "never":
        assert parts[2]["weights"] == [0.0] * parts[2]["steps"]
        assert all(name.startswith("3.") for name in parts[3]["uid"])
    else:
        assert parts[2]["tokens"] > 0  # the empty rank works for the others


@pytest.mark.slow
@pytest.mark.parametrize("exchange", ["rows", "never"])
def test_all_ranks_share_one_ladder_of_widths(found: list[dict[str, Any]], exchange: str) -> None:
    assert len({width for result in found for width in result[f"{exchange} widths"]}) <= 2


@pytest.mark.slow
def test_a_rank_without_a_batch_keeps_its_place(found: list[dict[str, Any]]) -> None:
    moved, stayed = zip(*(result["absent"] for result in found), strict=True)
    assert len({len(weights) for weights in moved}) == len({len(weights) for weights in stayed}) == 1
    assert moved[2] == [1.0] * len(moved[2])  # it works for the others
    assert stayed[2] == [0.0] * len(stayed[2])


@pytest.mark.slow
def test_policies_responses_gradients_fallback_and_given_plans_hold_on_every_rank(found: list[dict[str, Any]]) -> None:
    for result in found:
        assert result["policies"] == ["alone", "drop", "split", "truncate"]
        assert result["responses"]
        assert result["gradient"]
        assert result["boxed"]
        assert result["atoms"]
        assert result["given"] == "greedy"
        assert result["fallback"] > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "named"),
    [
        ("options", "multiple_of is 1 on ranks [0, 2, 3] and 2 on ranks [1]"),
        ("layout", "different options"),
        ("bad batch", "'mystery'"),
        ("no mask", "no attention_mask"),
        ("missing key", "fields is"),
        ("dtype", "fields is"),
        ("too long", "rows are counted over all ranks"),
        ("budget", "token_budget=0"),
        ("nobody", "no rank has a row"),
        ("no batch", "no rank has a batch"),
        ("absent", "fields is"),
        ("gradient", "'double' requires a gradient"),
        ("plan", "plan is"),
        ("restore", "outputs for"),
        ("restore shape", "different options"),
    ],
)
def test_what_is_wrong_on_one_rank_is_an_error_on_every_rank_at_once(
    found: list[dict[str, Any]], what: str, named: str
) -> None:
    for rank, result in enumerate(found):
        message, seconds = result["errors"][what]
        assert message.startswith("PadlessError"), f"rank {rank}: {message}"
        assert named in message, f"rank {rank}: {message}"
        assert seconds < 20  # nobody waited for a timeout


@pytest.mark.slow
def test_ranks_go_on_after_errors(found: list[dict[str, Any]]) -> None:
    assert len({result["after"] for result in found}) == 1


def test_fingerprints_differ_where_options_do() -> None:
    assert fingerprint({"a": 1, "b": None}) == fingerprint({"b": None, "a": 1})
    assert len({fingerprint({"a": value}) for value in (1, 1.0, "1", None, (1,))}) == 5
