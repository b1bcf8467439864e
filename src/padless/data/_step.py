"""One optimizer step, grouped into micro-batches for some ranks; what is left of it, grouped again for others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from padless.cost import CostModel
from padless.data._epoch import Corpus, Epoch, Members
from padless.errors import PadlessError
from padless.plan import Plan
from padless.planning.bucket import deal, deal_steps, mix
from padless.planning.items import Rounding
from padless.planning.lean import LeanSteps, lean_groups, lean_steps
from padless.planning.microbatch import microbatch
from padless.planning.slices import step_sums

__all__ = ["GROUPING_METHODS", "SAMPLER_COST", "Grouper", "GroupingMethod", "StepPlan", "split_parts"]

Index = npt.NDArray[np.int64]
GroupingMethod = Literal["fixed", "greedy", "balanced", "lean"]
_NOBODY: Index = np.empty(0, dtype=np.int64)
_COUNTED = 256  # steps that are planned at once only to be counted
GROUPING_METHODS = ("fixed", "greedy", "balanced", "lean")


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

    def held(self, corpus: Corpus) -> npt.NDArray[Any]:
        """Tokens of each member over all fields, (S,)."""
        return _tokens(corpus, self.members.sequences)

    def left_after(self, places: int) -> Members:
        """The members that have not run after so many micro-steps, in their canonical order."""
        behind = np.sort(self.order[self.offsets[places * self.ranks] :])
        members = self.members
        return Members(
            step=members.step,
            sequences=members.sequences[behind],
            units=None if members.units is None else members.units[behind],
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

    def plans(self, corpus: Corpus, epoch: Epoch, first: int, behind: int, ranks: int) -> list[StepPlan]:
        """Group the steps ``first`` to ``behind - 1`` whole: as `resume` without parts, many at once where that can be.

        At least one of them, perhaps fewer than asked for.
        """
        behind = min(behind, epoch.sliced) if self._many(corpus) else 0
        if behind <= first:
            return [self.resume(corpus, epoch.members(first), (), ranks, mix(epoch.seed, 5, first))]
        edges = epoch.edges(first, behind)  # (B + 1,)
        sequences = epoch.entries[edges[0] : edges[-1]].astype(np.int64)  # (S,)
        bounds = edges - edges[0]
        lean = self._lean(corpus, sequences, bounds, ranks)
        starts = bounds.tolist()
        steps, tokens, shortest = lean.steps.tolist(), lean.tokens.tolist(), lean.shortest.tolist()
        order, offsets, padded, idle = self._dealt(corpus, sequences, bounds, lean, ranks, epoch.seed, first)
        plans = []
        for b, count in enumerate(steps):
            start, stop, groups = starts[b], starts[b + 1], count * ranks
            held = sequences[start:stop]
            plans.append(
                StepPlan(
                    members=Members(step=first + b, sequences=held, units=None),
                    ranks=ranks,
                    steps=count,
                    order=order[start:stop],
                    offsets=offsets[b, : groups + 1],
                    padded=padded[b, :groups].reshape(count, ranks),
                    filler=np.array([shortest[b]]) if idle[b] else _NOBODY,
                    sequences=stop - start,
                    tokens=tokens[b],
                    targets=None if corpus.targets is None else step_sums(corpus.targets, held),
                )
            )
        return plans

    def places(self, corpus: Corpus, epoch: Epoch, ranks: int) -> Index:
        """Micro-steps of every step of an epoch, (steps,)."""
        counted: list[Index] = []
        sliced = epoch.sliced if self._many(corpus) else 0
        for first in range(0, sliced, _COUNTED):
            edges = epoch.edges(first, min(first + _COUNTED, sliced))
            counted.append(self._lean(corpus, epoch.entries[edges[0] : edges[-1]], edges - edges[0], ranks).steps)
        rest = [self.plans(corpus, epoch, step, step + 1, ranks)[0].steps for step in range(sliced, epoch.steps)]
        return np.concatenate([*counted, np.array(rest, dtype=np.int64)])

    def _many(self, corpus: Corpus) -> bool:
        return self.method == "lean" and corpus.uniform and self.ladder is None

    def _lean(self, corpus: Corpus, members: npt.NDArray[Any], bounds: Index, ranks: int) -> LeanSteps:
        return lean_steps(corpus.lengths, members, bounds, self.token_budget, **self._lean_options(ranks))

    def _lean_options(self, ranks: int) -> dict[str, Any]:
        return {
            "ranks": ranks,
            "multiple_of": self.multiple_of,
            "max_sequences": self.max_sequences,
            "every": self.microbatches_multiple_of,
            "cost": self.cost,
        }

    def _dealt(
        self, corpus: Corpus, sequences: Index, bounds: Index, lean: LeanSteps, ranks: int, seed: int, first: int
    ) -> tuple[Index, Index, Index, list[bool]]:
        """Order, offsets and padded tokens as ranks run them, and whether a step has idle ranks, (B,)."""
        offsets, padded = lean.offsets, lean.padded
        groups = lean.steps * ranks  # (B,)
        within = np.arange(padded.shape[1]) < groups[:, None]  # (B, room)
        empty = within & (padded == 0)
        idle = empty.any(axis=1)
        if idle.any():
            shortest = corpus.lengths[sequences[bounds[:-1] + lean.shortest]]  # (B,)
            padded = np.where(empty, self.rounding.up(shortest.astype(np.int64))[:, None], padded)
        order = lean.order
        if not self.in_order:
            order, offsets, padded = deal_steps(order, bounds, offsets, padded, lean.steps, ranks, seed, first)
        return order, offsets, padded, idle.tolist()

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
        if self._many(corpus):
            return lean_groups(lengths, self.token_budget, **self._lean_options(ranks))
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
        units = members.units if corpus.units is not None else None
        filler = np.array([shortest]) if units is None else np.flatnonzero(units == units[shortest])
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
    tokens = step_sums(corpus.lengths, real) if corpus.lengths.ndim == 1 else int(_tokens(corpus, real).sum())
    targets = None if corpus.targets is None else step_sums(corpus.targets, real)
    return len(real), tokens, targets


def _tokens(corpus: Corpus, sequences: Index) -> npt.NDArray[Any]:
    """Tokens of some sequences over all fields, (S,)."""
    held = corpus.lengths[sequences]
    return held if held.ndim == 1 else np.asarray(held.sum(axis=1, dtype=np.int64))
