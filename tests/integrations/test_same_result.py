"""Ten steps with padless are the host's own: every host, Qwen2 and Jamba, token and sequence mean, 1, 2, 4 processes.

With ``PADLESS_EVERY_CELL=1`` in the environment two and four processes both run every combination; without it each
runs one half of them.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from support.same_result import cells_of, host_is_off

EVERYTHING = bool(os.environ.get("PADLESS_EVERY_CELL"))
TESTS = Path(__file__).parents[1]
SECONDS = {1: 900, 2: 1200, 4: 1800}  # about 30, 70 and 130 of one core where nothing else runs
LOSSES = GRAD_NORMS = 1e-5  # relative; float32 rounding, added up over ten steps
PARAMETERS = 2e-6  # absolute; they move by 0.01 and more

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2000)]


@cache
def outcomes(ranks: int) -> dict[tuple[str, str, str, str], dict[str, Any]] | str:
    """What each cell gave; all cells of so many processes run in one go. What went wrong, where none of them ended."""
    with TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "support.same_result", str(ranks), folder, *["all"] * EVERYTHING]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        with subprocess.Popen(
            command,
            cwd=TESTS,
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        ) as leader:
            try:
                _, complaints = leader.communicate(timeout=SECONDS[ranks])
            except subprocess.TimeoutExpired:
                os.killpg(leader.pid, signal.SIGKILL)  # the ranks are its children
                return f"{ranks} ranks did not end within {SECONDS[ranks]} s"
        if leader.returncode:
            return complaints[-3000:]
        cells = json.loads((Path(folder) / "cells.json").read_text())
    return {(cell["host"], cell["kind"], cell["mode"], cell["wrap"]): cell for cell in cells}


@pytest.mark.parametrize(
    ("ranks", "host", "kind", "mode", "wrap"),
    [(ranks, *cell) for ranks in (1, 2, 4) for cell in cells_of(ranks, EVERYTHING)],
)
def test_ten_steps_are_those_of_the_host(ranks: int, host: str, kind: str, mode: str, wrap: str) -> None:
    found = outcomes(ranks)
    assert not isinstance(found, str), found
    cell = found[host, kind, mode, wrap]
    assert "error" not in cell, cell["error"]
    assert cell["moved"] > 0.01, "nothing was trained"
    assert cell["padded_tokens"][1] < cell["padded_tokens"][0]
    if host_is_off(host, kind, wrap):
        assert cell["host_alone"] > 1e-3, "the host agrees with its own DDP run now: hold padless to it here too"
        return
    assert cell["losses"] < LOSSES
    assert cell["grad_norms"] < GRAD_NORMS
    assert cell["parameters"] < PARAMETERS
