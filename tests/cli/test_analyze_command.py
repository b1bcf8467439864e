"""``padless analyze`` from files to figures, and every bad input in one line."""

from __future__ import annotations

import json
import sys
import threading
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from padless.cli import main


def run(capsys: pytest.CaptureFixture[str], *arguments: Any) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as left:
        main(["analyze", *map(str, arguments)])
    out, err = capsys.readouterr()
    return int(left.value.code or 0), out, err


def words(text: str) -> list[str]:
    return text.split()


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    path = tmp_path / "texts.jsonl"
    rng = np.random.default_rng(0)
    rows = [{"text": "word " * int(n)} for n in rng.integers(0, 120, size=400)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "my_words.py").write_text("def words(text):\n    return text.split()\n")
    monkeypatch.syspath_prepend(tmp_path)
    sys.modules.pop("my_words", None)
    return "my_words:words"


def test_text_files_are_measured_and_the_json_agrees_with_a_direct_count(
    texts: Path, tokenizer: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = run(capsys, texts, "--tokenizer", tokenizer, "--json", "--max-length", 100)
    assert code == 0
    told = json.loads(out)
    counts = np.array([len(json.loads(line)["text"].split()) for line in texts.read_text().splitlines()])
    kept = counts[counts > 0].clip(max=100)
    assert told["data"] == {
        "files": [str(texts)],
        "rows": 400,
        "empty": int((counts == 0).sum()),
        "dropped": 0,
        "truncated": int((counts > 100).sum()),
    }
    assert told["lengths"]["total"] == int(kept.sum())
    assert told["lengths"]["p90"] == pytest.approx(np.quantile(kept, 0.9))
    assert {"empty", "truncation"} <= {warning["kind"] for warning in told["warnings"]}


def test_a_column_of_lengths_needs_no_tokenizer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lengths = np.random.default_rng(0).integers(1, 500, size=300)
    np.save(tmp_path / "lengths.npy", lengths)
    pq.write_table(pa.table({"n": lengths}), tmp_path / "lengths.parquet")
    _, first, _ = run(capsys, tmp_path / "lengths.npy", "--json", "--ranks", 4)
    _, second, _ = run(capsys, tmp_path / "lengths.parquet", "--fields", "n", "--json", "--ranks", 4, "--no-cache")
    a, b = json.loads(first), json.loads(second)
    assert a["lengths"] == b["lengths"]
    assert a["strategies"] == b["strategies"]


def test_the_table_names_the_strategies_the_choice_and_what_to_paste(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    np.save(tmp_path / "l.npy", np.random.default_rng(0).lognormal(6, 1, size=600).clip(5, 6000).astype(int))
    code, out, _ = run(capsys, tmp_path / "l.npy", "--ranks", 8, "--html", tmp_path / "page.html")
    assert code == 0
    for text in ("longest-in-batch *", "step-balanced", "Recommendation: step-balanced", "TokenBudgetSampler", "verl"):
        assert text in out
    assert (tmp_path / "page.html").stat().st_size > 1_000_000


def test_prompts_and_responses_can_be_padded_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.save(tmp_path / "l.npy", np.array([[10, 400], [300, 20]] * 40))
    _, out, _ = run(capsys, tmp_path / "l.npy", "--json")
    told = json.loads(out)
    assert told["setup"]["padded_to"] == 700
    assert told["setup"]["current"] == "fixed"
    assert told["strategies"]["fixed"]["occupancy"] == pytest.approx((410 + 320) / 1400)


def test_a_mixture_is_drawn_by_its_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.save(tmp_path / "short.npy", np.full(500, 20))
    np.save(tmp_path / "long.npy", np.full(500, 2000))
    _, out, _ = run(capsys, tmp_path / "short.npy", tmp_path / "long.npy", "--weights", "0,1", "--json")
    told = json.loads(out)
    assert told["recommendation"]["strategy"] == "change nothing"  # only the long ones are drawn
    assert "source-length" in {warning["kind"] for warning in told["warnings"]}


def test_a_model_config_brings_cost_and_memory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.save(tmp_path / "l.npy", np.arange(1, 300))
    config = {"model_type": "qwen2", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    (tmp_path / "config.json").write_text(json.dumps({**config, "intermediate_size": 256, "vocab_size": 1000}))
    _, out, _ = run(capsys, tmp_path / "l.npy", "--model", tmp_path, "--json")
    told = json.loads(out)
    assert told["setup"]["cost"]["source"] == "config"
    assert told["model"]["memory"]["activations_gib"] > 0


def bad_parquet(folder: Path) -> list[Any]:
    (folder / "x.parquet").write_bytes(b"PAR1 no")
    return [folder / "x.parquet", "--fields", "n"]


def bad_lines(folder: Path) -> list[Any]:
    (folder / "x.jsonl").write_text('{"length": 1}\n{"length"\n')
    return [folder / "x.jsonl", "--no-cache"]


def bad_weights(folder: Path) -> list[Any]:
    np.save(folder / "l.npy", np.arange(1, 30))
    return [folder / "l.npy", "--weights", "1,2"]


def no_fields(folder: Path) -> list[Any]:
    (folder / "y.jsonl").write_text('{"story": "a"}\n')
    return [folder / "y.jsonl", "--no-cache"]


def mixed_types(folder: Path) -> list[Any]:
    (folder / "z.jsonl").write_text('{"text": "a"}\n{"text": 5}\n')
    return [folder / "z.jsonl", "--no-cache", "--tokenizer", "builtins:str.split"]


def lists_of_text(folder: Path) -> list[Any]:
    (folder / "z.jsonl").write_text('{"text": ["a", "b"]}\n')
    return [folder / "z.jsonl", "--no-cache", "--fields", "text"]


def small_budget(folder: Path) -> list[Any]:
    np.save(folder / "l.npy", np.arange(100, 130))
    return [folder / "l.npy", "--token-budget", 10]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (lambda f: [f / "none.jsonl"], "none.jsonl does not exist"),
        (bad_parquet, "x.parquet"),
        (bad_lines, "x.jsonl, line 2: not JSON"),
        (bad_weights, "2 numbers for 1 data sets"),
        (no_fields, "no column of 'story'"),
        (mixed_types, "row 1: text is a int, where other rows have str"),
        (lists_of_text, "column 'text' holds lists of text"),
        (small_budget, "no sequence fits the token budget 10"),
        (lambda f: [*small_budget(f)[:1], "--sync", "never"], "--sync never is unknown"),
        (lambda f: [*small_budget(f)[:1], "--tokenizer", "no_such:thing"], None),
    ],
)
def test_bad_input_is_one_line_and_exit_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: Any, message: str | None
) -> None:
    given = arguments(tmp_path)
    code, _, err = run(capsys, *given)
    assert code == 2
    lines = err.strip().splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("padless: ")
    assert (message or "cannot be loaded") in lines[0]


def test_what_plans_is_loaded_while_workers_tokenize_and_changes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command = import_module("padless.cli.analyze")
    texts = tmp_path / "texts.jsonl"  # several blocks of 1,000 rows: it is loaded after the first, beside the others
    texts.write_text("".join(json.dumps({"text": "a word " * (1 + row % 9)}) + "\n" for row in range(4_000)))
    loaded: list[str] = []
    load = command._load_planners
    monkeypatch.setattr(command, "_load_planners", lambda: (load(), loaded.append(threading.current_thread().name)))
    (tmp_path / "my_slow.py").write_text(
        "import time\n\n\ndef words(text):\n    time.sleep(0.0005)\n    return text.split()\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    results = []
    for delay, workers in ((0.0, 2), (600.0, 2), (0.0, 0)):
        monkeypatch.setattr(command, "_LONG_ENOUGH", delay)
        options = ("--tokenizer", "my_slow:words", "--json", "--workers", workers, "--no-cache")
        results.append(run(capsys, texts, *options)[:2])
        for thread in threading.enumerate():
            if isinstance(thread, threading.Timer):
                thread.join(120)
        assert len(loaded) == 1, "once, in the first run only"
    assert results[0][0] == 0
    assert results[0] == results[1] == results[2]
