"""Equal work: sequences over ranks, and packs that cost alike."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from padless.errors import PadlessError
from padless.lengths import positive_int

__all__ = ["partition"]

Index = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


def partition(work: Any, parts: int, *, equal_counts: bool = False, rounds: int = 1000) -> Index:
    """Divide items into ``parts`` so that the largest part has as little work as possible.

    Longest first onto the least loaded part, then items of the fullest part are exchanged with others' for as
    long as that helps. Work is any cost of a sequence: its tokens, or ``a * length + length ** 2``.

    Args:
        work: (N,) non-negative numbers.
        parts: how many parts, at least 1.
        equal_counts: part sizes differ by at most one (otherwise counts are free).
        rounds: exchanges at most.

    Returns:
        (N,) int64, the part of each item.

    >>> partition([64, 16, 16, 16, 16], 2).tolist()
    [0, 1, 1, 1, 1]
    """
    from padless.planning.small_kernels import assign

    array = np.asarray(work, dtype=np.float64)
    if array.ndim != 1 or not len(array) or not (np.isfinite(array).all() and array.min() >= 0):
        raise PadlessError("work must be a non-empty list of finite numbers, none negative")
    parts = positive_int(parts, name="parts")
    rounds = positive_int(rounds, name="rounds", minimum=0)
    most = np.full(parts, len(array), dtype=np.int64)  # (parts,)
    if equal_counts:
        most = np.diff(np.arange(parts + 1, dtype=np.int64) * len(array) // parts)[::-1].copy()
    down = np.argsort(-array, kind="stable")  # (N,)
    placed = np.empty(len(array), dtype=np.int64)
    assign(array[down], most, rounds, placed)
    result = np.empty(len(array), dtype=np.int64)
    result[down] = placed
    return result
