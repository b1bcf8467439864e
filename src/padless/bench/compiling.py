"""Compile what the benchmark plans and scans with, in processes beside the one that loads the models.

The first run on a machine would else wait for one kernel after the other. What is compiled is kept on disk, where the
benchmark finds it; from the second run on there is nothing left to do.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

__all__ = ["PARTS", "compile_packing", "compile_planning", "compile_scan", "compiled_beside", "leave_with_parent"]

PARTS = ("planning", "packing", "scan")

_LENGTHS, _BUDGET = (9, 8, 7, 5, 5, 4, 3, 3, 2, 1), 12


@contextmanager
def compiled_beside(parts: Sequence[str] = PARTS) -> Iterator[Callable[[], None]]:
    """Compile ``parts`` in a process each; what is given waits for them. Those left at the end are stopped.

    A process that fails is no error: the kernels are compiled where they are called, as without it.
    """
    code = "from padless.bench.compiling import compile_{0}, leave_with_parent; leave_with_parent(); compile_{0}()"
    # -P: a folder of the package's name where the command is run must not stand in for it.
    command = [sys.executable, "-P", "-c"]
    running: list[subprocess.Popen[bytes]] = []

    def wait() -> None:
        for process in running:
            process.wait()

    try:
        for part in parts:
            running.append(
                subprocess.Popen(
                    [*command, code.format(part)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                )
            )
        yield wait
    finally:
        for process in running:
            process.kill()
            process.wait()
            if process.stdin is not None:
                process.stdin.close()


def leave_with_parent() -> None:
    """End this process when its standard input does: nothing is written there, and a killed parent closes it."""

    def watch() -> None:
        os.read(0, 1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def compile_planning() -> None:
    """Plan a few sequences as `padless.regroup` does for padded rows."""
    from padless.cost import CostModel
    from padless.planning.microbatch import microbatch

    microbatch(_LENGTHS, _BUDGET, method="greedy")
    microbatch(_LENGTHS, _BUDGET, cost=CostModel(per_microbatch=1.0, per_token=1.0))


def compile_packing() -> None:
    """Pack a few sequences as `padless.regroup` does for packed rows."""
    from padless.cost import CostModel
    from padless.planning.pack import pack

    pack(_LENGTHS, _BUDGET, balance="work", cost=CostModel(per_microbatch=1.0, per_token=1.0))


def compile_scan() -> None:
    """The scan of Mamba-1 and the convolution before it, in float32."""
    import numpy as np

    from padless.bench import conv_kernels, scan_kernels

    for module in (scan_kernels, conv_kernels):
        module.kernels(np.dtype(np.float32))
