"""Tuning finds the largest budget that fits, survives what does not, and leaves everything as it was."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from padless.cost import CostModel
from padless.errors import PadlessError
from padless.tuning import AllocationMeter, OutOfLimit, Profile, Trial, load_profile, parse_bytes, tune
from padless.tuning.search import _largest, shapes_of
from support.trainers import tiny_model

PER_TOKEN = 1000


class Linear(nn.Module):
    """Needs a known number of bytes: ``PER_TOKEN`` for each token, and nothing for its one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.register_buffer("calls", torch.zeros(1))


def take(model: nn.Module, rows: int, width: int) -> None:
    model.calls += 1
    torch.rand(3)
    held = torch.zeros(rows * width * PER_TOKEN, dtype=torch.uint8)
    (model.weight * held.float()[:1]).sum().backward()


def test_the_budget_is_within_the_tolerance_of_what_a_known_model_needs() -> None:
    # held.float() takes four more bytes per byte: 5 * PER_TOKEN per token.
    limit = 5 * PER_TOKEN * 700
    profile = tune(
        Linear(), max_length=64, step=take, memory_limit=limit, headroom=0.0, tolerance=0.01, calibrate_seconds=0
    )
    assert 0.98 * 700 <= profile.token_budget <= 700
    assert profile.peak_memory <= limit
    assert any(not fits for _, _, fits, _ in profile.trials), "the limit was never met"


@pytest.mark.parametrize("headroom", [0.1, 0.5])
def test_headroom_is_taken_off(headroom: float) -> None:
    limit = 5 * PER_TOKEN * 1000
    profile = tune(
        Linear(), max_length=10, step=take, memory_limit=limit, headroom=headroom, tolerance=0.01, calibrate_seconds=0
    )
    assert profile.token_budget == pytest.approx(1000 * (1 - headroom), rel=0.03)


def test_everything_is_as_before() -> None:
    model = tiny_model("qwen2").eval()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    gradient = torch.ones_like(next(model.parameters()))
    next(model.parameters()).grad = gradient
    before = {name: value.clone() for name, value in model.state_dict().items()}
    random = torch.get_rng_state()
    tune(model, max_length=32, optimizer=optimizer, memory_limit="2MB", calibrate_seconds=0.2)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random)
    assert not model.training
    assert next(model.parameters()).grad is gradient
    assert bool((gradient == 1).all())
    assert [parameter.grad for parameter in list(model.parameters())[1:]] == [None] * (
        len(list(model.parameters())) - 1
    )
    assert not optimizer.state


def test_buffers_and_random_state_are_put_back_after_an_error() -> None:
    model = Linear()

    def fail(model: nn.Module, rows: int, width: int) -> None:
        take(model, rows, width)
        raise RuntimeError("not about memory")

    random = torch.get_rng_state()
    with pytest.raises(RuntimeError, match="not about memory"):
        tune(model, max_length=8, step=fail, memory_limit="1MB", calibrate_seconds=0)
    assert float(model.calls) == 0
    assert model.weight.grad is None
    assert torch.equal(torch.get_rng_state(), random)


def test_a_device_that_runs_out_of_memory_is_survived() -> None:
    def run_out(model: nn.Module, rows: int, width: int) -> None:
        if rows * width > 100:
            raise torch.OutOfMemoryError("CUDA out of memory")
        take(model, rows, width)

    seen: list[Trial] = []
    profile = tune(
        Linear(),
        max_length=10,
        step=run_out,
        memory_limit="1GB",
        tolerance=0.01,
        calibrate_seconds=0,
        on_trial=seen.append,
    )
    assert 98 <= profile.token_budget <= 100
    assert [trial.fits for trial in seen].count(False) >= 1


def test_a_longest_row_that_does_not_fit_is_an_error_with_ways_out() -> None:
    with pytest.raises(PadlessError, match=r"one row of 64 tokens does not fit.*gradient checkpointing"):
        tune(Linear(), max_length=64, step=take, memory_limit="10kB", calibrate_seconds=0)


