"""The optimizer steps of an epoch: which sequences belong to which, whatever the number of ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from padless.lengths import IntArray
from padless.plan import Plan
from padless.planning.bucket import (
    arrange,
    cut_by_padded,
    cut_by_size,
    cut_by_tokens,
    longest_first,
    mix,
    repeats,
    shuffle,
    shuffled,
)

__all__ = ["Corpus", "Epoch", "Grouping", "Members", "Settings", "Tail"]

Index = npt.NDArray[np.int64]
Grouping = Literal["step", "pool", "range", "sorted", "none"]
Tail = Literal["short", "drop", "repeat"]
Counting = Literal["real", "padded", "targets"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Corpus:
    """The sequences that are sampled, after the ``overlong`` policy.

    Attributes:
        lengths: (N,) or (N, F) tokens.
        units: (U + 1,) offsets into ``members`` of groups that stay together, or ``None`` where each sequence is one.
        members: (N,) sequences, group by group, or ``None``.
        targets: (N,) supervised tokens, or ``None``.
        weights: (U,) average appearances per epoch, or ``None`` for exactly one.
    """

    lengths: IntArray
    units: Index | None = None
    members: Index | None = None
    targets: IntArray | None = None
    weights: npt.NDArray[np.float64] | None = None

    def __len__(self) -> int:
        return len(self.lengths) if self.units is None else len(self.units) - 1

    @property
    def uniform(self) -> bool:
        """Whether every unit is one sequence, with one length."""
        return self.units is None and self.lengths.ndim == 1

    def unit_sizes(self) -> Index:
        """Sequences in each unit, (U,)."""
        return np.ones(len(self), dtype=np.int64) if self.units is None else np.diff(self.units)

    def of_units(self, values: npt.NDArray[Any], reduce: np.ufunc) -> npt.NDArray[Any]:
        """Sum or maximum of per-sequence values over each unit, (U,)."""
        if self.units is None or self.members is None:
            return values
        if len(self) == 0:
            return values[:0]
        return np.asarray(reduce.reduceat(values[self.members], self.units[:-1]))

    def total_lengths(self) -> IntArray:
        """Tokens over all fields, (N,)."""
        return self.lengths if self.lengths.ndim == 1 else self.lengths.sum(axis=1, dtype=np.int64)

    def expand(self, units: npt.NDArray[Any]) -> tuple[Index, Index]:
        """Sequences of some units, (S,), and which of these units each belongs to, (S,)."""
        if self.units is None or self.members is None:
            return units.astype(np.int64), np.arange(len(units))
        starts, sizes = self.units[units], self.units[units + 1] - self.units[units]
        of_unit = np.repeat(np.arange(len(units)), sizes)
        within = np.arange(len(of_unit)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        return self.members[starts[of_unit] + within], of_unit


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What decides an optimizer step's members. Ranks and budgets do not, but for pools (see `Epoch`)."""

    grouping: Grouping
    sequences_per_step: int | None
    tokens_per_step: int | None
    counting: Counting
    pool_steps: int
    ranges: int
    tail: Tail
    shuffle: bool
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Members:
    """One optimizer step.

    Attributes:
        step: its number in the epoch.
        sequences: (S,) the sequences.
        units: (S,) the unit of each, or ``None`` where each is one.
        weights: (S,) the weight of each, or ``None`` for 1.
        clusters: (c + 1,) offsets of the tight clusters that a pool gave it, to run as micro-batches, or ``None``.
        arranged_for, places: ranks and micro-steps that the clusters are meant for.
    """

    step: int
    sequences: Index
    units: Index | None
    weights: npt.NDArray[np.float64] | None = None
    clusters: Index | None = None
    arranged_for: int = 0
    places: int = 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pool:
    """Units of a pool, step after step, (n,); how many each of a step's clusters holds, (c,); micro-steps."""

    units: npt.NDArray[Any]
    runs: Index
    places: int


