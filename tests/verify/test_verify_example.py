"""The example runs as it is shown."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.parametrize(("family", "word"), [("jamba", "packing is refused: packed-position-ids leaks")])
def test_the_example_verifies_refuses_and_proves_the_step(family, word, tmp_path):
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "verify_model.py"), family],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PADLESS_CACHE": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert word in done.stdout
    assert "the same step" in done.stdout
    assert len((ROOT / "examples" / "verify_model.py").read_text().splitlines()) <= 40
