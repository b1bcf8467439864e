"""The packing examples run as they are."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def run_example(name: str, *arguments: object) -> str:
    told = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "RAY_ADDRESS": "local"},  # not a cluster that another test runs
    )
    assert told.returncode == 0, told.stderr
    return told.stdout


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    path = tmp_path / "corpus.jsonl"
    path.write_text("".join(json.dumps({"text": "some words " * (1 + n % 50)}) + "\n" for n in range(100)))
    return path


def test_the_corpus_example_packs_and_loads(corpus: Path, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    out = run_example("pack_corpus.py", corpus, tmp_path / "packs")
    assert out.startswith("100 documents in ")
    assert "positions start again" in out


@pytest.mark.slow
def test_the_ray_example_packs(corpus: Path) -> None:
    pytest.importorskip("ray")
    assert "% full" in run_example("ray_pack.py", corpus)


def test_the_examples_are_short() -> None:
    for name in ("pack_corpus.py", "ray_pack.py"):
        assert len((EXAMPLES / name).read_text().splitlines()) <= 40
