"""Several gloo processes forked from one server that has imported torch and transformers once: much cheaper to start.

Same rules as `support.ranks`: a deadline, no hang, the output of the rank that failed.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
import traceback
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from support.ranks import TESTS, free_port

PRELOADED = ("torch", "transformers", "support.rank_loss", "support.rank_exchange", "support.warm")


def run_forked(module: str, function: str, ranks: int, *, seconds: float = 240.0, **arguments: Any) -> list[Any]:
    """Call ``module.function(**arguments)`` in ``ranks`` processes; their return values, by rank."""
    os.environ["PYTHONPATH"] = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        given = Path(folder) / "given.pt"
        torch.save(arguments, given)
        processes = [
            context.Process(target=_run, args=(module, function, rank, ranks, port, folder), daemon=True)
            for rank in range(ranks)
        ]
        for process in processes:
            process.start()
        try:
            _wait(processes, seconds)
            texts = {
                rank: path.read_text() for rank in range(ranks) if (path := Path(folder) / f"error{rank}").exists()
            }
            failed = [rank for rank, process in enumerate(processes) if process.exitcode]
            if failed:
                raise RuntimeError("\n".join(f"rank {r} of {ranks} failed:\n{texts.get(r, 'killed')}" for r in failed))
            return [torch.load(Path(folder) / f"out{rank}.pt", weights_only=False) for rank in range(ranks)]
        finally:
            for process in processes:
                if process.is_alive():
                    process.kill()
                process.join()


def _run(module: str, function: str, rank: int, ranks: int, port: int, folder: str) -> None:
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    torch.set_num_threads(1)
    try:
        arguments = torch.load(Path(folder) / "given.pt", weights_only=False)
        result = getattr(import_module(module), function)(**arguments)
        torch.save(result, Path(folder) / f"out{rank}.pt")
    except BaseException:
        (Path(folder) / f"error{rank}").write_text(traceback.format_exc())
        os._exit(1)
    os._exit(0)  # no interpreter teardown: it would wait for threads of the process group


def _wait(processes: list[Any], seconds: float) -> None:
    end = time.monotonic() + seconds
    while any(process.is_alive() for process in processes):
        if any(process.exitcode for process in processes):
            time.sleep(3.0)  # the others find out
            return
        if time.monotonic() > end:
            raise TimeoutError(f"{len(processes)} ranks did not end within {seconds:.0f} s")
        time.sleep(0.05)
