"""Token lengths of what reaches the model, measured once, in parallel, and kept beside the data."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from padless.data._cache import open_cache
from padless.data._reading import Estimate, Progress, Raw, Reading, read
from padless.data._sources import open_source
from padless.data._tokenizer import load_tokenizer
from padless.errors import PadlessError, choose
from padless.lengths import as_lengths, positive_int

__all__ = ["Empty", "Estimate", "Measured", "Overlong", "measure"]

Index = npt.NDArray[np.int64]
Overlong = Literal["error", "truncate", "split", "drop", "alone"]
Empty = Literal["drop", "error", "keep"]

_NONE: Index = np.empty(0, dtype=np.int64)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class Measured:
    """Lengths of a dataset, and what became of every row.

    Attributes:
        lengths: (N,) int32 tokens of each kept sequence, or (N, F) for fields padded apart.
        indices: (N,) int64, the dataset row of each; a row that was split appears once for each piece.
        starts: (N,) int64, where a piece begins in its row; all 0 unless rows were split.
        targets: (N,) int32 supervised tokens after the label shift, or ``None`` if they were not asked for.
        rows: rows read.
        real_tokens: tokens of all rows as read, before any policy.
        empty, dropped, truncated, split: dataset rows without a token, dropped for their length, cut, split.
        tokens_dropped, tokens_cut: how many tokens the last two policies took away.
        max_length: the limit that was applied, or ``None``.
        estimate: how good the lengths are where they were estimated; ``None`` for exact ones.
        cached: whether they were read from the cache.
        cache_file: where they are kept, or ``None`` where nothing is (see `measure`).
        seconds: how long it took.
    """

    lengths: npt.NDArray[np.int32]
    indices: Index
    starts: Index
    rows: int
    real_tokens: int
    targets: npt.NDArray[np.int32] | None = None
    empty: Index = field(default_factory=lambda: _NONE)
    dropped: Index = field(default_factory=lambda: _NONE)
    truncated: Index = field(default_factory=lambda: _NONE)
    split: Index = field(default_factory=lambda: _NONE)
    tokens_dropped: int = 0
    tokens_cut: int = 0
    max_length: int | None = None
    estimate: Estimate | None = None
    cached: bool = False
    cache_file: Path | None = None
    seconds: float = 0.0

    def __len__(self) -> int:
        """Number of kept sequences."""
        return len(self.lengths)

    @property
    def rows_without_targets(self) -> Index:
        """Dataset rows (of kept sequences) that train on nothing, after truncation; needs ``targets``."""
        return _NONE if self.targets is None else self.indices[self.targets == 0]

    @property
    def counts(self) -> dict[str, int]:
        """How many rows there were, and how many met each fate."""
        return {
            "rows": self.rows,
            "kept": len(self),
            "empty": len(self.empty),
            "dropped": len(self.dropped),
            "truncated": len(self.truncated),
            "split": len(self.split),
            "without_targets": len(self.rows_without_targets),
            "tokens_dropped": self.tokens_dropped,
            "tokens_cut": self.tokens_cut,
        }

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready summary, without the arrays."""
        total = self.lengths if self.lengths.ndim == 1 else self.lengths.sum(axis=1)
        return {
            **self.counts,
            "real_tokens": self.real_tokens,
            "kept_tokens": int(total.sum(dtype=np.int64)),
            "mean_length": float(total.mean()) if len(total) else 0.0,
            "max_kept_length": int(total.max(initial=0)),
            "max_length": self.max_length,
            "estimate": None if self.estimate is None else self.estimate.to_dict(),
            "cached": self.cached,
            "seconds": self.seconds,
        }

    def __repr__(self) -> str:
        told = self.to_dict()
        odd = [
            f"{told[name]} {name}"
            for name in ("empty", "dropped", "truncated", "split", "without_targets")
            if told[name]
        ]
        return (
            f"Measured({told['kept']} sequences of {self.rows} rows, {told['kept_tokens']} tokens,"
            f" longest {told['max_kept_length']}"
            + "".join(f", {item}" for item in odd)
            + (f", estimated (mean error {self.estimate.mean_error:.1%})" if self.estimate else "")
            + ")"
        )


