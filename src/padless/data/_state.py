"""Where a sampler stands, as a few integers, and the refusal of a state that belongs to something else."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from padless.errors import PadlessError

__all__ = ["FORMAT", "Position", "fingerprint", "refuse_if_different"]

FORMAT = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """What has been consumed, in terms that no number of ranks enters.

    Attributes:
        epoch: the epoch in work.
        step: optimizer steps of it that are complete.
        parts: within the step in work, (ranks, micro-steps run) of each run that worked on it.
        arranged_for: the ranks for which the pools of this epoch were arranged.
    """

    epoch: int = 0
    step: int = 0
    parts: tuple[tuple[int, int], ...] = ()
    arranged_for: int = 1

    def to_dict(self) -> dict[str, Any]:
        """Plain integers."""
        return {
            "epoch": self.epoch,
            "step": self.step,
            "parts": [list(part) for part in self.parts],
            "arranged_for": self.arranged_for,
        }

    @classmethod
    def from_dict(cls, told: Mapping[str, Any]) -> Position:
        """What `to_dict` wrote."""
        return cls(
            epoch=int(told["epoch"]),
            step=int(told["step"]),
            parts=tuple((int(ranks), int(places)) for ranks, places in told["parts"]),
            arranged_for=int(told["arranged_for"]),
        )


def fingerprint(*arrays: npt.NDArray[Any] | None) -> str:
    """A hash of arrays' shapes and values, the same for int32 and int64."""
    digest = hashlib.blake2b(digest_size=8)
    for array in arrays:
        digest.update(b"-" if array is None else repr(array.shape).encode())
        if array is None:
            continue
        for start in range(0, len(array), 1 << 20):  # in pieces: a copy of the whole would double the memory
            piece = array[start : start + (1 << 20)]
            wanted = np.float64 if piece.dtype.kind == "f" else _width(piece)
            digest.update(np.ascontiguousarray(piece, dtype=wanted).data)
    return digest.hexdigest()


def _width(piece: npt.NDArray[Any]) -> type[np.generic]:
    """The narrowest of int32 and int64 that holds a piece, whatever it came in."""
    if piece.dtype == np.int32 or not piece.size:
        return np.int32
    fits = piece.min() >= -(2**31) and piece.max() < 2**31
    return np.int32 if fits else np.int64


def refuse_if_different(mine: Mapping[str, Any], theirs: Any, *, mid_step: bool) -> None:
    """Raise `PadlessError` naming what a state differs in.

    Args:
        mine: what this sampler is: ``format``, ``sequences``, ``lengths``, ``seed``, ``members`` and ``grouping``.
        theirs: the state.
        mid_step: whether it was saved within an optimizer step, whose grouping must then be the same, too.
    """
    if not isinstance(theirs, Mapping) or "format" not in theirs:
        raise PadlessError(f"this is not a state of TokenBudgetSampler: {theirs!r:.100}")
    if theirs["format"] != mine["format"]:
        raise PadlessError(
            f"the state has format {theirs['format']}, this version of padless reads {mine['format']}:"
            " finish the epoch with the version that saved it"
        )
    differing = [
        _difference(name, theirs.get(name), mine[name])
        for name in ("sequences", "lengths", "seed")
        if theirs.get(name) != mine[name]
    ]
    for part in ("members", "grouping") if mid_step else ("members",):
        saved = theirs.get(part) or {}
        differing += [
            _difference(name, saved.get(name), value) for name, value in mine[part].items() if saved.get(name) != value
        ]
    if differing:
        within = " (a state saved within an optimizer step needs the same grouping, too)" if mid_step else ""
        raise PadlessError("the state belongs to another sampler: " + "; ".join(differing) + within)


_NAMES = {"lengths": "the lengths (or atoms, targets, weights) differ", "sequences": "sequences"}


def _difference(name: str, saved: Any, current: Any) -> str:
    if name == "lengths":
        return _NAMES[name]
    return f"{_NAMES.get(name, name)}={saved!r} was saved, here it is {current!r}"
