"""The cost model: what it charges, how it is fitted, and what a config says."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from padless import CostModel, PadlessError, microbatch, pack
from padless.cost_config import token_work

GRID = [(rows, width) for rows in (1, 2, 4, 8) for width in (64, 256, 1024, 4096)]


@settings(max_examples=60, deadline=None)
@given(st.floats(0, 1), st.floats(0, 1e-3), st.floats(1e-7, 1e-3), st.floats(0, 1e-7))
def test_a_fit_recovers_exact_measurements(fixed: float, column: float, token: float, squared: float) -> None:
    true = CostModel(per_microbatch=fixed, per_column=column, per_token=token, per_token_squared=squared)
    fitted = CostModel.fit([(r, w, true.seconds(r, w)) for r, w in GRID])
    for rows, width in GRID:
        assert fitted.seconds(rows, width) == pytest.approx(true.seconds(rows, width), rel=0.05)
    assert fitted.residual is not None
    assert fitted.residual < 0.02


def test_a_fit_shrugs_off_outliers_and_says_what_is_left() -> None:
    rng = np.random.default_rng(0)
    true = CostModel(per_microbatch=0.02, per_column=1e-5, per_token=3e-6, per_token_squared=1e-10)
    measured = []
    for rows, width in GRID * 3:
        slow = 4.0 if rng.random() < 0.1 else 1.0
        measured.append((rows, width, true.seconds(rows, width) * slow * (1 + 0.02 * rng.standard_normal())))
    fitted = CostModel.fit(measured)
    for rows, width in GRID:
        assert fitted.seconds(rows, width) == pytest.approx(true.seconds(rows, width), rel=0.08)
    assert fitted.residual is not None
    assert fitted.residual < 0.05
    assert fitted.noise is not None
    assert fitted.noise > 0
    assert fitted.source == "fit"


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(1e-4, 10), min_size=len(GRID), max_size=len(GRID)))
def test_no_coefficient_is_ever_negative(seconds: list[float]) -> None:
    fitted = CostModel.fit([(r, w, s) for (r, w), s in zip(GRID, seconds, strict=True)])
    assert min(fitted.per_microbatch, fitted.per_column, fitted.per_token, fitted.per_token_squared) >= 0


@pytest.mark.parametrize(
    ("measurements", "message"),
    [
        ([], "0 shapes"),
        ([(1, 10, 0.1), (1, 10, 0.2)], "1 shapes"),
        ([(1, 10, 0.1), (1, 20, -0.2)], r"measurements\[1\]"),
        ([(1, 10, 0.1), (1, 20, float("nan"))], r"measurements\[1\]"),
        ([(1, 10), (1, 20)], r"measurements\[0\]"),
    ],
)
def test_measurements_that_cannot_be_fitted_are_named(measurements: Any, message: str) -> None:
    with pytest.raises(PadlessError, match=message):
        CostModel.fit(measurements)


def test_calibration_times_real_work() -> None:
    weights = np.random.default_rng(0).standard_normal((96, 96)).astype(np.float32)

    def step(rows: int, width: int) -> None:
        time.sleep(0.002)
        np.ones((rows * width, 96), dtype=np.float32) @ weights

    model = CostModel.calibrate(step, max_rows=4, max_width=512, max_seconds=20)
    assert model.source == "calibrated"
    assert model.per_microbatch >= 0.001
    assert model.noise is not None
    assert model.residual is not None
    assert model.seconds(4, 512) > model.seconds(1, 64)


def test_calibration_leaves_out_shapes_that_would_not_end_in_time() -> None:
    ran = []

    def step(rows: int, width: int) -> float:
        ran.append((rows, width))
        time.sleep(1e-6 * rows * width)
        return 1e-6 * rows * width

    shapes = [(1, 1000), (1, 2000), (1, 4000), (64, 1_000_000)]
    started = time.perf_counter()
    model = CostModel.calibrate(step, shapes=shapes, max_seconds=1.0)
    assert time.perf_counter() - started < 5
    assert (64, 1_000_000) not in ran
    assert model.per_token == pytest.approx(1e-6, rel=0.01)


def test_calibration_refuses_what_it_cannot_fit() -> None:
    with pytest.raises(PadlessError, match="at least two different"):
        CostModel.calibrate(lambda rows, width: 1.0, shapes=[(1, 1)])
    with pytest.raises(PadlessError, match="max_seconds"):
        CostModel.calibrate(lambda rows, width: 1.0, max_seconds=0)


DENSE = {
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "intermediate_size": 640,
    "vocab_size": 5000,
}


def test_a_config_is_counted_by_hand() -> None:
    layer = 256 * 32 * (2 * 8 + 2 * 2) + 3 * 256 * 640
    work = token_work(DENSE, width=4096)
    assert work.linear == 4 * layer + 256 * 5000
    assert work.pairs == 4 * 2 * 256 / 2
    model = CostModel.from_config(DENSE)
    assert model.per_token == 1.0
    assert model.per_token_squared == pytest.approx(work.pairs / work.linear)
    assert model.source == "config"


def test_a_sliding_window_is_work_per_token_unless_rows_are_shorter() -> None:
    window = {**DENSE, "sliding_window": 512}
    assert CostModel.from_config(window, width=4096).per_token_squared == 0
    assert CostModel.from_config(window, width=4096).per_token > 1
    assert CostModel.from_config(window, width=512) == CostModel.from_config(DENSE, width=512)


def test_experts_count_as_far_as_a_token_is_sent_to_them() -> None:
    sparse = {**DENSE, "num_local_experts": 8, "num_experts_per_tok": 2}
    dense, routed = token_work(DENSE, width=1024).linear, token_work(sparse, width=1024).linear
    assert routed - dense == 4 * (3 * 256 * 640 + 256 * 8)  # one more expert, and the router


def test_a_config_without_sizes_names_what_is_missing() -> None:
    with pytest.raises(PadlessError, match="hidden_size"):
        CostModel.from_config({"num_hidden_layers": 2})


ACTIVE = [
    ("Qwen2Config", {}, 0.0),
    ("LlamaConfig", {}, 0.0),
    ("Olmo2Config", {}, 0.0),
    ("Gemma2Config", {"head_dim": 64}, 0.0),
    ("JambaConfig", {"num_experts": 1}, 0.05),
    ("MambaConfig", {}, 0.06),
]


@pytest.mark.parametrize(("name", "extra", "state"), ACTIVE, ids=[name for name, _, _ in ACTIVE])
def test_a_config_agrees_with_the_weights_of_the_model_it_builds(name: str, extra: dict, state: float) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    sizes = (
        DENSE
        if "Mamba" not in name
        else {key: DENSE[key] for key in ("hidden_size", "num_hidden_layers", "vocab_size")}
    )
    config = getattr(transformers, name)(**{**sizes, **extra})
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    weights = sum(m.weight.numel() for m in model.modules() if isinstance(m, torch.nn.Linear))
    linear = token_work(config, width=4096).linear
    # Recurrences do work beyond their matrices: the state update.
    assert weights * (1 - 1e-9) <= linear <= weights * (1 + state + 1e-9)


def test_a_plan_prefers_what_its_cost_prefers() -> None:
    lengths = [100] * 64
    cheap = microbatch(lengths, 6400, cost=CostModel(per_microbatch=0, per_token=1, per_column=0))
    dear = microbatch(lengths, 6400, cost=CostModel(per_microbatch=10_000, per_token=1))
    assert len(dear) == 1 <= len(cheap)
    squares = CostModel(per_microbatch=0, per_token=1, per_token_squared=1)
    plan = pack([8, 4, 4, 4, 4], 100, cost=squares)
    assert plan.makespan() == 24 + 64 + 4 * 16
