"""Files that go wrong in odd ways, and a run that is interrupted: one line says what, where, and what to do."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from padless.cli import main

pytest.importorskip("typer")
pytest.importorskip("pyarrow")


def run(capsys: pytest.CaptureFixture[str], *arguments: Any) -> tuple[int, str]:
    with pytest.raises(SystemExit) as leaving:
        main([str(argument) for argument in arguments])
    told = capsys.readouterr().err.strip().splitlines()
    assert len(told) == 1
    return int(leaving.value.code or 0), told[0]


@pytest.mark.parametrize("held", [b"", b"not an array"], ids=["empty", "garbage"])
def test_a_file_that_is_no_array_is_one_line(held: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "lengths.npy"
    source.write_bytes(held)
    code, told = run(capsys, "analyze", source)
    assert code == 2
    assert "lengths.npy holds no array of numbers" in told


def test_a_tokenizer_that_raises_is_told_with_its_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "rows.jsonl"
    source.write_text('{"text": "a b c"}\n')
    code, told = run(capsys, "analyze", source, "--tokenizer", "builtins:int", "--no-cache")
    assert code == 2
    assert "the tokenizer gives no token ids for the text 'a b c': ValueError" in told


def test_options_are_named_as_they_are_typed() -> None:
    from padless.cli import _as_typed

    for command in ("analyze", "tune", "pack"):
        import_module(f"padless.cli.{command}")
    typed = {
        "overlong='bad' is unknown; give fields= (--fields)": "--overlong bad is unknown; give --fields",
        "state memory_limit='8GiB'": "state memory_limit='8GiB'",  # no option of this command
        "--rows=0; expected more": "--rows=0; expected more",
        "max_length=512, not 256": "--max-length 512, not 256",
    }
    for python, told in typed.items():
        assert _as_typed(python, ["analyze", "rows.jsonl"]) == told
    assert _as_typed("memory_limit='8GiB'", ["tune"]) == "--memory-limit 8GiB"
    assert _as_typed("restart=True (--restart)", ["pack"]) == "--restart"


@pytest.mark.parametrize("command", ["analyze", "pack", "bench"])
def test_a_negative_seed_is_refused_by_name(command: str) -> None:
    given = {
        "analyze": ["rows.jsonl"],
        "pack": ["rows.jsonl", "--out", "out", "--capacity", "8"],
        "bench": [],
    }[command]
    told = subprocess.run(
        [sys.executable, "-m", "padless", command, *given, "--seed", "-1"], capture_output=True, text=True, check=False
    )
    assert told.returncode == 2
    assert "--seed" in told.stderr
    assert "Traceback" not in told.stderr


def test_a_file_of_broken_rows_only_names_the_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "latin.jsonl"
    source.write_bytes(b'{"text": "caf\xe9"}\n{"text": "th\xe9"}\n')
    options = ["--out", tmp_path / "out", "--capacity", "16", "--tokenizer", "builtins:list"]
    code, told = run(capsys, "pack", source, *options)
    assert code == 2
    assert "no row can be read: latin.jsonl, line 1: not JSON" in told


def test_an_empty_file_is_said_to_have_no_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "zero.jsonl"
    source.touch()
    code, told = run(capsys, "analyze", source, "--tokenizer", "builtins:list", "--no-cache")
    assert code == 2
    assert told.endswith("zero.jsonl: there are no rows")


def test_a_bad_row_is_named_once_with_its_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mixed = tmp_path / "mixed.jsonl"
    mixed.write_text('{"text": "a b c"}\n{"text": null}\n{"text": 5}\n')
    code, told = run(capsys, "analyze", mixed, "--tokenizer", "builtins:list", "--no-cache")
    assert code == 2
    assert "mixed.jsonl, row 2: text is a int" in told
    chat = tmp_path / "chat.jsonl"
    chat.write_text(json.dumps({"messages": [{"role": "user", "content": "a"}]}) + "\n")
    template = tmp_path / "broken.jinja"
    template.write_text("{{ raise_exception('roles must alternate') }}")
    folder = tmp_path / "tokenizer"
    words(folder)
    options = ["--capacity", "16", "--tokenizer", folder, "--chat-template", template]
    code, told = run(capsys, "pack", chat, "--out", tmp_path / "out", *options)
    assert code == 2
    assert told.count("row 0") == 1
    assert "chat.jsonl, row 0: the chat template" in told


def words(folder: Path) -> None:
    """A tokenizer of whole words, saved in a folder."""
    tokenizers = pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers")
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    transformers.PreTrainedTokenizerFast(tokenizer_object=made, unk_token="[UNK]").save_pretrained(folder)


@pytest.mark.parametrize("workers", ["0", "2"])
def test_an_interrupted_run_says_that_it_can_be_continued(tmp_path: Path, workers: str) -> None:
    source = tmp_path / "rows.jsonl"
    source.write_text((json.dumps({"text": "a word " * 20}) + "\n") * 40_000)
    (tmp_path / "slow.py").write_text(
        "import time\ndef words(text):\n    time.sleep(0.001)\n    return [1] * len(text.split())\n"
    )
    command = [
        sys.executable,
        "-m",
        "padless",
        "pack",
        str(source),
        "--out",
        str(tmp_path / "out"),
        "--capacity",
        "512",
    ]
    process = subprocess.Popen(
        [*command, "--tokenizer", "slow:words", "--workers", workers],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        start_new_session=True,
        stderr=subprocess.PIPE,
        text=True,
    )
    until = time.monotonic() + 120
    while time.monotonic() < until and not list((tmp_path / "out" / ".padless").glob("*.npz")):
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)
    _, told = process.communicate(timeout=60)
    assert process.returncode == 130
    assert told.strip().splitlines()[-1] == (
        "padless: interrupted: run the same command again, it continues where it stopped"
    )
    assert "Traceback" not in told
