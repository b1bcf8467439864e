"""The settings that are shown, run as they stand, give the figures that are shown."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from padless.analysis import Setup, analyze_lengths
from padless.analysis.settings import settings_for
from padless.cost import DEFAULT_COST, CostModel
from padless.data import TokenBudgetSampler

FITTED = CostModel(per_microbatch=0.0123456789, per_token=1.5e-05, per_token_squared=2e-09, source="fit")


def some_lengths(count: int) -> np.ndarray:
    rng = np.random.default_rng(3)
    return np.minimum(np.round(rng.lognormal(5, 0.8, count)), 2000).astype(int).clip(1)


def pasted(text: str, lengths: Any) -> dict[str, Any]:
    """The names that a text defines, run on a tokenised dataset of these lengths."""
    names: dict[str, Any] = {"dataset": [{"input_ids": [7] * int(n), "labels": [7] * int(n)} for n in lengths]}
    exec(text, names)
    return names


def run(loader: Any) -> tuple[int, float]:
    """Micro-batches, and real over padded tokens, of the batches themselves."""
    masks = [batch["attention_mask"] for batch in loader]
    return len(masks), sum(int(m.sum()) for m in masks) / sum(m.numel() for m in masks)


@pytest.mark.parametrize("cost", [None, FITTED], ids=["default-cost", "fitted-cost"])
@pytest.mark.parametrize("multiple", [1, 16])
@pytest.mark.parametrize("strategy", ["step-balanced", "step-greedy", "pool", "range"])
def test_the_pytorch_lines_give_the_micro_batches_and_occupancy_shown(
    strategy: str, multiple: int, cost: CostModel | None
) -> None:
    """One step, so that the epoch's order plays no part: micro-batches are the same, not only alike."""
    lengths = some_lengths(192)
    found = analyze_lengths(lengths, token_budget=4096, sequences_per_step=192, cost=cost, multiple_of=multiple)
    shown = found.figures[strategy]
    count, occupancy = run(pasted(settings_for(strategy, found.setup)["pytorch"], lengths)["loader"])
    assert count == shown.microbatches
    assert occupancy == pytest.approx(shown.occupancy, abs=1e-9 if strategy.startswith("step") else 0.005)


def test_several_steps_come_close_whatever_their_order() -> None:
    lengths = some_lengths(1024)
    found = analyze_lengths(lengths, token_budget=8192, sequences_per_step=128)
    shown = found.figures["step-balanced"]
    count, occupancy = run(pasted(settings_for("step-balanced", found.setup)["pytorch"], lengths)["loader"])
    assert count == pytest.approx(shown.microbatches, rel=0.06)  # other rows meet in a step
    assert occupancy == pytest.approx(shown.occupancy, abs=0.01)
    # What the lines pass is what makes the difference: the sampler's own defaults plan for cheaper micro-batches.
    plain = TokenBudgetSampler(lengths, token_budget=8192, sequences_per_step=128)
    assert len(plain) > 1.2 * shown.microbatches


def test_the_lines_say_that_the_dataset_is_tokenised_and_need_no_tokenizer() -> None:
    setup = Setup(token_budget=4096, ranks=1, sequences_per_step=64, widest=2000, cost=DEFAULT_COST)
    text = settings_for("step-balanced", setup)["pytorch"]
    assert "tokenised, each with input_ids" in text
    assert "tokenizer" not in text


def test_trainers_are_given_a_cost_and_a_multiple_that_are_not_the_usual_ones() -> None:
    setup = Setup(token_budget=4096, ranks=1, sequences_per_step=64, widest=2000, cost=FITTED, multiple_of=16)
    usual = Setup(token_budget=4096, ranks=1, sequences_per_step=64, widest=2000, cost=DEFAULT_COST)
    for framework in ("transformers", "trl", "lightning"):
        assert "CostModel" not in settings_for("step-balanced", usual)[framework]
        text = settings_for("step-balanced", setup)[framework]
        start = text.index("PadlessOptions(")
        names: dict[str, Any] = {}
        options = "from padless import CostModel\nfrom padless.integrations.transformers import PadlessOptions\nmade = "
        depth = 0
        for stop in range(start, len(text)):
            depth += {"(": 1, ")": -1}.get(text[stop], 0)
            if depth == 0 and text[stop] == ")":
                break
        exec(options + text[start : stop + 1], names)
        made = names["made"]
        assert (made.token_budget, made.multiple_of, made.method) == (4096, 16, "balanced")
        assert made.cost.seconds(3, 70) == FITTED.seconds(3, 70)
        assert "from padless import CostModel" in text
