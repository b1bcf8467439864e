"""Worker processes that die or are interrupted end a run with one line, and never leave it waiting."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

DEADLY = """
import os, signal
def words(text):
    if text == "last words":
        os.kill(os.getpid(), signal.SIGKILL)
    return [1] * len(text.split())
"""
SLOW = """
import time
from pathlib import Path
def words(text):
    Path("began").touch()
    time.sleep(0.001)
    return [1] * len(text.split())
"""
COMMANDS = {
    "analyze": ["analyze", "rows.jsonl", "--no-cache"],
    "pack": ["pack", "rows.jsonl", "--out", "out", "--capacity", "512"],
}


def started(
    folder: Path, command: str, tokenizer: str, last: str, *, interrupts: signal.Handlers = signal.SIG_DFL
) -> subprocess.Popen[str]:
    (folder / "mine.py").write_text(tokenizer)
    # More blocks than are handed out ahead: the reader is not done when the workers are gone.
    rows = [{"text": "a word " * 60}] * 20_000 + [{"text": last}] * 3_000 + [{"text": "a word " * 60}] * 20_000
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return subprocess.Popen(
        [sys.executable, "-m", "padless", *COMMANDS[command], "--tokenizer", "mine:words", "--workers", "2"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder)},
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, interrupts),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def end_of(process: subprocess.Popen[str]) -> tuple[int, str]:
    try:
        _, told = process.communicate(timeout=60)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    return process.returncode, told


def wait_for(file: Path) -> None:
    until = time.monotonic() + 60
    while time.monotonic() < until and not file.exists():
        time.sleep(0.02)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_worker_that_dies_is_told_and_the_run_ends(command: str, tmp_path: Path) -> None:
    code, told = end_of(started(tmp_path, command, DEADLY, "last words"))
    assert (code, len(told.strip().splitlines())) == (2, 1)
    assert told.startswith("padless: a worker process died")


@pytest.mark.parametrize("command", COMMANDS)
def test_an_interrupt_of_every_process_is_told_once_and_ends_the_run(command: str, tmp_path: Path) -> None:
    process = started(tmp_path, command, SLOW, "words")
    wait_for(tmp_path / "began")
    os.killpg(process.pid, signal.SIGINT)
    code, told = end_of(process)
    assert code == 130
    assert told.startswith("padless: interrupted")
    assert len(told.strip().splitlines()) == 1


LATE = """
from multiprocessing.process import BaseProcess
run = BaseProcess.run
def late(self):
    time.sleep(self.name.endswith("-2"))
    run(self)
BaseProcess.run = late
"""


@pytest.mark.parametrize("command", COMMANDS)
def test_an_interrupt_while_a_worker_starts_is_told_once_as_well(command: str, tmp_path: Path) -> None:
    process = started(tmp_path, command, SLOW + LATE, "words")
    wait_for(tmp_path / "began")
    os.killpg(process.pid, signal.SIGINT)
    code, told = end_of(process)
    assert (code, len(told.strip().splitlines())) == (130, 1), told


WAITING = """
import os, time
from pathlib import Path
def words(text):
    Path("began").write_text(str(os.getpid()))
    until = time.monotonic() + 2
    while time.monotonic() < until:
        try:
            time.sleep(0.1)
        except KeyboardInterrupt:
            pass
    return [1] * len(text.split())
"""


@pytest.mark.parametrize("command", COMMANDS)
def test_a_worker_that_dies_after_an_interrupt_does_not_leave_the_run_waiting(command: str, tmp_path: Path) -> None:
    # With a worker that takes no task yet, the pool's queue is full, and more of them wait.
    process = started(tmp_path, command, WAITING + LATE, "words")
    wait_for(tmp_path / "began")
    time.sleep(0.2)
    os.kill(process.pid, signal.SIGINT)
    time.sleep(0.5)
    os.kill(int((tmp_path / "began").read_text()), signal.SIGKILL)
    code, told = end_of(process)
    assert (code, len(told.strip().splitlines())) == (130, 1), told


ONCE_SLOW = """
import time
from pathlib import Path
def words(text):
    if not Path("began").exists():
        Path("began").touch()
        time.sleep(1)
    return [1] * len(text.split())
"""


@pytest.mark.parametrize("command", COMMANDS)
def test_a_run_that_ignores_interrupts_has_workers_that_ignore_them(command: str, tmp_path: Path) -> None:
    process = started(tmp_path, command, ONCE_SLOW, "words", interrupts=signal.SIG_IGN)
    wait_for(tmp_path / "began")
    os.killpg(process.pid, signal.SIGINT)
    code, told = end_of(process)
    assert code == 0, told


@pytest.mark.parametrize("command", COMMANDS)
def test_workers_leave_with_a_killed_parent(command: str, tmp_path: Path) -> None:
    process = started(tmp_path, command, SLOW, "words")
    wait_for(tmp_path / "began")
    process.kill()
    # Workers hold the other end of its standard error: this returns when the last is gone.
    code, _ = end_of(process)
    assert code == -signal.SIGKILL
