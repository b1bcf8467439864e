"""One recommendation, that follows from the figures; warnings that are true; settings that can be pasted."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from padless.analysis import DataFacts, analyze_lengths, read_model
from padless.analysis.facts import histogram, length_facts
from padless.analysis.figures import Figures
from padless.analysis.recommend import NOTHING, recommend
from padless.analysis.schedule import STRATEGIES, Setup
from padless.analysis.settings import FRAMEWORKS, settings_for
from padless.cost import DEFAULT_COST
from padless.errors import PadlessError
from support.lengths import data_folder, measured_lengths

QWEN = {
    "model_type": "qwen2",
    "hidden_size": 3584,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "intermediate_size": 18944,
    "vocab_size": 152064,
}
JAMBA = {
    "model_type": "jamba",
    "hidden_size": 2560,
    "num_hidden_layers": 28,
    "num_attention_heads": 20,
    "num_key_value_heads": 8,
    "intermediate_size": 8960,
    "vocab_size": 65536,
    "attn_layer_period": 8,
    "attn_layer_offset": 4,
    "mamba_d_state": 16,
    "mamba_expand": 2,
    "mamba_d_conv": 4,
}


def test_uniform_lengths_need_no_change() -> None:
    advice = analyze_lengths(np.full(2000, 512), ranks=8, token_budget=16_384).recommendation
    assert advice.strategy == NOTHING
    assert "already computes 100.0% real tokens" in advice.reason
    assert advice.settings == {}


def rl_lengths() -> Any:
    prompts = measured_lengths("mix_rl_gsm8k_heavy", "prompt_lengths")
    responses = measured_lengths("mix_rl_gsm8k_heavy", "response_lengths")
    if data_folder() is None:  # stand-ins of one seed would be the same numbers
        responses = responses[::-1]
    return np.stack([prompts.clip(max=2875), responses.clip(max=8192)], axis=1)


def test_the_rl_mix_is_regrouped_within_its_steps() -> None:
    found = analyze_lengths(rl_lengths(), ranks=8, token_budget=16_384, sequences_per_step=256)
    assert found.current == "fixed"
    assert found.recommendation.strategy == "step-balanced"
    best = found.figures["step-balanced"].step_time_ratio
    assert found.recommendation.saving == pytest.approx(1 - best / found.figures["fixed"].step_time_ratio)
    assert found.recommendation.saving > 0.8


def test_the_sft_mix_depends_on_what_is_known_of_the_model() -> None:
    lengths = measured_lengths("mix_sft_general")[:6000]
    lengths = lengths[lengths <= 8192]
    unknown = analyze_lengths(lengths, ranks=8, token_budget=16_384)
    assert unknown.recommendation.strategy == "step-balanced"
    assert "padless verify" in unknown.recommendation.reason
    attention = analyze_lengths(lengths, ranks=8, token_budget=16_384, model=read_model(QWEN, width=8192))
    assert attention.recommendation.strategy == "packed"
    assert "padless verify" in attention.recommendation.reason


def test_a_hybrid_is_never_told_to_pack() -> None:
    lengths = measured_lengths("mix_sft_general")[:6000]
    lengths = lengths[lengths <= 8192]
    model = read_model(JAMBA, width=8192)
    assert model.recurrent
    found = analyze_lengths(lengths, ranks=8, token_budget=16_384, model=model)
    assert found.recommendation.strategy == "step-balanced"
    assert "recurrent layers" in found.recommendation.reason


def figures(**ratios: float) -> dict[str, Figures]:
    return {
        name: Figures(
            occupancy=0.9,
            microbatches=10,
            padded_tokens=100,
            step_time_ratio=ratios.get(name.replace("-", "_"), 2.0),
            rank_imbalance=0.0,
            neighbour_correlation=0.1,
            micro_steps=1,
            largest=10,
        )
        for name in STRATEGIES
    }


@pytest.mark.parametrize(
    ("ratios", "strategy"),
    [
        ({"step_balanced": 1.93, "step_greedy": 1.95}, NOTHING),
        ({"step_balanced": 1.5}, "step-balanced"),
        ({"step_balanced": 1.5, "step_greedy": 1.49}, "step-balanced"),
        ({"step_balanced": 1.5, "step_greedy": 1.3}, "step-greedy"),
        ({"step_balanced": 1.5, "pool": 1.3}, "step-balanced"),
        ({"step_balanced": 1.5, "pool": 1.2}, "pool"),
        ({"step_balanced": 1.5, "range": 1.2, "pool": 1.25}, "range"),
        ({"step_balanced": 1.5, "sorted": 1.0}, "step-balanced"),
        ({"step_balanced": 1.5, "packed": 1.0}, "step-balanced"),
    ],
)
def test_the_recommendation_follows_from_the_figures(ratios: dict[str, float], strategy: str) -> None:
    assert recommend(figures(**ratios), current="longest-in-batch", model=None).strategy == strategy


def test_packing_alone_can_be_worth_a_change() -> None:
    ratios = {"longest_in_batch": 1.2, "step_balanced": 1.2, "packed": 1.0}
    advice = recommend(figures(**ratios), current="longest-in-batch", model=read_model(QWEN, width=1024))
    assert advice.strategy == "packed"
    assert recommend(figures(**ratios), current="longest-in-batch", model=None).strategy == NOTHING


# --- settings


@pytest.mark.parametrize("strategy", [name for name in STRATEGIES if name not in ("fixed", "longest-in-batch")])
def test_settings_are_there_for_every_framework_and_parse(strategy: str) -> None:
    setup = Setup(token_budget=8192, ranks=4, sequences_per_step=128, widest=4096, cost=DEFAULT_COST)
    settings = settings_for(strategy, setup)
    for framework in FRAMEWORKS:
        text = settings[framework]
        assert "8192" in text or strategy == "packed"
        if framework == "verl":
            assert all("=" in line for line in text.splitlines() if not line.startswith("#"))
        else:
            names = {
                a.name for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ImportFrom) for a in node.names
            }
            assert names
    json.dumps(settings)


# --- warnings


def kinds(lengths: Any, **options: Any) -> dict[str, Any]:
    return {notice.kind: notice for notice in analyze_lengths(lengths, **options).warnings}


def test_sequences_over_the_budget_are_counted_and_left_out() -> None:
    found = analyze_lengths([100] * 98 + [900, 901], token_budget=500)
    [notice] = [n for n in found.warnings if n.kind == "over-budget"]
    assert notice.count == 2
    assert "901" in notice.message
    assert found.simulated == 98
    assert found.lengths.max == 901
    with pytest.raises(PadlessError, match="no sequence fits the token budget 50"):
        analyze_lengths([100, 200], token_budget=50)


def test_outliers_that_dominate_are_named() -> None:
    notice = kinds([100] * 999 + [5000])["outliers"]
    assert "50.0 times" in notice.message
    assert "outliers" not in kinds(list(range(1, 1000)))


def test_many_sequences_of_the_greatest_length_look_truncated() -> None:
    lengths = [*range(1, 900), *[1024] * 50]
    assert kinds(lengths)["truncation"].count == 50
    assert "before the data was written" in kinds(lengths)["truncation"].message
    assert "--max-length 1,024" in kinds(lengths, max_length=1024)["truncation"].message
    assert "truncation" not in kinds([512] * 100)


def test_empty_rows_are_counted() -> None:
    assert kinds([5] * 10, data=DataFacts(rows=13, empty=3))["empty"].count == 3


def test_a_mixture_whose_lengths_tell_the_source_is_named() -> None:
    rng = np.random.default_rng(0)
    short, long = rng.integers(50, 150, 500), rng.integers(1000, 3000, 500)
    sources = [0] * 500 + [1] * 500
    notice = kinds(np.concatenate([short, long]), sources=sources, names=["chat", "code"])["source-length"]
    assert "chat" in notice.message
    assert "code" in notice.message
    mixed = rng.permutation(np.concatenate([short, long]))
    assert "source-length" not in kinds(mixed, sources=sources, names=["chat", "code"])


# --- facts


def test_statistics_are_numpys() -> None:
    lengths = measured_lengths("mix_sft_general")
    facts = length_facts(lengths)
    assert (facts.count, facts.min, facts.max) == (len(lengths), lengths.min(), lengths.max())
    assert facts.total == int(lengths.sum())
    assert facts.mean == pytest.approx(lengths.mean())
    assert [facts.p50, facts.p90, facts.p99] == pytest.approx(np.quantile(lengths, [0.5, 0.9, 0.99]).tolist())


@pytest.mark.parametrize("lengths", [[7], [1, 1000], list(range(1, 61)), [5] * 9])
def test_the_histogram_counts_every_sequence(lengths: list[int]) -> None:
    made = histogram(np.array(lengths))
    assert sum(made["counts"]) == len(lengths)
    assert len(made["counts"]) <= 60
    edges = np.array(made["edges"])
    assert np.histogram(lengths, bins=edges - 0.5)[0].tolist() == made["counts"]


def test_the_report_has_the_keys_that_were_promised() -> None:
    told = analyze_lengths([100, 200, 300] * 20, ranks=2).to_dict()
    json.dumps(told)
    assert set(told["data"]) == {"files", "rows", "empty", "dropped", "truncated"}
    assert set(told["lengths"]) == {"count", "min", "mean", "p50", "p90", "p99", "max", "total"}
    assert list(told["strategies"]) == [
        "fixed", "longest-in-batch", "sorted", "step-greedy", "step-balanced", "pool", "range", "packed",
    ]  # fmt: skip
    wanted = {
        "occupancy",
        "microbatches",
        "padded_tokens",
        "step_time_ratio",
        "rank_imbalance",
        "neighbour_correlation",
    }
    assert all(wanted <= set(found) for found in told["strategies"].values())
    assert {"strategy", "reason", "settings"} <= set(told["recommendation"])
    assert isinstance(told["warnings"], list)


# --- the model


def test_a_config_gives_cost_memory_and_kind(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN))
    model = read_model(tmp_path, width=4096)
    assert not model.recurrent
    assert model.cost.per_token_squared > 0
    memory = model.memory(16_384)
    assert 0 < memory["activations_checkpointed_gib"] < memory["activations_gib"]
    assert analyze_lengths([100] * 10, model=model).setup.cost is model.cost


def test_a_bad_config_is_named(tmp_path: Path) -> None:
    with pytest.raises(PadlessError, match="cannot read the model config"):
        read_model(tmp_path / "none.json", width=10)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(PadlessError, match="is not JSON"):
        read_model(tmp_path, width=10)
    with pytest.raises(PadlessError, match="hidden_size"):
        read_model({"model_type": "x"}, width=10)


@pytest.mark.parametrize("strategy", ["step-balanced", "step-greedy", "pool", "packed"])
def test_every_name_that_is_pasted_exists(strategy: str) -> None:
    setup = Setup(token_budget=8192, ranks=4, sequences_per_step=128, widest=4096, cost=DEFAULT_COST)
    for framework in ("pytorch", "transformers", "trl", "lightning"):
        for node in ast.walk(ast.parse(settings_for(strategy, setup)[framework])):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("padless"):
                module = pytest.importorskip(node.module, exc_type=ImportError)
                assert all(hasattr(module, alias.name) for alias in node.names), (framework, node.module)
