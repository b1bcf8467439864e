"""How kernels are compiled: numba, cached on disk, and never a stale or unwritable cache."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
from numba.core.caching import IndexDataCacheFile

__all__ = ["jit"]

_stamps: dict[str, tuple[str, str]] = {}


def jit(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile ``function`` at its first call with each kind of argument, and keep the result on disk.

    numba writes its cache beside the source, or under the user's cache folder where that is read-only,
    and replaces files in one step, so that processes may race. What it stores is looked up by CPU and
    numba version. Two things are added here: the stamp is a hash of the source file instead of its
    modification time (installers that fix all times would keep an old kernel alive; a kernel calls only
    kernels of its own file, so the file is all it depends on), and where no folder can be written
    the kernel is compiled in memory.
    """
    compiled: Any = numba.njit(function)
    try:
        compiled.enable_caching()
    except RuntimeError:  # no folder can be written
        return compiled  # type: ignore[no-any-return]
    _stamp_by_content(compiled, function.__code__.co_filename)
    return compiled  # type: ignore[no-any-return]


def _stamp_by_content(compiled: Any, source: str) -> None:
    if source not in _stamps:
        _stamps[source] = (hashlib.sha256(Path(source).read_bytes()).hexdigest(), numba.__version__)
    try:
        cache = compiled._cache
        cache._cache_file = IndexDataCacheFile(
            cache_path=cache._cache_path,
            filename_base=cache._impl.filename_base,
            source_stamp=_stamps[source],
        )
    except AttributeError:  # another numba lays its cache out differently: its own stamp stays
        return
