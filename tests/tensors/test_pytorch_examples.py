"""The plain and the DDP example run, and print the same losses."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from support.ranks import free_port

EXAMPLES = Path(__file__).parents[2] / "examples"


def losses(*command: str) -> list[list[float]]:
    run = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=240, cwd=EXAMPLES)
    assert run.returncode == 0, run.stderr[-2000:]
    found: dict[str, list[float]] = {}
    # By match, not by line: two processes that share a pipe may print on one line.
    for rank, loss in re.findall(r"(rank \d+: |)loss ([0-9.]+)", run.stdout):
        found.setdefault(rank, []).append(float(loss))
    return list(found.values())


@pytest.mark.slow
def test_the_examples_run_and_ranks_agree() -> None:
    (plain,) = losses("plain_pytorch.py")
    assert len(plain) == 4
    assert len(set(plain)) == 4  # the optimizer has stepped
    port = str(free_port())
    ranks = losses("-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", port, "ddp.py")
    assert len(ranks) == 2
    assert ranks[0] == ranks[1]
    assert ranks[0][0] == pytest.approx(plain[0], abs=2e-4)  # the first step starts from the same weights and rows


@pytest.mark.parametrize("name", ["plain_pytorch.py", "ddp.py"])
def test_the_examples_stay_short(name: str) -> None:
    assert len((EXAMPLES / name).read_text().splitlines()) <= 40
