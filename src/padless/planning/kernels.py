"""How kernels are compiled: numba, cached on disk, and never a stale or unwritable cache."""

from __future__ import annotations

import hashlib
import itertools
import os
import secrets
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numba
from numba.core.bytecode import FunctionIdentity
from numba.core.caching import IndexDataCacheFile

__all__ = ["inlined", "jit", "only_for"]

_LAYOUT = "unique names"  # part of the stamp: kernels that were cached before names were unique are compiled anew
_stamps: dict[tuple[str, ...], tuple[str, str, str]] = {}


def _make_names_unique() -> None:
    """Let numba number what this process compiles from a random start.

    A kernel is cached with the parts of NumPy that it calls, each named by what it is and by a number that counts from
    1 in every process. Two parts that differ only in what they close over (the inner loop of ``np.sort`` and that of
    ``np.argsort``), compiled by two processes, can so get the same name; and of one name the linker takes the first
    that it has loaded, for all callers: wrong results, or a crash. What one process compiles is numbered apart already.
    """
    if hasattr(FunctionIdentity, "_unique_ids"):
        FunctionIdentity._unique_ids = itertools.count(secrets.randbits(48))


_make_names_unique()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_make_names_unique)


def jit(function: Callable[..., Any], *, made_of: Sequence[str] = (), **options: Any) -> Callable[..., Any]:
    """Compile ``function`` at its first call with each kind of argument, and keep the result on disk.

    numba writes its cache beside the source, or under the user's cache folder where that is read-only,
    and replaces files in one step, so that processes may race. What it stores is looked up by CPU and
    numba version. Three things are added here: names are unique (above); the stamp is a hash of the source instead of
    its modification time (installers that fix all times would keep an old kernel alive), of the kernel's file and of
    all files beside it whose names end in ``_kernels``, which are those that kernels may call each other from; and
    where no folder can be written the kernel is compiled in memory.

    Args:
        function: what to compile.
        made_of: further files whose contents are part of the kernel.
        options: of ``numba.njit``.
    """
    compiled: Any = numba.njit(**options)(function)
    try:
        compiled.enable_caching()
    except RuntimeError:  # no folder can be written
        return compiled  # type: ignore[no-any-return]
    _stamp_by_content(compiled, (function.__code__.co_filename, *made_of))
    return compiled  # type: ignore[no-any-return]


def only_for(signature: Any, kernel: Any) -> Any:
    """A kernel from `jit`, compiled or loaded from disk now, for arguments of these types and no others."""
    kernel.compile(signature)
    kernel.disable_compile()
    return kernel


class _Index(IndexDataCacheFile):  # type: ignore[misc]
    """An index that another version left behind may name classes that are gone: it counts as empty then."""

    def _load_index(self) -> dict[Any, Any]:
        try:
            known: dict[Any, Any] = super()._load_index()
        except Exception:  # of what is broken, pickle raises nearly anything
            return {}
        return known


def _stamp_by_content(compiled: Any, sources: tuple[str, ...]) -> None:
    if sources not in _stamps:
        files = sorted({*map(Path, sources), *Path(sources[0]).parent.glob("*_kernels.py")})
        read = hashlib.sha256(b"".join(map(_digest, files)))
        _stamps[sources] = (read.hexdigest(), numba.__version__, _LAYOUT)
    try:
        cache = compiled._cache
        cache._cache_file = _Index(
            cache_path=cache._cache_path,
            filename_base=cache._impl.filename_base,
            source_stamp=_stamps[sources],
        )
    except AttributeError:  # another numba lays its cache out differently: its own stamp stays
        return


@cache
def _digest(file: Path) -> bytes:
    return hashlib.sha256(file.read_bytes()).digest()


def inlined(function: Callable[..., Any]) -> Callable[..., Any]:
    """Part of each kernel that calls ``function``, from the same files as `jit`: a few operations on many arrays."""
    compiled: Callable[..., Any] = numba.njit(function, inline="always")
    return compiled
