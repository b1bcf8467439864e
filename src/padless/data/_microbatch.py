"""What a sampler yields: the dataset rows of a micro-batch, which know their place in the optimizer step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from padless.data._corpus import Sampled
from padless.data._epoch import Epoch
from padless.data._state import Position
from padless.data._step import StepPlan
from padless.planning.slices import rank_slots

__all__ = ["MicroBatch", "Running"]

Index = npt.NDArray[np.int64]


class _Told(Protocol):
    """What a micro-batch knows of its step."""

    @property
    def epoch(self) -> int: ...
    @property
    def step(self) -> int: ...
    @property
    def places(self) -> int: ...
    @property
    def step_sequences(self) -> int: ...
    @property
    def step_tokens(self) -> int: ...
    @property
    def step_targets(self) -> int | None: ...
    def sequences_of(self, place: int) -> Index: ...
    def lengths_of(self, place: int) -> npt.NDArray[Any]: ...
    def weights_of(self, place: int) -> npt.NDArray[np.float64]: ...


class MicroBatch(list[int]):
    """The dataset rows of one micro-batch: a list of ints, as a batch sampler yields them, that knows its place.

    Attributes:
        place: this micro-batch among the `places` that a rank runs in the step.
    """

    # Values are looked up when asked for: most loops ask for few, and thousands of micro-batches are made a second.
    __slots__ = ("_of", "place")

    _of: _Told
    place: int

    @property
    def sequences(self) -> Index:
        """(rows,) the places of these rows in the sampler's lengths."""
        return self._of.sequences_of(self.place)

    @property
    def lengths(self) -> npt.NDArray[Any]:
        """(rows,) or (rows, F) their tokens."""
        return self._of.lengths_of(self.place)

    @property
    def weights(self) -> npt.NDArray[np.float64]:
        """(rows,) 1.0, or 0.0 for a row that only keeps a rank busy, or fills the last step."""
        return self._of.weights_of(self.place)

    @property
    def epoch(self) -> int:
        """The epoch, from 0."""
        return self._of.epoch

    @property
    def step(self) -> int:
        """The optimizer step, counted from 0 in each epoch."""
        return self._of.step

    @property
    def places(self) -> int:
        """Micro-batches that a rank runs in the step."""
        return self._of.places

    @property
    def ends_step(self) -> bool:
        """Whether the optimizer step ends with it."""
        return self.place + 1 == self._of.places

    @property
    def step_sequences(self) -> int:
        """Sequences of the whole step over all ranks, zero-weight rows left out, as in the other totals.

        The totals are the denominators of a mean loss, known without communication.
        """
        return self._of.step_sequences

    @property
    def step_tokens(self) -> int:
        """Tokens of the whole step over all ranks."""
        return self._of.step_tokens

    @property
    def step_targets(self) -> int | None:
        """Targets of the whole step over all ranks; ``None`` where the sampler was not given targets."""
        return self._of.step_targets

    def __reduce__(self) -> tuple[Any, ...]:
        """A worker process needs the rows and what is told of them, not the step's plan."""
        of = self._of
        sent = _Sent(
            epoch=of.epoch,
            step=of.step,
            places=of.places,
            step_sequences=of.step_sequences,
            step_tokens=of.step_tokens,
            step_targets=of.step_targets,
            sequences=self.sequences,
            lengths=self.lengths,
            weights=self.weights,
        )
        return _rebuild, (list(self), sent, self.place)


@dataclass(slots=True, kw_only=True, eq=False)
class _Sent:
    """One micro-batch's attributes, apart from its step."""

    epoch: int
    step: int
    places: int
    step_sequences: int
    step_tokens: int
    step_targets: int | None
    sequences: Index
    lengths: npt.NDArray[Any]
    weights: npt.NDArray[np.float64]

    def sequences_of(self, place: int) -> Index:
        return self.sequences

    def lengths_of(self, place: int) -> npt.NDArray[Any]:
        return self.lengths

    def weights_of(self, place: int) -> npt.NDArray[np.float64]:
        return self.weights


def _rebuild(rows: list[int], of: _Told, place: int) -> MicroBatch:
    batch = MicroBatch(rows)
    batch._of, batch.place = of, place
    return batch


class Running:
    """A step under way on one rank: the plan, and the dataset rows of this rank's micro-batches, one after the other.

    Attributes:
        rows, cuts: micro-batch k is ``rows[cuts[k]:cuts[k + 1]]``.
        parts: runs on other numbers of ranks before this one.
        last: whether the epoch ends with this step.
    """

    __slots__ = ("cuts", "epoch", "last", "of", "parts", "places", "plan", "rank", "rows", "sampled", "slots", "step")

    def __init__(
        self, plan: StepPlan, of: Epoch, sampled: Sampled, rank: int, parts: tuple[tuple[int, int], ...]
    ) -> None:
        self.plan, self.of, self.sampled, self.rank, self.parts = plan, of, sampled, rank, parts
        self.epoch, self.step, self.places = of.number, plan.members.step, plan.steps
        self.last = self.step + 1 == of.steps
        self.slots, cuts = rank_slots(plan.order, plan.offsets, plan.filler, plan.ranks, rank)
        self.rows: list[int] = sampled.rows_of(plan.members.sequences[self.slots])
        self.cuts: list[int] = cuts.tolist()

    def after(self, place: int) -> Position:
        """Where a loop stands that has consumed the micro-batches up to this one."""
        ranks, number, around = self.plan.ranks, self.of.number, self.of.arranged_for
        if place + 1 < self.places:
            parts = (*self.parts, (ranks, place + 1))
            return Position(epoch=number, step=self.step, parts=parts, arranged_for=around)
        if not self.last:
            return Position(epoch=number, step=self.step + 1, arranged_for=around)
        return Position(epoch=number + 1, arranged_for=ranks)

    @property
    def step_sequences(self) -> int:
        """Of the whole step, as the two that follow."""
        return self.plan.sequences

    @property
    def step_tokens(self) -> int:
        """Of the whole step."""
        return self.plan.tokens

    @property
    def step_targets(self) -> int | None:
        """Of the whole step."""
        return self.plan.targets

    def sequences_of(self, place: int) -> Index:
        """(rows,) of one micro-batch."""
        return self.plan.members.sequences[self._slots_of(place)]

    def lengths_of(self, place: int) -> npt.NDArray[Any]:
        """(rows,) or (rows, F) of one micro-batch."""
        return self.sampled.corpus.lengths[self.sequences_of(place)]

    def weights_of(self, place: int) -> npt.NDArray[np.float64]:
        """(rows,) of one micro-batch."""
        weights, slots = self.plan.members.weights, self._slots_of(place)
        if not len(self.plan.group(place, self.rank)):
            return np.zeros(len(slots))
        return np.ones(len(slots)) if weights is None else weights[slots]

    def _slots_of(self, place: int) -> Index:
        return self.slots[self.cuts[place] : self.cuts[place + 1]]
