"""Models whose kernels are installed (plain stand-ins for them): which boundary arguments reach which kernel."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
ORDER = ("packed-position-ids", "packed-cu-seqlens", "packed-seq-idx", "packed-fla")
KNOWN = {
    "qwen3_next": ("leaks", "leaks", "exact", "unsupported"),
    "kimi_linear": ("leaks", "leaks", "leaks", "exact"),
    "lfm2": ("leaks", "leaks", "exact", "exact"),
}

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def found() -> dict[str, dict[str, dict[str, str]]]:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "support.kernel_standins", *KNOWN],
        env={**os.environ, "PYTHONPATH": str(TESTS), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("family", KNOWN)
def test_each_family_is_exact_with_the_arguments_that_its_kernels_read(found, family):
    assert tuple(found[family]["verdicts"][layout] for layout in ORDER) == KNOWN[family]
    leaking = [layout for layout in ORDER if found[family]["verdicts"][layout] == "leaks"]
    assert {found[family]["causes"][layout] for layout in leaking} <= {"recurrent-state", "convolution"}


def test_a_model_that_fills_in_cu_seqlens_itself_says_so(found):
    assert "multiple values for keyword argument 'cu_seqlens'" in found["qwen3_next"]["why"]["packed-fla"]


def test_kernels_with_cu_seqlens_take_one_packed_row(found):
    assert found["qwen3_next"]["rows"] == {"packed-seq-idx": "unsupported"}
    assert found["lfm2"]["rows"] == {"packed-seq-idx": "exact", "packed-fla": "exact"}