def measure(
    dataset: Any,
    *,
    tokenizer: Any = None,
    fields: str | Sequence[str] | Sequence[Sequence[str]] | None = None,
    chat_template: str | Callable[[Any], str] | None = None,
    length: Callable[[Mapping[str, Any]], Any] | None = None,
    add_special_tokens: bool = True,
    add_tokens: int = 0,
    join: str = "",
    targets: bool = False,
    max_length: int | None = None,
    overlong: Overlong = "error",
    empty: Empty = "drop",
    estimate: int | None = None,
    workers: int = 0,
    batch_size: int = 1000,
    cache: bool | str | Path = True,
    progress: Progress | None = None,
) -> Measured:
    """Measure the token lengths of a dataset as the model receives its rows.

    Args:
        dataset: a path (JSON lines, gzipped or not; a JSON array; Parquet; Arrow; a folder of one kind), a Hugging
            Face or Arrow dataset, a list of rows, anything with ``len`` and indexing (rows are then measured as
            indexing returns them, so lazy tokenisation counts), or an iterable. Rows are mappings, texts, lists of
            token ids, or lengths that are known already.
        tokenizer: a Hugging Face tokenizer, a ``tokenizers.Tokenizer``, anything with ``encode``, or a function from
            text to token ids. Not needed where rows hold ids or lengths.
        fields: the columns of the sequence: one name, or names that are joined; a list of lists makes fields padded
            apart: ``[["source"], ["target"]]``, ``[["prompt", "chosen"], ["prompt", "rejected"]]``. By default
            ``input_ids``, a column of lengths, ``messages``, prompt and completion, or ``text``, whichever is there.
        chat_template: for messages: passed to the tokenizer's ``apply_chat_template``, or a function of the messages.
        length: a function of a row that returns its length (or one for each field): for images and anything else
            that grows after tokenisation.
        add_special_tokens: whether the tokenizer adds its own to plain text.
        add_tokens: tokens that the training code appends later to each field, e.g. 1 for an end token.
        join: what stands between joined text columns.
        targets: count the supervised tokens too, from ``labels``, a completion mask, or the prompt's length.
        max_length: limit in tokens on one sequence (on each field).
        overlong: what happens to a longer one: ``"error"``, ``"truncate"``, ``"split"`` (one field only), ``"drop"``,
            ``"alone"`` (kept as it is). Your own tokenisation must cut in the same way.
        empty: what happens to a row without a token: ``"drop"``, ``"error"``, ``"keep"`` (with length 0).
        estimate: tokenize only a random sample of so many rows, and estimate the rest from their characters.
        workers: processes that tokenize; 0 runs in this one.
        batch_size: rows tokenized at once.
        cache: keep lengths beside the data (``.padless/``), found again by content and options, or in a given folder.
            In-memory data, and tokenizers or ``length`` functions whose content cannot be compared, are measured
            again each time; ``cache_file`` is then ``None``. An interrupted run continues where it stopped.
        progress: called with the rows done and the rows in all (``None`` where unknown).

    Raises:
        PadlessError: a row that cannot be read or is over the limit (its index is named), unknown columns or options,
            a dataset all of whose rows are empty.

    >>> found = measure(["a b c", "", "d e"], tokenizer=str.split)
    >>> found.lengths, found.indices, found.empty
    (array([3, 2], dtype=int32), array([0, 2]), array([1]))
    >>> measure([4, 9, 5], max_length=8, overlong="truncate").lengths
    array([4, 8, 5], dtype=int32)
    """
    began = time.perf_counter()
    choose("overlong", overlong, ("error", "truncate", "split", "drop", "alone"))
    choose("empty", empty, ("drop", "error", "keep"))
    positive_int(batch_size, name="batch_size")
    positive_int(workers, name="workers", minimum=0)
    positive_int(add_tokens, name="add_tokens", minimum=0)
    limit = None if max_length is None else positive_int(max_length, name="max_length")
    if estimate is not None:
        positive_int(estimate, name="estimate", minimum=10)
        if length is not None or targets:
            raise PadlessError("estimate= works from text: it does not go with length= or targets=True")
    plan = Reading(
        fields=fields,
        tokenizer=load_tokenizer(tokenizer),
        chat_template=chat_template,
        length=length,
        add_special_tokens=add_special_tokens,
        add_tokens=add_tokens,
        join=join,
        # Only supervised tokens depend on the limit before the policies do.
        targets_within=(limit or 0) if targets else None,
        estimate=estimate,
        batch_size=batch_size,
    )
    known = _known_lengths(dataset)
    if known is not None:
        raw, kept_at, was_cached, what = Raw(lengths=known), None, False, "lengths"
    else:
        source = open_source(dataset, in_place=True)
        what = source.what
        kept_at = open_cache(cache, source, plan)
        found = None if kept_at is None else kept_at.load()
        was_cached = found is not None
        raw = found or read(source, plan, kept_at, workers=workers, progress=progress)
        if kept_at is not None and found is None and not kept_at.save(raw):
            kept_at = None
    return _apply_policies(
        raw,
        what=what,
        limit=limit,
        overlong=overlong,
        empty=empty,
        cached=was_cached,
        cache_file=None if kept_at is None else kept_at.path,
        began=began,
    )


