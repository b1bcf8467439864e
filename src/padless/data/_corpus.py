"""From lengths and options to the sequences that are sampled: overlong ones dealt with, groups and weights read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from padless.data._epoch import Corpus
from padless.data._step import Grouper
from padless.data.measure import Measured
from padless.errors import PadlessError
from padless.lengths import IntArray, as_ids, as_lengths
from padless.planning.slots import apply_overlong

__all__ = ["Sampled", "open_corpus"]

Index = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sampled:
    """The sequences, and where each lies in the dataset.

    Attributes:
        corpus: what is planned.
        rows: (N,) dataset row of each sequence, or ``None`` where sequence n is row n.
        starts: (N,) first token of its row that each holds, or ``None`` for 0.
        dropped, truncated, split: given sequences that ``overlong`` touched.
    """

    corpus: Corpus
    rows: Index | None
    starts: Index | None
    dropped: Index
    truncated: Index
    split: Index

    def rows_of(self, sequences: Index) -> list[int]:
        """Dataset rows of some sequences, as a batch sampler yields them."""
        rows = sequences if self.rows is None else self.rows[sequences]
        return rows.tolist()  # type: ignore[no-any-return]

    def starts_of(self, sequences: Index) -> Index:
        """First token of its row that each of some sequences holds, (S,)."""
        return np.zeros(len(sequences), dtype=np.int64) if self.starts is None else self.starts[sequences]


def open_corpus(lengths: Any, *, atoms: Any, targets: Any, weights: Any, overlong: str, grouper: Grouper) -> Sampled:
    """Read what `TokenBudgetSampler` was given.

    Raises:
        PadlessError: lengths, atoms, targets or weights of the wrong kind, or a sequence over the budget.
    """
    rows: Index | None = None
    starts: Index | None = None
    if isinstance(lengths, Measured):
        measured = lengths
        if not np.array_equal(measured.indices, np.arange(len(measured))):
            rows = measured.indices
        starts = measured.starts if measured.starts.any() else None
        targets = measured.targets if targets is None else targets
        lengths = measured.lengths
    array = _read(lengths)
    count = len(array)
    ids = None if atoms is None else as_ids(atoms, count, name="atoms")
    goals = None if targets is None else _read_targets(targets, count)
    shares = None if weights is None else _read_weights(weights, count)
    limit = grouper.rounding.largest(grouper.token_budget)
    what, way_out = grouper.rounding.limit_in_words(grouper.token_budget)
    slots = apply_overlong(array, limit, overlong=overlong, what=what, atoms=ids, way_out=way_out)
    if slots.sequence is not None:
        places = slots.sequence
        if goals is not None and len(slots.split):
            raise PadlessError("targets are not known for the pieces of split sequences: use 'truncate' or 'drop'")
        ids = None if ids is None else ids[places]
        goals = None if goals is None else goals[places]
        shares = None if shares is None else shares[places]
        rows = places if rows is None else rows[places]
        starts = None if starts is None else starts[places]
        if slots.spans is not None:
            starts = slots.spans[:, 0] + (0 if starts is None else starts)
    units, members = (None, None) if ids is None else _units(ids)
    corpus = Corpus(lengths=slots.held, units=units, members=members, targets=goals)
    if shares is not None:
        corpus = Corpus(
            lengths=slots.held,
            units=units,
            members=members,
            targets=goals,
            weights=_unit_weights(corpus, shares),
        )
    _check_units(corpus, grouper)
    return Sampled(
        corpus=corpus,
        rows=rows,
        starts=starts,
        dropped=slots.dropped,
        truncated=slots.truncated,
        split=slots.split,
    )


def _read(lengths: Any) -> IntArray:
    """Lengths; none at all is a dataset without micro-batches, not an error."""
    if hasattr(lengths, "__len__") and len(lengths) == 0:
        return np.empty(0, dtype=np.int64)
    _refuse_rows(lengths)
    return as_lengths(lengths)


def _refuse_rows(lengths: Any) -> None:
    """A dataset in place of the lengths of its rows."""
    if any(hasattr(lengths, name) for name in ("__array__", "to_numpy")) and not hasattr(lengths, "column_names"):
        return  # an array or a column
    held = f"a {type(lengths).__name__}"
    if not (isinstance(lengths, Mapping) or hasattr(lengths, "column_names")):
        if not hasattr(lengths, "__getitem__"):
            return
        first = lengths[0]
        number = isinstance(first, int | float | np.number)
        if number or (isinstance(lengths, Sequence) and not isinstance(first, Mapping | str | bytes)):
            return  # what is wrong with other lists is for `as_lengths` to say
        held += f" of rows ({type(first).__name__})"
    raise PadlessError(
        f"lengths is {held}; expected the tokens of each sequence: padless.data.measure(dataset, tokenizer=...), whose"
        " result is taken as it is"
    )


def _read_targets(targets: Any, count: int) -> IntArray:
    goals = as_lengths(targets, minimum=0, name="targets") if count else np.empty(0, dtype=np.int64)
    if goals.shape != (count,):
        raise PadlessError(f"targets has shape {goals.shape}; expected one number for each of {count} sequences")
    return goals


def _read_weights(weights: Any, count: int) -> npt.NDArray[np.float64]:
    shares = np.asarray(weights, dtype=np.float64)
    if shares.shape != (count,):
        raise PadlessError(f"weights has shape {shares.shape}; expected one number for each of {count} sequences")
    wrong = np.flatnonzero(~(np.isfinite(shares) & (shares >= 0)))
    if len(wrong):
        raise PadlessError(f"weights[{wrong[0]}] is {shares[wrong[0]]}; expected a finite number of at least 0")
    return shares


def _units(ids: Index) -> tuple[Index, Index]:
    """Offsets (U + 1,) and members (N,) of the groups, in order of their first member."""
    _, first, inverse = np.unique(ids, return_index=True, return_inverse=True)
    rank = np.empty(len(first), dtype=np.int64)
    rank[np.argsort(first, kind="stable")] = np.arange(len(first))
    unit = rank[inverse]  # (N,)
    members = np.argsort(unit, kind="stable").astype(np.int64)
    return np.concatenate([[0], np.cumsum(np.bincount(unit, minlength=len(first)))]).astype(np.int64), members


def _unit_weights(corpus: Corpus, shares: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    least, most = corpus.of_units(shares, np.minimum), corpus.of_units(shares, np.maximum)
    unequal = np.flatnonzero(least != most)
    if len(unequal):
        raise PadlessError(f"sequences of one atom have different weights ({least[unequal[0]]} and {most[unequal[0]]})")
    return np.asarray(most, dtype=np.float64)


def _check_units(corpus: Corpus, grouper: Grouper) -> None:
    """A group that stays together must fit a micro-batch."""
    if corpus.units is None or not len(corpus):
        return
    sizes = corpus.unit_sizes()
    if grouper.max_sequences is not None and int(sizes.max()) > grouper.max_sequences:
        raise PadlessError(
            f"an atom of {int(sizes.max())} sequences does not fit max_sequences={grouper.max_sequences}: raise it"
        )
