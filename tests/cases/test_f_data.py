"""Samplers that lost, repeated or reordered data: public reports, each with its input and what was expected."""

from __future__ import annotations

import json
import warnings
from collections import Counter
from itertools import islice
from typing import Any

import pytest
from torch.utils.data import DataLoader

from padless import PadlessError
from padless.data import PooledStream, TokenBudgetSampler


def build(count: int, per_step: int, ranks: int = 1, rank: int = 0, **options: Any) -> TokenBudgetSampler:
    """Sequences of equal length, a micro-batch of at most ``token_budget`` of them."""
    chosen = {"lengths": [1] * count, "token_budget": per_step, "sequences_per_step": per_step, **options}
    return TokenBudgetSampler(**chosen, ranks=ranks, rank=rank)


def rows(batches: Any) -> list[int]:
    return [i for batch in batches for i, weight in zip(batch, batch.weights, strict=True) if weight]


def test_f01_fewer_sequences_than_ranks() -> None:
    """pytorch/pytorch#45324: 4 sequences on 9 ranks, filled or dropped, without an internal assertion."""
    filled = [list(build(4, 9, 9, rank, token_budget=1, shuffle=False, tail="repeat")) for rank in range(9)]
    assert [len(run) for run in filled] == [1] * 9
    assert Counter(i for run in filled for batch in run for i in batch) == Counter([0, 1, 2, 3, 0, 1, 2, 3, 0])
    assert sorted(rows(batch for run in filled for batch in run)) == [0, 1, 2, 3]
    with pytest.warns(UserWarning, match="4 sequences, sequences_per_step=9, tail='drop'"):
        dropping = build(4, 9, 9, 0, tail="drop")
    assert list(dropping) == []


def test_f03_the_epoch_changes_the_order_and_repeats_it() -> None:
    """pytorch/pytorch#31771: 22 sequences, seed 5, epochs 0, 1, 0."""
    sampler, orders = build(22, 4, seed=5), []
    for epoch in (0, 1, 0):
        sampler.set_epoch(epoch)
        orders.append(rows(sampler))
    assert orders[0] != orders[1]
    assert orders[0] == orders[2]
    sampler.set_epoch(0)
    assert [rows(sampler), rows(sampler)] == orders[:2], "without set_epoch the next pass is the next epoch"


def test_f04_ranks_share_the_seed() -> None:
    """huggingface/accelerate#2694: with one seed the ranks are disjoint; others are refused (tested on processes)."""
    runs = [rows(build(8, 4, 2, rank, seed=3, token_budget=2)) for rank in range(2)]
    assert sorted(runs[0] + runs[1]) == list(range(8))


def test_f06_a_state_of_the_end_starts_the_next_epoch() -> None:
    """meta-pytorch/data#1437: not 0 batches, and not epoch 2."""
    source = build(8, 2)
    assert len(list(islice(source, 4))) == 4
    resumed = build(8, 2)
    resumed.load_state_dict(source.state_dict())
    assert resumed.epoch == 1
    assert len(list(resumed)) == 4
    assert resumed.epoch == 2


def test_f07_resuming_in_a_later_epoch_keeps_its_order() -> None:
    """huggingface/accelerate#2016: epoch 1, two of five batches consumed."""
    whole = build(10, 2)
    whole.set_epoch(1)
    expected = [list(batch) for batch in whole]
    source = build(10, 2)
    source.set_epoch(1)
    list(islice(source, 2))
    resumed = build(10, 2)
    resumed.load_state_dict(json.loads(json.dumps(source.state_dict())))
    resumed.set_epoch(1)  # what a loop does at the head of its epoch
    assert [list(batch) for batch in resumed] == expected[2:]


def test_f08_the_offset_is_used_once() -> None:
    """NVIDIA-NeMo/Megatron-Bridge#4601: 4 of 10 consumed, then whole epochs."""
    source = build(10, 2)
    list(islice(source, 2))
    resumed = build(10, 2)
    resumed.load_state_dict(source.state_dict())
    assert [len(rows(resumed)) for _ in range(3)] == [6, 10, 10]


def test_f09_prefetching_does_not_move_the_saved_place() -> None:
    """lhotse-speech/lhotse#785: 2 workers, 2 batches ahead each, 5 consumed."""
    data = list(range(40))
    expected = [list(batch) for batch in build(40, 2)]
    sampler = build(40, 2)
    loader = DataLoader(data, batch_sampler=sampler, num_workers=2, prefetch_factor=2)  # type: ignore[arg-type]
    taken = [batch.tolist() for batch in islice(sampler.follow(loader), 5)]
    resumed = build(40, 2)
    resumed.load_state_dict(sampler.state_dict())
    assert taken + [list(batch) for batch in resumed] == expected


