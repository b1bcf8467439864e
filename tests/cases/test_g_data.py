"""Length grouping that did not group, or biased: reports from public trackers, with input and what was expected."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from padless import PadlessError
from padless.data import TokenBudgetSampler, measure


class Lazy:
    """Rows that are tokenised when they are read."""

    def __init__(self, lengths: list[int]) -> None:
        self.lengths, self.reads = lengths, 0

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.reads += 1
        return {"input_ids": [1] * self.lengths[index]}


def test_g01_lengths_are_those_of_the_rows_as_they_are_read() -> None:
    """NVIDIA-NeMo/Automodel#3755: rows of messages, tokenised on access; lengths that are all 0 are an error."""
    assert measure(Lazy([5, 1, 4, 2])).lengths.tolist() == [5, 1, 4, 2]
    with pytest.raises(PadlessError, match=r"all 2 rows .* have length 0"):
        measure([{"input_ids": []}, {"input_ids": []}])
    with pytest.raises(PadlessError, match="says what a sequence is"):
        measure([{"messages": [{"role": "user", "content": "hello"}]}])


def test_g02_given_lengths_are_used_without_reading_a_row() -> None:
    """huggingface/transformers#10909."""
    data = Lazy([5, 9, 3])
    sampler = TokenBudgetSampler([5, 9, 3], token_budget=20, sequences_per_step=3)
    sampler.rows(data)
    list(sampler)
    assert data.reads == 0
    assert measure([{"length": 5}, {"length": 9}, {"length": 3}]).lengths.tolist() == [5, 9, 3]
    with pytest.raises(PadlessError, match="targets has shape"):
        TokenBudgetSampler([5, 9, 3], targets=[1, 2], token_budget=20, sequences_per_step=3)


def test_g04_both_sides_of_a_pair_count() -> None:
    """pytorch/text#250: sources of 2 beside targets of 10; a budget of 12 holds one pair, not three."""
    pairs = [[2, 10], [2, 9], [2, 10]]
    sampler = TokenBudgetSampler(pairs, token_budget=12, sequences_per_step=3)
    assert [len(batch) for batch in sampler] == [1, 1, 1]


def consecutive(grouping: str) -> Iterator[float]:
    lengths = np.random.default_rng(0).integers(39, 408, 256)
    for seed in range(12):
        sampler = TokenBudgetSampler(
            lengths, token_budget=4 * 408, max_sequences=4, sequences_per_step=16, grouping=grouping, seed=seed,
            pool_steps=4, method="lean",
        )  # fmt: skip
        list(sampler)
        yield abs(sampler.diagnostics.neighbour_correlation)


@pytest.mark.parametrize("grouping", ["step", "pool", "range"])
def test_g05_the_order_of_lengths_is_not_predictable(grouping: str) -> None:
    """tloen/alpaca-lora#246: batches of 4 from pools of 64; sorted order is near 0.76 in the report."""
    assert np.mean(list(consecutive(grouping))) < 0.3
    assert np.mean(list(consecutive("sorted"))) > 0.7


def test_g06_a_pool_larger_than_a_batch_is_what_helps() -> None:
    """haotian-liu/LLaVA#988: lengths 1 and 8 in turn, two to a batch."""
    lengths = [1, 8] * 4
    common = {"token_budget": 16, "sequences_per_step": 2, "shuffle": False}
    none = TokenBudgetSampler(lengths, grouping="none", max_sequences=2, **common)
    list(none)
    assert (none.diagnostics.padded_tokens, none.diagnostics.real_tokens) == (64, 36)
    pooled = TokenBudgetSampler(lengths, grouping="pool", pool_steps=4, max_sequences=2, **common)
    list(pooled)
    assert pooled.diagnostics.padded_tokens == 36
    with pytest.raises(PadlessError, match="pool_steps=1"):
        TokenBudgetSampler(lengths, grouping="pool", pool_steps=1, **common)


@pytest.mark.parametrize("grouping", ["step", "pool", "range", "sorted"])
def test_g07_no_micro_batch_is_nearly_empty(grouping: str) -> None:
    """lhotse-speech/lhotse#1145: 100 sequences of 10 at a budget of 100 are ten full micro-batches."""
    sampler = TokenBudgetSampler([10] * 100, token_budget=100, sequences_per_step=50, grouping=grouping)
    assert [len(batch) for batch in sampler] == [10] * 10