@dataclass(frozen=True, kw_only=True, eq=False)
class Epoch:
    """The order of one epoch, and its cut into optimizer steps; made when first asked for.

    Attributes:
        corpus: what is sampled.
        settings: what decides the members of a step.
        number: of the epoch.
        token_budget, max_sequences: of a micro-batch.
        arranged_for, grouper: shape the clusters of ``pool`` and ``range``: micro-batches for so many ranks, by
            `padless.microbatch` with the sampler's options.
    """

    corpus: Corpus
    settings: Settings
    number: int
    token_budget: int
    arranged_for: int
    grouper: Callable[..., Plan]
    max_sequences: int | None = None
    _arranged: dict[int, Pool] = field(default_factory=dict)

    @cached_property
    def seed(self) -> int:
        return mix(self.settings.seed, self.number)

    @cached_property
    def entries(self) -> npt.NDArray[Any]:
        """Units in the order in which the epoch visits them, (E,); int32 where that is wide enough."""
        corpus, how = self.corpus, self.settings
        if how.grouping == "sorted":
            return longest_first(corpus.of_units(corpus.total_lengths(), np.maximum))
        if corpus.weights is not None:
            drawn = np.repeat(np.arange(len(corpus)), repeats(corpus.weights, mix(self.seed, 2)))
            if how.shuffle:
                shuffle(drawn, self.seed)
            return drawn
        if how.shuffle:
            return shuffled(len(corpus), self.seed)
        return np.arange(len(corpus))

    @cached_property
    def _sizes(self) -> Index | None:
        """Sequences of each entry, (E,), where they are not all 1."""
        return None if self.corpus.units is None else self.corpus.unit_sizes()[self.entries]

    @cached_property
    def _counted(self) -> npt.NDArray[Any]:
        """What each entry adds to ``tokens_per_step``, (E,)."""
        counted = self.corpus.targets if self.settings.counting == "targets" else None
        per_sequence = self.corpus.total_lengths() if counted is None else counted
        return np.asarray(self.corpus.of_units(per_sequence, np.add)[self.entries])

    @cached_property
    def bounds(self) -> Index | None:
        """Offsets of the steps in the entries, (steps + 1,), or ``None`` where all but the last take as many."""
        how = self.settings
        if how.grouping in ("pool", "range") and (how.tokens_per_step is not None or self._sizes is not None):
            return self._pooled[0]
        if how.tokens_per_step is None:
            assert how.sequences_per_step is not None
            return None if self._sizes is None else cut_by_size(self._sizes, how.sequences_per_step)
        if how.counting != "padded":
            return cut_by_tokens(self._counted, how.tokens_per_step)
        widths = self.corpus.of_units(self.corpus.total_lengths(), np.maximum)[self.entries]
        return cut_by_padded(
            widths,
            how.tokens_per_step,
            budget=self.token_budget,
            max_rows=self.max_sequences or len(widths) + 1,
            sort=how.grouping != "none",
        )

    @cached_property
    def _pooled(self) -> tuple[Index, Index]:
        """Offsets of the steps, (steps + 1,), and the first step of each pool, (pools + 1,).

        Pools are cut by what a step counts; the steps of one pool share its units evenly.
        """
        how = self.settings
        counted = self._counted if how.tokens_per_step is not None else self._sizes
        target = how.tokens_per_step or self._per_step
        assert counted is not None
        pools = cut_by_tokens(counted, how.pool_steps * target)
        sums = np.add.reduceat(counted.astype(np.int64), pools[:-1]) if len(counted) else pools[:0]
        steps = np.minimum(np.maximum(np.rint(sums / target).astype(np.int64), 1), np.diff(pools))  # (pools,)
        bounds = [
            start + np.arange(m) * (size // m) + np.minimum(np.arange(m), size % m)
            for start, size, m in zip(pools[:-1].tolist(), np.diff(pools).tolist(), steps.tolist(), strict=True)
        ]
        firsts = np.concatenate([[0], np.cumsum(steps)]).astype(np.int64)
        return np.concatenate([*bounds, [len(counted)]]).astype(np.int64), firsts

    @cached_property
    def whole_steps(self) -> int:
        """Steps that are as large as asked for; what follows is the tail."""
        if self.bounds is None:
            return len(self.entries) // self._per_step
        steps = len(self.bounds) - 1
        return steps - 1 if steps and self._last_is_short(int(self.bounds[-2])) else steps

    def _last_is_short(self, start: int) -> bool:
        how = self.settings
        pooled = how.grouping in ("pool", "range")
        if pooled and int(self._pooled[1][-1] - self._pooled[1][-2]) > 1:
            return False  # it shares its pool evenly with other steps
        if how.tokens_per_step is None:
            assert self._sizes is not None
            # Groups of unequal size fill a step only roughly: it is short where the largest would still fit.
            return int(self._sizes[start:].sum() + self._sizes.max()) <= self._per_step
        if how.counting == "padded":
            return False
        return int(self._counted[start:].sum()) < how.tokens_per_step

    @cached_property
    def steps(self) -> int:
        """Optimizer steps of the epoch, the tail's included."""
        if self.settings.tail == "drop":
            return self.whole_steps
        if self.bounds is None:
            return -(-len(self.entries) // self._per_step)
        return len(self.bounds) - 1

    @cached_property
    def dropped(self) -> Index:
        """Sequences of the tail that the policy ``"drop"`` leaves out."""
        if self.settings.tail != "drop":
            return np.empty(0, dtype=np.int64)
        start = self._span(self.steps)[0] if self.steps < self._all_steps else len(self.entries)
        return self.corpus.expand(self.entries[start:])[0]

    def members(self, step: int) -> Members:
        """The sequences of one optimizer step."""
        start, stop = self._span(step)
        if self.settings.grouping in ("pool", "range") and step < self.whole_steps:
            return self._pooled_members(step, start, stop)
        units = self.entries[start:stop]
        sequences, of_unit = self.corpus.expand(units)
        if self.settings.tail != "repeat" or step < self.whole_steps:
            return Members(step=step, sequences=sequences, units=of_unit)
        more, of_more = self.corpus.expand(self._fill(start, stop))
        return Members(
            step=step,
            sequences=np.concatenate([sequences, more]),
            units=np.concatenate([of_unit, of_more + len(units)]),
            weights=np.concatenate([np.ones(len(sequences)), np.zeros(len(more))]),
        )

    @property
    def sliced(self) -> int:
        """So many of the first steps are simply the entries between `edges`, each with weight 1."""
        how = self.settings
        if how.grouping in ("pool", "range"):
            return 0
        return self.whole_steps if how.tail == "repeat" else self.steps

    def edges(self, first: int, behind: int) -> Index:
        """Where the entries of the steps ``first`` to ``behind - 1`` start, and the end: (behind - first + 1,)."""
        if self.bounds is not None:
            return self.bounds[first : behind + 1]
        return np.minimum(np.arange(first, behind + 1) * self._per_step, len(self.entries))

    # --- private

    @property
    def _per_step(self) -> int:
        assert self.settings.sequences_per_step is not None
        return self.settings.sequences_per_step

    @property
    def _all_steps(self) -> int:
        return -(-len(self.entries) // self._per_step) if self.bounds is None else len(self.bounds) - 1

    def _span(self, step: int) -> tuple[int, int]:
        """Where a step's entries lie."""
        if self.bounds is not None:
            return int(self.bounds[step]), int(self.bounds[step + 1])
        return step * self._per_step, min((step + 1) * self._per_step, len(self.entries))

    def _pool_of(self, step: int) -> tuple[int, int, int]:
        """The number of the pool that a step belongs to, its first step, and the first step behind it."""
        if self.bounds is None:
            pool = step // self.settings.pool_steps
            return pool, pool * self.settings.pool_steps, min((pool + 1) * self.settings.pool_steps, self.whole_steps)
        firsts = self._pooled[1]
        pool = int(np.searchsorted(firsts, step, side="right")) - 1
        return pool, int(firsts[pool]), int(firsts[pool + 1])

    def _pooled_members(self, step: int, start: int, stop: int) -> Members:
        """One step of a pool. The pool in work is kept; those before it are forgotten."""
        number, first, behind = self._pool_of(step)
        begin, end = self._span(first)[0], self._span(behind - 1)[1]
        if number not in self._arranged:
            self._arranged.clear()
            self._arranged[number] = self._arrange(self.entries[begin:end], behind - first, mix(self.seed, 3, number))
        pool = self._arranged[number]
        sequences, of_unit = self.corpus.expand(pool.units[start - begin : stop - begin])
        edges = np.concatenate([[0], np.cumsum(pool.runs)])
        edges[-1] = stop - start  # the pool's remainder is with the shortest
        clusters = edges if self.corpus.units is None else np.searchsorted(of_unit, edges)
        return Members(
            step=step,
            sequences=sequences,
            units=of_unit,
            clusters=clusters,
            arranged_for=self.arranged_for,
            places=pool.places,
        )

    def _arrange(self, units: npt.NDArray[Any], steps: int, seed: int) -> Pool:
        """Cut one step as the pool's lengths suggest into micro-batches, and every step of the pool likewise."""
        how = self.settings
        sizes = self._unit_widths[units]  # (n,)
        profile = np.ascontiguousarray(np.sort(sizes)[::-1][steps // 2 :: steps][: len(units) // steps])  # (u,)
        plan = self.grouper(
            profile,
            max(self.token_budget // self._mean_unit, 1),
            ranks=self.arranged_for,
            max_sequences=None if self.max_sequences is None else max(self.max_sequences // self._mean_unit, 1),
        )
        rows = plan.rows[np.argsort(-plan.widths, kind="stable")]
        runs = rows[rows > 0]
        window = 1
        if how.grouping == "range":
            window = max(2, round(steps * len(runs) / how.ranges))
        arranged = np.asarray(units[arrange(sizes, steps, runs, window=window, seed=seed)])
        return Pool(units=arranged, runs=runs, places=plan.steps)

    @cached_property
    def _unit_widths(self) -> npt.NDArray[Any]:
        return self.corpus.of_units(self.corpus.total_lengths(), np.maximum)

    @cached_property
    def _mean_unit(self) -> int:
        return max(1, round(len(self.corpus.lengths) / max(len(self.corpus), 1)))

    def _fill(self, start: int, stop: int) -> npt.NDArray[Any]:
        """Units from the epoch's beginning, around and around, that fill a short last step."""
        how = self.settings
        sizes = self._counted if how.tokens_per_step is not None else self._sizes
        target = how.tokens_per_step or self._per_step
        held = stop - start if sizes is None else int(sizes[start:stop].sum())
        if sizes is not None and not sizes.sum():
            return self.entries[:0]
        chosen: list[int] = []
        while True:
            place = len(chosen) % len(self.entries)
            held += 1 if sizes is None else int(sizes[place])
            if held > target:
                return self.entries[np.array(chosen, dtype=np.int64)]
            chosen.append(place)
