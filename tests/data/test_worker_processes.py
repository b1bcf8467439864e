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


def started(folder: Path, command: str, tokenizer: str, last: str) -> subprocess.Popen[str]:
    (folder / "mine.py").write_text(tokenizer)
    # Blocks far over what a pipe holds: the reader is writing to one when the workers are gone.
    rows = [{"text": "a word " * 60}] * 20_000 + [{"text": last}] * 3_000 + [{"text": "a word " * 60}] * 20_000
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return subprocess.Popen(
        [sys.executable, "-m", "padless", *COMMANDS[command], "--tokenizer", "mine:words", "--workers", "2"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder)},
        start_new_session=True,
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


@pytest.mark.parametrize("command", COMMANDS)
def test_a_worker_that_dies_is_told_and_the_run_ends(command: str, tmp_path: Path) -> None:
    code, told = end_of(started(tmp_path, command, DEADLY, "last words"))
    assert (code, len(told.strip().splitlines())) == (2, 1)
    assert told.startswith("padless: a worker process died")


@pytest.mark.parametrize("command", COMMANDS)
def test_an_interrupt_of_every_process_is_told_once_and_ends_the_run(command: str, tmp_path: Path) -> None:
    process = started(tmp_path, command, SLOW, "words")
    until = time.monotonic() + 60
    while time.monotonic() < until and not (tmp_path / "began").exists():
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGINT)
    code, told = end_of(process)
    assert code == 130
    assert told.startswith("padless: interrupted")
    assert len(told.strip().splitlines()) == 1
