"""One optimizer step, grouped into micro-batches for some ranks; what is left of it, grouped again for others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from padless.cost import CostModel
from padless.data._epoch import Corpus, Members
from padless.errors import PadlessError
from padless.plan import Plan
from padless.planning.bucket import deal, mix, step_sums
from padless.planning.items import Rounding
from padless.planning.lean import lean_groups
from padless.planning.microbatch import microbatch

__all__ = ["GROUPING_METHODS", "SAMPLER_COST", "Grouper", "GroupingMethod", "MicroBatch", "StepPlan", "split_parts"]

Index = npt.NDArray[np.int64]
GroupingMethod = Literal["fixed", "greedy", "balanced", "lean"]
_NOBODY: Index = np.empty(0, dtype=np.int64)
GROUPING_METHODS = ("fixed", "greedy", "balanced", "lean")


class MicroBatch(list[int]):
    """The dataset rows of one micro-batch: a list of ints, as a batch sampler yields them, that knows its place.

    Attributes:
        sequences: (rows,) the places of these rows in the sampler's lengths.
        lengths: (rows,) or (rows, F) their tokens.
        weights: (rows,) 1.0, or 0.0 for a row that only keeps a rank busy, or fills the last step.
        epoch, step: the optimizer step, counted from 0 in each epoch.
        place, places: this micro-batch among those that a rank runs in the step.
        ends_step: whether the optimizer step ends with it.
        step_sequences, step_tokens, step_targets: of the whole step over all ranks, zero-weight rows left out: the
            denominators of a mean loss, known without communication (``step_targets`` is ``None`` where the sampler was
            not given targets).
    """

    sequences: Index
    lengths: npt.NDArray[Any]
    weights: npt.NDArray[np.float64]
    epoch: int
    step: int
    place: int
    places: int
    ends_step: bool
    step_sequences: int
    step_tokens: int
    step_targets: int | None

    def __reduce__(self) -> tuple[Any, ...]:
        """A worker process needs the rows and weights, and the place costs little more."""
        return _rebuild, (list(self), self.__dict__)


def _rebuild(rows: list[int], attributes: dict[str, Any]) -> MicroBatch:
    batch = MicroBatch(rows)
    batch.__dict__.update(attributes)
    return batch


@dataclass(frozen=True, kw_only=True, eq=False)
class StepPlan:
    """Micro-batches of one step's remaining sequences: group ``k * ranks + r`` is micro-step k on rank r.

    Attributes:
        members: the sequences that were left to run.
        order: (S,) places in the members; ``offsets`` (K * ranks + 1,) cut it into groups.
        padded: (K, ranks) positions computed, those of idle ranks included.
        filler: places in the members of the smallest unit, which an idle rank runs with weight 0;
            empty where no rank is idle.
        tokens, targets, sequences: of the whole step, those that ran before included.
    """

    members: Members
    ranks: int
    steps: int
    order: Index
    offsets: Index
    padded: Index
    filler: Index
    sequences: int
    tokens: int
    targets: int | None

    def group(self, place: int, rank: int) -> Index:
        """Places in the members of one micro-batch, (rows,)."""
        g = place * self.ranks + rank
        return self.order[self.offsets[g] : self.offsets[g + 1]]

    @cached_property
    def rows(self) -> Index:
        """Sequences in each group, (K, ranks)."""
        return np.diff(self.offsets).reshape(self.steps, self.ranks)

    def left_after(self, places: int) -> Members:
        """The members that have not run after so many micro-steps, in their canonical order."""
        behind = np.sort(self.order[self.offsets[places * self.ranks] :])
        members = self.members
        return Members(
            step=members.step,
            sequences=members.sequences[behind],
            units=members.units[behind],
            weights=None if members.weights is None else members.weights[behind],
        )


SAMPLER_COST = CostModel(per_microbatch=100.0, source="default")
"""Where no cost is given, samplers take a fixed cost of 100 tokens: on supervised mixes less padding for practically
the same modelled time, even where the fixed cost is the planners' default of 500 (benchmarks/data)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grouper:
    """How the sequences of a step are grouped: the options of `padless.microbatch`."""

    token_budget: int
    method: GroupingMethod
    multiple_of: int
    max_sequences: int | None
    microbatches_multiple_of: int
    cost: CostModel
    ladder: tuple[int, ...] | None = None
    in_order: bool = False

    def plan(self, corpus: Corpus, members: Members, ranks: int, seed: int) -> StepPlan:
        """Group a whole step."""
        return self._group(corpus, members, ranks, seed, _totals(corpus, members))

    def resume(
        self, corpus: Corpus, members: Members, parts: Sequence[tuple[int, int]], ranks: int, seed: int
    ) -> StepPlan:
        """Group what is left of a step after ``parts``: (ranks, micro-steps run) of every run before this one."""
        totals = _totals(corpus, members)
        for part, (before, places) in enumerate(parts):
            plan = self._group(corpus, members, before, mix(seed, part), totals)
            if not 0 <= places < max(plan.steps, 1):
                raise PadlessError(
                    f"the state says that {places} micro-steps ran on {before} ranks in step {members.step},"
                    f" which has {plan.steps}: it was not saved with these grouping options"
                )
            members = plan.left_after(places)
        return self._group(corpus, members, ranks, mix(seed, len(parts)), totals)

    def _group(
        self, corpus: Corpus, members: Members, ranks: int, seed: int, totals: tuple[int, int, int | None]
    ) -> StepPlan:
        lengths = corpus.lengths[members.sequences]  # (S,) or (S, F)
        groups = self._clustered(lengths, members, ranks) or self._planned(corpus, lengths, members, ranks)
        steps, order, offsets, padded = groups
        filler = _NOBODY
        idle = offsets[1:] == offsets[:-1]
        if idle.any():
            filler, filler_tokens = self._filler(corpus, members, lengths)
            padded = np.where(idle, filler_tokens, padded)
        if not self.in_order:
            order, offsets, padded = deal(order, offsets, padded, steps, ranks, seed)
        sequences, tokens, targets = totals
        return StepPlan(
            members=members,
            ranks=ranks,
            steps=steps,
            order=order,
            offsets=offsets,
            padded=padded.reshape(steps, ranks),
            filler=filler,
            sequences=sequences,
            tokens=tokens,
            targets=targets,
        )

    def _planned(
        self, corpus: Corpus, lengths: npt.NDArray[Any], members: Members, ranks: int
    ) -> tuple[int, Index, Index, Index]:
        if self.method == "lean" and corpus.uniform and self.ladder is None:
            return lean_groups(
                lengths,
                self.token_budget,
                ranks=ranks,
                multiple_of=self.multiple_of,
                max_sequences=self.max_sequences,
                every=self.microbatches_multiple_of,
                cost=self.cost,
            )
        atoms = None if corpus.units is None else members.units
        plan = self.microbatch(lengths, self.token_budget, ranks=ranks, max_sequences=self.max_sequences, atoms=atoms)
        return plan.steps, plan.order, plan.offsets, plan.group_tokens

    def microbatch(
        self, lengths: npt.NDArray[Any], budget: int, *, ranks: int, max_sequences: int | None, atoms: Any = None
    ) -> Plan:
        """`padless.microbatch` with these options. Nothing is overlong: the corpus has been through the policy."""
        options: dict[str, Any] = {} if self.ladder is None else {"ladder": self.ladder}
        return microbatch(
            lengths,
            budget,
            ranks=ranks,
            method="balanced" if self.method == "lean" else self.method,
            cost=self.cost,
            multiple_of=self.multiple_of,
            max_sequences=max_sequences,
            atoms=atoms,
            overlong="alone",
            microbatches_multiple_of=self.microbatches_multiple_of,
            **options,
        )

    def _clustered(
        self, lengths: npt.NDArray[Any], members: Members, ranks: int
    ) -> tuple[int, Index, Index, Index] | None:
        """A pool's clusters as they are, where they suit these ranks and the budget: the costliest first."""
        edges = members.clusters
        if edges is None or ranks != members.arranged_for:
            return None
        rows = np.diff(edges)  # (c,)
        widths = self.rounding.up(np.maximum.reduceat(lengths, edges[:-1], axis=0))  # (c,) or (c, F)
        padded = rows * (widths if widths.ndim == 1 else widths.sum(axis=1))
        over = (padded > self.token_budget) & (rows > 1)
        if over.any() or (self.max_sequences is not None and rows.max() > self.max_sequences):
            return None
        costs = (self.cost).padded(rows, widths)
        first = np.argsort(-costs, kind="stable")
        sizes = np.zeros(members.places * ranks, dtype=np.int64)
        sizes[: len(rows)] = rows[first]
        order = np.repeat(edges[first] - np.cumsum(rows[first]) + rows[first], rows[first]) + np.arange(int(edges[-1]))
        tokens = np.zeros(len(sizes), dtype=np.int64)
        tokens[: len(rows)] = padded[first]
        return members.places, order, np.concatenate([[0], np.cumsum(sizes)]), tokens

    def _filler(self, corpus: Corpus, members: Members, lengths: npt.NDArray[Any]) -> tuple[Index, int]:
        """The unit that an idle rank runs, as places in the members, and its padded tokens."""
        totals = lengths if lengths.ndim == 1 else lengths.sum(axis=1)
        shortest = int(totals.argmin())
        filler = (
            np.array([shortest]) if corpus.units is None else np.flatnonzero(members.units == members.units[shortest])
        )
        width = self.rounding.up(lengths[filler].max(axis=0))
        return filler, len(filler) * int(width.sum())

    @property
    def rounding(self) -> Rounding:
        """How widths are rounded."""
        ladder = None if self.ladder is None else np.array(self.ladder, dtype=np.int64)
        return Rounding(multiple_of=self.multiple_of, ladder=ladder)


def split_parts(parts: tuple[tuple[int, int], ...], ranks: int) -> tuple[tuple[tuple[int, int], ...], int]:
    """The runs of a step on other numbers of ranks, and the micro-steps that these ranks have run since.

    >>> split_parts(((8, 2), (3, 1)), 3), split_parts(((8, 2), (3, 1)), 5)
    ((((8, 2),), 1), (((8, 2), (3, 1)), 0))
    """
    if parts and parts[-1][0] == ranks:
        return parts[:-1], parts[-1][1]
    return parts, 0


def _totals(corpus: Corpus, members: Members) -> tuple[int, int, int | None]:
    """Sequences, tokens and targets of a step, zero-weight members left out."""
    real = members.sequences if members.weights is None else members.sequences[members.weights > 0]
    flat = corpus.lengths.ndim == 1
    tokens = step_sums(corpus.lengths, real) if flat else int(corpus.lengths[real].sum(dtype=np.int64))
    targets = None if corpus.targets is None else step_sums(corpus.targets, real)
    return len(real), tokens, targets
