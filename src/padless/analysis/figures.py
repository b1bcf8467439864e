"""A schedule in a few numbers."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from padless.analysis.schedule import Schedule, Setup

__all__ = ["Figures", "figures_of", "perfect_time"]

Index = npt.NDArray[np.int64]

_STEPS = 12  # a correlation of fewer steps is noise


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What a strategy makes of an epoch.

    Attributes:
        occupancy: real over padded tokens.
        microbatches: micro-batches with sequences, over all ranks.
        padded_tokens: positions computed.
        step_time_ratio: modelled time over that of the padding-free bound (`perfect_time`); 1 is perfect.
        rank_imbalance: share by which the slowest rank's time exceeds the ranks' mean: time spent waiting, over time
            spent working. 0 for one rank.
        neighbour_correlation: correlation between the mean lengths of consecutive optimizer steps; near 0 for a
            shuffled epoch, 1 for a sorted one. ``None`` with fewer than 12 steps, or where all are equal.
        micro_steps: micro-steps, each as long as its slowest rank.
        largest: padded tokens of the largest micro-batch.
    """

    occupancy: float
    microbatches: int
    padded_tokens: int
    step_time_ratio: float
    rank_imbalance: float
    neighbour_correlation: float | None
    micro_steps: int
    largest: int

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return asdict(self)


def figures_of(schedule: Schedule, setup: Setup, *, epoch_share: float = 1.0) -> Figures:
    """Sum a schedule up; counts are divided by ``epoch_share``, the part of the epoch that was scheduled."""
    padded, real = schedule.padded, schedule.real
    costs = schedule.costs(setup.cost)  # (G,)
    by_rank = costs.reshape(-1, setup.ranks)  # (micro-steps, R)
    if setup.sync == "step":
        ends = np.flatnonzero(np.diff(schedule.step[:: setup.ranks])) + 1
        by_rank = np.add.reduceat(by_rank, np.concatenate([[0], ends]), axis=0)  # (steps, R)
    slowest = float(by_rank.max(axis=1).sum())
    mean = float(by_rank.mean(axis=1).sum())
    return Figures(
        occupancy=float(real.sum() / padded.sum()),
        microbatches=round(int((schedule.rows > 0).sum()) / epoch_share),
        padded_tokens=round(int(padded.sum()) / epoch_share),
        step_time_ratio=slowest / perfect_time(schedule.lengths, setup),
        rank_imbalance=slowest / mean - 1.0,
        neighbour_correlation=_neighbour_correlation(schedule),
        micro_steps=round((int(schedule.micro_step[-1]) + 1) / epoch_share),
        largest=int(padded.max()),
    )


def perfect_time(lengths: Index, setup: Setup) -> float:
    """Modelled time of an epoch without padding and without waiting: full micro-batches, work even over the ranks.

    No strategy can be faster. The cost per column is left out: how few columns suffice depends on the layout.
    """
    total = lengths.sum(axis=1).astype(np.float64)  # (N,)
    cost = setup.cost
    work = cost.per_token * total.sum() + cost.per_token_squared * np.square(total).sum()
    microbatches = np.ceil(total.sum() / setup.token_budget)
    return float((work + cost.per_microbatch * microbatches) / setup.ranks)


def _neighbour_correlation(schedule: Schedule) -> float | None:
    step = np.repeat(schedule.step, schedule.rows)  # (N,)
    total = schedule.lengths.sum(axis=1)[schedule.order].astype(np.float64)
    count = np.bincount(step)
    mean = np.bincount(step, weights=total)[count > 0] / count[count > 0]  # (steps,)
    if len(mean) < _STEPS or mean[1:].std() == 0 or mean[:-1].std() == 0:
        return None
    return float(np.corrcoef(mean[:-1], mean[1:])[0, 1])
