"""Compiled kernels on disk: shared by processes, absent where nothing can be written, never stale."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import padless

PLAN = "import padless; print(padless.pack([7, 5, 4, 1], 10).order.tolist(), padless.__file__)"
COUNT = """
import sys
sys.path.insert(0, {folder!r})
import kernel
print(kernel.answer(1))
"""


def run(code: str, *, timeout: int = 240, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture
def kernel(tmp_path: Path) -> Path:
    """A module with one kernel, always of the same time and size."""
    source = tmp_path / "kernel.py"
    source.write_text("from padless.planning.kernels import jit\n\n\n@jit\ndef answer(x):\n    return x + 41\n")
    os.utime(source, (0, 0))
    return source


def test_several_processes_may_compile_and_cache_at_once(kernel: Path) -> None:
    cache = kernel.parent / "cache"
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(cache)}
    code = COUNT.format(folder=str(kernel.parent))
    running = [
        subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(4)
    ]
    assert [process.communicate(timeout=200)[0].strip() for process in running] == ["42"] * 4
    assert list(cache.rglob("*.nbi"))
    assert run(code, NUMBA_CACHE_DIR=str(cache)) == "42"  # what they left behind loads


def test_another_cpu_gets_a_kernel_of_its_own_from_the_same_cache(kernel: Path) -> None:
    cache, code = kernel.parent / "cache", COUNT.format(folder=str(kernel.parent))
    assert run(code, NUMBA_CACHE_DIR=str(cache)) == "42"
    assert len(list(cache.rglob("*.nbc"))) == 1
    assert run(code, NUMBA_CACHE_DIR=str(cache), NUMBA_CPU_NAME="generic", NUMBA_CPU_FEATURES="") == "42"
    assert len(list(cache.rglob("*.nbc"))) == 2


@pytest.mark.slow
def test_a_folder_that_cannot_be_written_does_not_stop_a_plan(tmp_path: Path) -> None:
    package = tmp_path / "site" / "padless"
    shutil.copytree(
        Path(padless.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__", "bench", "cli")
    )
    # Root may write anywhere: files where folders are needed refuse every user.
    for folder in [package, *(p for p in package.rglob("*") if p.is_dir())]:
        (folder / "__pycache__").write_text("in the way")
    blocked = tmp_path / "home"
    blocked.write_text("not a folder")
    answer = run(
        PLAN,
        PYTHONPATH=str(package.parent),
        HOME=str(blocked),
        XDG_CACHE_HOME=str(blocked / "cache"),
        PYTHONDONTWRITEBYTECODE="1",
    )
    assert answer.startswith("[0, 1, 2, 3]")
    assert str(package) in answer


@pytest.mark.parametrize("replacement", ["98", "998"])
def test_a_changed_source_is_compiled_anew_even_with_the_same_time(kernel: Path, replacement: str) -> None:
    code = COUNT.format(folder=str(kernel.parent))
    environment = {"NUMBA_CACHE_DIR": str(kernel.parent / "cache"), "PYTHONDONTWRITEBYTECODE": "1"}
    assert run(code, **environment) == "42"
    kernel.write_text(kernel.read_text().replace("41", replacement))
    os.utime(kernel, (0, 0))
    assert run(code, **environment) == str(int(replacement) + 1)