def test_f10_the_state_counts_sequences_and_not_batches() -> None:
    """mosaicml/llm-foundry#1277: micro-batches of different sizes; what is left is what was not yielded."""
    lengths = [2, 2, 2, 3, 3, 5, 5, 6, 6, 6]
    source = TokenBudgetSampler(lengths, token_budget=6, sequences_per_step=5)
    first = rows(islice(source, 2))
    resumed = TokenBudgetSampler(lengths, token_budget=6, sequences_per_step=5)
    resumed.load_state_dict(source.state_dict())
    assert sorted(first + rows(resumed)) == list(range(10))


def test_f11_what_waits_in_the_pool_survives() -> None:
    """pytorch/torchtitan#3008: three of 6 tokens at a budget of 10, saved after the first."""
    data = [{"input_ids": [i] * 6} for i in range(3)]
    whole = PooledStream(data, token_budget=10, shuffle=False)
    expected = [[row["input_ids"][0] for row in batch] for batch in whole]
    source = PooledStream(data, token_budget=10, shuffle=False)
    first = next(iter(source))
    resumed = PooledStream(data, token_budget=10, shuffle=False)
    resumed.load_state_dict(source.state_dict())
    rest = [[row["input_ids"][0] for row in batch] for batch in resumed]
    assert [[row["input_ids"][0] for row in first], *rest] == expected == [[0], [1], [2]]


@pytest.mark.parametrize("ranges", [1, 2, 4, 7, 10, 20])
def test_f12_length_ranges_lose_nothing(ranges: int) -> None:
    """lhotse-speech/lhotse#610: 10 sequences, also with more ranges than sequences."""
    sampler = TokenBudgetSampler(
        list(range(1, 11)), token_budget=30, sequences_per_step=3, grouping="range", ranges=ranges
    )
    assert sorted(rows(sampler)) == list(range(10))


@pytest.mark.parametrize(("count", "batches", "used", "dropped"), [(3, 0, 0, 3), (7, 1, 45, 2), (10, 2, 90, 0)])
def test_f13_dropped_tails_leave_the_figures(count: int, batches: int, used: int, dropped: int) -> None:
    """axolotl-ai-cloud/axolotl#3848: steps of 5 rows of 9 tokens at a capacity of 10."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        sampler = TokenBudgetSampler([9] * count, token_budget=50, multiple_of=10, sequences_per_step=5, tail="drop")
    assert len(list(sampler)) == batches
    told = sampler.diagnostics
    assert (told.real_tokens, told.padded_tokens) == (used, batches * 50)
    assert told.occupancy == 0.9 if batches else told.occupancy != told.occupancy
    if batches:
        assert told.dropped == dropped


@pytest.mark.parametrize("workers", [0, 1, 4])
def test_f14_workers_share_a_stream(workers: int) -> None:
    """pytorch/pytorch#30599: 10 items, two at a time."""
    stream = PooledStream([{"input_ids": [i]} for i in range(10)], token_budget=2)
    loader = DataLoader(stream, batch_size=None, num_workers=workers)
    assert sorted(row["input_ids"][0] for batch in loader for row in batch) == list(range(10))


def test_f15_len_is_the_number_of_batches_in_every_epoch() -> None:
    """huggingface/sentence-transformers#3348: for all ranks, shuffled."""
    lengths = [1 + (7 * i) % 23 for i in range(61)]
    for rank in range(2):
        sampler = TokenBudgetSampler(lengths, token_budget=50, sequences_per_step=9, ranks=2, rank=rank)
        for epoch in range(3):
            sampler.set_epoch(epoch)
            assert len(sampler) == sum(1 for _ in sampler)


def test_f16_a_rank_aware_sampler_is_not_sharded_twice() -> None:
    """Lightning-AI/pytorch-lightning#5145: 8 sequences on 2 ranks are 4 for each, and who shards again is stopped."""
    assert [len(rows(build(8, 8, 2, rank, token_budget=4))) for rank in range(2)] == [4, 4]
    with pytest.raises(PadlessError, match="already deals out"):
        build(8, 8, 2, 0).batch_size  # noqa: B018 - asking is the act
