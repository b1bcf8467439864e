"""The scripts that take and print the benchmark's figures read what a run writes."""

from __future__ import annotations

import copy
import importlib.util
import json
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks/policy_update"


def load(name: str):
    spec = importlib.util.spec_from_file_location(f"policy_update_{name}", FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def told(small_report):
    return json.loads(json.dumps(small_report.to_dict()))


def test_expectations_name_what_holds_and_what_does_not(told):
    bench = load("bench")
    jamba = told["models"]["jamba.json"]
    checks = dict(bench.expectations("jamba", jamba))
    equal = [holds for text, holds in checks.items() if "equals each sequence alone" in text]
    assert equal == [True] * 4
    assert next(holds for text, holds in checks.items() if "timing only" in text)
    worse = copy.deepcopy(jamba)
    worse["arms"]["balanced"]["gradient_difference"] = 1e-4
    worse["arms"]["balanced"]["overhead_seconds"] = worse["arms"]["balanced"]["seconds"]
    failing = [text for text, holds in bench.expectations("jamba", worse) if not holds]
    assert any("balanced equals" in text for text in failing)
    assert any("planning and tensor work is 100.00%" in text for text in failing)


def test_the_order_of_arms_is_judged_by_rounds_and_their_spread():
    slower_than = load("bench").not_faster
    close, apart = {"seconds_all": [1.0, 1.1, 0.9, 1.05]}, {"seconds_all": [1.2, 1.35, 1.1, 1.2]}
    assert slower_than(apart, close)
    assert not slower_than(close, apart)
    scattered = {"seconds_all": [0.9, 1.3, 0.95, 1.2]}
    assert slower_than(close, scattered)
    assert slower_than(scattered, close)
    assert slower_than({"seconds_all": [1.0]}, {"seconds_all": [1.0]})


def test_every_arm_gets_a_line_in_the_readmes_table(told):
    lines = load("plot").section({"command": "padless bench", "commit": "abc", "report": told})
    rows = [line for line in lines if line.startswith("| ")]
    assert len(rows) == 2 * (2 + 5)
    assert len({row.count("|") for row in rows}) == 1
    assert sum("timing only" in row for row in rows) == 1


def test_committed_results_are_printed_in_the_readme():
    readme = (FOLDER / "README.md").read_text()
    plot = load("plot")
    assert readme.count(plot.BEGIN) == readme.count(plot.END) == 1
    for path in sorted((FOLDER / "results").glob("*.json")):
        for line in plot.section(json.loads(path.read_text())):
            assert line in readme, path.name
