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


ORDER, LEAST = "return np.argsort(x)", "return np.sort(x)"
BOTH = """
import sys
sys.path.insert(0, {folder!r})
import numpy as np
import order, least
x = np.random.default_rng(0).random(50)
first, second = least.answer(x), order.answer(x)
print((first == np.sort(x)).all() and (second == np.argsort(x)).all())
"""


def write(source: Path, body: str, *, helpers: int = 0) -> None:
    """A module with a kernel that calls a few others, which shifts the numbers of all that is compiled after them."""
    lines = ["import numpy as np", "from padless.planning.kernels import jit", ""]
    for k in range(helpers):
        lines += ["@jit", f"def helper_{k}(x):", "    return x[0]", ""]
    calls = [f"    helper_{k}(x)" for k in range(helpers)]
    source.write_text("\n".join([*lines, "@jit", "def answer(x):", *calls, f"    {body}", ""]))


@pytest.mark.slow
@pytest.mark.parametrize("helpers", [2, 3, 4])
def test_kernels_that_other_processes_cached_do_not_call_each_others_helpers(tmp_path: Path, helpers: int) -> None:
    """With numba's own numbers the loops of sort and argsort get one name at 3 helpers: a wrong order, or a crash."""
    write(tmp_path / "order.py", ORDER, helpers=helpers)
    write(tmp_path / "least.py", LEAST)
    compile_one = "import sys; sys.path.insert(0, {!r}); import numpy as np, {} as m; m.answer(np.ones(3))"
    cache = str(tmp_path / "cache")
    for name in ("order", "least"):
        run(compile_one.format(str(tmp_path), name), NUMBA_CACHE_DIR=cache)
    assert run(BOTH.format(folder=str(tmp_path)), NUMBA_CACHE_DIR=cache) == "True"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_process_numbers_its_kernels_apart_from_its_parents() -> None:
    code = """
import os, padless.planning.kernels
from numba.core.bytecode import FunctionIdentity
reading, writing = os.pipe()
if os.fork() == 0:
    os.write(writing, str(next(FunctionIdentity._unique_ids)).encode())
    os._exit(0)
os.wait()
print(abs(int(os.read(reading, 100)) - next(FunctionIdentity._unique_ids)) > 1_000_000)
"""
    assert run(code) == "True"


def test_a_kernel_is_compiled_anew_when_one_it_may_call_has_changed(tmp_path: Path) -> None:
    """Kernels may call those of other files beside theirs, whose names end in ``_kernels``."""
    called, source = tmp_path / "called_kernels.py", tmp_path / "kernel.py"
    head = "from padless.planning.kernels import jit\n"
    source.write_text(head + "from called_kernels import add\n\n\n@jit\ndef answer(x):\n    return add(x)\n")
    code, cache = COUNT.format(folder=str(tmp_path)), str(tmp_path / "cache")
    for plus in (41, 42):
        called.write_text(head + f"\n\n@jit\ndef add(x):\n    return x + {plus}\n")
        os.utime(called, (0, 0))
        shutil.rmtree(tmp_path / "__pycache__", ignore_errors=True)  # Python's own, which goes by time and size
        assert run(code, NUMBA_CACHE_DIR=cache, PYTHONDONTWRITEBYTECODE="1") == str(1 + plus)


def test_a_kernel_is_compiled_anew_when_a_file_that_it_is_made_of_has_changed(tmp_path: Path) -> None:
    part, source = tmp_path / "part.py", tmp_path / "kernel.py"
    source.write_text(
        "from padless.planning.kernels import jit\nimport part\nPLUS = part.PLUS\n\n\n"
        "def add(x):\n    return x + PLUS\n\n\nanswer = jit(add, made_of=[part.__file__], nogil=True)\n"
    )
    code, cache = COUNT.format(folder=str(tmp_path)), str(tmp_path / "cache")
    for plus in (41, 42):
        part.write_text(f"PLUS = {plus}\n")
        os.utime(part, (0, 0))
        shutil.rmtree(tmp_path / "__pycache__", ignore_errors=True)
        assert run(code, NUMBA_CACHE_DIR=cache, PYTHONDONTWRITEBYTECODE="1") == str(1 + plus)


def test_an_index_that_names_a_class_of_another_version_is_no_error(tmp_path: Path) -> None:
    cache = str(tmp_path / "cache")
    for name in ("Given", "Renamed"):
        (tmp_path / "kernel.py").write_text(
            "from typing import NamedTuple\nfrom padless.planning.kernels import jit\n\n\n"
            f"class {name}(NamedTuple):\n    x: int\n\n\n"
            f"@jit\ndef add(given):\n    return given.x + 1\n\n\ndef answer(x):\n    return add({name}(x))\n"
        )
        code = COUNT.format(folder=str(tmp_path))
        assert run(code, NUMBA_CACHE_DIR=cache, PYTHONDONTWRITEBYTECODE="1") == "2"


def test_a_broken_index_is_written_anew(kernel: Path) -> None:
    cache, code = kernel.parent / "cache", COUNT.format(folder=str(kernel.parent))
    assert run(code, NUMBA_CACHE_DIR=str(cache)) == "42"
    (index,) = cache.rglob("*.nbi")
    whole = index.read_bytes()
    for broken in (b"", whole[: len(whole) // 2], b"garbage"):
        index.write_bytes(broken)
        assert run(code, NUMBA_CACHE_DIR=str(cache)) == "42"
        assert index.read_bytes() == whole


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
