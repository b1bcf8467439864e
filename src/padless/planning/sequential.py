"""Micro-batches filled one after the other: the given order, and the published token-budget rule."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from padless.planning.grouping import Grouping, deal
from padless.planning.items import Items
from padless.planning.kernels import jit

__all__ = ["fixed", "greedy", "rank_blocks"]

Index = npt.NDArray[np.int64]
Array = Any


@jit
def _grow(order: Array, rows: Array, wide: Array, over: Array, budget: int, most: int, starts: Array) -> int:
    """Items in ``order`` join the open group while rows x widest is within the budget; bounds in ``starts``."""
    count, fields = len(order), wide.shape[1]
    widest = np.zeros(fields, dtype=np.int64)
    held = g = 0
    alone = False
    for k in range(count):
        i = order[k]
        width = 0
        for f in range(fields):
            width += max(widest[f], wide[i, f])
        if k > 0 and (over[i] or alone or held + rows[i] > most or (held + rows[i]) * width > budget):
            g += 1
            starts[g] = k
            held = 0
            widest[:] = 0
        elif k == 0:
            starts[0] = 0
        held += rows[i]
        alone = over[i]
        for f in range(fields):
            widest[f] = max(widest[f], wide[i, f])
    starts[g + 1] = count
    return g + 1


def _bounds(order: Index, items: Items, budget: int, most: int) -> Index:
    starts = np.empty(len(order) + 1, dtype=np.int64)
    groups = _grow(order, items.rows, items.widths, items.over, budget, most, starts)
    return starts[: groups + 1].copy()


def fixed(items: Items, *, budget: int, most: int, ranks: int) -> Grouping:
    """Given order, ``most`` sequences to a micro-batch, fewer where the budget ends first; dealt to ranks in turn."""
    order = np.arange(len(items), dtype=np.int64)
    return deal(order, _bounds(order, items, budget, most), ranks)


def rank_blocks(count: int, ranks: int) -> Index:
    """Bounds (R + 1,) of consecutive shares that differ by at most one, as data-parallel training deals them."""
    return np.asarray((np.arange(ranks + 1, dtype=np.int64) * count) // ranks)


def greedy(items: Items, *, budget: int, most: int, ranks: int) -> Grouping:
    """The published rule: sort ascending, admit a sequence while rows x longest stays within the budget.

    Each rank applies it to its own consecutive share of the given order; ranks with fewer micro-batches
    end with empty ones.
    """
    shares = rank_blocks(len(items), ranks)
    width = items.widths.sum(axis=1)  # (I,)
    orders, bounds = [], []
    for lo, hi in zip(shares[:-1].tolist(), shares[1:].tolist(), strict=True):
        order = lo + np.argsort(width[lo:hi], kind="stable").astype(np.int64)
        orders.append(order)
        bounds.append(lo + (_bounds(order, items, budget, most) if hi > lo else np.zeros(1, dtype=np.int64)))
    steps = max(len(b) - 1 for b in bounds)
    start = np.zeros((steps, ranks), dtype=np.int64)  # (K, R)
    stop = np.zeros((steps, ranks), dtype=np.int64)
    for rank, b in enumerate(bounds):
        start[: len(b) - 1, rank], stop[: len(b) - 1, rank] = b[:-1], b[1:]
    return Grouping(order=np.concatenate(orders), start=start, stop=stop)
