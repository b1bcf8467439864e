"""Threads for the scan's kernels: those that torch's own operations run in.

torch's OpenMP threads do not sleep between two operations: they wait busily for a few milliseconds. Threads of one's
own that are to work in between find every core taken; on two cores the scan gained nothing from its second thread. So
the kernels run in the same OpenMP team, where that can be called. Elsewhere (macOS, Windows, a torch without OpenMP) a
pool of threads does it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

__all__ = ["run_shares", "shares_of"]

_MAPS = Path("/proc/self/maps")
_Task: Any = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


def shares_of(blocks: int, *, worth_it: bool) -> list[tuple[int, int]]:
    """Blocks [first, last) of each of torch's threads; all of them in one where sharing is not worth it.

    >>> shares_of(7, worth_it=False)
    [(0, 7)]
    """
    threads = max(1, min(torch.get_num_threads(), blocks)) if worth_it else 1
    return list(pairwise(blocks * i // threads for i in range(threads + 1)))


def run_shares(run: Callable[[int], None], shares: int) -> None:
    """Call ``run(0) ... run(shares - 1)``, each in a thread, and return when all are done.

    ``run`` should release the GIL for what takes long. The first exception is raised.
    """
    if shares == 1:
        run(0)
    elif (team := _team()) is not None:
        team(run, shares)
    else:
        others = [_pool().submit(run, share) for share in range(1, shares)]
        try:
            run(0)
        finally:
            wait(others)
        for done in others:
            done.result()


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(thread_name_prefix="padless-scan")


@cache
def _team() -> Callable[[Callable[[int], None], int], None] | None:
    """`run_shares` in the OpenMP threads of torch; ``None`` where there are none to call."""
    file = _loaded_openmp()
    if file is None:
        return None
    parallel: Any = ctypes.CDLL(file).GOMP_parallel  # lets go of the GIL
    parallel.argtypes, parallel.restype = (_Task, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint), None
    asked = ctypes.PyDLL(file)  # keeps it: these two return at once

    def team(run: Callable[[int], None], shares: int) -> None:
        failed: list[BaseException] = []

        def task(_: int | None) -> None:
            try:
                # A team may be smaller than asked for, down to one thread inside another parallel region.
                for share in range(asked.omp_get_thread_num(), shares, asked.omp_get_num_threads()):
                    run(share)
            except BaseException as error:  # it must not leave a function that C has called
                failed.append(error)

        parallel(_Task(task), None, shares, 0)
        if failed:
            raise failed[0]

    return team


def _loaded_openmp() -> str | None:
    """The GNU OpenMP library that torch has brought along and loaded: another one would have threads of its own."""
    home = str(Path(torch.__file__).parent)
    try:
        lines = _MAPS.read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    files = {line.split(maxsplit=5)[-1] for line in lines if "libgomp" in line}
    return min((file for file in files if file.startswith(home)), default=None)
