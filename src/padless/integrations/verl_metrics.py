"""Figures of each phase of a verl step: counted where micro-batches are made, shown in verl's own metrics."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from padless.integrations.verl_hooks import log
from padless.shapes import round_up

__all__ = ["PhaseStats", "Recorder", "as_metrics", "count", "log_lines"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseStats:
    """Tokens of one rank in one phase; stats of several calls add with ``+``.

    Attributes:
        real_tokens, computed_tokens: tokens of the rows; positions that the model computed.
        micro_batches: forward passes.
        peak: the largest micro-batch over its budget, 1.0 when it is exactly full.
        calls: how many engine calls are in the sums.
        planned: whether padless made the plan (False: verl did).

    >>> a = PhaseStats(real_tokens=80, computed_tokens=100, micro_batches=2, peak=0.5)
    >>> (a + a).occupancy, (a + a).micro_batches
    (0.8, 4)
    """

    real_tokens: int
    computed_tokens: int
    micro_batches: int
    peak: float
    calls: int = 1
    planned: bool = True

    @property
    def occupancy(self) -> float:
        """Real over computed tokens."""
        return self.real_tokens / self.computed_tokens if self.computed_tokens else 1.0

    def __add__(self, other: PhaseStats) -> PhaseStats:
        return PhaseStats(
            real_tokens=self.real_tokens + other.real_tokens,
            computed_tokens=self.computed_tokens + other.computed_tokens,
            micro_batches=self.micro_batches + other.micro_batches,
            peak=max(self.peak, other.peak),
            calls=self.calls + other.calls,
            planned=self.planned and other.planned,
        )

    def __str__(self) -> str:
        return (
            f"{self.micro_batches} micro-batches, {self.real_tokens:,} real / {self.computed_tokens:,} computed tokens,"
            f" occupancy {self.occupancy:.3f}, largest {self.peak:.2f} x the budget"
        )


def count(
    lengths: npt.NDArray[np.int64],
    groups: Sequence[Sequence[int]],
    budget: int,
    *,
    padded: bool,
    multiple_of: int = 1,
    planned: bool = True,
) -> PhaseStats:
    """Count what micro-batches of these rows compute.

    Args:
        lengths: (N,) tokens of the rows.
        groups: rows of each micro-batch.
        budget: the token budget that they were made for.
        padded: whether a micro-batch is a rectangle (rows x longest) or one packed row.

    >>> count(np.array([4, 2]), [[0, 1]], 8, padded=True).occupancy
    0.75
    """
    sizes = []
    for group in groups:
        held = lengths[np.asarray(group, dtype=np.int64)]
        sizes.append(len(held) * round_up(int(held.max()), multiple_of) if padded else int(held.sum()))
    return PhaseStats(
        real_tokens=int(lengths.sum()),
        computed_tokens=sum(sizes),
        micro_batches=len(sizes),
        peak=max(sizes, default=0) / budget,
        planned=planned,
    )


class Recorder:
    """Keeps the figures of forward-only phases until the next update of this process reports them.

    verl's trainers keep nothing but the utilisation of a log-prob pass, so its figures travel with the
    update's metrics. A process that never updates (a reference model on its own) prints them instead.
    """

    def __init__(self) -> None:
        self.pending: dict[str, PhaseStats] = {}
        self.last: dict[str, PhaseStats] = {}

    def add(self, phase: str, stats: PhaseStats) -> None:
        """Note a phase; `last` keeps the latest of each for tests and for the curious."""
        self.last[phase] = stats
        self.pending[phase] = self.pending[phase] + stats if phase in self.pending else stats

    def flush(self) -> dict[str, PhaseStats]:
        """Everything since the last flush."""
        taken, self.pending = self.pending, {}
        return taken


def as_metrics(stats: dict[str, PhaseStats]) -> dict[str, Any]:
    """``padless/<phase>/<figure>`` in verl's `Metric`; averages over ranks, but for the peak.

    verl's trainers average a figure over mini-batches unless its name says ``max``.
    """
    from verl.utils.metric import Metric

    figures: dict[str, Any] = {}
    for phase, value in stats.items():
        figures[f"padless/{phase}/occupancy"] = Metric(value=value.occupancy, aggregation="mean")
        figures[f"padless/{phase}/real_tokens"] = Metric(value=value.real_tokens, aggregation="mean")
        figures[f"padless/{phase}/computed_tokens"] = Metric(value=value.computed_tokens, aggregation="mean")
        figures[f"padless/{phase}/micro_batches"] = Metric(value=value.micro_batches, aggregation="mean")
        figures[f"padless/{phase}/max_over_budget"] = Metric(value=value.peak, aggregation="max")
    return figures


def log_lines(stats: dict[str, PhaseStats], *, loud: bool) -> None:
    """One line per phase: on standard output of rank 0 where the user asked for it, else to the log at level info."""
    import torch.distributed as dist

    for phase, value in stats.items():
        if not loud:
            log.info("padless %s: %s", phase, value)
        elif not dist.is_initialized() or dist.get_rank() == 0:
            print(f"padless {phase}: {value}", flush=True)
