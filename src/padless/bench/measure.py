"""Time and memory of one optimizer step, and the machine it ran on."""

from __future__ import annotations

import ctypes
import gc
import os
import platform
import re
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

__all__ = ["Clock", "PeakMemory", "machine", "versions"]

_STATUS, _STATM, _CLEAR = Path("/proc/self/status"), Path("/proc/self/statm"), Path("/proc/self/clear_refs")


class Clock:
    """Seconds by part. On CUDA each part ends when the device has done its work."""

    def __init__(self, device: str) -> None:
        self.parts: dict[str, float] = {}
        self._cuda = device == "cuda"

    @contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        """Add the time of the block to ``part``."""
        self._wait()
        began = time.perf_counter()
        try:
            yield
        finally:
            self._wait()
            self.parts[part] = self.parts.get(part, 0.0) + time.perf_counter() - began

    def _wait(self) -> None:
        if self._cuda:
            torch.cuda.synchronize()


class PeakMemory:
    """The most memory used inside a block, in bytes.

    On CUDA what torch had allocated at most, weights included. On the CPU how far the process's resident memory rose
    above what it was before: Linux keeps the high-water mark and lets a process reset its own; where that is not
    allowed, a thread looks every few milliseconds; where there is no /proc, the answer is ``None``.
    """

    def __init__(self, device: str) -> None:
        self.peak: int | None = None
        self._cuda = device == "cuda"
        self._before = 0
        self._watch: _Watch | None = None

    def __enter__(self) -> PeakMemory:
        if self._cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        elif _STATM.exists():
            _give_back()
            self._before = _resident()
            if not _reset_high_water():
                self._watch = _Watch()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._cuda:
            torch.cuda.synchronize()
            self.peak = int(torch.cuda.max_memory_allocated())
        elif _STATM.exists():
            most = self._watch.stop() if self._watch is not None else _high_water()
            self.peak = max(0, most - self._before)


def _give_back() -> None:
    """What the last arm freed must not count as memory that this one may use for nothing."""
    gc.collect()
    if sys.platform == "linux":
        try:
            ctypes.CDLL("libc.so.6").malloc_trim(0)
        except (OSError, AttributeError):  # another libc: the figure is then a little low
            return


def _resident() -> int:
    return int(_STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _high_water() -> int:
    found = re.search(r"VmHWM:\s+(\d+) kB", _STATUS.read_text())
    return int(found.group(1)) * 1024 if found else _resident()


def _reset_high_water() -> bool:
    try:
        _CLEAR.write_text("5")
    except OSError:
        return False
    return _high_water() <= _resident() + (1 << 24)


class _Watch:
    def __init__(self) -> None:
        self._most, self._done = 0, threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._done.wait(0.003):
            self._most = max(self._most, _resident())

    def stop(self) -> int:
        self._done.set()
        self._thread.join()
        return max(self._most, _resident())


def machine(device: str) -> dict[str, Any]:
    """What the benchmark ran on, and how much ran there in the last minute, the benchmark itself included."""
    told: dict[str, Any] = {
        "system": f"{platform.system()} {platform.release()}",
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "device": device,
    }
    if hasattr(os, "getloadavg"):
        told["load_average"] = round(os.getloadavg()[0], 1)
    if device == "cuda":
        told["accelerator"] = torch.cuda.get_device_name()
        told["accelerator_memory_bytes"] = int(torch.cuda.get_device_properties(0).total_memory)
    return told


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        found = re.search(r"model name\s*:\s*(.+)", info.read_text())
        if found:
            return found.group(1).strip()
    return platform.processor() or platform.machine()


def versions() -> dict[str, str]:
    """Of Python and of what does the work."""
    told = {"python": platform.python_version()}
    for name in ("torch", "transformers", "numpy", "numba"):
        try:
            told[name] = version(name)
        except PackageNotFoundError:
            continue
    return told
