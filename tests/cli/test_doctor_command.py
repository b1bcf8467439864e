"""``padless doctor`` says what is broken, what could be better, and nothing else."""

from __future__ import annotations

import json
import os
import tomllib
from pathlib import Path

import pytest

from padless.cli import main

ROOT = Path(__file__).resolve().parents[2]


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as stopped:
        main(["doctor", *arguments])
    return int(stopped.value.code or 0)


@pytest.fixture
def module():
    from importlib import import_module

    return import_module("padless.cli.doctor")


def by_name(module) -> dict:
    return {finding.name: finding for finding in module.examine()}


def test_this_installation_is_fit(capsys):
    assert run("--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert told["fit"] is True
    found = {finding["name"]: finding for finding in told["findings"]}
    assert {"padless", "numpy", "numba", "torch", "flash-attn", "numba cache", "BLAS threads", "CUDA"} <= set(found)
    assert found["numpy"]["status"] == "ok"
    assert run() == 0
    shown = capsys.readouterr().out
    assert "numba cache" in shown
    assert "Broken" not in shown


def test_the_oldest_versions_are_those_of_the_package_itself(module):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *(w for extra in project["optional-dependencies"].values() for w in extra)]
    # several extras may name one package; the integrations' own extra is the one that counts
    lowest: dict[str, set[str]] = {}
    for line in wanted:
        name, _, oldest = line.partition(">=")
        lowest.setdefault(name.split("[")[0], set()).add(oldest)
    for package, (oldest, newest) in module.SUPPORTED.items():
        assert oldest in lowest[package], package
        assert module._parts(oldest) <= module._parts(newest)


def test_a_version_that_is_too_old_is_broken_and_a_new_one_is_advice(module, monkeypatch, capsys):
    versions = {"torch": "2.1.0+cpu", "transformers": "99.0"}
    real = module.version
    monkeypatch.setattr(module, "version", lambda package: versions.get(package) or real(package))
    found = by_name(module)
    assert found["torch"].status == "broken"
    assert 'pip install -U "torch>=2.4"' in found["torch"].advice
    assert found["transformers"].status == "advice"
    assert "padless verify" in found["transformers"].advice
    assert run() == 1
    assert "Broken: torch." in capsys.readouterr().out


def test_a_kernel_that_is_installed_but_cannot_be_imported_is_broken(module, monkeypatch):
    real = module.version
    monkeypatch.setattr(module, "version", lambda package: "2.0" if package == "mamba-ssm" else real(package))
    finding = by_name(module)["mamba-ssm"]
    assert finding.status == "broken"
    assert "ModuleNotFoundError" in finding.advice


def test_a_missing_needed_package_is_broken_and_a_missing_optional_one_is_not(module, monkeypatch):
    def missing(package: str) -> str:
        raise module.PackageNotFoundError(package)

    monkeypatch.setattr(module, "version", missing)
    found = by_name(module)
    assert found["numba"].status == "broken"
    assert found["verl"].status == "ok"
    assert found["verl"].found == "not installed"


def test_a_cache_that_cannot_be_written_to_is_found(module, monkeypatch, tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(blocked / "numba"))
    monkeypatch.setenv("PADLESS_CACHE", str(blocked))
    found = by_name(module)
    assert found["numba cache"].status == "broken"
    assert "NUMBA_CACHE_DIR" in found["numba cache"].advice
    assert found["report cache"].status == "advice"
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "new" / "numba"))
    assert by_name(module)["numba cache"].status == "ok"
    assert not (tmp_path / "new").exists()


def test_ranks_that_share_the_cores_are_told_how_many_threads_to_take(module, monkeypatch):
    cores = len(os.sched_getaffinity(0))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(2 * cores + 1))
    finding = by_name(module)["BLAS threads"]
    assert finding.status == "advice"
    assert "OMP_NUM_THREADS=1" in finding.advice


def test_a_gpu_that_torch_cannot_use_is_broken(module, monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(module.shutil, "which", lambda name: "/usr/bin/nvidia-smi")
    finding = by_name(module)["CUDA"]
    assert finding.status == "broken"
    assert "cannot use it" in finding.advice
    monkeypatch.setattr(module.shutil, "which", lambda name: None)
    assert by_name(module)["CUDA"].found == "no GPU"
