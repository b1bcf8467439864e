"""The prepared GPU script: its plans are valid, its deadline holds, and its dry run works from end to end."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from padless.bench.models import BUILT_IN

SCRIPT = Path(__file__).parents[2] / "benchmarks/gpu/run_gpu.py"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("run_gpu", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["run_gpu"] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("kernels", [False, True])
def test_plans_fit_the_time_and_name_models_that_can_be_built(script, tmp_path, monkeypatch, kernels):
    monkeypatch.setattr(script, "has_mamba_kernels", lambda: kernels)
    plans = script.real_plans(tmp_path)
    assert sum(plan.needs for plan in plans) <= 8 * 60 - 10
    names = [plan.arguments[1] for plan in plans]
    assert names[:2] == ["qwen2.5-1.5b", "qwen2.5-7b"]
    assert set(names[:2]) <= set(BUILT_IN)
    from transformers import AutoConfig

    config = json.loads(Path(names[2]).read_text())
    built = AutoConfig.for_model(config.pop("model_type"), **config)
    assert built.layers_block_type.count("attention") == (2 if kernels else 1)
    assert built.hidden_size == (2560 if kernels else 512)


def test_a_plan_is_not_started_without_its_time_and_is_stopped_at_the_deadline(script):
    late = script.execute(script.Plan("late", 60.0, ()), time.monotonic() + 5)
    assert "5 s left, 60 s needed" in late["skipped"]
    began = time.monotonic()
    slow = script.execute(script.Plan("slow", 0.1, ("--repeats", "500")), time.monotonic() + 1.0)
    assert "stopped after" in slow["failed"]
    assert time.monotonic() - began < 30
    wrong = script.execute(script.Plan("wrong", 0.1, ("--rows", "0")), time.monotonic() + 120)
    assert "exit code 2" in wrong["failed"]
    assert "--rows=0" in wrong["failed"]
    told = script.table([late, slow, wrong])
    assert told.count("\n") == 4


@pytest.mark.slow
def test_the_dry_run_prints_one_table_and_writes_json(tmp_path):
    out = tmp_path / "results" / "dry.json"
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--dry-run", "--out", str(out), "--minutes", "4"],
        capture_output=True, text=True, timeout=280, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr + done.stdout
    told = json.loads(out.read_text())
    assert told["dry_run"]
    reports = [result["report"] for result in told["results"]]
    assert len(reports) == 2
    arms = [next(iter(report["models"].values()))["arms"] for report in reports]
    assert all(list(found) == ["fixed", "truncate", "greedy", "balanced", "packed"] for found in arms)
    assert arms[0]["packed"]["valid"]
    assert not arms[1]["packed"]["valid"]  # found in half precision, too
    assert done.stdout.count("balanced") == 2
    assert "packed*" in done.stdout
