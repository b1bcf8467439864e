"""Scale, tiny data and counted policies: reports from public trackers, each with its input and what was expected."""

from __future__ import annotations

import time
import warnings

import numpy as np
import pytest

from padless import PadlessError
from padless.data import PackedCollator, TokenBudgetSampler, measure


def test_l05_tiny_or_no_data_gives_no_batch_and_a_message_that_says_why() -> None:
    """axolotl-ai-cloud/axolotl#3100: 3 sequences with steps of 4 and dropping; no sequence at all."""
    with pytest.warns(UserWarning, match="3 sequences, sequences_per_step=4, tail='drop'"):
        assert list(TokenBudgetSampler([5, 5, 5], token_budget=20, sequences_per_step=4, tail="drop")) == []
    with pytest.warns(UserWarning, match="0 sequences"):
        empty = TokenBudgetSampler([], token_budget=20, sequences_per_step=4)
    assert (len(empty), list(empty), empty.steps) == (0, [], 0)
    assert len(measure([])) == 0


def test_l06_data_that_fill_no_micro_batch_are_enough() -> None:
    """huggingface/trl#1337."""
    sampler = TokenBudgetSampler([3, 2], token_budget=2048, sequences_per_step=64)
    assert [sorted(batch) for batch in sampler] == [[0, 1]]
    assert sampler.diagnostics.real_tokens == 5
    assert sampler.diagnostics.dropped == 0


def test_l07_measuring_does_not_depend_on_the_number_of_workers() -> None:
    """snowflakedb/ArcticTraining#155."""
    texts = [" ".join(["word"] * (1 + i % 5)) for i in range(40)]
    found = [measure(texts, tokenizer=str.split, workers=w, batch_size=7).lengths for w in (0, 1, 2)]
    assert all((lengths == found[0]).all() for lengths in found)


def test_l08_the_number_of_steps_comes_from_the_plan() -> None:
    """huggingface/trl#452: 8 sequences of 5 in micro-batches of 20 tokens are two steps, not eight."""
    sampler = TokenBudgetSampler([5] * 8, token_budget=20, tokens_per_step=20)
    assert sampler.steps == 2
    assert len(sampler) == 2
    assert sampler.step_boundaries.tolist() == [1, 2]


def test_l09_one_policy_for_sequences_that_are_too_long_with_counts() -> None:
    """huggingface/trl#1832: lengths 4, 9, 5 at a limit of 8, the same in the measure and in the sampler."""
    dropped = measure([4, 9, 5], max_length=8, overlong="drop")
    assert dropped.indices.tolist() == [0, 2]
    assert (len(dropped.dropped), dropped.tokens_dropped) == (1, 9)
    cut = measure([4, 9, 5], max_length=8, overlong="truncate")
    assert (cut.lengths.tolist(), cut.tokens_cut) == ([4, 8, 5], 1)
    split = measure([4, 9, 5], max_length=8, overlong="split")
    assert (split.lengths.tolist(), split.starts.tolist()) == ([4, 8, 1, 5], [0, 0, 8, 0])
    with pytest.raises(PadlessError, match="row 1"):
        measure([4, 9, 5], max_length=8)
    for policy, held in (("drop", [4, 5]), ("truncate", [4, 5, 8]), ("split", [1, 4, 5, 8])):
        sampler = TokenBudgetSampler([4, 9, 5], token_budget=8, sequences_per_step=3, overlong=policy)
        assert sorted(int(n) for batch in sampler for n in batch.lengths) == held
    with pytest.raises(PadlessError, match="index 1"):
        TokenBudgetSampler([4, 9, 5], token_budget=8, sequences_per_step=3)


def test_l03_a_block_mask_is_built_in_the_collator_without_slow_loops() -> None:
    """hiyouga/LlamaFactory#7272: 40 sequences in a row of 4,096 tokens."""
    sizes = [103] * 16 + [102] * 24
    rows = [{"input_ids": [1] * size} for size in sizes]
    collate = PackedCollator(layout="packed-block-mask-bool")
    seconds = []
    for _ in range(5):
        began = time.process_time()
        mask = collate(rows)["attention_mask"]
        seconds.append(time.process_time() - began)
    assert mask.shape[-2:] == (4096, 4096)
    assert int(mask.sum()) == sum(n * (n + 1) // 2 for n in sizes)
    assert min(seconds) < 0.2


def test_l11_a_rank_s_next_batch_does_not_cost_more_on_more_ranks() -> None:
    """lhotse-speech/lhotse#1399: a step is planned once, and a rank makes only its own micro-batch of it."""
    lengths = np.random.default_rng(0).integers(1, 100, 20_000)
    planned, seconds = [], []
    for ranks in (1, 600):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            sampler = TokenBudgetSampler(
                lengths, token_budget=500, sequences_per_step=2_000, ranks=ranks, rank=ranks - 1, method="lean"
            )
        list(sampler)  # compile
        took = []
        for _ in range(3):
            began = time.process_time()
            seen = sum(len(batch) for batch in sampler)
            took.append(time.process_time() - began)
        planned.append(seen)
        seconds.append(min(took) / 10)  # ten steps
    # All of it on one rank; on 600 its share, whatever it computes to know it.
    assert planned[0] == 20_000
    assert planned[1] < 20_000 / 600 * 2
    assert seconds[1] < 2 * seconds[0] + 1e-3
