"""Rounding, combined multiples, and ladders of widths."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from padless import PadlessError
from padless.shapes import as_ladder, combine_multiples, ladder, round_up, snap


@given(st.integers(0, 10**12), st.integers(1, 10**6))
def test_rounding_up_is_the_smallest_multiple_that_is_enough(value: int, multiple: int) -> None:
    rounded = round_up(value, multiple)
    assert rounded % multiple == 0
    assert 0 <= rounded - value < multiple


@given(st.lists(st.integers(1, 64), min_size=1, max_size=4))
def test_a_combined_multiple_satisfies_all_and_no_smaller_one_does(multiples: list[int]) -> None:
    combined = combine_multiples(*multiples)
    assert all(combined % m == 0 for m in multiples)
    assert combined == next(k for k in range(1, combined + 1) if all(k % m == 0 for m in multiples))


def padded(lengths: list[int], widths: object) -> int:
    return int(snap(np.array(lengths), as_ladder(widths)).sum())


@given(st.lists(st.integers(1, 25), min_size=1, max_size=12), st.integers(1, 4), st.sampled_from([1, 4]))
def test_a_ladder_is_the_best_of_its_size(lengths: list[int], count: int, multiple: int) -> None:
    found = ladder(lengths, count, multiple_of=multiple)
    assert len(found) <= count
    assert (found % multiple == 0).all()
    widths = sorted({round_up(length, multiple) for length in lengths})
    others = widths[:-1]
    best = min(
        padded(lengths, [*chosen, widths[-1]])
        for size in range(min(count, len(widths)))
        for chosen in combinations(others, size)
    )
    assert padded(lengths, found) == best


@given(st.lists(st.integers(1, 500), min_size=1, max_size=80), st.integers(1, 6))
def test_a_wider_ladder_never_pads_more(lengths: list[int], count: int) -> None:
    assert padded(lengths, ladder(lengths, count + 1)) <= padded(lengths, ladder(lengths, count))


def test_a_length_over_the_ladder_is_named() -> None:
    with pytest.raises(PadlessError, match="length 9 at index 2"):
        snap(np.array([1, 2, 9]), np.array([4, 8]))


@pytest.mark.parametrize("bad", [0, -1, 2.0, True])
def test_a_ladder_needs_a_positive_count(bad: object) -> None:
    with pytest.raises(PadlessError, match="count="):
        ladder([1, 2], bad)  # type: ignore[arg-type]
