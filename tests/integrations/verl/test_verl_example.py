"""The launch script is a configuration that verl accepts; running it needs GPUs and an inference engine."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import yaml

from support.verl_env import environment

SCRIPT = Path(__file__).parents[3] / "examples" / "verl_grpo.sh"


def test_the_launch_script_composes_with_verls_own_configuration() -> None:
    done = subprocess.run(
        ["sh", str(SCRIPT), "--cfg", "job"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=environment(PYTHON=sys.executable, MODEL="/models/jamba", TRAIN="train.parquet", VAL="val.parquet"),
    )
    assert done.returncode == 0, done.stderr[-2000:]
    role = yaml.safe_load(done.stdout[done.stdout.index("actor_rollout_ref:") :])["actor_rollout_ref"]
    assert role["model"]["external_lib"] == "padless.integrations.verl"
    assert role["model"]["use_remove_padding"] is False
    budgets = (
        role["actor"]["ppo_max_token_len_per_gpu"],
        role["ref"]["log_prob_max_token_len_per_gpu"],
        role["rollout"]["log_prob_max_token_len_per_gpu"],
    )
    assert budgets == (16384, 16384, 16384)
    assert role["actor"]["use_dynamic_bsz"] is True
    assert role["rollout"]["log_prob_use_dynamic_bsz"] is True
