"""verl 0.7.1, where every micro-batch has the full width: rows are rolled and cut, and nothing else changes."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.verl_env import TESTS
from support.verl_fixed import PROMPT, PROMPTS, RESPONSE, RESPONSES, ROWS

OLDER = Path(sys.prefix) / "verl-0.7"
pytestmark = pytest.mark.skipif(not (OLDER / "verl").is_dir(), reason="verl 0.7.1 is not beside verl 0.9.1")


@pytest.fixture(scope="module")
def arms(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("fixed")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PADLESS_VERL", "VERL_"))}
    path = os.pathsep.join([str(OLDER), str(TESTS)])
    done = subprocess.run(
        [sys.executable, "-m", "support.verl_fixed", str(folder)],
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
        env=kept | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return pickle.loads((folder / "rank0.pkl").read_bytes())


@pytest.mark.parametrize("role", ["actor", "critic"])
def test_outputs_losses_and_parameters_are_those_of_verl(arms: dict[str, Any], role: str) -> None:
    assert arms["version"] == "0.7.1"
    stock, ours = arms["stock"][role], arms["padless"][role]
    for name, value in stock["outputs"].items():
        assert np.abs(value - ours["outputs"][name]).max() < 1e-5, name
    assert stock["metrics"], "there are losses to compare"
    for name, value in stock["metrics"].items():
        np.testing.assert_allclose(ours["metrics"][name], value, rtol=1e-5, atol=1e-7, err_msg=name)
    for name, value in stock["parameters"].items():
        np.testing.assert_allclose(ours["parameters"][name], value, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("role", ["actor", "critic"])
def test_every_micro_batch_is_as_wide_as_its_longest_row(arms: dict[str, Any], role: str) -> None:
    lengths = [p + r for p, r in zip(PROMPTS, RESPONSES, strict=True)]
    longest = [max(lengths[start : start + 2]) for start in range(0, ROWS, 2)]
    assert arms["stock"][role]["shapes"] == [(2, PROMPT + RESPONSE)] * 6
    assert arms["padless"][role]["shapes"] == [(2, width) for width in longest] * 2


def test_uninstall_brings_the_padding_back(arms: dict[str, Any]) -> None:
    for role in ("actor", "critic"):
        assert arms["restored"][role]["shapes"] == arms["stock"][role]["shapes"]
