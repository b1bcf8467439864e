"""What each batching strategy does with an epoch of lengths: which sequences run together, where and when."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from padless.cost import CostModel
from padless.data._epoch import Grouping
from padless.data._state import Position
from padless.data.sampler import TokenBudgetSampler
from padless.errors import choose
from padless.plan import Plan, Sync
from padless.planning.microbatch import microbatch
from padless.planning.pack import pack

__all__ = ["STRATEGIES", "Schedule", "Setup", "make_schedule"]

Index = npt.NDArray[np.int64]

STRATEGIES = ("fixed", "longest-in-batch", "sorted", "step-greedy", "step-balanced", "pool", "range", "packed")
"""Names of the strategies, from what needs no thought to what needs a model that keeps documents apart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """How the user trains.

    Attributes:
        token_budget: padded tokens that one micro-batch may have.
        ranks: data-parallel ranks.
        sequences_per_step: sequences between two parameter updates, over all ranks.
        widest: what ``fixed`` pads to: the longest sequence of all data, or the sum over fields padded apart.
        cost, sync, multiple_of: as in `padless.microbatch`.
        seed: order of the epoch.
        rows: sequences in a micro-batch of ``fixed`` and ``longest-in-batch``; ``None`` for as many as always fit.
    """

    token_budget: int
    ranks: int
    sequences_per_step: int
    widest: int
    cost: CostModel
    sync: Sync = "microbatch"
    multiple_of: int = 1
    seed: int = 0
    rows: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Micro-batches of an epoch, ordered by micro-step, then rank.

    Attributes:
        lengths: (N, F) tokens of each sequence in each field padded apart (F is 1 where there are none).
        order: (N,) sequences, micro-batch by micro-batch.
        offsets: (G + 1,) where each micro-batch starts in ``order``; it may be empty.
        micro_step: (G,) running number of the micro-step over the epoch; its micro-batches run side by side.
        rank: (G,) the rank that runs it.
        step: (G,) optimizer step.
        width: (G,) positions of one row of it; for packs, tokens of the pack.
        packed: one row of concatenated sequences instead of a rectangle.
    """

    lengths: Index
    order: Index
    offsets: Index
    micro_step: Index
    rank: Index
    step: Index
    width: Index
    packed: bool = False

    @property
    def rows(self) -> Index:
        """(G,) sequences of each micro-batch."""
        return np.diff(self.offsets)

    @property
    def padded(self) -> Index:
        """(G,) positions that the device computes."""
        return self.width if self.packed else self.rows * self.width

    @property
    def real(self) -> Index:
        """(G,) tokens."""
        return _sums(self.lengths.sum(axis=1)[self.order], self.offsets)

    def costs(self, cost: CostModel) -> npt.NDArray[np.float64]:
        """(G,) modelled time; an empty micro-batch costs its fixed part."""
        if not self.packed:
            return cost.padded(self.rows, self.width)
        squares = np.square(self.lengths.sum(axis=1).astype(np.float64))
        return cost.packed(self.width, _sums(squares[self.order], self.offsets).astype(np.float64))

    def members(self, group: int) -> Index:
        """Sequences of one micro-batch."""
        return self.order[self.offsets[group] : self.offsets[group + 1]]


def make_schedule(name: str, lengths: Index, setup: Setup) -> Schedule:
    """Schedule one epoch of ``lengths``, (N, F), all within the token budget, in the given order.

    The strategies: ``fixed`` pads every sequence to the widest of all data; ``longest-in-batch`` to the longest of its
    micro-batch (both take ``rows``, or as many as fit at the widest); ``step-greedy`` and
    ``step-balanced`` regroup inside each optimizer step; ``sorted``, ``pool`` and ``range`` are the groupings of
    `padless.data.TokenBudgetSampler`; ``packed`` puts sequences end to end, over the whole epoch.
    """
    return _MAKERS[choose("strategy", name, STRATEGIES)](lengths, setup)


def _fixed(lengths: Index, setup: Setup) -> Schedule:
    schedule = _longest(lengths, setup)
    rows = schedule.rows
    return replace(schedule, width=np.where(rows > 0, setup.widest, 0))


def _longest(lengths: Index, setup: Setup) -> Schedule:
    """As most loaders do: the rank's share of the step in micro-batches of so many rows as always fit."""
    count, ranks = len(lengths), setup.ranks
    rows = setup.rows or max(1, setup.token_budget // setup.widest)
    place = np.arange(count)
    step = place // setup.sequences_per_step
    size = np.minimum(setup.sequences_per_step, count - step * setup.sequences_per_step)  # (N,) of its step
    share = _ceil(size, ranks)
    within = place - step * setup.sequences_per_step
    rank, micro = within // share, within % share // rows
    most = _ceil(_ceil(setup.sequences_per_step, ranks), rows)
    last = _ceil(_ceil(int(size[-1]), ranks), rows)
    key = (step * most + micro) * ranks + rank
    order = np.argsort(key, kind="stable")
    groups = (int(step[-1]) * most + last) * ranks
    offsets = np.searchsorted(key[order], np.arange(groups + 1))
    return _schedule(lengths, order, offsets, np.arange(groups) // (most * ranks), setup)


def _sampled(grouping: Grouping) -> Callable[[Index, Setup], Schedule]:
    """What `padless.data.TokenBudgetSampler` yields, on all ranks at once."""

    def make(lengths: Index, setup: Setup) -> Schedule:
        total = lengths.sum(axis=1)
        sampler = TokenBudgetSampler(
            total,
            token_budget=setup.token_budget,
            sequences_per_step=setup.sequences_per_step,
            grouping=grouping,
            ranks=setup.ranks,
            rank=0,
            seed=setup.seed,
            cost=setup.cost,
            multiple_of=setup.multiple_of,
            check_ranks=False,
        )
        epoch = sampler._epoch(Position(epoch=0, arranged_for=setup.ranks))
        plans = [sampler._plan(epoch, step) for step in range(epoch.steps)]
        order = np.concatenate([plan.members.sequences[plan.order] for plan in plans])
        rows = np.concatenate([np.diff(plan.offsets) for plan in plans])
        step = np.repeat(np.arange(len(plans)), [len(plan.offsets) - 1 for plan in plans])
        return _schedule(total[:, None], order, np.concatenate([[0], np.cumsum(rows)]), step, setup)

    return make


def _shuffled_in_micro_steps(groups: list[Index], ranks: int, rng: np.random.Generator) -> list[Index]:
    """Neighbours cost alike, so they stay side by side on the ranks; the micro-steps come in random order."""
    whole = len(groups) // ranks
    blocks = [groups[i * ranks : (i + 1) * ranks] for i in rng.permutation(whole)]
    return [group for block in blocks for group in block] + groups[whole * ranks :]


def _by_step(method: str) -> Callable[[Index, Setup], Schedule]:
    def make(lengths: Index, setup: Setup) -> Schedule:
        total = lengths.sum(axis=1)
        plans: list[Plan] = []
        for start in range(0, len(total), setup.sequences_per_step):
            plans.append(
                microbatch(
                    total[start : start + setup.sequences_per_step],
                    setup.token_budget,
                    ranks=setup.ranks,
                    method=method,  # type: ignore[arg-type]
                    cost=setup.cost,
                    multiple_of=setup.multiple_of,
                    sync=setup.sync,
                )
            )
        starts = np.arange(len(plans)) * setup.sequences_per_step
        order = np.concatenate([plan.order + start for plan, start in zip(plans, starts, strict=True)])
        rows = np.concatenate([plan.rows for plan in plans])
        step = np.repeat(np.arange(len(plans)), [len(plan) for plan in plans])
        offsets = np.concatenate([[0], np.cumsum(rows)]).astype(np.int64)
        return _schedule(total[:, None], order, offsets, step, setup)

    return make


def _packed(lengths: Index, setup: Setup) -> Schedule:
    total = lengths.sum(axis=1)
    plan = pack(total, setup.token_budget, ranks=setup.ranks)
    packs = [group for group in plan if len(group)]
    schedule = _dealt(lengths, _shuffled_in_micro_steps(packs, setup.ranks, np.random.default_rng(setup.seed)), setup)
    tokens = _sums(total[schedule.order], schedule.offsets)
    return replace(schedule, width=_ceil(tokens, setup.multiple_of) * setup.multiple_of, packed=True)


_MAKERS: dict[str, Callable[[Index, Setup], Schedule]] = {
    "fixed": _fixed,
    "longest-in-batch": _longest,
    "sorted": _sampled("sorted"),
    "step-greedy": _by_step("greedy"),
    "step-balanced": _by_step("balanced"),
    "pool": _sampled("pool"),
    "range": _sampled("range"),
    "packed": _packed,
}


def _dealt(lengths: Index, groups: list[Index], setup: Setup) -> Schedule:
    """Micro-batches dealt to the ranks in turn; an optimizer step is over once its sequences are."""
    groups = groups + [np.empty(0, dtype=np.int64)] * (-len(groups) % setup.ranks)
    rows = np.array([len(group) for group in groups], dtype=np.int64)
    per_micro_step = rows.reshape(-1, setup.ranks).sum(axis=1)
    before = np.cumsum(per_micro_step) - per_micro_step
    step = np.repeat(before // setup.sequences_per_step, setup.ranks)
    offsets = np.concatenate([[0], np.cumsum(rows)]).astype(np.int64)
    joined = lengths.sum(axis=1, keepdims=True)  # what is regrouped is rolled into one field
    return _schedule(joined, np.concatenate(groups), offsets, step, setup)


def _schedule(lengths: Index, order: Index, offsets: Index, step: Index, setup: Setup) -> Schedule:
    groups = len(offsets) - 1
    widest = np.zeros((groups, lengths.shape[1]), dtype=np.int64)  # (G, F)
    full = np.flatnonzero(np.diff(offsets))
    widest[full] = np.maximum.reduceat(lengths[order], offsets[full], axis=0)
    rounded = -(-widest // setup.multiple_of) * setup.multiple_of
    place = np.arange(groups)
    return Schedule(
        lengths=lengths,
        order=order.astype(np.int64),
        offsets=offsets.astype(np.int64),
        micro_step=place // setup.ranks,
        rank=place % setup.ranks,
        step=step.astype(np.int64),
        width=rounded.sum(axis=1),
    )


def _ceil(value: Any, by: int) -> Any:
    return -(-value // by)


def _sums(values: npt.NDArray[np.int64] | npt.NDArray[np.float64], offsets: Index) -> npt.NDArray[np.int64]:
    total = np.concatenate([[0], np.cumsum(values)])
    return np.asarray(total[offsets[1:]] - total[offsets[:-1]])
