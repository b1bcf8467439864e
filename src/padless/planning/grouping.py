"""What a micro-batch planner returns: stretches of an item order, laid out over micro-steps and ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from padless.errors import choose
from padless.planning.items import Items

__all__ = ["ORDERS", "Grouping", "Order", "deal", "gather", "lay_out", "reorder"]

Index = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Order = Literal["largest-first", "smallest-first", "small-ends", "largest-then-random"]
ORDERS = ("largest-first", "smallest-first", "small-ends", "largest-then-random")


@dataclass(frozen=True, slots=True, kw_only=True)
class Grouping:
    """Group (k, r) holds items ``order[start[k, r]:stop[k, r]]``; equal bounds mean an empty micro-batch.

    Attributes:
        order: (I,) item numbers.
        start, stop: (K, R) bounds.
    """

    order: Index
    start: Index
    stop: Index


def deal(order: Index, bounds: Index, ranks: int) -> Grouping:
    """Groups between consecutive ``bounds`` (G + 1,), ``ranks`` to a step in order; the last step is completed."""
    groups = len(bounds) - 1
    steps = -(-groups // ranks)
    start = np.zeros(steps * ranks, dtype=np.int64)
    stop = np.zeros(steps * ranks, dtype=np.int64)
    start[:groups], stop[:groups] = bounds[:-1], bounds[1:]
    return Grouping(order=order, start=start.reshape(steps, ranks), stop=stop.reshape(steps, ranks))


def lay_out(order: Index, bounds: Index, costs: Floats, ranks: int, steps: int) -> Grouping:
    """Runs by descending cost, ``ranks`` to a step, so that those side by side cost alike.

    Every other step runs through the ranks backwards, which also evens the ranks' totals.
    """
    by_cost = np.argsort(-costs, kind="stable")  # (G,)
    start = np.zeros(steps * ranks, dtype=np.int64)
    stop = np.zeros(steps * ranks, dtype=np.int64)
    start[: len(by_cost)], stop[: len(by_cost)] = bounds[:-1][by_cost], bounds[1:][by_cost]
    laid = Grouping(order=order, start=start.reshape(steps, ranks), stop=stop.reshape(steps, ranks))
    for bound in (laid.start, laid.stop):  # (K, R)
        bound[1::2] = bound[1::2, ::-1].copy()
    return laid


def gather(grouping: Grouping, items: Items) -> tuple[Index, Index]:
    """Slots group by group, (S,), and where each group starts, (K * R + 1,)."""
    start, stop = grouping.start.ravel(), grouping.stop.ravel()  # (G,)
    sizes = stop - start
    at = np.repeat(start - (np.cumsum(sizes) - sizes), sizes) + np.arange(int(sizes.sum()))  # (I,) places in order
    chosen = grouping.order[at]  # (I,) items
    rows = items.rows[chosen]
    before = np.concatenate([[0], np.cumsum(rows)])  # (I + 1,) slots before each chosen item
    offsets = before[np.concatenate([[0], np.cumsum(sizes)])]
    if len(items.members) == len(items.rows):
        return items.members[items.starts[chosen]], offsets
    slots = np.repeat(items.starts[chosen] - before[:-1], rows) + np.arange(int(rows.sum()))  # (S,)
    return items.members[slots], offsets


def reorder(grouping: Grouping, slowest: Floats, order: str, seed: int) -> Grouping:
    """Run whole micro-steps in another order; ``slowest`` (K,) is the cost of each one's slowest rank.

    ``largest-first`` lets memory fail at the start, ``small-ends`` keeps a pipeline's fill and drain
    short, ``largest-then-random`` moves only the costliest to the front of a seeded shuffle.
    """
    choose("order", order, ORDERS)
    down = np.argsort(-slowest, kind="stable")  # (K,)
    if order == "smallest-first":
        down = down[::-1]
    elif order == "small-ends":
        down = np.concatenate([down[::-1][::2], down[::-1][1::2][::-1]])
    elif order == "largest-then-random":
        down = np.concatenate([down[:1], np.random.default_rng(seed).permutation(down[1:])])
    return Grouping(order=grouping.order, start=grouping.start[down], stop=grouping.stop[down])
