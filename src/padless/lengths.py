"""Sequence lengths: read from whatever holds them, checked once, kept as plain integers."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from padless.errors import PadlessError, shown

__all__ = ["MOST_TOKENS", "IntArray", "Lengths", "as_ids", "as_lengths", "positive_int"]

IntArray: TypeAlias = npt.NDArray[np.int64] | npt.NDArray[np.int32]
"""What `as_lengths` returns: int32 stays int32 (half the memory traffic), all else is int64."""

MOST_TOKENS = 2**62
"""Lengths may sum to so much; with rounding and padding their totals still fit 64 bits."""

Lengths: TypeAlias = Any
"""Accepted wherever lengths are asked for: list, tuple, NumPy array, torch tensor, Arrow or pandas column."""


def as_lengths(lengths: Lengths, *, minimum: int = 1, name: str = "lengths") -> IntArray:
    """Read sequence lengths (in tokens) as an integer array.

    Args:
        lengths: 1-D integers of shape (N,), or (N, F) for F fields padded apart. Lists, NumPy
            arrays, torch tensors, Arrow and pandas columns are accepted; int32 input is not widened.
        minimum: the smallest legal length of a one-field sequence. With several fields a single
            field may be 0 tokens long, but their sum must reach the minimum.
        name: how messages call the argument.

    Returns:
        A C-contiguous int32 or int64 array of shape (N,) or (N, F); never empty. It may share
        memory with the input.

    Raises:
        PadlessError: no sequence, another number of axes, values that are not integers, a length below the
            minimum (its index is named), or lengths that sum to more than `MOST_TOKENS`.

    >>> as_lengths([3, 5])
    array([3, 5])
    >>> as_lengths([3, 0])
    Traceback (most recent call last):
    ...
    padless.errors.PadlessError: lengths[1] is 0; a sequence needs at least 1 token: drop empty rows first
    """
    array = _to_numpy(lengths, name)
    if array.ndim not in (1, 2):
        raise PadlessError(f"{name} has shape {array.shape}; expected (N,), or (N, F) for F fields padded apart")
    if array.size == 0:
        raise PadlessError(f"{name} is empty: there is no sequence to plan")
    if array.dtype.kind not in "iu":
        odd = _first_non_integer(array)
        raise PadlessError(
            f"{name}{_at(odd)} is {shown(array[odd])} ({array.dtype}); lengths are whole numbers of tokens:"
            " convert them to integers first"
        )
    checked = _narrow(array, name)
    smallest = checked.min()
    if smallest < (minimum if checked.ndim == 1 else 0):
        index = _unravel(int(checked.argmin()), checked.shape)
        raise PadlessError(f"{name}{_at(index)} is {checked[index]}; {_minimum_reason(minimum, int(smallest))}")
    if checked.dtype == np.int64 and int(checked.max()) > MOST_TOKENS // checked.size:  # int32 cannot get there
        _check_total(checked, name)
    if checked.ndim == 2:
        totals = checked.sum(axis=1, dtype=np.int64)  # (N,)
        if totals.min() < minimum:
            row = int(totals.argmin())
            raise PadlessError(
                f"{name}[{row}] is {checked[row].tolist()}; {_minimum_reason(minimum, int(totals[row]))}"
            )
    return checked


def as_ids(ids: Any, count: int, *, name: str) -> npt.NDArray[np.int64]:
    """Read one integer id per sequence as int64 of shape (count,); ids may be any integers.

    >>> as_ids([7, 7, 2], 3, name="atoms")
    array([7, 7, 2])
    """
    array = _to_numpy(ids, name)
    if array.ndim != 1 or len(array) != count:
        raise PadlessError(f"{name} has shape {array.shape}; expected one integer id for each of {count} sequences")
    if array.dtype.kind not in "iu":
        raise PadlessError(f"{name} holds {array.dtype} values; expected one integer id per sequence")
    return array.astype(np.int64, copy=False)


def positive_int(value: Any, *, name: str, minimum: int = 1) -> int:
    """Return ``value`` as an int of at least ``minimum``; floats and booleans are refused.

    >>> positive_int(8, name="token_budget")
    8
    >>> positive_int(0, name="token_budget")
    Traceback (most recent call last):
    ...
    padless.errors.PadlessError: token_budget=0; expected an integer of at least 1
    """
    try:
        if isinstance(value, bool | np.bool_):
            raise TypeError
        number = operator.index(value)
    except TypeError:
        raise PadlessError(f"{name}={shown(value)}; expected an integer of at least {minimum}") from None
    if number < minimum:
        raise PadlessError(f"{name}={number}; expected an integer of at least {minimum}")
    return number


def _to_numpy(values: Any, name: str) -> npt.NDArray[Any]:
    """Convert without importing torch, Arrow or pandas: each brings its own way to NumPy."""
    if isinstance(values, str | bytes) or values is None or np.isscalar(values):
        raise PadlessError(f"{name}={shown(values)}; expected a sequence of integers")
    if not isinstance(values, np.ndarray):
        detach = getattr(values, "detach", None)  # torch.Tensor, on any device, with or without grad
        if callable(detach):
            values = detach().cpu().numpy()
        elif hasattr(values, "to_numpy"):  # pyarrow.Array / ChunkedArray, pandas.Series
            values = _from_column(values, name)
        elif not hasattr(values, "__array__") and not isinstance(values, Sequence):
            values = list(values)
    try:
        array = np.asarray(values)
    except (ValueError, OverflowError) as error:
        raise PadlessError(f"{name} is not a rectangular array of integers: {error}") from None
    if array.size == 0 and array.dtype.kind == "f":  # np.asarray([]) is float64
        array = array.astype(np.int64)
    return np.require(array, requirements=["C", "A"]) if array.ndim else array


def _from_column(column: Any, name: str) -> npt.NDArray[Any]:
    nulls = getattr(column, "null_count", 0)
    if nulls:
        index = next(i for i, value in enumerate(column.to_pylist()) if value is None)
        raise PadlessError(f"{name}[{index}] is null; {nulls} rows have no length: drop or fill them first")
    try:
        return np.asarray(column.to_numpy(zero_copy_only=False))
    except TypeError:  # ChunkedArray in older Arrow, pandas: no such argument
        return np.asarray(column.to_numpy())


def _narrow(array: npt.NDArray[Any], name: str) -> IntArray:
    if array.dtype == np.int32 or array.dtype == np.int64:
        return array
    if array.dtype.itemsize < 4:
        return array.astype(np.int32)
    if array.dtype == np.uint64 and array.max() > np.iinfo(np.int64).max:
        raise PadlessError(f"{name}[{int(array.argmax())}] is {array.max()}; it does not fit 64 bits")
    return array.astype(np.int64)


def _check_total(array: IntArray, name: str) -> None:
    total = (int((array >> 32).sum()) << 32) + int((array & 0xFFFFFFFF).sum())
    if total > MOST_TOKENS:
        index = _unravel(int(array.argmax()), array.shape)
        raise PadlessError(
            f"{name} sums to {total}, over the {MOST_TOKENS} that plans can count; the longest is"
            f" {name}{_at(index)}, {array[index]}: are these lengths in tokens?"
        )


def _first_non_integer(array: npt.NDArray[Any]) -> tuple[int, ...]:
    if array.dtype.kind == "f":
        odd = np.flatnonzero(~(np.isfinite(array) & (array == np.floor(array))).ravel())
        flat = int(odd[0]) if len(odd) else 0
    elif array.dtype.kind == "O":
        flat = next((i for i, value in enumerate(array.ravel()) if not isinstance(value, int | np.integer)), 0)
    else:
        flat = 0
    return _unravel(flat, array.shape)


def _unravel(flat: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(int(i) for i in np.unravel_index(flat, shape))


def _at(index: tuple[int, ...]) -> str:
    return "[" + ", ".join(map(str, index)) + "]"


def _minimum_reason(minimum: int, value: int) -> str:
    if value < 0:
        return "a length cannot be negative"
    return f"a sequence needs at least {minimum} token{'s' if minimum > 1 else ''}: drop empty rows first"
