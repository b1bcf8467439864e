"""Iterators of a sampler: one micro-batch after the other, each with the place that follows it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from padless.data._epoch import Epoch
from padless.data._state import Position, refuse_if_different
from padless.data._step import MicroBatch, StepPlan, split_parts

if TYPE_CHECKING:
    from padless.data.sampler import TokenBudgetSampler

__all__ = ["Place", "SamplerIterator"]


class Place:
    """What an iterator knows of a micro-batch that it hands out, and the sampler needs when it is consumed."""

    __slots__ = ("after", "epoch", "plan")

    def __init__(self, plan: StepPlan, epoch: Epoch, after: Position) -> None:
        self.plan, self.epoch, self.after = plan, epoch, after


class SamplerIterator(Iterator[MicroBatch]):
    """One pass over (the rest of) an epoch. Its state is what it handed out, for loaders that keep it themselves."""

    def __init__(self, sampler: TokenBudgetSampler, start: Position) -> None:
        self._sampler = sampler
        self._go_to(start)

    def _go_to(self, position: Position) -> None:
        self._position = position
        self._number = position.epoch
        self._epoch = self._sampler._epoch(position)
        self._plan: StepPlan | None = None
        self._parts, self._next = split_parts(position.parts, self._sampler.ranks)

    def __iter__(self) -> SamplerIterator:
        return self

    def __next__(self) -> MicroBatch:
        position = self._position
        if position.epoch != self._number or position.step >= self._epoch.steps:
            raise StopIteration
        if self._plan is None:
            self._plan = self._sampler._plan(self._epoch, position.step, self._parts)
        plan, place = self._plan, self._next
        batch = self._batch(plan, place)
        self._position = self._after(plan, place)
        self._next += 1
        if batch.ends_step:
            self._plan, self._parts, self._next = None, (), 0
        self._sampler._issue(Place(plan, self._epoch, self._position), batch)
        return batch

    def _after(self, plan: StepPlan, place: int) -> Position:
        now = self._position
        if place + 1 < plan.steps:
            parts = (*self._parts, (plan.ranks, place + 1))
            return Position(epoch=now.epoch, step=now.step, parts=parts, arranged_for=now.arranged_for)
        if now.step + 1 < self._epoch.steps:
            return Position(epoch=now.epoch, step=now.step + 1, arranged_for=now.arranged_for)
        return Position(epoch=now.epoch + 1, arranged_for=self._sampler.ranks)

    def _batch(self, plan: StepPlan, place: int) -> MicroBatch:
        sampled, members = self._sampler._sampled, plan.members
        places = plan.group(place, self._sampler.rank)
        if len(places):
            weights = np.ones(len(places)) if members.weights is None else members.weights[places]
        else:
            places = plan.filler
            weights = np.zeros(len(places))
        sequences = members.sequences[places]
        batch = MicroBatch(sampled.rows_of(sequences))
        batch.sequences = sequences
        batch.lengths = sampled.corpus.lengths[sequences]
        batch.weights = weights
        batch.epoch, batch.step = self._number, members.step
        batch.place, batch.places = place, plan.steps
        batch.ends_step = place + 1 == plan.steps
        batch.step_sequences, batch.step_tokens, batch.step_targets = plan.sequences, plan.tokens, plan.targets
        return batch

    def state_dict(self) -> dict[str, Any]:
        """What this iterator has handed out; ``StatefulDataLoader`` saves it with each micro-batch."""
        return {**self._sampler._mine, "position": self._position.to_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to where the state was saved."""
        position = Position.from_dict(state["position"])
        refuse_if_different(self._sampler._mine, state, mid_step=bool(position.parts))
        self._go_to(position)
