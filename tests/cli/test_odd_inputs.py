"""Files that go wrong in odd ways, and a run that is interrupted: one line says what, where, and what to do."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
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
