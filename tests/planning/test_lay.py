"""Records become packs: the blocked kernel against the plain reading of what a record says."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from padless.planning import fit, pack_kernels, sparse_kernels

_NONE = np.empty(0, dtype=np.int64)


def plainly(lengths: Any, records: Any, packs: int) -> list[list[int]]:
    """Each record hands the next sequences of its length, in their order, to its packs one after the other."""
    waiting = {int(n): iter(np.flatnonzero(lengths == n).tolist()) for n in np.unique(lengths)}
    held: list[list[int]] = [[] for _ in range(packs)]
    for length, first, count, each in records.tolist():
        for pack in range(first, first + count):
            held[pack] += [next(waiting[length]) for _ in range(each)]
    assert all(next(rest, None) is None for rest in waiting.values())
    return held


@pytest.mark.parametrize("narrow", [True, False])
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize(
    ("count", "longest", "room"),
    [(1, 1, 1), (50, 7, 20), (3_000, 3, 3), (20_000, 40, 64), (60_000, 9, 23), (30_000, 500, 500)],
)
def test_packs_are_what_the_records_say_also_across_blocks(
    count: int, longest: int, room: int, dtype: Any, narrow: bool
) -> None:
    lengths = np.random.default_rng(count).integers(1, longest + 1, count).astype(dtype)
    found = fit.Histogram.of(lengths)
    opened = np.arange(room + 1)  # packs that exist, some of them full
    for records, packs in (
        pack_kernels.best_fit(found.counts, room, _NONE),
        pack_kernels.best_fit(found.counts, room, opened),
        sparse_kernels.best_fit_sparse(found.sizes, found.numbers, room, _NONE),
        sparse_kernels.best_fit_sparse(found.sizes, found.numbers, room, opened),
        pack_kernels.first_fit(found.sizes, found.numbers, room, count),
    ):
        order, offsets = fit._laid_out(found, records, packs, narrow=narrow)
        assert order.dtype == offsets.dtype == np.int64
        got = [order[a:b].tolist() for a, b in itertools.pairwise(offsets)]
        assert got == plainly(lengths, records, packs)
