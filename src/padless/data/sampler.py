"""A batch sampler that keeps each micro-batch within a token budget, loses nothing, and resumes anywhere."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar

import numpy as np

from padless.cost import CostModel, check_cost
from padless.data._corpus import Sampled, open_corpus
from padless.data._dataset import SampledRows
from padless.data._diagnostics import Diagnostics
from padless.data._epoch import Counting, Epoch, Grouping, Settings, Tail
from padless.data._iterate import SamplerIterator
from padless.data._microbatch import MicroBatch, Running
from padless.data._ranks import find_ranks, require_agreement
from padless.data._state import FORMAT, Position, fingerprint, refuse_if_different
from padless.data._step import GROUPING_METHODS, SAMPLER_COST, Grouper, GroupingMethod, StepPlan
from padless.errors import PadlessError, choose
from padless.lengths import Lengths, positive_int
from padless.planning.bucket import mix
from padless.planning.slots import Overlong
from padless.shapes import as_ladder, combine_multiples

__all__ = ["Diagnostics", "MicroBatch", "TokenBudgetSampler"]

Batch = TypeVar("Batch")


class TokenBudgetSampler:
    """Yields the dataset rows of one micro-batch after the other, for ``DataLoader(batch_sampler=...)``.

    An epoch is cut into optimizer steps first, by the seed and the epoch alone; only then is each step grouped into
    micro-batches for the ranks. Every rank runs the same number of micro-batches in each step, and none is over the
    budget.

    Args:
        lengths: (N,) tokens of each sequence, (N, F) for fields padded apart, or what `padless.data.measure` returned
            (then rows, pieces and targets are known, too).
        token_budget: ceiling on rows x width of one micro-batch.
        sequences_per_step: sequences of one optimizer step over all ranks. Give this or ``tokens_per_step``.
        tokens_per_step: a step ends where it first reaches so many tokens.
        counting: which tokens: ``"real"``, ``"targets"`` (needs targets), or ``"padded"`` (positions computed, as one
            rank would group the step; then a ceiling; not for ``pool`` and ``range``).
        grouping: ``"step"``: a step's members are a uniform shuffle, only their grouping is chosen: no length bias.
            ``"pool"``: a pool of ``pool_steps`` steps is sorted and dealt out in tight clusters, one of each stratum of
            lengths to a step: least padding. ``"range"``: the same with clusters drawn at random within ``ranges``
            coarse ranges of length. ``"sorted"``: longest first, for evaluation. ``"none"``: shuffled and grouped in
            that order: a baseline.
        pool_steps: steps whose sequences are pooled; more of them leave less padding.
        ranges: length ranges of a pool, for ``"range"``.
        tail: a last step that is not full: ``"short"`` runs it as it is, ``"drop"`` leaves it out (counted),
            ``"repeat"`` fills it with sequences of weight 0.
        shuffle: whether ``step``, ``pool``, ``range`` and ``none`` shuffle the epoch.
        ranks, rank: data-parallel world size and rank; by default those of torch.distributed, and 1 and 0 without it.
        seed: of all random choices; the global random state has no influence.
        method: ``"lean"`` plans a step of a few hundred sequences in about a tenth of a millisecond, so that the first
            batch and ``len`` are there at once for millions of sequences. ``"balanced"`` is that of
            `padless.microbatch`: it searches many times as long, for steps that are modelled one to three percent
            faster; with atoms, several fields or a ladder, ``"lean"`` is the same as this. ``"greedy"`` and
            ``"fixed"`` are baselines.
        cost, multiple_of, max_sequences, microbatches_multiple_of: as in `padless.microbatch`, but without a ``cost`` a
            micro-batch's fixed part is taken as 100 tokens, which leaves less padding.
        ladder: the only widths allowed, for compiled models; a row wider than its step is rounded up.
        atoms: (N,) group ids; sequences that share one stay in one micro-batch (and step).
        targets: (N,) supervised tokens, for ``counting="targets"`` and `MicroBatch.step_targets`.
        weights: (N,) average appearances of each sequence per epoch, for mixtures: 2.5 is two or three times, 0.1 every
            tenth epoch. Without it every sequence appears exactly once.
        overlong: a sequence over the budget: ``"error"``, ``"drop"``, ``"alone"``, ``"truncate"`` or ``"split"``. The
            last two need rows cut accordingly: wrap the dataset with `rows`.
        check_ranks: compare seeds, lengths and options over torch.distributed when built (a small collective), if
            ``ranks`` and ``rank`` come from there.

    A second iteration without `set_epoch` goes on to the next epoch by itself. Leaving a loop early and iterating again
    starts the same epoch over, from where the last state was loaded or its beginning.

    Workers prefetch: a ``DataLoader`` asks the sampler for rows long before the loop sees them. Iterate
    ``sampler.follow(loader)`` instead of ``loader``, and `state_dict`, `at_step_boundary` and `current` speak of
    the micro-batch that the loop received last. torchdata's ``StatefulDataLoader`` keeps the right state by itself.

    Raises:
        PadlessError: bad options; a sequence over the budget (named) under ``overlong="error"``.

    >>> sampler = TokenBudgetSampler([5, 1, 4, 2], token_budget=10, sequences_per_step=4, grouping="sorted")
    >>> [(list(batch), batch.ends_step) for batch in sampler]
    [([0, 2], False), ([3, 1], True)]
    """

    def __init__(
        self,
        lengths: Lengths,
        *,
        token_budget: int,
        sequences_per_step: int | None = None,
        tokens_per_step: int | None = None,
        counting: Counting = "real",
        grouping: Grouping = "step",
        pool_steps: int = 64,
        ranges: int = 256,
        tail: Tail = "short",
        shuffle: bool = True,
        ranks: int | None = None,
        rank: int | None = None,
        seed: int = 0,
        method: GroupingMethod = "lean",
        cost: CostModel | None = None,
        multiple_of: int | tuple[int, ...] = 1,
        ladder: Any = None,
        max_sequences: int | None = None,
        microbatches_multiple_of: int = 1,
        atoms: Any = None,
        targets: Any = None,
        weights: Any = None,
        overlong: Overlong = "error",
        check_ranks: bool = True,
    ) -> None:
        choose("grouping", grouping, ("step", "pool", "range", "sorted", "none"))
        choose("tail", tail, ("short", "drop", "repeat"))
        choose("counting", counting, ("real", "padded", "targets"))
        choose("method", method, GROUPING_METHODS)
        if (sequences_per_step is None) == (tokens_per_step is None):
            raise PadlessError("give either sequences_per_step= or tokens_per_step=: one of them says what a step is")
        if counting != "real" and tokens_per_step is None:
            raise PadlessError(
                f"counting={counting!r} says what tokens_per_step counts, but sequences_per_step was given"
            )
        if counting == "padded" and grouping in ("pool", "range"):
            raise PadlessError(
                "counting='padded' goes with grouping step, sorted or none; pools pad little: count 'real'"
            )
        self._settings = Settings(
            grouping=grouping,
            sequences_per_step=_optional(sequences_per_step, "sequences_per_step"),
            tokens_per_step=_optional(tokens_per_step, "tokens_per_step"),
            counting=counting,
            pool_steps=positive_int(pool_steps, name="pool_steps", minimum=2),
            ranges=positive_int(ranges, name="ranges"),
            tail=tail,
            shuffle=bool(shuffle),
            seed=positive_int(seed, name="seed", minimum=0),
        )
        self._grouper = Grouper(
            token_budget=positive_int(token_budget, name="token_budget"),
            method="fixed" if grouping == "none" else method,
            multiple_of=combine_multiples(multiple_of),
            max_sequences=_optional(max_sequences, "max_sequences"),
            microbatches_multiple_of=positive_int(microbatches_multiple_of, name="microbatches_multiple_of"),
            cost=check_cost(cost) or SAMPLER_COST,
            ladder=None if ladder is None else tuple(as_ladder(ladder).tolist()),
            in_order=grouping in ("sorted", "none"),
        )
        self._sampled: Sampled = open_corpus(
            lengths, atoms=atoms, targets=targets, weights=weights, overlong=overlong, grouper=self._grouper
        )
        if counting == "targets" and self._sampled.corpus.targets is None:
            raise PadlessError("counting='targets' needs targets=, or measure(..., targets=True)")
        self.ranks, self.rank, distributed = find_ranks(ranks, rank)
        self._mine = self._describe()
        if distributed and check_ranks:
            require_agreement(self._mine)
        self._begin = self._start = Position(arranged_for=self.ranks)
        self._run: Running | None = None
        self._noted = self._done = 0
        self._diagnostics = self._start_diagnostics = Diagnostics()
        self._cache: Epoch | None = None
        self._counted: tuple[tuple[Any, ...], Any] | None = None
        self._waiting: deque[MicroBatch] | None = None
        self.current: MicroBatch | None = None
        self._warn_if_nothing()

    # --- iteration

    def __iter__(self) -> SamplerIterator:
        """The rest of the epoch: a batch sampler's iterator that has a state of its own."""
        if self._waiting is not None:
            self._waiting.clear()
        self._stand(self._start, self._start_diagnostics)
        return SamplerIterator(self, self._start)

    def follow(self, loader: Iterable[Batch]) -> Iterator[Batch]:
        """Pass a loader's batches through and keep count: the sampler's state is then that of the loop.

        The loader must yield one batch for each micro-batch, in order, as ``DataLoader`` does with any number of
        workers.
        """
        self._waiting = deque()
        try:
            for batch in loader:
                if not self._waiting:
                    raise PadlessError(
                        "the loader yields more batches than this sampler handed out: it must use the sampler as its"
                        " batch_sampler, unwrapped"
                    )
                self._consume(self._waiting.popleft())
                yield batch
        finally:
            self._waiting = None

    def _consume(self, batch: MicroBatch) -> None:
        run: Running = batch._of  # type: ignore[assignment]
        if run is not self._run:
            self._note()
            self._run, self._noted = run, batch.place
        self.current = batch
        self._done = batch.place + 1
        if self._done == run.places and run.last:
            self._note()
            self._diagnostics += self._of_epoch(run.of)
            self._start, self._start_diagnostics = run.after(batch.place), self.diagnostics

    def _note(self) -> None:
        """Count what was consumed of the step in work since the last time; per step, because counting takes a while."""
        run = self._run
        if run is not None and self._done > self._noted:
            self._diagnostics.note(self._sampled.corpus, run.plan, self._noted, self._done)
            self._noted = self._done

    def _stand(self, position: Position, diagnostics: Diagnostics) -> None:
        """Nothing has been consumed since a position."""
        self._begin, self._run = position, None
        self._diagnostics = diagnostics + Diagnostics()

    @property
    def _position(self) -> Position:
        """What the loop has consumed."""
        return self._begin if self._run is None else self._run.after(self._done - 1)

    @property
    def at_step_boundary(self) -> bool:
        """Whether the last micro-batch ended its optimizer step: time to update. True before the first."""
        return self.current is None or self.current.ends_step

    @property
    def batch_size(self) -> None:
        """Micro-batches differ in size. Raises on several ranks: who asks is about to shard the sampler once more."""
        if self.ranks > 1:
            raise PadlessError(
                f"this sampler already deals out micro-batches to {self.ranks} ranks, and something (Accelerate's"
                " prepare, Lightning's use_distributed_sampler) is about to do it again: leave the loader unprepared"
            )

    # --- size

    def __len__(self) -> int:
        """Micro-batches of this rank in the current epoch, counted from its beginning; the same on every rank.

        Exact. The first call in an epoch plans all of it: about a second for every few million sequences with the
        default method.
        """
        boundaries = self.step_boundaries
        return int(boundaries[-1]) if len(boundaries) else 0

    @property
    def steps(self) -> int:
        """Optimizer steps in the current epoch."""
        return self._epoch(self._position).steps

    @property
    def step_boundaries(self) -> Any:
        """(steps,) int64: how many micro-batches a rank has run when each optimizer step of the epoch ends.

        Exact; see ``len``. Steps that ran before a restore, on other ranks perhaps, count as this sampler would have
        run them.
        """
        position = self._position
        key = (position.epoch, position.arranged_for)
        if self._counted is None or self._counted[0] != key:
            epoch = self._epoch(position)
            places = self._grouper.places(self._sampled.corpus, epoch, self.ranks)
            self._counted = (key, np.cumsum(places, dtype=np.int64))
        return self._counted[1]

    # --- epochs and state

    @property
    def epoch(self) -> int:
        """The epoch in work; after the last micro-batch of one, the next."""
        return self._position.epoch

    def set_epoch(self, epoch: int) -> None:
        """Go to the beginning of an epoch. For the current one nothing changes: a loaded place is kept."""
        epoch = positive_int(epoch, name="epoch", minimum=0)
        if epoch != self._position.epoch:
            self._start, self._start_diagnostics = Position(epoch=epoch, arranged_for=self.ranks), self.diagnostics
            self._stand(self._start, self._start_diagnostics)
            self.current = None

    @property
    def diagnostics(self) -> Diagnostics:
        """Counts over all ranks of what was consumed, over all epochs, restores included."""
        self._note()
        return self._diagnostics + Diagnostics()

    def state_dict(self) -> dict[str, Any]:
        """Where the loop stands: plain numbers and words, the same on every rank, to be saved at any micro-batch."""
        return {**self._mine, "position": self._position.to_dict(), "diagnostics": self.diagnostics.to_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state, with any number of ranks and workers, as often as you like.

        Raises:
            PadlessError: the state belongs to other data, lengths, seed, options or version; says what differs.
        """
        mid_step = isinstance(state, Mapping) and bool(state.get("position", {}).get("parts"))
        refuse_if_different(self._mine, state, mid_step=mid_step)
        self._start = Position.from_dict(state["position"])
        self._start_diagnostics = Diagnostics.from_dict(state.get("diagnostics") or Diagnostics().to_dict())
        self._stand(self._start, self._start_diagnostics)
        self.current = None

    def rows(self, dataset: Any) -> SampledRows:
        """The dataset as this sampler means it: rows cut to what was counted, rows of weight 0 without targets.

        Not needed where nothing is truncated or split and the loop multiplies each loss by `MicroBatch.weights`.
        """
        return SampledRows(dataset, self._sampled)

    # --- private

    def _describe(self) -> dict[str, Any]:
        corpus, how, group = self._sampled.corpus, self._settings, self._grouper
        members = {
            name: getattr(how, name)
            for name in ("grouping", "sequences_per_step", "tokens_per_step", "counting", "tail", "shuffle")
        }
        if how.grouping in ("pool", "range"):
            members |= {
                "pool_steps": how.pool_steps,
                "token_budget": group.token_budget,
                "max_sequences": group.max_sequences,
            }
        if how.grouping == "range":
            members["ranges"] = how.ranges
        if how.counting == "padded":
            members |= {"token_budget": group.token_budget, "max_sequences": group.max_sequences}
        grouping = {
            "token_budget": group.token_budget,
            "method": group.method,
            "multiple_of": group.multiple_of,
            "ladder": None if group.ladder is None else list(group.ladder),
            "max_sequences": group.max_sequences,
            "microbatches_multiple_of": group.microbatches_multiple_of,
            "cost": group.cost.to_dict(),
        }
        return {
            "format": FORMAT,
            "sequences": len(corpus.lengths),
            "lengths": fingerprint(corpus.lengths, corpus.units, corpus.members, corpus.targets, corpus.weights),
            "seed": how.seed,
            "members": members,
            "grouping": grouping,
        }

    def _epoch(self, position: Position) -> Epoch:
        """The epoch of a position; the last one made is kept."""
        made = self._cache
        if made is None or (made.number, made.arranged_for) != (position.epoch, position.arranged_for):
            made = self._cache = Epoch(
                corpus=self._sampled.corpus,
                settings=self._settings,
                number=position.epoch,
                token_budget=self._grouper.token_budget,
                max_sequences=self._grouper.max_sequences,
                grouper=self._grouper.microbatch,
                arranged_for=position.arranged_for,
            )
        return made

    def _plans(self, epoch: Epoch, first: int, behind: int) -> list[StepPlan]:
        """At least one and at most ``behind - first`` whole steps."""
        return self._grouper.plans(self._sampled.corpus, epoch, first, behind, self.ranks)

    def _plan(self, epoch: Epoch, step: int, parts: tuple[tuple[int, int], ...] = ()) -> StepPlan:
        members, seed = epoch.members(step), mix(epoch.seed, 5, step)
        return self._grouper.resume(self._sampled.corpus, members, parts, self.ranks, seed)

    def _of_epoch(self, epoch: Epoch) -> Diagnostics:
        """What is counted once an epoch, at its end."""
        sampled = self._sampled
        return Diagnostics(
            dropped=len(sampled.dropped) + len(epoch.dropped),
            truncated=len(sampled.truncated),
            split=len(sampled.split),
        )

    def _warn_if_nothing(self) -> None:
        how, count = self._settings, len(self._sampled.corpus.lengths)
        size = how.sequences_per_step or how.tokens_per_step
        what = "sequences_per_step" if how.sequences_per_step else "tokens_per_step"
        if count == 0 or (how.tail == "drop" and what == "sequences_per_step" and count < (size or 0)):
            warnings.warn(
                f"there is no micro-batch: {count} sequences, {what}={size}, tail={how.tail!r}",
                UserWarning,
                stacklevel=3,
            )


def _optional(value: Any, name: str) -> int | None:
    return None if value is None else positive_int(value, name=name)
