"""What is planned: whole sequences, or what the ``overlong`` policy leaves of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from padless.errors import PadlessError, choose
from padless.lengths import IntArray

__all__ = ["OVERLONG", "Overlong", "Slots", "apply_overlong"]

Overlong = Literal["error", "truncate", "split", "drop", "alone"]
OVERLONG = ("error", "truncate", "split", "drop", "alone")
Index = npt.NDArray[np.int64]


def _none() -> Index:
    return np.empty(0, dtype=np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Slots:
    """S pieces to plan, each of one sequence.

    Attributes:
        sequence: (S,) int64, the sequence of each piece; ``None`` when piece s is simply sequence s.
        held: (S,) or (S, F) tokens of each piece.
        spans: (S, 2) int64 tokens of its sequence that each piece holds; ``None`` when all are whole.
        dropped, truncated, split, alone: sequences the policy touched, ascending.
    """

    sequence: Index | None
    held: IntArray
    spans: Index | None = None
    dropped: Index = field(default_factory=_none)
    truncated: Index = field(default_factory=_none)
    split: Index = field(default_factory=_none)
    alone: Index = field(default_factory=_none)


def apply_overlong(
    lengths: IntArray,
    limit: Index | int,
    *,
    overlong: str,
    what: str,
    atoms: Index | None = None,
    total: IntArray | None = None,
    way_out: str = "raise the limit",
) -> Slots:
    """Deal with every sequence that cannot fit, as the policy says.

    Args:
        lengths: (N,) or (N, F) tokens.
        limit: the largest total (over fields) that fits, for all or one per sequence, (N,).
        overlong: ``"error"``, ``"truncate"``, ``"split"``, ``"drop"`` or ``"alone"``.
        what: the limit in words, for messages: ``"token_budget 512"``.
        atoms: (N,) ids; where one of a group is dropped, or runs alone, the whole group is.
        total: (N,) what is compared with the limit; by default the lengths, fields added up.
        way_out: how to let longer ones in, for messages.
    """
    choose("overlong", overlong, OVERLONG)
    if total is None:
        total = lengths if lengths.ndim == 1 else lengths.sum(axis=1, dtype=np.int64)  # (N,)
    if isinstance(limit, int) and int(total.max(initial=0)) <= limit:
        return Slots(sequence=None, held=lengths)
    limits = np.broadcast_to(np.asarray(limit, dtype=np.int64), total.shape)  # (N,)
    over = np.flatnonzero(total > limits)
    if not len(over):
        return Slots(sequence=None, held=lengths)
    if overlong == "error":
        _refuse(total, limits, over, what, way_out)
    if atoms is not None and overlong in ("drop", "alone"):
        over = np.flatnonzero(np.isin(atoms, atoms[over]))
    if overlong == "drop":
        kept = np.delete(np.arange(len(lengths), dtype=np.int64), over)
        return Slots(sequence=kept, held=lengths[kept], dropped=over)
    if overlong == "alone":
        return Slots(sequence=None, held=lengths, alone=over)
    first = int(over[0])
    if lengths.ndim == 2:
        raise PadlessError(
            f"lengths[{first}] sums to {total[first]}, over {what}; overlong={overlong!r} cannot know which of the"
            f" {lengths.shape[1]} fields to cut: cut them first, or use 'drop' or 'alone'"
        )
    if limits[over].min() < 1:
        row = int(over[limits[over].argmin()])
        raise PadlessError(
            f"lengths[{row}] is {total[row]} and nothing of it fits {what}: raise it, or drop the sequence"
        )
    if overlong == "truncate":
        held = lengths.astype(np.int64)
        held[over] = limits[over]
        spans = np.stack([np.zeros_like(held), held], axis=1)  # (N, 2)
        return Slots(sequence=np.arange(len(held)), held=held, spans=spans, truncated=over)
    if atoms is not None:
        raise PadlessError(
            f"lengths[{first}] is {total[first]}, over {what}; overlong='split' would tear atom {atoms[first]} apart:"
            " use 'truncate', 'drop' or 'alone'"
        )
    return _split(lengths, limits, over)


def _split(lengths: IntArray, limits: Index, over: Index) -> Slots:
    """Cut sequences over the limit into full pieces and a remainder, in order."""
    pieces = -(-lengths.astype(np.int64) // limits)  # (N,)
    sequence = np.repeat(np.arange(len(lengths), dtype=np.int64), pieces)  # (S,)
    number = np.arange(len(sequence)) - np.repeat(np.cumsum(pieces) - pieces, pieces)  # (S,) place in its sequence
    start = number * limits[sequence]
    stop = np.minimum(start + limits[sequence], lengths[sequence])
    return Slots(sequence=sequence, held=stop - start, spans=np.stack([start, stop], axis=1), split=over)


def _refuse(total: npt.NDArray[np.integer[Any]], limits: Index, over: Index, what: str, way_out: str) -> None:
    first = int(over[0])
    more = f" (and {len(over) - 1} more)" if len(over) > 1 else ""
    room = "" if str(limits[first]) in what.split() else f" (at most {limits[first]} tokens fit)"
    raise PadlessError(
        f"length {total[first]} at index {first} exceeds {what}{room}{more}:"
        f" {way_out}, or choose overlong='truncate', 'split', 'drop' or 'alone'"
    )