def test_on_a_cpu_a_limit_must_be_stated() -> None:
    with pytest.raises(PadlessError, match="state a limit"):
        tune(Linear(), max_length=64, step=take)


def test_optimizer_state_that_does_not_exist_yet_is_counted() -> None:
    model = tiny_model("qwen2")
    size = sum(parameter.numel() * 4 for parameter in model.parameters())
    peaks = {}
    for name, optimizer in (
        ("adamw", torch.optim.AdamW(model.parameters())),
        ("momentum", torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)),
        ("sgd", torch.optim.SGD(model.parameters(), lr=0.1)),
    ):
        profile = tune(
            model, max_length=16, optimizer=optimizer, memory_limit="1GB", max_budget=16, calibrate_seconds=0
        )
        peaks[name] = profile.peak_memory
    assert peaks["momentum"] - peaks["sgd"] == size
    assert peaks["adamw"] - peaks["sgd"] == 2 * size


def test_longest_rows_are_tried_before_short_ones() -> None:
    assert shapes_of(4096, 1024) == [(4, 1024), (64, 64)]
    for budget in (1024, 1500, 9000):
        for rows, width in shapes_of(budget, 1024):
            assert rows * width <= budget
            assert width <= 1024


@pytest.mark.parametrize("most", [8, 9, 100, 777, 8000])
def test_the_search_agrees_with_trying_every_budget(most: int) -> None:
    found = _largest(lambda budget: budget <= most, 8, 10_000, 0.0)
    assert found == most
    assert _largest(lambda budget: budget <= 7, 8, 10_000, 0.0) is None
    assert _largest(lambda budget: True, 8, 500, 0.1) == 500


def test_calibration_measures_seconds_of_the_shapes_that_fit() -> None:
    profile = tune(tiny_model("qwen2"), max_length=64, memory_limit="3MB", calibrate_seconds=1.0)
    assert profile.cost is not None
    assert profile.cost.source == "calibrated"
    assert 0 < profile.cost.seconds(1, 64) < 10


def test_a_profile_is_read_back_and_refused_for_another_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("qwen2")
    profile = tune(model, max_length=16, memory_limit="2MB", max_budget=64, calibrate_seconds=0)
    place = profile.save(tmp_path / "kept" / "profile.json")
    assert Profile.load(place) == profile
    assert load_profile(place, model=model) == profile
    with pytest.raises(PadlessError, match="was made for Qwen2ForCausalLM"):
        load_profile(place, model=tiny_model("qwen2", layers=3))
    monkeypatch.setenv("PADLESS_PROFILE", str(place))
    assert load_profile() == profile
    monkeypatch.delenv("PADLESS_PROFILE")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(PadlessError, match=r"no profile at padless-profile\.json: run padless tune"):
        load_profile()
    (tmp_path / "padless-profile.json").write_text("{}")
    with pytest.raises(PadlessError, match="not a profile of this version"):
        load_profile()
    kept = Profile(token_budget=5, cost=CostModel(per_token=2.0))
    assert Profile.load(kept.save(tmp_path / "cost.json")) == kept


def test_the_meter_counts_what_is_alive_and_stops_at_the_limit() -> None:
    with AllocationMeter(held=100) as meter:
        first = torch.zeros(250)  # 1000 bytes
        view = first.view(25, 10)
        second = first + 1
        del second
        third = view.clone()
    assert meter.peak == 100 + 2000
    assert meter.live == 100 + 2000
    del third
    assert meter.live == 100 + 1000
    with pytest.raises(OutOfLimit), AllocationMeter(limit=999):
        torch.zeros(250)


@pytest.mark.parametrize(("text", "size"), [("80GiB", 80 * 2**30), ("500MB", 500_000_000), ("64 k", 64_000), (7, 7)])
def test_amounts_of_memory_are_read(text: str | int, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "many", "-3GB", "0", "3 apples"])
def test_other_amounts_are_refused(text: str) -> None:
    with pytest.raises(PadlessError, match="no amount of memory"):
        parse_bytes(text)
