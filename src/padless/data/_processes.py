"""Worker processes, and how they take an interrupt, which a terminal sends to all of them."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

__all__ = ["run_task", "worker_pool"]


def worker_pool(workers: int, start: Callable[..., None], *arguments: Any) -> ProcessPoolExecutor:
    """A pool whose processes call ``start`` first. Tasks for it are submitted as ``run_task, function, ...``.

    Forked workers inherit the arguments, so tokenizers and functions that cannot be pickled work as well.
    """
    method = "fork" if "fork" in multiprocessing.get_all_start_methods() else "spawn"
    return ProcessPoolExecutor(
        workers, mp_context=multiprocessing.get_context(method), initializer=_start, initargs=(start, arguments)
    )


_asked_to_stop = False
_at_work = False


def run_task(function: Callable[..., Any], *arguments: Any) -> Any:
    """Run in a worker. An interrupt ends the task, and all that are asked for later, but not the process.

    One that died between two tasks would break the pool, and print a traceback.
    """
    global _at_work
    if _asked_to_stop:
        raise KeyboardInterrupt
    _at_work = True
    try:
        return function(*arguments)
    finally:
        _at_work = False


def _start(start: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    signal.signal(signal.SIGINT, _interrupted)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    gc.freeze()  # the collector leaves alone, and shared with the parent, what was inherited
    start(*arguments)


def _interrupted(*_: Any) -> None:
    global _asked_to_stop
    _asked_to_stop = True
    if _at_work:
        raise KeyboardInterrupt
