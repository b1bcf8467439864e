"""Micro-batches of optimizer steps in microseconds: runs of the sorted lengths under a few caps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from padless.cost import CostModel
from padless.planning.lean_kernels import plan_step, plan_steps

__all__ = ["LeanSteps", "lean_groups", "lean_steps"]

Index = npt.NDArray[np.int64]
_UNLIMITED = 2**62


def lean_groups(
    lengths: npt.NDArray[Any],
    budget: int,
    *,
    ranks: int,
    multiple_of: int,
    max_sequences: int | None,
    every: int,
    cost: CostModel,
) -> tuple[int, Index, Index, Index]:
    """Group a step for some ranks: micro-steps K, order (S,), offsets (K * R + 1,), padded tokens (K * R,).

    One rank: the dynamic programme over runs of the sorted lengths, whose sum of costs is the least. Several ranks:
    for one number of micro-steps after the other, at most four kinds of them, each with a cap, spread by some shares
    around a centre that is as low as bisection finds; a run goes, longest first, to the kind whose cap it fills
    best. Ranks that would be idle then take the second part of the run with most padding.

    For one field, without atoms or a ladder; `padless.microbatch` takes everything and looks longer.

    >>> steps, order, offsets, padded = lean_groups(
    ...     np.array([900, 100, 120, 880, 110, 90]), 2000, ranks=1, multiple_of=1, max_sequences=None, every=1,
    ...     cost=CostModel())
    >>> order.tolist(), offsets.tolist(), padded.tolist()
    ([0, 3, 2, 4, 1, 5], [0, 2, 6], [1800, 480])
    """
    count = len(lengths)
    rule, weights = _rule(budget, ranks, multiple_of, max_sequences, every), _weights(cost)
    room = _room(count, ranks, every)
    order, offsets, padded = np.empty(count, np.int64), np.empty(room + 1, np.int64), np.empty(room, np.int64)
    steps: int = plan_step(lengths.astype(np.int64), rule, weights, order, offsets, padded)
    return steps, order, offsets[: steps * ranks + 1], padded[: steps * ranks]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LeanSteps:
    """Plans of B consecutive steps, as `lean_groups` makes them one at a time.

    Attributes:
        order: (S,) places in their step, step after step.
        offsets, padded: a row of each for every step, of which the first ``steps * ranks`` (+ 1) entries count.
        steps, tokens, shortest: (B,) micro-steps, tokens, and the place of the shortest sequence.
    """

    order: Index
    offsets: Index
    padded: Index
    steps: Index
    tokens: Index
    shortest: Index


def lean_steps(
    lengths: npt.NDArray[Any],
    members: npt.NDArray[Any],
    bounds: Index,
    budget: int,
    *,
    ranks: int,
    multiple_of: int,
    max_sequences: int | None,
    every: int,
    cost: CostModel,
) -> LeanSteps:
    """`lean_groups` for steps whose members are ``members[bounds[b]:bounds[b + 1]]``, places in ``lengths`` (N,)."""
    largest = int(np.diff(bounds).max())
    rule, room = _rule(budget, ranks, multiple_of, max_sequences, every), _room(largest, ranks, every)
    batch = len(bounds) - 1
    order, told = np.empty(int(bounds[-1]), np.int64), np.empty((batch, 3), np.int64)
    offsets, padded = np.empty((batch, room + 1), np.int64), np.empty((batch, room), np.int64)
    plan_steps(lengths, members, bounds, rule, _weights(cost), order, offsets, padded, told)
    steps, tokens, shortest = told.T
    return LeanSteps(order=order, offsets=offsets, padded=padded, steps=steps, tokens=tokens, shortest=shortest)


def _rule(
    budget: int, ranks: int, multiple_of: int, max_sequences: int | None, every: int
) -> tuple[int, int, int, int, int]:
    return budget, _UNLIMITED if max_sequences is None else max_sequences, ranks, every, multiple_of


def _weights(cost: CostModel) -> tuple[float, float, float, float]:
    return (
        float(cost.per_microbatch), float(cost.per_column), float(cost.per_token), float(cost.per_token_squared),
    )  # fmt: skip


def _room(count: int, ranks: int, every: int) -> int:
    """Groups there can be at most: one for each sequence, completed to whole micro-steps."""
    steps = -(-count // ranks)
    return -(-steps // every) * every * ranks
