"""The built wheel holds what it should, and works where it is installed on its own."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    # Built with the tools of this environment: the test needs no network.
    done = subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(ROOT)],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = folder.glob("*.whl")
    return built


@pytest.mark.slow
def test_the_wheel_holds_the_package_its_types_and_its_licence_only(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"padless"}
    assert "padless/py.typed" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    sources = {str(file.relative_to(ROOT / "src")) for file in (ROOT / "src").rglob("*.py")}
    assert sources <= set(names)


@pytest.mark.slow
def test_the_installed_wheel_plans_and_has_a_command(wheel: Path, tmp_path: Path) -> None:
    target = tmp_path / "site"
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(target), str(wheel)],
        check=True,
        timeout=240,
    )
    code = (
        f"import sys; sys.path.insert(0, {str(target)!r}); import padless;"
        f"assert padless.__file__.startswith({str(target)!r}), padless.__file__;"
        "print(padless.microbatch([5, 3, 9, 2], 12).check().real_tokens)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True, cwd=tmp_path
    )
    assert done.stdout.strip() == "19"
    command = (
        f"import sys, runpy; sys.path.insert(0, {str(target)!r});"
        "sys.argv = ['padless', '--version']; runpy.run_module('padless', run_name='__main__')"
    )
    shown = subprocess.run(
        [sys.executable, "-c", command], capture_output=True, text=True, timeout=120, check=False, cwd=tmp_path
    )
    assert shown.stdout.strip() == "0.1.0", shown.stderr
