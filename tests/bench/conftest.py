"""One small run on two tiny models, shared by the tests that look at what a run tells."""

from __future__ import annotations

import pytest
import torch
import transformers

from padless.bench import BenchOptions, built_in, run
from support.tiny_models import JAMBA, QWEN2, config_file


@pytest.fixture(scope="session")
def small_workload():
    return built_in("gsm8k-rl", sequences=6, scale=0.015, seed=1)


@pytest.fixture(scope="session")
def small_report(tmp_path_factory, small_workload):
    transformers.logging.set_verbosity_error()
    folder = tmp_path_factory.mktemp("models")
    models = (config_file(folder, "qwen", QWEN2), config_file(folder, "jamba", JAMBA))
    told = []
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        report = run(small_workload, BenchOptions(models=models, rows=3, calibration_seconds=1.0), progress=told.append)
    finally:
        torch.set_num_threads(before)
    assert told
    return report
