"""Pools of worker processes that start badly, or elsewhere than on Linux, say so and end; they never wait for ever."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PREAMBLE = """
import multiprocessing, os, signal, sys, threading, time
from padless import PadlessError
from padless.data import measure
import mine

ROWS = ["a b c", "d e"] * 50

def tell(**options):
    try:
        print(measure(ROWS, cache=False, batch_size=10, **options).real_tokens)
    except PadlessError as error:
        print(f"PadlessError: {error}")
    except BaseException as error:
        print(f"{type(error).__name__}: {error}")
"""
MINE = """
class Odd(Exception):
    def __init__(self, one, two):
        super().__init__(f"{one} and {two}")

def words(text):
    return text.split()

def odd(text):
    raise Odd(1, 2)
"""
SPAWNED = "multiprocessing.get_all_start_methods = lambda: ['spawn']\n"


def told_by(folder: Path, script: str) -> list[str]:
    """Lines on standard output. A run that waits for ever fails."""
    (folder / "mine.py").write_text(MINE)
    (folder / "script.py").write_text(PREAMBLE + script)
    ended = subprocess.run(
        [sys.executable, "script.py"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return ended.stdout.splitlines()


needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="workers are forked")

NO_MORE = """
fork, forked = os.fork, []
def one_only():
    if forked:
        raise BlockingIOError(11, "Resource temporarily unavailable")
    forked.append(fork())
    return forked[0]
os.fork = one_only
tell(tokenizer=mine.words, workers=3)
print(multiprocessing.active_children())
"""


@needs_fork
def test_where_no_more_processes_can_be_had_those_that_were_are_ended(tmp_path: Path) -> None:
    told = told_by(tmp_path, NO_MORE)
    assert told[0].startswith(
        "PadlessError: worker processes cannot be started: [Errno 11] Resource temporarily unavailable"
    )
    assert told[1:] == ["[]"]


TAKEN_ELSEWHERE = """
threading.Thread(target=time.sleep, args=(1.5,)).start()  # does not block what the main thread does

fork, came = os.fork, []
def interrupted():
    if came == [0]:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.3)
    came.append(len(came))
    return fork()
os.fork = interrupted
tell(tokenizer=mine.words, workers=3)
print(multiprocessing.active_children())
"""


@needs_fork
def test_an_interrupt_that_another_thread_takes_does_not_meet_a_pool_half_started(tmp_path: Path) -> None:
    assert told_by(tmp_path, TAKEN_ELSEWHERE) == ["KeyboardInterrupt: ", "[]"]


HANDLED = """
def handle(number, frame):
    raise SystemExit("in order")
signal.signal(signal.SIGTERM, handle)
fork, came = os.fork, []
def terminated():
    if came == [0]:
        os.kill(os.getpid(), signal.SIGTERM)
    came.append(len(came))
    return fork()
os.fork = terminated
tell(tokenizer=mine.words, workers=3)
print(multiprocessing.active_children())
"""


@needs_fork
def test_neither_does_a_termination_that_the_program_takes(tmp_path: Path) -> None:
    assert told_by(tmp_path, HANDLED) == ["SystemExit: in order", "[]"]


def test_an_error_that_cannot_be_unpickled_is_not_told_as_a_dead_worker(tmp_path: Path) -> None:
    assert told_by(tmp_path, "tell(length=mine.odd, workers=2)") == ["RuntimeError: Odd: 1 and 2"]


SPAWN = """
if __name__ == "__main__":
    tell(tokenizer=mine.words, workers=2)
    tell(tokenizer=lambda text: text.split(), workers=2)
"""


def test_workers_that_are_spawned_count_the_same_and_name_what_they_cannot_be_sent(tmp_path: Path) -> None:
    counted, refused = told_by(tmp_path, SPAWNED + SPAWN)
    assert counted == "250"
    assert refused.startswith("PadlessError: worker processes cannot be started: Can't pickle <function <lambda>")


UNGUARDED = """
try:
    measure(ROWS, tokenizer=mine.words, workers=2, cache=False)
except PadlessError as error:
    print(f"PadlessError: {error}")
"""


def test_a_spawned_worker_that_runs_the_script_again_is_explained(tmp_path: Path) -> None:
    *_, told = told_by(tmp_path, SPAWNED + UNGUARDED)
    assert told.startswith("PadlessError: worker processes cannot be started, for the reason that one of them printed")
