"""What a sampler did, in counts that add."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from padless.data._epoch import Corpus
from padless.data._step import StepPlan
from padless.metrics import Neighbours
from padless.planning.slices import count_groups

__all__ = ["Diagnostics"]


@dataclass(slots=True, kw_only=True)
class Diagnostics:
    """Counts over all ranks of what was consumed. They add with ``+``, and travel in the sampler's state.

    Attributes:
        sequences: that ran with weight.
        repeated: zero-weight rows, that filled a short last step or kept a rank busy.
        dropped: sequences left out by ``overlong`` or ``tail``, counted once an epoch, at its end.
        truncated, split: sequences cut by ``overlong``, counted once an epoch, at its end.
        real_tokens, padded_tokens: tokens of sequences, and positions computed.
        micro_batches, idle: groups over all ranks, and how many of them had nothing to do.
        steps: optimizer steps; ``step_tokens_squared`` and the ``smallest_step``, ``largest_step`` tell their spread.
        neighbours: correlation of consecutive micro-batches on rank 0 (all ranks draw theirs alike).
    """

    sequences: int = 0
    repeated: int = 0
    dropped: int = 0
    truncated: int = 0
    split: int = 0
    real_tokens: int = 0
    padded_tokens: int = 0
    micro_batches: int = 0
    idle: int = 0
    steps: int = 0
    step_tokens: int = 0
    step_tokens_squared: float = 0.0
    smallest_step: int | None = None
    largest_step: int | None = None
    neighbours: Neighbours = field(default_factory=Neighbours)

    @property
    def occupancy(self) -> float:
        """Real over padded tokens; NaN before the first micro-batch."""
        return self.real_tokens / self.padded_tokens if self.padded_tokens else math.nan

    @property
    def neighbour_correlation(self) -> float:
        """Of the mean lengths of consecutive micro-batches; NaN for fewer than two."""
        return self.neighbours.correlation

    @property
    def step_size_spread(self) -> float:
        """Standard deviation over mean of the steps' real tokens; NaN before the first step ended."""
        if not self.step_tokens:
            return math.nan
        mean = self.step_tokens / self.steps
        return math.sqrt(max(self.step_tokens_squared / self.steps - mean**2, 0.0)) / mean

    def __add__(self, other: Diagnostics) -> Diagnostics:
        """Counts of both."""
        summed = {
            item.name: getattr(self, item.name) + getattr(other, item.name)
            for item in fields(self)
            if item.name not in ("smallest_step", "largest_step")
        }
        steps = [d for d in (self, other) if d.smallest_step is not None and d.largest_step is not None]
        smallest = min((d.smallest_step for d in steps if d.smallest_step is not None), default=None)
        largest = max((d.largest_step for d in steps if d.largest_step is not None), default=None)
        return Diagnostics(**summed, smallest_step=smallest, largest_step=largest)

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers, ready for JSON; `from_dict` reads them back."""
        return asdict(self)

    @classmethod
    def from_dict(cls, told: dict[str, Any]) -> Diagnostics:
        """What `to_dict` wrote."""
        return cls(**{**told, "neighbours": Neighbours(**told["neighbours"])})

    def note(self, corpus: Corpus, plan: StepPlan, start: int, stop: int) -> None:
        """Count the micro-steps ``start`` to ``stop`` of a step; the last one closes it."""
        if start == stop:
            return
        first, behind = start * plan.ranks, stop * plan.ranks
        offsets, weights = plan.offsets[first : behind + 1], plan.members.weights
        chain = _to_array(self.neighbours)
        ran, real, padded, idle = count_groups(
            plan.held(corpus), weights, plan.order, offsets, plan.padded[start:stop], plan.ranks, chain
        )
        _set_from(self.neighbours, chain)
        self.sequences += ran
        self.repeated += int(offsets[-1] - offsets[0]) - ran + idle * len(plan.filler)
        self.real_tokens += real
        self.padded_tokens += padded
        self.micro_batches += behind - first
        self.idle += idle
        if stop == plan.steps:
            self.steps += 1
            self.step_tokens += plan.tokens
            self.step_tokens_squared += float(plan.tokens) ** 2
            self.smallest_step = plan.tokens if self.smallest_step is None else min(self.smallest_step, plan.tokens)
            self.largest_step = plan.tokens if self.largest_step is None else max(self.largest_step, plan.tokens)


def _to_array(chain: Neighbours) -> npt.NDArray[np.float64]:
    last = math.nan if chain.last is None else chain.last
    return np.array(
        [chain.pairs, chain.before, chain.after, chain.before_squared, chain.after_squared, chain.product, last]
    )


def _set_from(chain: Neighbours, values: npt.NDArray[np.float64]) -> None:
    pairs, chain.before, chain.after, chain.before_squared, chain.after_squared, chain.product, last = values.tolist()
    chain.pairs, chain.last = int(pairs), None if math.isnan(last) else last
