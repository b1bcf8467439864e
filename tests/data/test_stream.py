"""PooledStream: bounded memory, no overlap over ranks and workers, resumable."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from padless import PadlessError
from padless.data import PaddedCollator, PooledStream
from padless.verify.resume import assert_rescalable, assert_resumable


def rows_of(count: int, seed: int = 0, longest: int = 30) -> list[dict[str, Any]]:
    lengths = np.random.default_rng(seed).integers(1, longest, count)
    return [{"input_ids": [i] * int(n), "id": i} for i, n in enumerate(lengths)]


def build(rows: Any, ranks: int = 1, rank: int = 0, **options: Any) -> PooledStream:
    chosen = {"token_budget": 60, "pool_size": 16, **options}
    return PooledStream(rows, ranks=ranks, rank=rank, **chosen)


def seen(batch: list[dict[str, Any]]) -> list[int]:
    return [row["id"] for row in batch if row.get("sample_weight", 1.0)]


@settings(max_examples=20)
@given(st.integers(0, 60), st.integers(1, 20), st.integers(1, 4), st.integers(0, 3), st.integers(1, 3))
def test_ranks_share_the_stream_without_overlap_in_equal_numbers_of_micro_batches(
    count: int, pool: int, ranks: int, seed: int, multiple: int
) -> None:
    rows = rows_of(count, seed)
    streams = [
        build(rows, ranks, r, pool_size=pool, seed=seed, microbatches_multiple_of=multiple) for r in range(ranks)
    ]
    for _ in range(2):
        runs = [list(stream) for stream in streams]
        assert len({len(run) for run in runs}) == 1
        assert len(runs[0]) % multiple == 0
        assert Counter(i for run in runs for batch in run for i in seen(batch)) == Counter(range(count))
        assert all(len(b) * max(len(row["input_ids"]) for row in b) <= 60 for run in runs for b in run)
    if count:
        assert streams[0].epoch == 2


@settings(max_examples=6)
@given(st.integers(1, 30), st.integers(1, 12), st.integers(1, 3))
def test_a_stream_restored_at_every_micro_batch_continues_identically(count: int, pool: int, ranks: int) -> None:
    rows = rows_of(count)
    assert_resumable(lambda: build(rows, ranks, ranks - 1, pool_size=pool), through="json", epochs=2)


def test_a_stream_restored_on_other_numbers_of_ranks_at_every_micro_batch_continues_with_the_unseen() -> None:
    rows = rows_of(50)
    assert_rescalable(lambda ranks, rank: build(rows, ranks, rank), ranks=(1, 2, 3), indices=seen, through="json")


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_the_order_does_not_depend_on_the_number_of_workers(workers: int) -> None:
    rows = rows_of(70)
    expected = [seen(batch) for batch in build(rows)]
    loader = DataLoader(build(rows), batch_size=None, num_workers=workers)
    assert [seen(batch) for batch in loader] == expected


@pytest.mark.parametrize(("before", "after"), [(2, 0), (0, 2), (2, 3)])
def test_the_state_of_a_followed_loader_is_that_of_the_loop_whatever_was_prefetched(before: int, after: int) -> None:
    rows = rows_of(70)
    expected = [seen(batch) for batch in build(rows)]
    stream = build(rows)
    taken = []
    for batch in islice(stream.follow(DataLoader(stream, batch_size=None, num_workers=before)), 5):
        taken.append(seen(batch))
        state = stream.state_dict()
    other = build(rows)
    other.load_state_dict(state)
    for _ in range(2):  # loading twice is as good as once
        other.load_state_dict(state)
    rest = [seen(b) for b in other.follow(DataLoader(other, batch_size=None, num_workers=after))]
    assert taken + rest == expected
    assert other.epoch == 1
    assert other.diagnostics.sequences == 70
    assert [seen(b) for b in other.follow(DataLoader(other, batch_size=None, num_workers=after))] == [
        seen(batch) for batch in list_of_epoch(rows, 1)
    ]


def list_of_epoch(rows: Any, epoch: int) -> list[Any]:
    stream = build(rows)
    stream.set_epoch(epoch)
    return list(stream)


def test_stateful_data_loader_keeps_the_state_itself() -> None:
    torchdata = pytest.importorskip("torchdata.stateful_dataloader")
    rows = rows_of(70)
    expected = [seen(batch) for batch in build(rows)]
    loader = torchdata.StatefulDataLoader(build(rows), batch_size=None, num_workers=2)
    taken = [seen(batch) for batch in islice(loader, 4)]
    state = loader.state_dict()
    fresh = torchdata.StatefulDataLoader(build(rows), batch_size=None, num_workers=2)
    fresh.load_state_dict(state)
    assert taken + [seen(batch) for batch in fresh] == expected


def test_memory_is_bounded_by_the_pool() -> None:
    alive, most = 0, 0

    class Tracked(dict[str, Any]):
        def __init__(self, i: int) -> None:
            nonlocal alive, most
            super().__init__(input_ids=[i] * (1 + i % 7), id=i)
            alive += 1
            most = max(most, alive)

        def __del__(self) -> None:
            nonlocal alive
            alive -= 1

    stream = build(lambda epoch: (Tracked(i) for i in range(2000)), pool_size=32)
    assert sum(len(batch) for batch in stream) == 2000
    assert most <= 4 * 32


def test_only_a_rank_s_own_rows_are_transformed() -> None:
    rows, calls = rows_of(40), []

    def transform(row: dict[str, Any]) -> dict[str, Any]:
        calls.append(row["id"])
        return row

    list(build(rows, 4, 1, transform=transform))
    assert len(calls) < 25


def test_hugging_face_streams_are_read_whole_by_every_worker() -> None:
    datasets = pytest.importorskip("datasets")
    rows = rows_of(40)

    def generate(shards: list[int]) -> Iterator[dict[str, Any]]:
        for shard in shards:
            yield from rows[shard * 10 : shard * 10 + 10]

    stream = datasets.IterableDataset.from_generator(generate, gen_kwargs={"shards": [0, 1, 2, 3]})
    for workers in (0, 2):
        loader = DataLoader(build(stream), batch_size=None, num_workers=workers)
        assert Counter(i for batch in loader for i in seen(batch)) == Counter(range(40))


def test_batches_are_collated_in_the_worker() -> None:
    stream = build(rows_of(20), collate=PaddedCollator())
    for batch in DataLoader(stream, batch_size=None, num_workers=1):
        assert batch["input_ids"].shape == batch["attention_mask"].shape
        assert batch["input_ids"].numel() <= 60


def test_empty_and_overlong_rows_are_counted_and_named() -> None:
    rows = [{"input_ids": [0] * n, "id": i} for i, n in enumerate([3, 0, 70, 5])]
    with pytest.raises(PadlessError, match="length 70 at index 1"):
        list(build(rows))
    stream = build(rows, overlong="drop")
    assert sorted(i for batch in stream for i in seen(batch)) == [0, 3]
    assert stream.diagnostics.dropped == 2
    cut = build(rows, overlong="split")
    pieces = sorted(len(row["input_ids"]) for batch in cut for row in batch)
    assert pieces == [3, 5, 10, 60]
    assert cut.diagnostics.split == 1


def test_a_pool_whose_rows_are_all_dropped_is_passed_over() -> None:
    rows = [{"input_ids": [0] * n, "id": i} for i, n in enumerate([70] * 5 + [3, 4])]
    stream = build(rows, overlong="drop", pool_size=2)
    assert sorted(i for batch in stream for i in seen(batch)) == [5, 6]
    assert stream.diagnostics.dropped == 5
    assert list(build(rows[:5], overlong="drop", pool_size=2)) == []


def test_one_shot_iterators_and_foreign_states_are_refused() -> None:
    with pytest.raises(PadlessError, match="one-shot"):
        build(iter([]))
    with pytest.raises(PadlessError, match="pool_size=16 was saved, here it is 8"):
        build(rows_of(9), pool_size=8).load_state_dict(build(rows_of(9)).state_dict())
    stream = build(rows_of(40))
    list(islice(stream, 1))
    other = build(rows_of(40, seed=5))
    other.load_state_dict(stream.state_dict())
    with pytest.raises(PadlessError, match="other rows"):
        list(other)
