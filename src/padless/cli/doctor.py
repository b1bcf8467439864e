"""``padless doctor``: is this installation fit, and what would make it better?"""

from __future__ import annotations

import json
import os
import platform
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

__all__ = ["SUPPORTED", "Finding", "doctor", "examine"]

Status = Literal["ok", "advice", "broken"]

SUPPORTED: dict[str, tuple[str, str]] = {
    "numpy": ("1.26", "2.4"),
    "numba": ("0.60", "0.68"),
    "torch": ("2.4", "2.13"),
    "transformers": ("5.0", "5.24"),
    "accelerate": ("1.0", "1.15"),
    "trl": ("1.16", "1.16"),
    "verl": ("0.9", "0.9"),
    "lightning": ("2.4", "2.6"),
    "ray": ("2.30", "2.60"),
}
"""Package -> oldest version that is supported, newest one that the tests have run with."""

_NEEDED = ("numpy", "numba")
_KERNELS = {
    "flash-attn": "packed rows run without a dense mask",
    "mamba-ssm": "Mamba layers scan in one kernel, and Mamba-2 layers can take seq_idx",
    "causal-conv1d": "short convolutions can take seq_idx",
    "flash-linear-attention": "DeltaNet and other linear attention can take cu_seqlens",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        name: what.
        found: its state.
        status: ``ok``, ``advice`` (works, could be better), ``broken``.
        advice: what to do.
    """

    name: str
    found: str
    status: Status = "ok"
    advice: str = ""


def doctor(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """Look at versions, kernels, caches, threads and GPUs, and say in plain words what to do. Exit code 1 if broken."""
    findings = list(examine())
    broken = [finding for finding in findings if finding.status == "broken"]
    if as_json:
        typer.echo(json.dumps({"fit": not broken, "findings": [asdict(finding) for finding in findings]}, indent=2))
    else:
        _print(findings, broken)
    if broken:
        raise typer.Exit(1)


def examine() -> Iterator[Finding]:
    """All findings about this process's Python."""
    import padless

    yield Finding(name="padless", found=f"{padless.__version__}, Python {platform.python_version()}")
    for package, (oldest, newest) in SUPPORTED.items():
        yield _package(package, oldest, newest)
    for package, gain in _KERNELS.items():
        yield _kernel(package, gain)
    yield _numba_cache()
    yield _report_cache()
    yield _threads()
    yield _gpu()


def _package(package: str, oldest: str, newest: str) -> Finding:
    found = _version(package)
    if found is None:
        needed = package in _NEEDED
        advice = f"pip install {package}" if needed else ""
        return Finding(name=package, found="not installed", status="broken" if needed else "ok", advice=advice)
    if _parts(found) < _parts(oldest):
        return Finding(
            name=package, found=found, status="broken", advice=f'too old: pip install -U "{package}>={oldest}"'
        )
    failure = _import_failure(package) if package in ("numpy", "numba", "torch", "transformers") else None
    if failure is not None:
        return Finding(name=package, found=found, status="broken", advice=f"it cannot be imported: {failure}")
    if _parts(found)[:2] > _parts(newest)[:2]:
        advice = f"newer than what was tested ({newest}): run `padless verify` on your model"
        return Finding(name=package, found=found, status="advice", advice=advice)
    return Finding(name=package, found=found)


def _kernel(package: str, gain: str) -> Finding:
    found = _version(package)
    if found is None:
        return Finding(name=package, found="not installed", advice=f"with it, on a GPU, {gain}")
    module = {"flash-attn": "flash_attn", "flash-linear-attention": "fla"}.get(package, package.replace("-", "_"))
    failure = _import_failure(module)
    if failure is None:
        return Finding(name=package, found=found)
    advice = f"it cannot be imported, so models fall back or fail: {failure}; reinstall it for this torch"
    return Finding(name=package, found=found, status="broken", advice=advice)


def _numba_cache() -> Finding:
    """Compiled planners are kept beside the code, or in the user's cache; otherwise every process compiles again."""
    own = os.environ.get("NUMBA_CACHE_DIR")
    folders = [Path(own)] if own else [Path(__file__).parents[1] / "planning" / "__pycache__", _user_cache("numba")]
    usable = next((folder for folder in folders if _writable(folder)), None)
    if usable is not None:
        return Finding(name="numba cache", found=str(usable))
    advice = "no folder can be written to, so planners compile in every process: set NUMBA_CACHE_DIR to one that can"
    return Finding(name="numba cache", found=str(folders[0]), status="broken", advice=advice)


def _report_cache() -> Finding:
    own = os.environ.get("PADLESS_CACHE")
    folder = Path(own).expanduser() if own else _user_cache("padless")
    if _writable(folder):
        return Finding(name="report cache", found=str(folder))
    advice = "it cannot be written to, so models are verified anew each time: set PADLESS_CACHE"
    return Finding(name="report cache", found=str(folder), status="advice", advice=advice)


def _threads() -> Finding:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    wanted = os.environ.get("OMP_NUM_THREADS")
    used = int(wanted) if wanted and wanted.isdigit() else cores
    if find_spec("torch") is not None and _import_failure("torch") is None:
        import torch

        used = torch.get_num_threads()
    found = f"{used} threads on {cores} cores"
    if used > cores:
        advice = f"more threads than cores slow everything down: set OMP_NUM_THREADS={cores} or fewer"
        return Finding(name="BLAS threads", found=found, status="advice", advice=advice)
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "1")
    if ranks.isdigit() and int(ranks) * used > cores:
        each = max(1, cores // int(ranks))
        advice = f"{ranks} ranks share this machine: set OMP_NUM_THREADS={each}"
        return Finding(name="BLAS threads", found=found, status="advice", advice=advice)
    return Finding(name="BLAS threads", found=found)


def _gpu() -> Finding:
    present = shutil.which("nvidia-smi") is not None
    if find_spec("torch") is None or _import_failure("torch") is not None:
        return Finding(name="CUDA", found="torch is not usable", status="advice" if present else "ok")
    import torch

    if torch.cuda.is_available():
        names = sorted({torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())})
        return Finding(name="CUDA", found=f"{torch.version.cuda}, {torch.cuda.device_count()} x {', '.join(names)}")
    if not present:
        return Finding(name="CUDA", found="no GPU")
    kind = "a CPU build" if torch.version.cuda is None else f"built for CUDA {torch.version.cuda}"
    advice = f"there is a GPU, but torch {torch.__version__} ({kind}) cannot use it: install a matching build"
    return Finding(name="CUDA", found="not usable", status="broken", advice=advice)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _parts(text: str) -> tuple[int, ...]:
    """The leading numbers of a version.

    >>> _parts("2.13.0+cpu"), _parts("5.0.0rc1")
    ((2, 13, 0), (5, 0, 0))
    """
    parts = []
    for piece in text.split("+")[0].split("."):
        digits = piece[: next((i for i, letter in enumerate(piece) if not letter.isdigit()), len(piece))]
        if not digits:
            break
        parts.append(int(digits))
    return tuple(parts)


def _import_failure(module: str) -> str | None:
    try:
        import_module(module)
    except Exception as error:  # a broken extension may raise anything
        return f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
    return None


def _user_cache(name: str) -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / name


def _writable(folder: Path) -> bool:
    """Whether a file can be made in ``folder``, or in the nearest parent that exists."""
    there = next((place for place in (folder, *folder.parents) if place.exists()), None)
    if there is None or not there.is_dir():
        return False
    try:
        with tempfile.TemporaryFile(dir=there):
            return True
    except OSError:
        return False


def _print(findings: list[Finding], broken: list[Finding]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(show_header=False, box=None, pad_edge=False)
    style: dict[str, Any] = {"ok": "green", "advice": "yellow", "broken": "bold red"}
    for finding in findings:
        mark = Text(finding.status, style=style[finding.status])
        table.add_row(mark, Text(finding.name), Text(finding.found), Text(finding.advice))
    console = Console()
    console.print(table)
    advised = sum(finding.status == "advice" for finding in findings)
    if broken:
        console.print(f"Broken: {', '.join(finding.name for finding in broken)}.", style="bold red", highlight=False)
    else:
        console.print("All is well." if not advised else f"Fit, with {advised} piece(s) of advice.", highlight=False)
