"""Several gloo processes with a deadline: a hang is a failed test, never a stuck suite."""

from __future__ import annotations

import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

TESTS = Path(__file__).parent.parent
_START = """
import os
import sys
sys.path.insert(0, {tests!r})
import torch
torch.set_num_threads(1)
from importlib import import_module
arguments = torch.load({given!r}, weights_only=False)
result = getattr(import_module({module!r}), {function!r})(**arguments)
torch.save(result, {out!r})
# torch 2.13 aborts at the interpreter's exit now and then, after DDP on gloo, whether or not the group was destroyed:
# five of 160 processes of a script without padless. All is done and saved here.
sys.stdout.flush()
sys.stderr.flush()
os._exit(0)
"""


def free_port() -> int:
    """A TCP port that nobody listens on, below those that the system gives to clients."""
    while True:
        port = random.SystemRandom().randrange(15_000, 30_000)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port


def run_ranks(module: str, function: str, ranks: int, *, seconds: float = 240.0, **arguments: Any) -> list[Any]:
    """Call ``module.function(**arguments)`` in ``ranks`` processes; their return values, by rank.

    The environment is torchrun's; the function makes its process group itself, or lets the host do it. Raises with the
    output of the first rank that failed, or when ``seconds`` are over.
    """
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        given = Path(folder) / "given.pt"
        torch.save(arguments, given)
        processes, logs, outs = [], [], []
        for rank in range(ranks):
            out = Path(folder) / f"out{rank}.pt"
            log = open(Path(folder) / f"log{rank}.txt", "w+")  # noqa: SIM115 (closed below, after the processes)
            code = _START.format(tests=str(TESTS), given=str(given), module=module, function=function, out=str(out))
            names = {
                "RANK": rank,
                "LOCAL_RANK": rank,
                "WORLD_SIZE": ranks,
                "LOCAL_WORLD_SIZE": ranks,
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
                "OMP_NUM_THREADS": 1,
                "HF_HUB_OFFLINE": 1,
                "TRL_EXPERIMENTAL_SILENCE": 1,
                "TOKENIZERS_PARALLELISM": "false",
            }
            environment = {**os.environ, **{name: str(value) for name, value in names.items()}}
            processes.append(
                subprocess.Popen([sys.executable, "-c", code], stdout=log, stderr=subprocess.STDOUT, env=environment)
            )
            logs.append(log)
            outs.append(out)
        try:
            failed = _wait(processes, seconds)
            if failed:
                raise RuntimeError("\n".join(f"rank {rank} of {ranks} failed:\n{_tail(logs[rank])}" for rank in failed))
            return [torch.load(out, weights_only=False) for out in outs]
        finally:
            for process in processes:
                process.kill()
                process.wait()
            for log in logs:
                log.close()


def _wait(processes: list[subprocess.Popen[bytes]], seconds: float) -> list[int]:
    """The ranks that failed, shortly after the first one did; none when all ended well."""
    end = time.monotonic() + seconds
    while any(process.poll() is None for process in processes):
        if any(process.returncode for process in processes):
            time.sleep(3.0)  # the others find out
            break
        if time.monotonic() > end:
            raise TimeoutError(f"{len(processes)} ranks did not end within {seconds:.0f} s")
        time.sleep(0.05)
    return [rank for rank, process in enumerate(processes) if process.poll()]


def _tail(log: Any, characters: int = 2500) -> str:
    log.seek(0)
    return str(log.read())[-characters:]
