"""Environment variables under which verl runs on a CPU, in every process of a job."""

from __future__ import annotations

import os
import pickle
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parents[1]

ENVIRONMENT = {
    "VERL_PLATFORM": "cpu",
    "VERL_ENGINE_DEVICE": "cuda",  # the FSDP engine is registered for cuda; nothing in it needs a GPU
    "VERL_USE_EXTERNAL_MODULES": "support.verl_cpu",
}


def use_environment() -> None:
    """Set the variables for this process and its children; before verl is imported."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)


def environment(**more: str) -> dict[str, str]:
    """This process' environment without padless options, plus what verl needs here, plus ``more``."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PADLESS_VERL")}
    kept.pop("VERL_USE_EXTERNAL_PLUGINS", None)
    path = os.pathsep.join(filter(None, [str(TESTS), os.environ.get("PYTHONPATH", "")]))
    return kept | ENVIRONMENT | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path} | more


def run_code(code: str, *, timeout: float = 120, **more: str) -> subprocess.CompletedProcess[str]:
    """Run Python code in a process of its own."""
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
        env=environment(**more),
    )


def run_ranks(module: str, ranks: int, folder: Path, *, timeout: float = 240, **more: str) -> list[Any]:
    """Run ``python -m module folder`` as one job of ``ranks`` gloo processes; what each pickled to rank<r>.pkl.

    Every process is ended at the timeout, so a rank that waits for another fails the test.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    jobs = []
    for rank in range(ranks):
        where = {"RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": str(ranks)}
        where |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        log = open(folder / f"rank{rank}.log", "w")  # noqa: SIM115 - closed with the process
        jobs.append(
            subprocess.Popen(
                [sys.executable, "-m", module, str(folder)],
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment(**where, **more),
            )
        )
    try:
        codes = [job.wait(timeout=timeout) for job in jobs]
    finally:
        for job in jobs:
            if job.poll() is None:
                job.kill()
                job.wait()
    logs = "\n".join((folder / f"rank{rank}.log").read_text()[-4000:] for rank in range(ranks))
    assert codes == [0] * ranks, logs
    return [pickle.loads((folder / f"rank{rank}.pkl").read_bytes()) for rank in range(ranks)]
