"""The foundation: lengths are read from anything, and bad ones are named."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from padless.errors import PadlessError, choose
from padless.lengths import as_ids, as_lengths, positive_int

counts = st.lists(st.integers(1, 2**31 - 1), min_size=1, max_size=30)


@given(counts)
def test_every_container_of_lengths_reads_alike(values: list[int]) -> None:
    import pandas
    import pyarrow
    import torch

    expected = np.array(values, dtype=np.int64)
    for held in (
        values,
        tuple(values),
        expected,
        expected.astype(np.int32),
        expected.astype(np.uint64),
        torch.tensor(values),
        pyarrow.array(values),
        pyarrow.chunked_array([values, values[:0]]),
        pandas.Series(values),
        iter(values),
    ):
        read = as_lengths(held)
        assert read.tolist() == values
        assert read.dtype in (np.int32, np.int64)


@pytest.mark.parametrize(
    ("held", "says"),
    [
        ([], "empty"),
        ([3, 0, 2], r"lengths\[1\] is 0"),
        ([3, -4], r"lengths\[1\] is -4; a length cannot be negative"),
        ([3, 2.5], r"lengths\[1\]"),
        ([1.0, float("nan")], r"lengths\[1\]"),
        ([1, None], r"lengths\[1\]"),
        (["7"], r"lengths\[0\]"),
        ([True, False], r"lengths\[0\]"),
        ("12", "expected a sequence"),
        (7, "expected a sequence"),
        (None, "expected a sequence"),
        ([[1, 2], [3]], "not a rectangular array"),
        ([[[1]]], "shape"),
        ([[2, 3], [0, 0]], r"lengths\[1\] is \[0, 0\]"),
        ([[2, 3], [0, -1]], r"lengths\[1, 1\] is -1"),
        (np.array([2**64 - 1], dtype=np.uint64), "64 bits"),
    ],
)
def test_bad_lengths_are_named(held: object, says: str) -> None:
    with pytest.raises(PadlessError, match=says):
        as_lengths(held)


def test_a_null_in_an_arrow_column_is_named() -> None:
    import pyarrow

    with pytest.raises(PadlessError, match=r"lengths\[1\] is null; 2 rows"):
        as_lengths(pyarrow.array([3, None, 4, None]))


def test_one_of_several_fields_may_be_empty() -> None:
    assert as_lengths([[0, 3], [4, 0]]).tolist() == [[0, 3], [4, 0]]


@given(st.one_of(st.floats(), st.booleans(), st.text(), st.none(), st.integers(max_value=0)))
def test_a_budget_that_is_no_positive_integer_is_refused(value: object) -> None:
    with pytest.raises(PadlessError, match="token_budget="):
        positive_int(value, name="token_budget")


def test_ids_must_be_one_integer_each() -> None:
    assert as_ids([-5, 3], 2, name="atoms").tolist() == [-5, 3]
    for bad in ([1], [1.5, 2.0], [[1, 2]]):
        with pytest.raises(PadlessError, match="atoms"):
            as_ids(bad, 2, name="atoms")


def test_an_unknown_choice_lists_the_known_ones() -> None:
    with pytest.raises(PadlessError, match="method='fast' is unknown; choose one of 'fixed', 'greedy'"):
        choose("method", "fast", ("fixed", "greedy"))
