"""``padless pack`` from files to shards, and every bad input in one line."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from padless.cli import main


def run(capsys: pytest.CaptureFixture[str], *arguments: Any) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as left:
        main(["pack", *map(str, arguments)])
    out, err = capsys.readouterr()
    return int(left.value.code or 0), out, err


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    rows = [{"input_ids": list(range(n % 23))} for n in range(200)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_it_packs_and_says_what_became_of_every_row(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = run(capsys, source, "--out", tmp_path / "out", "--capacity", 64)
    assert code == 0
    assert "191 documents" in out
    assert "9 empty rows" in out
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    shard = tmp_path / "out" / manifest["shards"][0]["name"]
    assert pq.read_table(shard).num_rows == manifest["totals"]["packs"]


def test_json_is_the_manifest_and_a_second_run_only_reports(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = (source, "--out", tmp_path / "out", "--capacity", 64, "--json", "--workers", 2)
    code, out, err = run(capsys, *arguments)
    assert (code, err) == (0, "")
    first = json.loads(out)
    assert not first["resumed"]
    again = json.loads(run(capsys, *arguments)[1])
    assert again["resumed"]
    assert again["shards"] == first["shards"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--capacity", "16"], "row 17: 17 tokens exceed the capacity 16"),
        (["--capacity", "0"], "capacity=0"),
        (["--capacity", "64", "--engine", "spark"], "--engine spark is unknown"),
        (["--capacity", "64", "--fields", "text"], "fields names column 'text'"),
        (["--capacity", "64", "--method", "magic"], "--method magic is unknown"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    code, _, err = run(capsys, source, "--out", tmp_path / "out", *arguments)
    assert code == 2
    assert len(err.strip().splitlines()) == 1
    assert message in err


def test_progress_shows_rate_and_time_left_on_a_terminal_and_lines_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    from rich.console import Console

    from padless.cli import _screen

    clock = [0.0]
    monkeypatch.setattr(_screen.time, "monotonic", lambda: clock[0])
    for terminal in (True, False):
        out = io.StringIO()
        made = Console(file=out, force_terminal=terminal, width=120)
        monkeypatch.setattr(_screen, "error_console", lambda made=made: made)
        with _screen.progress_bar(quiet=False) as show:
            show("tokenizing", 0, 2_000_000, "rows")
            clock[0] += 20
            show("tokenizing", 500_000, 2_000_000, "rows")
        text = out.getvalue()
        assert "tokenizing" in text
        assert "25.0k rows/s" in text
        assert "2.00M" in text
        assert "left" in text or terminal


def test_counts_are_written_for_people() -> None:
    from padless.cli._screen import number

    assert [number(n) for n in (0, 999, 12_345, 123_456, 3_200_000, 5e9)] == [
        "0", "999", "12.3k", "123k", "3.20M", "5.00G",
    ]  # fmt: skip
