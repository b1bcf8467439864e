"""Rounding of widths: multiples that hardware and parallelism ask for, and ladders for compiled models."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from padless.errors import PadlessError
from padless.lengths import IntArray, as_lengths, positive_int

__all__ = ["as_ladder", "combine_multiples", "round_up", "snap"]

Number = TypeVar("Number", int, npt.NDArray[np.int64])


def round_up(value: Number, multiple_of: int) -> Number:
    """The smallest multiple of ``multiple_of`` that is at least ``value`` (an int or an array).

    >>> round_up(1234, 8), round_up(1240, 8)
    (1240, 1240)
    """
    return -(-value // multiple_of) * multiple_of


def combine_multiples(*multiples: int | Iterable[int]) -> int:
    """One multiple that satisfies all: their least common multiple.

    Tensor parallelism 3, context parallelism 2 x 2 and FP8 blocks of 16 need 48; their maximum, 16, breaks the first.

    >>> combine_multiples(3, 2 * 2, 16)
    48
    >>> combine_multiples((8, 12))
    24
    """
    flat: list[int] = []
    for item in multiples:
        flat.extend(item if isinstance(item, Iterable) else [item])
    return math.lcm(*(positive_int(value, name="multiple_of") for value in flat))


def as_ladder(widths: Any) -> npt.NDArray[np.int64]:
    """Sorted distinct widths (S,) from any order of positive integers.

    >>> as_ladder([512, 128, 128])
    array([128, 512])
    """
    ladder: npt.NDArray[np.int64] = np.unique(as_lengths(widths, name="ladder").astype(np.int64))
    return ladder


def snap(lengths: npt.NDArray[np.int64], ladder: IntArray) -> npt.NDArray[np.int64]:
    """The smallest width of ``ladder`` (sorted, (S,)) that holds each length.

    Raises:
        PadlessError: a length is over the widest step; its index is named.

    >>> snap(np.array([1, 128, 129]), np.array([128, 512]))
    array([128, 128, 512])
    """
    places = np.searchsorted(ladder, lengths)
    if places.size and places.max() == len(ladder):
        index = np.unravel_index(int(places.argmax()), places.shape)
        at = ", ".join(str(int(i)) for i in index)
        raise PadlessError(
            f"length {lengths[index]} at index {at} is over the widest width of the ladder, {ladder[-1]}:"
            " add a wider one, or truncate the sequence"
        )
    return np.asarray(ladder, dtype=np.int64)[places]
