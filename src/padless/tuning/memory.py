"""How much memory a micro-batch needs: the device's own count, or a count of live storages on the CPU."""

from __future__ import annotations

import gc
import re
import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from padless.errors import PadlessError, shown

__all__ = ["AllocationMeter", "OutOfLimit", "free_cached", "is_out_of_memory", "parse_bytes"]

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


def parse_bytes(value: int | str) -> int:
    """Bytes from a number or from ``"80GiB"``, ``"500 MB"``.

    >>> parse_bytes("2GiB"), parse_bytes("1.5 kB"), parse_bytes(10)
    (2147483648, 1500, 10)
    """
    text = str(value).strip()
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?i?)b?", text.lower())
    if match is None or match[2] not in _UNITS or not float(match[1]):
        raise PadlessError(f"{shown(value)} is no amount of memory; write 80GiB, 500MB or a number of bytes")
    return int(float(match[1]) * _UNITS[match[2]])


class OutOfLimit(MemoryError):
    """A micro-batch needs more than the stated limit."""


class AllocationMeter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of storages that operations make, and stops where a limit is passed.

    It stands in for a device's memory on the CPU: what exists before (parameters, optimizer state) is given as
    ``held``; storages that kernels use inside are not seen.

    >>> with AllocationMeter() as meter:
    ...     x = torch.ones(1000) * 2
    >>> meter.peak >= 4000
    True
    """

    def __init__(self, *, limit: int | None = None, held: int = 0) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.limit = limit
        self.live = held
        self.peak = held
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                self._add(leaf)
        return out

    def _add(self, tensor: torch.Tensor) -> None:
        try:
            storage = tensor.untyped_storage()
            key, size = storage._cdata, storage.nbytes()
        except (RuntimeError, NotImplementedError):  # a tensor without storage
            return
        if key in self._known:
            return
        self._known.add(key)
        weakref.finalize(storage, self._drop, key, size).atexit = False
        self.live += size
        self.peak = max(self.peak, self.live)
        if self.limit is not None and self.live > self.limit:
            raise OutOfLimit(f"{self.live} bytes live; the limit is {self.limit}")

    def _drop(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.live -= size


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out, in any of the ways that devices say it."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and ("out of memory" in text or "can't allocate memory" in text)


def free_cached(device: torch.device, *, collect: bool = True) -> None:
    """Drop dead objects and cached blocks, so that the next trial starts like the first.

    ``collect`` looks for reference cycles, which a pass that failed may leave behind.
    """
    if collect:
        gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
