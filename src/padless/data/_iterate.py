"""Iterators of a sampler: one micro-batch after the other."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from padless.data._microbatch import MicroBatch, Running
from padless.data._state import Position, refuse_if_different
from padless.data._step import StepPlan, split_parts
from padless.errors import PadlessError

if TYPE_CHECKING:
    from padless.data.sampler import TokenBudgetSampler

__all__ = ["SamplerIterator"]

_AHEAD = 64  # steps that are planned in one call, once an iteration is under way


class SamplerIterator(Iterator[MicroBatch]):
    """One pass over (the rest of) an epoch. Its state is what it handed out, for loaders that keep it themselves."""

    def __init__(self, sampler: TokenBudgetSampler, start: Position) -> None:
        self._sampler = sampler
        self._go_to(start)

    def _go_to(self, position: Position) -> None:
        self._start, self._run = position, None
        self._epoch = self._sampler._epoch(position)
        self._parts, self._place = split_parts(position.parts, self._sampler.ranks)
        self._planned: deque[StepPlan] = deque()
        self._ahead = 1

    _run: Running | None

    def __iter__(self) -> SamplerIterator:
        return self

    def __next__(self) -> MicroBatch:
        run, place = self._run, self._place
        if run is None or place == run.places:
            run = self._next_run()
            place = self._place
        # No calls that can be avoided: on one rank a step has dozens of micro-batches.
        cuts = run.cuts
        batch = MicroBatch(run.rows[cuts[place] : cuts[place + 1]])
        batch._of, batch.place = run, place
        self._place = place + 1
        sampler = self._sampler
        if sampler._waiting is None:
            sampler._consume(batch)
        else:  # a loop is followed: it counts when the loop receives it
            sampler._waiting.append(batch)
        return batch

    def _next_run(self) -> Running:
        """The step that follows; steps are planned in growing numbers, so that the first is there at once."""
        sampler, before = self._sampler, self._run
        step = self._start.step if before is None else before.step + 1
        if step >= self._epoch.steps:
            raise StopIteration
        parts = self._parts
        if parts:
            plan = sampler._plan(self._epoch, step, parts)
        else:
            if not self._planned:
                self._planned.extend(sampler._plans(self._epoch, step, step + self._ahead))
                self._ahead = min(2 * self._ahead, _AHEAD)
            plan = self._planned.popleft()
        if before is not None:
            self._place = 0
        elif self._place >= plan.steps:
            raise PadlessError(
                f"the state says that {self._place} micro-steps of step {step} ran, which has {plan.steps}:"
                " it was not saved with these grouping options"
            )
        self._parts = ()
        self._run = Running(plan, self._epoch, sampler._sampled, sampler.rank, parts)
        return self._run

    @property
    def _position(self) -> Position:
        return self._start if self._run is None else self._run.after(self._place - 1)

    def state_dict(self) -> dict[str, Any]:
        """What this iterator has handed out; ``StatefulDataLoader`` saves it with each micro-batch."""
        return {**self._sampler._mine, "position": self._position.to_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to where the state was saved."""
        position = Position.from_dict(state["position"])
        refuse_if_different(self._sampler._mine, state, mid_step=bool(position.parts))
        self._go_to(position)
