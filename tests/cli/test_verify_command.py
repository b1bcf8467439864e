"""``padless verify``: models by folder, configuration, type and function; exit codes; JSON and page."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from padless.cli import main
from padless.verify import build_small


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as stopped:
        main(["verify", *arguments])
    return int(stopped.value.code or 0)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PADLESS_CACHE", str(tmp_path / "cache"))


def test_a_model_type_is_built_small_and_a_requested_leak_ends_in_one(capsys, tmp_path):
    page = tmp_path / "report.html"
    assert run("jamba", "--layouts", "right-padded,packed-position-ids", "--json", "--html", str(page)) == 1
    told = json.loads(capsys.readouterr().out)
    assert told["model"] == "JambaForCausalLM"
    assert {name: result["verdict"] for name, result in told["layouts"].items()} == {
        "right-padded": "exact",
        "packed-position-ids": "leaks",
    }
    assert "JambaMambaMixer" in page.read_text()
    assert run("jamba", "--layouts", "right-padded,packed-position-ids") == 1
    shown = capsys.readouterr()
    assert "read from the cache" in shown.out
    assert "not exact: packed-position-ids" in shown.err


def test_exact_layouts_end_in_zero_in_half_precision_and_with_eager_attention(capsys):
    arguments = ("--layouts", "right-padded", "--dtype", "bfloat16", "--attn", "eager", "--json", "--no-cache")
    assert run("qwen2", *arguments) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["environment"]["dtype"] == "bfloat16"
    assert told["environment"]["attention"] == "eager"


def test_checkpoint_folders_and_configurations_are_read(capsys, tmp_path):
    model = build_small("llama")
    model.save_pretrained(tmp_path / "checkpoint")
    model.config.save_pretrained(tmp_path / "config")
    assert run(str(tmp_path / "checkpoint"), "--layouts", "packed-position-ids", "--json", "--no-cache") == 0
    assert json.loads(capsys.readouterr().out)["model"] == "LlamaForCausalLM"
    assert run(str(tmp_path / "config" / "config.json"), "--layouts", "packed-position-ids", "--no-cache") == 0
    assert "exact" in capsys.readouterr().out


def test_a_function_that_returns_a_model_is_called(capsys, tmp_path, monkeypatch):
    (tmp_path / "my_models.py").write_text(
        "from padless.verify import build_small\n\ndef tiny():\n    return build_small('mamba')\n"
    )
    monkeypatch.chdir(tmp_path)
    assert run("my_models:tiny", "--layouts", "packed-position-ids", "--json", "--no-cache") == 1
    told = json.loads(capsys.readouterr().out)
    assert told["model"] == "MambaForCausalLM"
    assert told["layouts"]["packed-position-ids"]["cause"] == "recurrent-state"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("no-such-model",), "no folder, file, MODULE:FUNCTION or model type"),
        (("no_such_module:build",), "cannot be loaded"),
        (("json:dumps",), "cannot be loaded"),
        (("math:pi",), "not a torch.nn.Module"),
        (("qwen2", "--layouts", "packed"), "layout='packed' is unknown"),
        (("qwen2", "--layouts", ","), "names no layout"),
        (("qwen2", "--dtype", "int8"), "--dtype int8 is unknown"),
        (("qwen2", "--attn", "paged"), "--attn paged is unknown"),
        (("qwen2", "--layouts", "naive", "--html", "/no/such/folder/x.html"), "cannot write"),
    ],
)
def test_bad_input_ends_in_two_with_one_line(arguments, message, capsys):
    assert run(*arguments) == 2
    told = capsys.readouterr().err.strip()
    assert message in told
    assert "Traceback" not in told
    assert len([line for line in told.splitlines() if line.startswith("padless:")]) == 1


def test_a_folder_without_a_model_is_bad_input(tmp_path, capsys):
    assert run(str(tmp_path)) == 2
    assert "cannot be loaded" in capsys.readouterr().err
    (tmp_path / "config.json").write_text("{}")
    assert run(str(tmp_path)) == 2