def _known_lengths(dataset: Any) -> npt.NDArray[np.int64] | None:
    """An array (or tensor, or Arrow column) of integers is lengths already; no row is read. (N, F)."""
    if isinstance(dataset, list | tuple | str | Path) or not (hasattr(dataset, "dtype") or hasattr(dataset, "type")):
        return None
    if hasattr(dataset, "dtype") and getattr(dataset, "ndim", 1) not in (1, 2):
        return None
    if hasattr(dataset, "type") and not hasattr(dataset, "dtype") and not hasattr(dataset, "to_numpy"):
        return None
    if len(dataset) == 0:
        return np.empty((0, 1), dtype=np.int64)
    lengths = as_lengths(dataset, minimum=0).astype(np.int64)
    return lengths.reshape(len(lengths), -1)


def _apply_policies(
    raw: Raw,
    *,
    what: str,
    limit: int | None,
    overlong: Overlong,
    empty: Empty,
    cached: bool,
    cache_file: Path | None,
    began: float,
) -> Measured:
    """Turn token counts of all rows, (N, F), into those of the kept sequences."""
    lengths = raw.lengths  # (N, F)
    count, width = lengths.shape
    rows = np.arange(count)
    blank = np.flatnonzero(lengths.sum(axis=1) == 0)
    if len(blank) and empty == "error":
        raise PadlessError(
            f"row {blank[0]} of {what} has no token ({len(blank)} such rows): empty='drop' leaves them out"
        )
    if count and len(blank) == count:
        raise PadlessError(
            f"all {count} rows of {what} have length 0: the columns read hold no token;"
            " pass fields=, tokenizer= or length="
        )
    keep = np.ones(count, dtype=bool)
    if empty == "drop":
        keep[blank] = False
    over = np.empty(0, dtype=np.int64)
    if limit is not None:
        over = np.flatnonzero((lengths > limit).any(axis=1))
    if len(over) and overlong == "error":
        row = int(over[0])
        raise PadlessError(
            f"row {row} of {what} is {int(lengths[row].max())} tokens long, max_length is {limit}"
            f" ({len(over)} such rows): choose overlong='truncate', 'split', 'drop' or 'alone'"
        )
    if overlong == "drop":
        keep[over] = False
    targets = raw.targets
    kept, starts = rows[keep], np.zeros(int(keep.sum()), dtype=np.int64)
    final = lengths[keep]  # (M, F)
    if len(over) and overlong == "truncate":
        assert limit is not None
        final = np.minimum(final, limit)
    if len(over) and overlong == "split":
        assert limit is not None
        if width > 1:
            raise PadlessError("overlong='split' works on one field; use 'truncate' or 'drop' for fields padded apart")
        if targets is not None:
            raise PadlessError("targets are not known for the pieces of split rows; use overlong='truncate' or 'drop'")
        kept, starts, final = _split(kept, final[:, 0], limit)
    return Measured(
        lengths=(final[:, 0] if width == 1 else final).astype(np.int32),
        indices=kept,
        starts=starts,
        rows=count,
        real_tokens=int(lengths.sum()),
        targets=None if targets is None else targets[kept].astype(np.int32),
        empty=blank,
        dropped=over if overlong == "drop" else _NONE,
        truncated=over if overlong == "truncate" else _NONE,
        split=over if overlong == "split" else _NONE,
        tokens_dropped=int(lengths[over].sum()) if overlong == "drop" else 0,
        tokens_cut=int(np.maximum(lengths[over] - (limit or 0), 0).sum()) if overlong == "truncate" else 0,
        max_length=limit,
        estimate=raw.estimate,
        cached=cached,
        cache_file=cache_file,
        seconds=time.perf_counter() - began,
    )


def _split(rows: Index, lengths: Index, limit: int) -> tuple[Index, Index, Index]:
    """Cut (M,) sequences into pieces of at most ``limit`` tokens: rows, starts and lengths (P,), (P,), (P, 1)."""
    pieces = np.maximum(-(-lengths // limit), 1)  # (M,)
    of_piece = np.repeat(np.arange(len(rows)), pieces)  # (P,)
    first_piece = np.repeat(np.cumsum(pieces) - pieces, pieces)  # (P,)
    starts = (np.arange(len(of_piece)) - first_piece) * limit
    left = np.minimum(lengths[of_piece] - starts, limit)
    return rows[of_piece], starts, left[:, None]
