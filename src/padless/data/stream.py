"""Streams without length or random access: pool, group, emit; bounded memory, no overlap, resumable."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
from torch.utils.data import IterableDataset, get_worker_info

from padless.cost import CostModel, check_cost
from padless.data._dataset import cut_row, without_targets
from padless.data._diagnostics import Diagnostics
from padless.data._epoch import Corpus, Members
from padless.data._ranks import find_ranks
from padless.data._state import FORMAT, fingerprint, refuse_if_different
from padless.data._step import GROUPING_METHODS, SAMPLER_COST, Grouper, GroupingMethod, StepPlan, split_parts
from padless.errors import PadlessError, choose
from padless.lengths import as_lengths, positive_int
from padless.planning.bucket import mix
from padless.planning.slots import OVERLONG, Overlong, Slots, apply_overlong
from padless.shapes import combine_multiples

__all__ = ["PooledStream"]

Row = Any
Parts = tuple[tuple[int, int], ...]
Collate = Callable[[list[Row]], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamPosition:
    """What has been consumed.

    Attributes:
        epoch: the epoch in work.
        rows: rows of the source before the pool in work.
        pool: its number.
        parts: (ranks, micro-steps run) of each run that worked on it.
        index: micro-steps of the epoch that have run.
        base: the index at which the loader in use began: workers take turns from there.
        lengths: hash of the pool's lengths where the pool is begun, else empty.
    """

    epoch: int = 0
    rows: int = 0
    pool: int = 0
    parts: tuple[tuple[int, int], ...] = ()
    index: int = 0
    base: int = 0
    lengths: str = ""


class _Placed(NamedTuple):
    """What a followed loader carries beside each micro-batch."""

    batch: Any
    position: dict[str, Any]
    counts: dict[str, Any]


@dataclass(frozen=True, kw_only=True, eq=False)
class _Pool:
    """Rows of one pool and what is planned of them."""

    rows: list[Row]
    read: int
    corpus: Corpus
    slots: Slots
    empty: int
    lengths: str

    @property
    def members(self) -> Members:
        count = len(self.corpus.lengths)
        return Members(step=0, sequences=np.arange(count), units=np.arange(count))

    def sequence(self, index: int, *, weight: float) -> Row:
        """The row of one sequence, cut to its piece; without targets where its weight is 0."""
        place = index if self.slots.sequence is None else int(self.slots.sequence[index])
        row = self.rows[place]
        if self.slots.spans is not None:
            start, stop = self.slots.spans[index].tolist()
            row = cut_row(row, start, stop - start)
        return row if weight else without_targets(row, place)


class PooledStream(IterableDataset[Any]):
    """Micro-batches within a token budget from a stream of rows, for ``DataLoader(stream, batch_size=None)``.

    So many rows are pooled, grouped by length for all ranks together, and their micro-batches emitted in random order:
    every rank emits the same number, without communication. The order does not depend on the number of workers.

    Every rank and worker reads the whole stream and measures every row, but transforms and collates only its own: let
    ``source`` yield cheap rows, and do expensive work in ``transform``.

    Args:
        source: a Hugging Face ``IterableDataset``, any object that iterates anew each time, or a function from the
            epoch to an iterable. Its order must be the same on all ranks. A one-shot iterator is refused.
        token_budget: ceiling on rows x width of one micro-batch.
        length: tokens of a row, as the model receives it; by default those of ``input_ids`` (or of the row itself).
        transform: applied to the rows of this rank and worker only. It must not change their length.
        collate: from a list of rows to a batch; `padless.data.PaddedCollator` and `PackedCollator` fit. By default the
            list itself.
        pool_size: rows held in memory; larger pools leave less padding.
        ranks, rank: as in `TokenBudgetSampler`.
        shuffle: emit the micro-batches of a pool in random order.
        seed: of that order.
        method, cost, multiple_of, max_sequences, microbatches_multiple_of: as in `padless.microbatch`;
            the last makes every pool end with a whole accumulation window.
        overlong: a row over the budget: ``"error"``, ``"drop"``, ``"alone"``, ``"truncate"``, ``"split"`` (the last two
            cut every per-token column). Rows without a token are dropped and counted.

    A row of weight 0 keeps a rank busy that has nothing to do: it has no targets. A second iteration goes on to the
    next epoch (``source.set_epoch`` is called where it exists).

    Use `follow` to keep a state that speaks of what the loop received, whatever workers have prefetched; it may be
    loaded with another number of ranks and workers. torchdata's ``StatefulDataLoader`` keeps its own.

    >>> stream = PooledStream([[1] * 5, [1], [1] * 4, [1] * 2], token_budget=10, shuffle=False, length=len)
    >>> [[len(row) for row in batch] for batch in stream]
    [[5, 4], [2, 1]]
    """

    def __init__(
        self,
        source: Any,
        *,
        token_budget: int,
        length: Callable[[Row], int] | None = None,
        transform: Callable[[Row], Row] | None = None,
        collate: Collate | None = None,
        pool_size: int = 4096,
        ranks: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        method: GroupingMethod = "balanced",
        cost: CostModel | None = None,
        multiple_of: int | tuple[int, ...] = 1,
        max_sequences: int | None = None,
        microbatches_multiple_of: int = 1,
        overlong: Overlong = "error",
    ) -> None:
        choose("method", method, GROUPING_METHODS)
        choose("overlong", overlong, OVERLONG)
        if isinstance(source, Iterator):
            raise PadlessError(
                f"source is a one-shot {type(source).__name__} that cannot be read again: pass a function that makes it"
            )
        if not callable(source) and not isinstance(source, Iterable):
            raise PadlessError(
                f"source is a {type(source).__name__}; expected an iterable, or a function that makes one"
            )
        self._source, self._length, self._transform = source, length, transform
        self._collate: Collate = collate or list
        self._pool_size = positive_int(pool_size, name="pool_size")
        self._overlong, self._seed = overlong, positive_int(seed, name="seed", minimum=0)
        self._grouper = Grouper(
            token_budget=positive_int(token_budget, name="token_budget"),
            method=method,
            multiple_of=combine_multiples(multiple_of),
            max_sequences=None if max_sequences is None else positive_int(max_sequences, name="max_sequences"),
            microbatches_multiple_of=positive_int(microbatches_multiple_of, name="microbatches_multiple_of"),
            cost=check_cost(cost) or SAMPLER_COST,
            in_order=not shuffle,
        )
        self.ranks, self.rank, _ = find_ranks(ranks, rank)
        self._position = self._start = StreamPosition()
        self._diagnostics = self._start_diagnostics = Diagnostics()
        self._followed = False

    # --- iteration

    def __iter__(self) -> Iterator[Any]:
        """The rest of the epoch."""
        if get_worker_info() is None and not self._followed:
            self._position, self._diagnostics = self._start, self._start_diagnostics + Diagnostics()
        for placed in self._placed(self._start):
            if self._followed:
                # Plain integers and words: they pass through a worker's queue and default_convert unchanged.
                yield placed
            else:
                self._consume(placed)
                yield placed.batch

    def follow(self, loader: Iterable[Any]) -> Iterator[Any]:
        """Pass a loader's batches through and keep count: the stream's state is then that of the loop.

        ``loader`` is ``DataLoader(stream, batch_size=None, ...)`` with any number of workers.
        """
        self._followed = True
        self._start = replace(self._start, base=self._start.index)
        try:
            for item in loader:
                if not (isinstance(item, tuple) and len(item) == 3):
                    raise PadlessError("the loader must pass items through: DataLoader(stream, batch_size=None)")
                placed = _Placed(*item)
                self._consume(placed)
                yield placed.batch
        finally:
            self._followed = False

    def _consume(self, placed: _Placed) -> None:
        self._position = _from_dict(placed.position)
        self._diagnostics += Diagnostics.from_dict(placed.counts)
        if self._position.index == 0:  # the epoch is over: the next iteration begins another
            self._start, self._start_diagnostics = self._position, self.diagnostics

    def _placed(self, start: StreamPosition) -> Iterator[_Placed]:
        """This rank's and worker's micro-batches, each with the position behind it."""
        worker = get_worker_info()
        turn, turns = (0, 1) if worker is None else (worker.id, worker.num_workers)
        now = start
        skipped = Diagnostics()
        pools = self._pools(start)
        pool = next(pools, None)
        while pool is not None:
            following = next(pools, None)  # one pool ahead: the last micro-batch of an epoch must know that it is
            parts, begun = split_parts(now.parts, self.ranks)
            plan = self._plan(pool, now, parts)
            for place in range(begun, plan.steps):
                after = self._after(now, parts, plan, place, pool, last=following is None)
                counts = self._counts(pool, plan, place, parts)
                if (now.index - start.base) % turns == turn:
                    batch = self._batch(pool, plan, place)
                    yield _Placed(batch, _to_dict(after), (skipped + counts).to_dict())
                    skipped = Diagnostics()
                now = after
            pool = following

    def _after(
        self,
        now: StreamPosition,
        parts: Parts,
        plan: StepPlan,
        place: int,
        pool: _Pool,
        *,
        last: bool,
    ) -> StreamPosition:
        if place + 1 < plan.steps:
            done = (*parts, (plan.ranks, place + 1))
            return replace(now, parts=done, index=now.index + 1, lengths=pool.lengths)
        if last:
            return StreamPosition(epoch=now.epoch + 1)
        return replace(now, rows=now.rows + pool.read, pool=now.pool + 1, parts=(), index=now.index + 1, lengths="")

    def _plan(self, pool: _Pool, now: StreamPosition, parts: Parts) -> StepPlan:
        if now.lengths and now.lengths != pool.lengths:
            raise PadlessError(
                f"the source yields other rows than those the state was saved with (rows {now.rows} and following)"
            )
        seed = mix(self._seed, now.epoch, now.pool)
        return self._grouper.resume(pool.corpus, pool.members, parts, self.ranks, seed)

    def _batch(self, pool: _Pool, plan: StepPlan, place: int) -> Any:
        chosen, weight = plan.group(place, self.rank), 1.0
        if not len(chosen):
            chosen, weight = plan.filler, 0.0
        rows = [pool.sequence(int(i), weight=weight) for i in plan.members.sequences[chosen]]
        if self._transform is not None:
            rows = [self._transform(row) for row in rows]
        return self._collate(rows)

    def _counts(self, pool: _Pool, plan: StepPlan, place: int, parts: Parts) -> Diagnostics:
        """What one micro-step adds; what a pool dropped or cut is counted with its first."""
        counts = Diagnostics()
        counts.note(pool.corpus, plan, place, place + 1)
        if place == 0 and not parts:
            counts.dropped = pool.empty + len(pool.slots.dropped)
            counts.truncated, counts.split = len(pool.slots.truncated), len(pool.slots.split)
        return counts

    # --- the source

    def _pools(self, start: StreamPosition) -> Iterator[_Pool]:
        rows = islice(self._rows(start.epoch), start.rows, None)
        first = start.rows
        held: list[Row] = []
        lengths: list[int] = []
        read = empty = 0
        for row in rows:
            read += 1
            length = self._measure(row, first + read - 1)
            if length == 0:
                empty += 1
            else:
                held.append(row)
                lengths.append(length)
            if len(held) == self._pool_size:
                pool = self._pool(held, lengths, read, empty, first)
                held, lengths = [], []
                if pool is None:
                    empty = read  # all of them dropped, to be counted with the next pool
                    continue
                yield pool
                first, read, empty = first + read, 0, 0
        if held:
            pool = self._pool(held, lengths, read, empty, first)
            if pool is not None:
                yield pool

    def _pool(self, rows: list[Row], lengths: list[int], read: int, empty: int, first: int) -> _Pool | None:
        """One pool; ``None`` where ``overlong`` dropped every row."""
        array = as_lengths(lengths)
        limit = self._grouper.rounding.largest(self._grouper.token_budget)
        what = f"token_budget {self._grouper.token_budget} (indices count from row {first} of the stream)"
        slots = apply_overlong(array, limit, overlong=self._overlong, what=what)
        if not len(slots.held):
            return None
        return _Pool(
            rows=rows,
            read=read,
            corpus=Corpus(lengths=slots.held),
            slots=slots,
            empty=empty,
            lengths=fingerprint(np.asarray(array)),
        )

    def _rows(self, epoch: int) -> Iterator[Row]:
        source = self._source
        if hasattr(source, "set_epoch"):
            source.set_epoch(epoch)
        if callable(source):
            return iter(source(epoch))
        if hasattr(source, "iter") and hasattr(source, "features"):
            # A Hugging Face dataset would give each worker some shards; batch-wise it gives every worker all rows.
            return _rows_of_batches(source.iter(batch_size=64))
        return iter(source)

    def _measure(self, row: Row, number: int) -> int:
        if self._length is not None:
            found = self._length(row)
        elif isinstance(row, Mapping):
            if "input_ids" not in row:
                raise PadlessError(
                    f"row {number} has no input_ids (keys {sorted(row)}): pass length= (a function of a row)"
                )
            found = len(row["input_ids"])
        else:
            found = len(row)
        return positive_int(found, name=f"the length of row {number}", minimum=0)

    # --- state

    @property
    def epoch(self) -> int:
        """The epoch in work."""
        return self._position.epoch

    def set_epoch(self, epoch: int) -> None:
        """Go to the beginning of an epoch; for the current one nothing changes."""
        epoch = positive_int(epoch, name="epoch", minimum=0)
        if epoch != self._position.epoch:
            self._position = self._start = StreamPosition(epoch=epoch)
            self._start_diagnostics = self.diagnostics

    @property
    def diagnostics(self) -> Diagnostics:
        """Counts over all ranks of what was consumed, restores included (with workers: of what was followed)."""
        return self._diagnostics + Diagnostics()

    def state_dict(self) -> dict[str, Any]:
        """Where the loop stands: plain numbers and words, the same on every rank."""
        return {
            **self._describe(),
            "position": _to_dict(self._position),
            "diagnostics": self._diagnostics.to_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state, with any number of ranks and workers; the source must yield the same rows again.

        Raises:
            PadlessError: a state of other options or of another version; says what differs.
        """
        parts = isinstance(state, Mapping) and bool(state.get("position", {}).get("parts"))
        refuse_if_different(self._describe(), state, mid_step=parts)
        position = _from_dict(state["position"])
        if get_worker_info() is None:  # a StatefulDataLoader restores each worker to its own turn
            position = replace(position, base=position.index)
        self._position = self._start = position
        self._start_diagnostics = Diagnostics.from_dict(state["diagnostics"])
        self._diagnostics = self._start_diagnostics + Diagnostics()

    def _describe(self) -> dict[str, Any]:
        group = self._grouper
        return {
            "format": FORMAT,
            "sequences": None,
            "lengths": None,
            "seed": self._seed,
            "members": {"pool_size": self._pool_size, "overlong": self._overlong},
            "grouping": {
                "token_budget": group.token_budget,
                "method": group.method,
                "multiple_of": group.multiple_of,
                "max_sequences": group.max_sequences,
                "microbatches_multiple_of": group.microbatches_multiple_of,
                "shuffle": not group.in_order,
                "cost": group.cost.to_dict(),
            },
        }


def _rows_of_batches(batches: Iterable[Mapping[str, Any]]) -> Iterator[Row]:
    for batch in batches:
        names = list(batch)
        for values in zip(*batch.values(), strict=True):
            yield dict(zip(names, values, strict=True))


def _to_dict(position: StreamPosition) -> dict[str, Any]:
    return {
        "epoch": position.epoch,
        "rows": position.rows,
        "pool": position.pool,
        "parts": [list(part) for part in position.parts],
        "index": position.index,
        "base": position.base,
        "lengths": position.lengths,
    }


def _from_dict(told: Mapping[str, Any]) -> StreamPosition:
    parts = tuple((int(ranks), int(places)) for ranks, places in told["parts"])
    return StreamPosition(**{**told, "parts": parts})
