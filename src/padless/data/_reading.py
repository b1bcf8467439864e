"""The pass over a dataset that counts tokens: batched, in worker processes, resumable, exact or estimated."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from padless.data._processes import run_task, worker_pool
from padless.data._rows import Columns, Counter, choose_fields
from padless.data._sources import Source
from padless.data._tokenizer import describe_tokenizer
from padless.errors import PadlessError

if TYPE_CHECKING:
    from padless.data._cache import Cache

__all__ = ["Estimate", "Progress", "Raw", "Reading", "read"]

Counts = npt.NDArray[np.int64]
Progress = Callable[[int, int | None], None]

_SAVE_EVERY_SECONDS = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """How well estimated lengths match true ones, on sampled rows that the estimate did not see.

    Attributes:
        sample: rows tokenized, half to fit and half to judge.
        tokens_per_character, tokens_per_row: length = tokens_per_row + tokens_per_character * characters.
        mean_error: mean of ``|estimated - true| / true``.
        worst_error: its 95th percentile.
        total_error: ``estimated / true - 1`` of the judged rows' tokens together.
    """

    sample: int
    tokens_per_character: float
    tokens_per_row: float
    mean_error: float
    worst_error: float
    total_error: float

    def to_dict(self) -> dict[str, float]:
        """Ready for JSON."""
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Raw:
    """Token counts of every row, (N, F), before any policy; ``targets`` (N,) where they were asked for."""

    lengths: Counts
    targets: Counts | None = None
    estimate: Estimate | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What is counted: the options of `padless.data.measure` that change a length."""

    fields: str | Sequence[str] | Sequence[Sequence[str]] | None
    tokenizer: Any
    chat_template: str | Callable[[Any], str] | None
    length: Callable[[Mapping[str, Any]], Any] | None
    add_special_tokens: bool
    add_tokens: int
    join: str
    targets_within: int | None
    estimate: int | None
    batch_size: int

    def counter(self, columns: Sequence[str]) -> Counter:
        """The counter for rows with these columns."""
        chosen = () if self.length is not None else choose_fields(columns, self.fields, tokenizer=self.tokenizer)
        return Counter(
            fields=chosen,
            tokenizer=self.tokenizer,
            chat_template=self.chat_template,
            length=self.length,
            add_special_tokens=self.add_special_tokens,
            add_tokens=self.add_tokens,
            join=self.join,
        )

    def describe(self) -> str | None:
        """Text that is equal for equal readings, or ``None`` where a function's content cannot be compared."""
        if self.length is not None or callable(self.chat_template):
            return None
        tokenizer = describe_tokenizer(self.tokenizer)
        if tokenizer is None:
            return None
        plain = (self.fields, self.chat_template, self.add_special_tokens, self.add_tokens, self.join)
        return repr((tokenizer, plain, self.targets_within, self.estimate, self.batch_size))


def read(source: Source, plan: Reading, cache: Cache | None, *, workers: int, progress: Progress | None) -> Raw:
    """Count every row of a source."""
    batches = source.payloads(plan.batch_size)
    first = next(batches, None)
    if first is None:
        return Raw(lengths=np.empty((0, 1), dtype=np.int64))
    counter = plan.counter(list(source.unpack(first[1], 0)))
    batches = chain([first], batches)
    if plan.estimate is not None:
        return _estimated(source, counter, batches, plan.estimate, progress)
    done = [] if cache is None else cache.partial()
    rows_done = sum(map(len, done))
    todo = ((row, payload) for row, payload in batches if row >= rows_done)
    job = _Job(source.unpack, counter, plan.targets_within)
    saved = time.monotonic()
    try:
        for counts in job.run(todo, workers):
            done.append(counts)
            rows_done += len(counts)
            if progress is not None:
                progress(rows_done, source.total)
            if cache is not None and time.monotonic() - saved > _SAVE_EVERY_SECONDS:
                cache.save_partial(done)
                saved = time.monotonic()
    except (KeyboardInterrupt, SystemExit):
        if cache is not None:
            cache.save_partial(done)
        raise
    table = np.concatenate(done)  # (N, F) or (N, F + 1)
    if plan.targets_within is None:
        return Raw(lengths=table)
    return Raw(lengths=table[:, :-1], targets=table[:, -1])


