"""Each example of a trainer is short and runs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
NAMES = {
    "trainer_causal_lm.py": "occupancy",
    "sft_trl.py": "occupancy",
    "dpo_trl.py": "occupancy",
    "grpo_trl.py": "occupancy",
    "lightning_module.py": "train_loss",
    "accelerate_loop.py": "micro-batches",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_the_example_is_short_and_runs(name: str) -> None:
    lines = (EXAMPLES / name).read_text().splitlines()
    assert len(lines) <= 40, f"{name} has {len(lines)} lines"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    ran = subprocess.run(
        [sys.executable, name], cwd=EXAMPLES, env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert NAMES[name] in ran.stdout
