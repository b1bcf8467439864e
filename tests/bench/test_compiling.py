"""Kernels are compiled beside the loading of the models, and nothing waits for a process that fails or hangs."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from padless.bench import compiling
from padless.bench.compiling import PARTS, compiled_beside

USED = """
import numpy as np, torch
import padless
from padless.bench import conv_kernels, scan_kernels
from padless.tensors import regroup
lengths = np.random.default_rng(0).integers(1, 60, 48)
mask = (torch.arange(60) < torch.from_numpy(lengths)[:, None]).long()
cost = padless.CostModel(per_microbatch=0.01, per_column=1e-6, per_token=1e-4, per_token_squared=1e-8)
for how in ({"method": "greedy"}, {"cost": cost}, {"layout": "packed", "cost": cost}):
    regroup({"input_ids": mask, "attention_mask": mask}, 128, **how)
scan_kernels.kernels(np.dtype(np.float32))
conv_kernels.kernels(np.dtype(np.float32))
"""


@pytest.mark.slow
def test_after_it_the_benchmark_finds_every_kernel_on_disk(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    with compiled_beside() as wait:
        wait()
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.nb?")}
    assert len(before) > 20
    subprocess.run([sys.executable, "-c", USED], check=True, timeout=240, env=dict(os.environ))
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.nb?")} == before


def test_a_process_that_fails_is_no_error() -> None:
    with compiled_beside(["nothing"]) as wait:
        wait()


def test_processes_that_are_still_running_at_the_end_are_stopped(tmp_path: Path, monkeypatch) -> None:
    endless = tmp_path / "endless"
    endless.write_text(f"#!/bin/sh\necho $$ > {tmp_path}/$$.pid\nexec sleep 300\n")
    endless.chmod(0o755)
    monkeypatch.setattr(compiling.sys, "executable", str(endless))
    began = time.monotonic()
    with compiled_beside():
        while len(list(tmp_path.glob("*.pid"))) < len(PARTS):
            assert time.monotonic() - began < 60
            time.sleep(0.01)
    assert time.monotonic() - began < 60
    for file in tmp_path.glob("*.pid"):
        with pytest.raises(ProcessLookupError):
            os.kill(int(file.stem), 0)


BESIDE = """
import time
from padless.bench.compiling import compiled_beside
with compiled_beside():
    time.sleep(600)
"""
ENDLESS = """
import os, time
from pathlib import Path
(Path(__file__).parent / f"{os.getpid()}.pid").touch()
time.sleep(600)
"""


def test_what_compiles_leaves_with_a_killed_parent(tmp_path: Path) -> None:
    (tmp_path / "numba.py").write_text(ENDLESS)
    parent = subprocess.Popen([sys.executable, "-c", BESIDE], env={**os.environ, "PYTHONPATH": str(tmp_path)})
    began = time.monotonic()
    try:
        while len(list(tmp_path.glob("*.pid"))) < len(PARTS):
            assert time.monotonic() - began < 60
            time.sleep(0.01)
    finally:
        parent.kill()
        parent.wait()
    left = {int(file.stem) for file in tmp_path.glob("*.pid")}
    while left:
        assert time.monotonic() - began < 120
        time.sleep(0.01)
        left = {pid for pid in left if runs(pid)}


def runs(pid: int) -> bool:
    try:
        # One that nobody has waited for yet is there, but does not run.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
