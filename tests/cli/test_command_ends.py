"""A command ends with one line and the right code, whatever ends it: signals, a closed pipe, a full disk."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import IO, Any

import pytest

pytest.importorskip("typer")
pytest.importorskip("pyarrow")

WORDS = """
def words(text):
    return [1] * len(text.split())
"""
OUTPUTS = {
    "analyze --json": ["analyze", "rows.jsonl", "--tokenizer", "mine:words", "--json"],
    "analyze": ["analyze", "rows.jsonl", "--tokenizer", "mine:words"],
    "pack --json": ["pack", "rows.jsonl", "--tokenizer", "mine:words", "--out", "out", "--capacity", "64", "--json"],
    "pack": ["pack", "rows.jsonl", "--tokenizer", "mine:words", "--out", "out", "--capacity", "64"],
    "version": ["--version"],
}


def command(folder: Path, arguments: list[str], *, tokenizer: str = WORDS, rows: int = 300, **more: Any) -> Any:
    (folder / "mine.py").write_text(tokenizer)
    (folder / "rows.jsonl").write_text("".join(json.dumps({"text": "a " * (i % 30 + 1)}) + "\n" for i in range(rows)))
    streams: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, **more}
    return subprocess.Popen(
        [sys.executable, "-m", "padless", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder)},
        start_new_session=True,
        text=True,
        **streams,
    )


def end_of(process: Any) -> tuple[int, str]:
    try:
        _, told = process.communicate(timeout=60)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    return process.returncode, (told or "").strip()


def wait_for(file: Path) -> None:
    until = time.monotonic() + 60
    while time.monotonic() < until and not file.exists():
        time.sleep(0.02)


def closed_pipe() -> IO[Any]:
    reader, writer = os.pipe()
    os.close(reader)
    return os.fdopen(writer, "w")


@pytest.mark.parametrize("name", OUTPUTS)
def test_an_output_that_nobody_reads_ends_a_command_as_any_filter(name: str, tmp_path: Path) -> None:
    with closed_pipe() as nobody:
        assert end_of(command(tmp_path, OUTPUTS[name], stdout=nobody)) == (141, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device that is always full")
@pytest.mark.parametrize("name", ["analyze --json", "pack", "version"])
def test_an_output_that_cannot_be_written_is_an_error_in_one_line(name: str, tmp_path: Path) -> None:
    with open("/dev/full", "w") as full:
        code, told = end_of(command(tmp_path, OUTPUTS[name], stdout=full))
    assert (code, told) == (2, "padless: cannot write the output: No space left on device")


def test_progress_that_nobody_sees_ends_nothing(tmp_path: Path) -> None:
    with closed_pipe() as nobody:
        process = command(tmp_path, OUTPUTS["analyze --json"], stdout=subprocess.PIPE, stderr=nobody)
        out, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert json.loads(out)["data"]["rows"] == 300


STUBBORN = """
import os, time
from pathlib import Path
def words(text):
    Path(f"began-{os.getpid()}").touch()
    Path("began").touch()
    while True:
        try:
            time.sleep(60)
        except KeyboardInterrupt:
            Path("asked").touch()
