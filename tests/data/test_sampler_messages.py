"""What samplers and planners say about a dataset in place of lengths, ladders that are too short, and long values."""

from __future__ import annotations

from typing import Any

import datasets
import numpy as np
import pytest
import torch

import padless
from padless.data import TokenBudgetSampler, measure
from padless.errors import PadlessError, shown
from padless.integrations.transformers import PadlessOptions

ROWS = [{"input_ids": list(range(500)), "text": "word " * 500} for _ in range(4)]
LIMIT = 400


def sampler_of(lengths: Any, **options: Any) -> TokenBudgetSampler:
    return TokenBudgetSampler(lengths, **({"token_budget": 4096, "sequences_per_step": 4} | options))


class Lazy(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        return torch.arange(500)


@pytest.mark.parametrize(
    "dataset",
    [
        ROWS,
        [row["text"] for row in ROWS],
        datasets.Dataset.from_list(ROWS),
        datasets.DatasetDict({"train": datasets.Dataset.from_list(ROWS)}),
        torch.utils.data.TensorDataset(torch.ones(4, 500)),
        Lazy(),
    ],
    ids=["dicts", "texts", "datasets", "splits", "tensors", "lazy"],
)
def test_a_dataset_in_place_of_lengths_is_sent_to_measure_and_not_printed(dataset: Any) -> None:
    with pytest.raises(PadlessError, match=r"padless\.data\.measure\(dataset, tokenizer=\.\.\.\)") as caught:
        sampler_of(dataset)
    assert len(str(caught.value)) < LIMIT


@pytest.mark.parametrize(
    "lengths",
    [
        [3, 4],
        (3, 4),
        [[3, 4], [5, 6]],
        [np.array([3, 4]), np.array([5, 6])],
        np.array([3, 4]),
        torch.tensor([3, 4]),
        datasets.Dataset.from_dict({"length": [3, 4]})["length"],
        measure([{"input_ids": [1, 2, 3]}, {"input_ids": [1]}]),
        range(3, 5),
    ],
)
def test_lengths_in_any_form_are_still_lengths(lengths: Any) -> None:
    assert sum(len(batch) for batch in sampler_of(lengths)) == 2


def test_a_ladder_that_is_too_short_is_what_the_message_speaks_of() -> None:
    lengths = [10, 100]
    for call in (
        lambda **more: sampler_of(lengths, **more),
        lambda **more: padless.microbatch(lengths, 4096, **more),
    ):
        said = (
            r"length 100 at index 1 exceeds ladder=\[32, 64\] \(at most 64 tokens fit\): add a wider width to ladder="
        )
        with pytest.raises(PadlessError, match=said):
            call(ladder=[32, 64])
        said = r"ladder=\[64, 8192\] within token_budget 4096 \(at most 64 .* fit\): raise token_budget, or add a width"
        with pytest.raises(PadlessError, match=said):
            call(ladder=[64, 8192])
    with pytest.raises(PadlessError, match=r"length 100 at index 1 exceeds token_budget 64: raise the limit"):
        sampler_of(lengths, token_budget=64)


def test_lean_is_said_to_be_a_method_of_samplers() -> None:
    for call in (
        lambda: padless.microbatch([3, 4], 8, method="lean"),  # type: ignore[arg-type]
        lambda: padless.regroup([[1, 2], [3]], 8, method="lean"),
        lambda: PadlessOptions(token_budget=8, method="lean"),  # type: ignore[arg-type]
    ):
        with pytest.raises(PadlessError, match=r"'lean' is one of .*TokenBudgetSampler.*'fixed', 'greedy', 'balanced'"):
            call()
    with pytest.raises(PadlessError, match=r"method='best' is unknown; choose one of 'fixed'"):
        padless.microbatch([3, 4], 8, method="best")  # type: ignore[arg-type]


def test_no_message_prints_a_long_value_whole() -> None:
    long = "x" * 5000
    for call in (
        lambda: padless.microbatch(long, 8),
        lambda: padless.microbatch([3], long),  # type: ignore[arg-type]
        lambda: padless.microbatch([3], 8, method=long),  # type: ignore[arg-type]
        lambda: padless.microbatch([{"text": long}], 8),
        lambda: padless.CostModel(per_token=long),  # type: ignore[arg-type]
        lambda: padless.microbatch([3], 8, cost=long),  # type: ignore[arg-type]
        lambda: measure([{"input_ids": [1]}], fields=[1] * 5000),  # type: ignore[arg-type]
        lambda: padless.regroup([[1]], 8, report=long),  # type: ignore[arg-type]
        lambda: padless.microbatch([9000], 8192, ladder=list(range(1, 5000))),
    ):
        with pytest.raises(PadlessError) as caught:
            call()
        assert len(str(caught.value)) < LIMIT


def test_a_shown_value_keeps_its_ends() -> None:
    assert shown([1, 2]) == "[1, 2]"
    assert shown(list(range(10_000))).startswith("[0, 1, 2")
    assert shown(list(range(10_000))).endswith("9999]")
    assert len(shown("y" * 999)) == 80
    assert "\n" not in shown(torch.ones(50, 50))
