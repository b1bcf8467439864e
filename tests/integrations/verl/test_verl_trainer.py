"""The Ray trainer end to end on a CPU: GRPO steps with a rollout of random tokens, two ranks, one config line."""

from __future__ import annotations

import math
import re
import signal
import subprocess
from pathlib import Path

import pytest

from support.verl_env import environment
from support.verl_trainer import command, prepare

pytest.importorskip("transfer_queue", exc_type=ImportError)

RANKS, STEPS, BUDGET = 2, 2, 1024


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, float]]:
    """What the trainer's console logger said about each step."""
    folder: Path = tmp_path_factory.mktemp("trainer")
    prepare(folder)
    switch = (
        "actor_rollout_ref.model.external_lib=padless.integrations.verl",
        "actor_rollout_ref.actor.use_kl_loss=True",
    )
    log = folder / "log.txt"
    with open(log, "w") as out:
        job = subprocess.Popen(
            command(folder, ranks=RANKS, budget=BUDGET, steps=STEPS, extra=switch),
            cwd=folder,
            env=environment(VERL_TEST_VOCABULARY="259", RAY_USAGE_STATS_ENABLED="0", HF_HUB_OFFLINE="1"),
            stdout=out,
            stderr=subprocess.STDOUT,
        )
        try:
            code = job.wait(timeout=500)
        finally:
            if job.poll() is None:
                job.send_signal(signal.SIGINT)  # Ray ends its processes with the driver
                job.wait(timeout=30)
    text = log.read_text()
    assert code == 0, text[-4000:]
    figure = re.compile(r"(actor/[^\s:]+):(-?\d[\d.]*(?:e-?\d+)?)")
    lines = re.findall(r"step:\d+ - (.*)", text)
    return [{name: float(value) for name, value in figure.findall(line)} for line in lines]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_trainer_trains_within_the_budget_and_says_so(steps: list[dict[str, float]]) -> None:
    assert len(steps) == STEPS
    for figures in steps:
        assert math.isfinite(figures["actor/grad_norm"])
        assert figures["actor/grad_norm"] > 0
        for phase in ("old_log_prob", "ref", "update"):
            assert 0.7 < figures[f"actor/padless/{phase}/occupancy"] <= 1
            assert 0 < figures[f"actor/padless/{phase}/max_over_budget"] <= 1
            computed = figures[f"actor/padless/{phase}/computed_tokens"]
            assert figures[f"actor/padless/{phase}/real_tokens"] <= computed