"""


def gone(folder: Path) -> bool:
    """Whether all processes that tokenized have left, soon."""
    pids = [int(path.name.partition("-")[2]) for path in folder.glob("began-*")]
    until = time.monotonic() + 10
    while time.monotonic() < until:
        if not any(Path(f"/proc/{pid}").exists() for pid in pids):
            return True
        time.sleep(0.05)
    return False


WORKING = {
    "analyze": ["analyze", "rows.jsonl", "--tokenizer", "mine:words", "--workers", "2", "--no-cache"],
    "pack": ["pack", "rows.jsonl", "--tokenizer", "mine:words", "--workers", "2", "--out", "out", "--capacity", "64"],
}


@pytest.mark.parametrize("name", WORKING)
def test_a_second_interrupt_ends_a_run_at_once_with_its_workers(name: str, tmp_path: Path) -> None:
    patient = "import padless.data._processes as p\np._PATIENCE = 120.0\n"  # workers are not killed for being late
    process = command(tmp_path, WORKING[name], tokenizer=patient + STUBBORN)
    wait_for(tmp_path / "began")
    os.kill(process.pid, signal.SIGINT)
    wait_for(tmp_path / "asked")  # the first one has been taken, and is passed on
    os.kill(process.pid, signal.SIGINT)
    code, told = end_of(process)
    assert code == 130
    assert told.startswith("padless: interrupted")
    assert len(told.splitlines()) == 1
    assert gone(tmp_path)


def test_a_task_that_does_not_stop_ends_some_seconds_after_the_interrupt(tmp_path: Path) -> None:
    process = command(tmp_path, WORKING["analyze"], tokenizer=STUBBORN)
    wait_for(tmp_path / "began")
    os.kill(process.pid, signal.SIGINT)
    assert end_of(process) == (130, "padless: interrupted")
    assert gone(tmp_path)


SLEEPY = STUBBORN.replace("except KeyboardInterrupt", "except ZeroDivisionError")


@pytest.mark.parametrize(("name", "workers"), [("analyze", "2"), ("pack", "0"), ("pack", "2")])
def test_a_termination_is_told_in_one_line_and_leaves_nothing(name: str, workers: str, tmp_path: Path) -> None:
    arguments = [workers if word == "2" else word for word in WORKING[name]]
    process = command(tmp_path, arguments, tokenizer=SLEEPY)
    wait_for(tmp_path / "began")
    process.terminate()
    code, told = end_of(process)
    assert code == 143
    assert told.startswith("padless: terminated")
    assert len(told.splitlines()) == 1
    assert gone(tmp_path)


def limited(size: int) -> Callable[[], None]:
    def limit() -> None:
        import resource

        resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))

    return limit


def saved_tokenizer(folder: Path) -> None:
    """One whose lengths are kept: its content can be compared."""
    tokenizers = pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers")
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=made, unk_token="[UNK]").save_pretrained(folder / "saved")


def test_lengths_that_cannot_be_kept_are_still_analyzed(tmp_path: Path) -> None:
    saved_tokenizer(tmp_path)
    asked = ["analyze", "rows.jsonl", "--tokenizer", "saved", "--json"]
    process = command(tmp_path, asked, stdout=subprocess.PIPE, preexec_fn=limited(1024))
    out, told = process.communicate(timeout=60)
    assert process.returncode == 0
    assert json.loads(out)["data"]["rows"] == 300
    assert told.startswith("padless: the measured lengths cannot be kept in")
    assert len(told.strip().splitlines()) == 1
    assert not list((tmp_path / ".padless").iterdir())


def test_a_page_that_cannot_be_written_leaves_the_one_before(tmp_path: Path) -> None:
    pytest.importorskip("plotly")
    (tmp_path / "page.html").write_text("before")
    asked = [*OUTPUTS["analyze"], "--html", "page.html"]
    code, told = end_of(command(tmp_path, asked, preexec_fn=limited(20_000)))
    assert (code, told) == (2, "padless: cannot write page.html: File too large")
    assert (tmp_path / "page.html").read_text() == "before"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine.py", "page.html", "rows.jsonl"]


def test_no_worker_is_forked_while_another_thread_loads_what_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    before = threading.active_count()
    module, loads, ready = import_module("padless.cli.analyze"), threading.Event(), threading.Event()

    def load() -> None:
        loads.set()
        ready.wait(60)

    monkeypatch.setattr(module, "_load_planners", load)
    monkeypatch.setattr(module, "_LONG_ENOUGH", 0.0)
    with module._loading_planners(2) as began:
        assert not loads.wait(0.2), "workers are not there yet"
        began()
        assert loads.wait(60)
        began()
        ready.set()
    assert threading.active_count() == before, "those of the next data set may be forked"


@pytest.mark.parametrize(
    "asked",
    [["tune", "nothing", "--out", "file/profile.json"], ["verify", "nothing", "--html", "missing/page.html"],
     ["analyze", "nothing", "--html", "missing/page.html"], ["bench", "--html", "file/page.html"]],
    ids=lambda asked: asked[0],
)  # fmt: skip
def test_a_result_that_could_not_be_written_is_refused_before_the_run(
    asked: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from padless.cli import main

    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit) as leaving:
        main(asked)
    assert leaving.value.code == 2
    assert capsys.readouterr().err.startswith(f"padless: cannot write {asked[-1]}: ")
