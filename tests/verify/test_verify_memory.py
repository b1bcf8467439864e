"""A check keeps the float32 copy of the parameters and less than two forward passes, and makes as many as it says."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from padless.verify import build_small, check_layouts
from support.live import LiveBytes

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def cost():
    spec = importlib.util.spec_from_file_location("verify_cost", ROOT / "scripts" / "verify_cost.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_live_bytes_counts_what_is_alive_and_no_view_twice():
    given = torch.ones(100)
    with LiveBytes() as live:
        first = given + 1  # 400 bytes
        second = first.view(10, 10)
        given.view(-1)
        third = torch.cat([first, first])  # 800 bytes
        assert live.now == live.peak == 1200
        del first, second
        assert live.now == 800
        del third
        assert (live.now, live.peak) == (0, 1200)


@pytest.mark.slow
def test_a_check_holds_less_than_two_forward_passes_beside_the_copy(cost):
    model = cost.llama("small", "cpu", torch.bfloat16)
    copy = 4 * sum(parameter.numel() for parameter in model.parameters())
    once = cost.forward_bytes(cost.llama("small", "cpu"))
    found = cost.check(model)
    assert copy < found["peak"] < copy + 2 * once
    assert found["forward"] <= 360
    assert found["backward"] <= 120
    assert found["seconds"] < 5


def test_without_the_copy_a_large_model_takes_the_passes_alone(cost):
    """Over copy_limit a small model of the architecture stands in: nothing grows with the parameters."""
    model = build_small("llama").bfloat16()
    copy = 4 * sum(parameter.numel() for parameter in model.parameters())
    wide = torch.nn.Parameter(torch.zeros(50 * copy // 2, dtype=torch.bfloat16))
    model.register_parameter("unused", wide)
    with LiveBytes() as live:
        report = check_layouts(model, layouts=["right-padded"], seeds=(0,), copy_limit=10 * copy, cache=False)
    assert any("small model of the same architecture" in note for note in report.notes)
    assert live.peak < 10 * copy


def test_the_figures_of_seven_billion_parameters_are_those_of_the_page(cost):
    """Shapes alone, on the meta device: the page may not promise less than the model would take."""
    model = cost.llama("7 billion", "meta")
    parameters = sum(parameter.numel() for parameter in model.parameters())
    assert round(4 * parameters / 1e9) == 27
    assert round(cost.forward_bytes(model) / 1e9, 1) == 0.8
    page = (ROOT / "docs" / "verify.md").read_text()
    assert "27 GB" in page
    assert "0.8 GB" in page
