"""Worker processes, and how they take an interrupt, which a terminal sends to all of them."""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from typing import Any

from padless.errors import PadlessError

__all__ = ["run_task", "worker_pool"]


_TAKEN = (signal.SIGINT, signal.SIGTERM)
_PATIENCE = 5.0
"""Seconds in which a task that is asked to stop may do so, before its process is killed."""


@contextmanager
def worker_pool(workers: int, start: Callable[..., None], *arguments: Any) -> Iterator[ProcessPoolExecutor]:
    """A pool whose processes are started at once and call ``start`` first; what waits at the end is cancelled.

    Tasks for it are submitted as ``run_task, function, ...``. Forked workers inherit the arguments, so tokenizers and
    functions that cannot be pickled work as well. If the run ends before its time, tasks that run are asked to stop.

    Raises:
        PadlessError: no more processes can be had, or the arguments cannot be sent to those that are not forked.
    """
    method = "fork" if "fork" in multiprocessing.get_all_start_methods() else "spawn"
    pool = ProcessPoolExecutor(
        workers,
        mp_context=multiprocessing.get_context(method),
        initializer=_start,
        initargs=(os.getpid(), start, arguments),
    )
    try:
        with _signals_held():  # workers inherit that, until they can take one
            first = _launch(pool)
        if method != "fork":
            _wait_for_start(first)
        yield pool
    except BaseException:
        _ask_to_stop(pool)
        raise
    # Cancelled by the pool: it waits for ever if a worker dies when futures were cancelled behind its back.
    pool.shutdown(wait=True, cancel_futures=True)


def _launch(pool: ProcessPoolExecutor) -> Future[int]:
    try:
        return pool.submit(os.getpid)
    except Exception as error:  # whatever an object makes the pickler raise, where workers are not forked
        for process in _processes(pool):  # no task will tell them to leave, and the interpreter would wait for them
            process.kill()
            process.join()
        if "bootstrapping" in str(error):  # a worker that runs the script again: Python explains it
            raise
        if isinstance(error, OSError | RuntimeError | AssertionError):  # no more processes or threads, or not here
            raise PadlessError(f"worker processes cannot be started: {error}; use fewer workers, or none") from error
        raise PadlessError(
            f"worker processes cannot be started: {error}; on this system they need a tokenizer and functions that can"
            " be pickled, as those of a module can; or choose workers=0"
        ) from error


def _wait_for_start(first: Future[int]) -> None:
    try:
        first.result()
    except BrokenProcessPool:
        raise PadlessError(
            "worker processes cannot be started, for the reason that one of them printed: on this system they import"
            " the modules of the tokenizer and functions, and the script itself, whose work must stand below"
            ' `if __name__ == "__main__":`; or choose workers=0'
        ) from None


def _processes(pool: ProcessPoolExecutor) -> list[Any]:
    return list((pool._processes or {}).values())


def _ask_to_stop(pool: ProcessPoolExecutor) -> None:
    """What runs ends as at a terminal's interrupt; where it does not, its process is killed some time later."""
    processes = [process for process in _processes(pool) if process.is_alive()]
    if hasattr(signal, "pthread_sigmask"):
        for process in processes:
            with suppress(OSError):  # it is gone already
                os.kill(process.pid, signal.SIGINT)
    late = threading.Timer(_PATIENCE, lambda: [process.kill() for process in processes if process.is_alive()])
    late.daemon = True
    late.start()
    pool.shutdown(wait=True, cancel_futures=True)
    late.cancel()


@contextmanager
def _signals_held() -> Iterator[None]:
    """An interrupt, or a termination that is taken, waits until the end: a pool half started cannot be shut down.

    Other threads, such as those of a linear algebra library, would take a signal that only this thread blocks, and
    hand it to this one: so a handler holds it, too.
    """
    came: list[int] = []
    held = {}
    if threading.current_thread() is threading.main_thread():  # no other takes signals, or may say how
        held = {number: how for number in _TAKEN if callable(how := signal.getsignal(number))}
    masked = signal.pthread_sigmask(signal.SIG_BLOCK, _TAKEN) if hasattr(signal, "pthread_sigmask") else None
    for number in held:
        signal.signal(number, lambda number, _: came.append(number))
    try:
        yield
    finally:
        for number, how in held.items():
            signal.signal(number, how)
        if masked is not None:
            signal.pthread_sigmask(signal.SIG_SETMASK, masked)
        if came:
            signal.raise_signal(came[0])


_asked_to_stop = False
_at_work = False


def run_task(function: Callable[..., Any], *arguments: Any) -> Any:
    """Run in a worker. An interrupt ends the task, and all that are asked for later, but not the process.

    One that died between two tasks would break the pool, and print a traceback.
    """
    global _at_work
    try:
        _at_work = True
        if _asked_to_stop:
            raise KeyboardInterrupt
        return function(*arguments)
    except Exception as error:
        raise _portable(error) from error
    finally:
        _at_work = False


def _portable(error: Exception) -> Exception:
    """The error, or what it says where the parent could not unpickle it: that would look like a dead worker."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # whatever a constructor with arguments of its own raises
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def _start(parent: int, start: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # as in the background of a shell script
        signal.signal(signal.SIGINT, _interrupted)
    if signal.getsignal(signal.SIGTERM) is not signal.SIG_IGN:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the parent's way to end in order is not a worker's
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _TAKEN)
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
    global _asked_to_stop, _at_work
    _asked_to_stop = True
    if _at_work:
        _at_work = False  # one is enough: a second would meet what cleans up after the first
        raise KeyboardInterrupt
