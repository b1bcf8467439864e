"""What is read off the groups of a step: one rank's slots, counts over all ranks, sums."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from padless.planning.kernels import jit

__all__ = ["count_groups", "rank_slots", "step_sums"]

Index = npt.NDArray[np.int64]
AnyIndex = npt.NDArray[Any]

_NO_WEIGHTS = np.empty(0)


def rank_slots(order: Index, offsets: Index, filler: Index, ranks: int, rank: int) -> tuple[Index, Index]:
    """One rank's groups, one after the other: slots (s,), and where each group starts (K + 1,); filler where idle.

    >>> slots, cuts = rank_slots(np.array([5, 6, 7]), np.array([0, 1, 2, 3, 3]), np.array([6]), 2, 1)
    >>> slots.tolist(), cuts.tolist()
    ([6, 6], [0, 1, 2])
    """
    steps = (len(offsets) - 1) // ranks
    cuts = np.empty(steps + 1, np.int64)
    slots = np.empty(len(order) + steps * len(filler), np.int64)
    held: int = _rank_slots(order, offsets, filler, ranks, rank, slots, cuts)
    return slots[:held], cuts


def count_groups(
    held: AnyIndex,
    weights: npt.NDArray[np.float64] | None,
    order: Index,
    offsets: Index,
    padded: Index,
    ranks: int,
    chain: npt.NDArray[np.float64],
) -> tuple[int, int, int, int]:
    """(sequences of weight above 0, their tokens, padded tokens, empty groups) of some micro-steps.

    ``held`` (n,) are the tokens of each member; ``offsets`` (K * ranks + 1,) places in ``order``; ``padded``
    (K, ranks). ``chain`` (7,) is a `padless.metrics.Neighbours` (pairs, before, after, their squares, product, last
    or NaN), and goes on with the mean lengths of rank 0.
    """
    told: tuple[int, int, int, int] = _count_groups(
        held, _NO_WEIGHTS if weights is None else weights, order, offsets, padded, ranks, chain
    )
    return told


def step_sums(lengths: AnyIndex, sequences: Index) -> int:
    """Tokens of some sequences: ``lengths`` (N,), ``sequences`` (S,)."""
    return int(_sum_at(lengths, sequences))


@jit
def _rank_slots(order: Index, offsets: Index, filler: Index, ranks: int, rank: int, slots: Index, cuts: Index) -> int:
    at = 0
    for k in range(len(cuts) - 1):
        cuts[k] = at
        start, stop = offsets[k * ranks + rank], offsets[k * ranks + rank + 1]
        for i in range(start, stop):
            slots[at] = order[i]
            at += 1
        if start == stop:
            for place in filler:
                slots[at] = place
                at += 1
    cuts[len(cuts) - 1] = at
    return at


@jit
def _count_groups(
    held: AnyIndex, weights: AnyIndex, order: Index, offsets: Index, padded: Index, ranks: int, chain: AnyIndex
) -> tuple[int, int, int, int]:
    ran, tokens, positions, idle = 0, 0, 0, 0
    for g in range(len(offsets) - 1):
        start, stop = offsets[g], offsets[g + 1]
        positions += padded[g // ranks, g % ranks]
        total = 0
        for i in range(start, stop):
            total += held[order[i]]
            if len(weights) == 0 or weights[order[i]] > 0.0:
                ran += 1
                tokens += held[order[i]]
        if start == stop:
            idle += 1
        elif g % ranks == 0:
            mean = total / (stop - start)
            if chain[6] == chain[6]:  # not NaN: there is one before
                chain[0] += 1.0
                chain[1] += chain[6]
                chain[2] += mean
                chain[3] += chain[6] * chain[6]
                chain[4] += mean * mean
                chain[5] += chain[6] * mean
            chain[6] = mean
    return ran, tokens, positions, idle


@jit
def _sum_at(lengths: AnyIndex, sequences: Index) -> Any:
    total = np.int64(0)
    for i in sequences:
        total += lengths[i]
    return total
