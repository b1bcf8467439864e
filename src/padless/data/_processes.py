"""Worker processes, and how they take an interrupt, which a terminal sends to all of them."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from typing import Any

__all__ = ["run_task", "worker_pool"]


@contextmanager
def worker_pool(workers: int, start: Callable[..., None], *arguments: Any) -> Iterator[ProcessPoolExecutor]:
    """A pool whose processes are started at once and call ``start`` first; what waits at the end is cancelled.

    Tasks for it are submitted as ``run_task, function, ...``. Forked workers inherit the arguments, so tokenizers and
    functions that cannot be pickled work as well.
    """
    method = "fork" if "fork" in multiprocessing.get_all_start_methods() else "spawn"
    pool = ProcessPoolExecutor(
        workers,
        mp_context=multiprocessing.get_context(method),
        initializer=_start,
        initargs=(os.getpid(), start, arguments),
    )
    try:
        with _interrupts_held():  # workers inherit that, until they can take one
            pool.submit(os.getpid)
        yield pool
    finally:
        # Cancelled by the pool itself: it waits for ever if a worker dies when futures were cancelled behind its back.
        pool.shutdown(wait=True, cancel_futures=True)


@contextmanager
def _interrupts_held() -> Iterator[None]:
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


_asked_to_stop = False
_at_work = False


def run_task(function: Callable[..., Any], *arguments: Any) -> Any:
    """Run in a worker. An interrupt ends the task, and all that are asked for later, but not the process.

    One that died between two tasks would break the pool, and print a traceback.
    """
    global _at_work
    if _asked_to_stop:
        raise KeyboardInterrupt
    try:
        _at_work = True
        return function(*arguments)
    finally:
        _at_work = False


def _start(parent: int, start: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # as in the background of a shell script
        signal.signal(signal.SIGINT, _interrupted)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    threading.Thread(target=_leave_with, args=(parent,), daemon=True).start()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    gc.freeze()  # the collector leaves alone, and shared with the parent, what was inherited
    start(*arguments)


def _leave_with(parent: int) -> None:
    """A killed parent tells nobody: without this its workers would wait for tasks for ever."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


def _interrupted(*_: Any) -> None:
    global _asked_to_stop
    _asked_to_stop = True
    if _at_work:
        raise KeyboardInterrupt
