"""verl's real worker and FSDP2 engine: the same step with and without padless, on one and two ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.verl_env import run_ranks

KINDS = ("qwen2", "jamba")


@pytest.fixture(scope="module", params=[1, 2], ids=["one-rank", "two-ranks"])
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank of the job measured."""
    folder: Path = tmp_path_factory.mktemp("verl")
    return run_ranks("support.verl_steps", request.param, folder)


def computed(run: dict[str, Any], phase: str) -> list[int]:
    return [rows * width for rows, width in run[f"{phase}_shapes"]]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_log_probs_loss_and_gradient_norm_are_those_of_verl(ranks: list[dict[str, Any]], kind: str) -> None:
    for rank in ranks:
        stock, ours = rank[kind]["stock"], rank[kind]["padless"]
        assert np.abs(stock["log_probs"] - ours["log_probs"]).max() < 1e-5
        for name in ("loss", "grad_norm"):
            (before,), (after,) = stock["metrics"][name], ours["metrics"][name]
            assert after == pytest.approx(before, rel=1e-6), name
        assert stock["metrics"]["grad_norm"][0] > 1e-3  # there is something to compare


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["infer", "update"])
@pytest.mark.parametrize("kind", KINDS)
def test_padding_goes_and_the_budget_holds(
    ranks: list[dict[str, Any]], kind: str, phase: str, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = {}
    for arm in ("stock", "padless"):
        runs = [rank[kind][arm] for rank in ranks]
        tokens = [computed(run, phase) for run in runs]
        rows[arm] = {
            "computed": sum(map(sum, tokens)),
            "occupancy": sum(run["real_tokens"] for run in runs) / sum(map(sum, tokens)),
            "peak": max(map(max, tokens)) / runs[0]["budget"],
            "micro": len(tokens[0]),
        }
        assert len({len(each) for each in tokens}) == 1, "ranks must run the same number of micro-batches"
    with capsys.disabled():
        print(f"\n{kind}, {phase}, {len(ranks)} ranks: micro-batches, computed tokens, occupancy, peak over budget")
        for arm, row in rows.items():
            figures = f"{row['micro']:3d} {row['computed']:8,d} {row['occupancy']:.3f} {row['peak']:.2f}"
            print(f"  {arm:8s} {figures}")
    assert rows["padless"]["peak"] <= 1.0
    assert rows["stock"]["peak"] > 1.0, "otherwise the comparison shows nothing"
    assert rows["padless"]["occupancy"] >= 0.85
    assert rows["stock"]["occupancy"] <= 0.5


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_the_figures_reported_are_those_of_the_forward_passes(ranks: list[dict[str, Any]], kind: str) -> None:
    for rank in ranks:
        run = rank[kind]["padless"]
        for phase, shapes in (("old_log_prob", "infer"), ("update", "update")):
            figures = run["figures"][phase]
            assert figures.computed_tokens == sum(computed(run, shapes))
            assert figures.real_tokens == run["real_tokens"]
            assert figures.micro_batches == len(run[f"{shapes}_shapes"])
            assert figures.peak == max(computed(run, shapes)) / run["budget"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_the_figures_are_in_verls_metrics(ranks: list[dict[str, Any]], kind: str) -> None:
    metrics = ranks[0][kind]["padless"]["metrics"]
    runs = [rank[kind]["padless"] for rank in ranks]
    for phase in ("old_log_prob", "update"):
        mean = np.mean([run["figures"][phase].occupancy for run in runs])
        assert metrics[f"padless/{phase}/occupancy"] == [pytest.approx(mean)]
        assert metrics[f"padless/{phase}/max_over_budget"] == [max(run["figures"][phase].peak for run in runs)]
    assert not any(name.startswith("padless") for name in ranks[0][kind]["stock"]["metrics"])


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_after_uninstall_verl_does_what_it_did(ranks: list[dict[str, Any]], kind: str) -> None:
    for rank in ranks:
        stock, restored = rank[kind]["stock"], rank[kind]["restored"]
        assert restored["update_shapes"] == stock["update_shapes"]
        np.testing.assert_array_equal(restored["log_probs"], stock["log_probs"])


@pytest.mark.slow
def test_a_row_over_the_budget_on_one_rank_is_refused_on_every_rank(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert "row 0 of rank 0 has 80 tokens: over the token budget 64" in rank["refusals"]["overlong"]


@pytest.mark.slow
def test_ranks_with_other_options_are_refused_on_every_rank(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        if len(ranks) == 1:
            assert rank["refusals"]["options"] == "ran"
        else:
            assert "rank 1 plans with other options than rank 0" in rank["refusals"]["options"]


@pytest.mark.slow
def test_a_leak_is_found_by_all_ranks_together(ranks: list[dict[str, Any]]) -> None:
    messages = {rank["leak"] for rank in ranks}
    assert len(messages) == 1, "every rank says the same"
    (message,) = messages
    assert "JambaForCausalLM leaks between packed sequences" in message
    assert "It enters in model.layers.0.mamba" in message