class _Job:
    """Counting of one payload, here or in worker processes."""

    def __init__(self, unpack: Callable[[Any, int], Columns], counter: Counter, targets_within: int | None) -> None:
        self.unpack, self.counter, self.targets_within = unpack, counter, targets_within

    def __call__(self, first_row: int, payload: Any) -> Counts:
        columns = self.unpack(payload, first_row)
        lengths = self.counter(columns, first_row)  # (B, F)
        if self.targets_within is None:
            return lengths
        kept = lengths[:, 0] if not self.targets_within else np.minimum(lengths[:, 0], self.targets_within)
        return np.column_stack([lengths, self.counter.supervised(columns, kept, first_row)])

    def run(self, todo: Iterator[tuple[int, Any]], workers: int) -> Iterator[Counts]:
        """Results in order; the reader never runs more than a few batches ahead of the workers."""
        if workers == 0:
            for row, payload in todo:
                yield self(row, payload)
            return
        with worker_pool(workers, _start_worker, self) as pool:
            waiting: deque[Future[Counts]] = deque()
            try:
                for row, payload in todo:
                    waiting.append(pool.submit(run_task, _in_worker, row, payload))
                    if len(waiting) >= 4 * workers:
                        yield waiting.popleft().result()
                while waiting:
                    yield waiting.popleft().result()
            except BrokenProcessPool:
                raise PadlessError(
                    "a worker process died while measuring (out of memory?): use fewer workers"
                ) from None


_job: _Job | None = None


def _start_worker(job: _Job) -> None:
    global _job
    _job = job


def _in_worker(row: int, payload: Any) -> Counts:
    assert _job is not None
    return _job(row, payload)


def _estimated(
    source: Source, counter: Counter, batches: Iterator[tuple[int, Any]], sample: int, progress: Progress | None
) -> Raw:
    """Characters of every row, tokens of a reservoir sample (Vitter's algorithm R), and a line through them."""
    if len(counter.fields) != 1:
        raise PadlessError("estimate= works on one field")
    rng = np.random.default_rng(0)
    characters: list[Counts] = []
    held: list[str] = []
    seen, plain = 0, True
    for first_row, payload in batches:
        columns = source.unpack(payload, first_row)
        texts, plain = counter.sequence_texts(columns, first_row)
        characters.append(np.array([len(text) for text in texts], dtype=np.int64))
        for text in texts:
            if not text:
                continue
            seen += 1
            if len(held) < sample:
                held.append(text)
            elif (place := int(rng.integers(seen))) < sample:
                held[place] = text
        if progress is not None:
            progress(first_row + len(texts), source.total)
    count = np.concatenate(characters)  # (N,)
    if len(held) < 10:
        raise PadlessError(f"only {len(held)} rows of {source.what} hold text: too few to estimate from; measure them")
    size = np.array([len(text) for text in held], dtype=np.float64)  # (S,)
    true = counter.tokens(held, special=plain).astype(np.float64)  # (S,)
    mix = rng.permutation(len(held))
    fit, judge = mix[: len(mix) // 2], mix[len(mix) // 2 :]
    slope, base = _line(size[fit], true[fit])
    error = np.maximum(np.rint(base + slope * size[judge]), 1) / true[judge] - 1
    guessed = np.maximum(np.rint(base + slope * size[judge]), 1).sum()
    quality = Estimate(
        sample=len(held),
        tokens_per_character=slope,
        tokens_per_row=base,
        mean_error=float(np.abs(error).mean()),
        worst_error=float(np.quantile(np.abs(error), 0.95)),
        total_error=float(guessed / true[judge].sum() - 1),
    )
    lengths = np.where(count > 0, np.maximum(np.rint(base + slope * count), 1), 0).astype(np.int64)
    return Raw(lengths=lengths[:, None], estimate=quality)


def _line(size: npt.NDArray[np.float64], true: npt.NDArray[np.float64]) -> tuple[float, float]:
    """Weighted least squares (weights 1 / size: errors grow with the square root of a text), base at least 0."""
    weight = 1.0 / size
    mean_size, mean_true = np.average(size, weights=weight), np.average(true, weights=weight)
    spread = np.sum(weight * (size - mean_size) ** 2)
    slope = float(np.sum(weight * (size - mean_size) * (true - mean_true)) / spread) if spread > 0 else 0.0
    base = float(mean_true - slope * mean_size)
    if base < 0 or slope <= 0:
        return float(true.sum() / size.sum()), 0.0
    return slope, base
