"""``padless tune`` writes a profile that the integrations read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from padless.cli import main
from padless.tuning import Profile
from support.trainers import tiny_config


@pytest.fixture
def config(tmp_path: Path) -> Path:
    place = tmp_path / "tiny.json"
    held = tiny_config("qwen2").to_dict()
    place.write_text(json.dumps({key: value for key, value in held.items() if value is not None}))
    return place


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as stopped:
        main(["tune", *arguments])
    return int(stopped.value.code or 0)


def test_it_writes_the_profile_and_prints_json(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "profile.json"
    arguments = ["--max-length", "32", "--memory-limit", "2MB", "--calibrate-seconds", "0.5", "--out", str(out)]
    assert run(str(config), *arguments, "--json") == 0
    told = json.loads(capsys.readouterr().out)
    profile = Profile.load(out)
    assert told["token_budget"] == profile.token_budget >= 32
    assert profile.model.startswith("Qwen2ForCausalLM:")
    assert profile.peak_memory <= 0.9 * 2_000_000
    assert profile.cost is not None


def test_the_table_names_budget_and_file(config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "p.json"
    assert (
        run(
            str(config),
            *("--max-length", "32", "--memory-limit", "2MB", "--calibrate-seconds", "0", "--out", str(out)),
            *("--optimizer", "sgd", "--gradient-checkpointing"),
        )
        == 0
    )
    shown = capsys.readouterr().out
    assert "token budget" in shown
    assert f"{Profile.load(out).token_budget:,}" in shown
    assert Profile.load(out).details["gradient_checkpointing"] is True


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--max-length", "32"], "state a limit"),
        (["--max-length", "32", "--memory-limit", "1kB"], "does not fit"),
        (["--optimizer", "lion"], "choose one of 'adamw'"),
    ],
)
def test_bad_input_ends_in_one_line(
    config: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(str(config), *arguments) == 2
    assert message in capsys.readouterr().err
