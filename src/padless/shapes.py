"""Rounding of widths: multiples that hardware and parallelism ask for, and ladders for compiled models."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from padless.errors import PadlessError
from padless.lengths import IntArray, Lengths, as_lengths, positive_int

__all__ = ["as_ladder", "combine_multiples", "ladder", "round_up", "snap"]

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


def ladder(lengths: Lengths, count: int, *, multiple_of: int = 1) -> npt.NDArray[np.int64]:
    """At most ``count`` widths that hold every length with the fewest padded tokens.

    For compiled or graph-captured models, which pay for every new width. Each sequence is charged
    the width it is rounded up to. Optimal, by dynamic programming on the distinct (rounded) lengths:
    ``best[s][j] = min over i of best[s - 1][i] + width[j] * (sequences with a width in i + 1 .. j)``.
    The cost is concave in the sense of Monge, so the best ``i`` grows with ``j`` and each layer takes
    D log D steps for D distinct widths.

    Args:
        lengths: (N,) tokens; any order.
        count: how many distinct widths are allowed, at least 1.
        multiple_of: each width is a multiple of it.

    Returns:
        (S,) int64 ascending widths, S at most ``count``; the last one holds the longest sequence.

    >>> ladder([3, 3, 3, 4, 9, 10], 2)
    array([ 4, 10])
    """
    array = as_lengths(lengths)
    if array.ndim != 1:
        raise PadlessError(f"lengths has shape {array.shape}; a ladder is made for one field: make one for each")
    steps = positive_int(count, name="count")
    multiple = positive_int(multiple_of, name="multiple_of")
    widths, sequences = np.unique(round_up(array.astype(np.int64), multiple), return_counts=True)  # (D,), (D,)
    if len(widths) <= steps:
        return widths
    before = np.concatenate([[0], np.cumsum(sequences)])  # (D + 1,) sequences narrower than width j
    best = widths * before[1:]  # (D,) everything up to width j, in one step
    choices = []  # per further step: (D,) the last width of the step before
    for _ in range(steps - 1):
        best, choice = _ladder_layer(best, widths, before)
        choices.append(choice)
    steps_down = [len(widths) - 1]
    for choice in reversed(choices):
        if choice[steps_down[-1]] < 0:  # fewer steps were enough
            break
        steps_down.append(int(choice[steps_down[-1]]))
    return np.asarray(widths[steps_down[::-1]])


def _ladder_layer(
    best: npt.NDArray[np.int64], widths: npt.NDArray[np.int64], before: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """One more step, all ends at once: divide and conquer on the monotone choice, level by level."""
    count = len(widths)
    result, choice = best.copy(), np.full(count, -1, dtype=np.int64)
    ranges = [(1, count, 0, count - 1)]  # ends lo..hi - 1, choices from..to
    while ranges:
        lo, hi, least, most = ranges.pop()
        if lo >= hi:
            continue
        middle = (lo + hi) // 2
        first, last = least, min(most, middle - 1)
        totals = best[first : last + 1] + widths[middle] * (before[middle + 1] - before[first + 1 : last + 2])
        at = first + int(totals.argmin())
        if totals[at - first] < result[middle]:
            result[middle], choice[middle] = totals[at - first], at
        ranges.append((lo, middle, least, at))
        ranges.append((middle + 1, hi, at, most))
    return result, choice
