"""The examples of the data part run, and do what they say."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def load(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_data_loader_example_trains_and_measures() -> None:
    told = load("dataloader").main(steps=4)
    assert told["steps"] == 4
    assert told["occupancy"] > 0.8


def test_the_streaming_example_resumes_with_other_workers() -> None:
    assert load("streaming").main() > 0.85


@pytest.mark.parametrize("name", ["dataloader", "streaming"])
def test_examples_stay_short(name: str) -> None:
    assert len((EXAMPLES / f"{name}.py").read_text().splitlines()) <= 40
