"""Real architectures: verdicts against a slow float64 reference, no false exact, and a page that lists them all."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest

from padless import PadlessError
from padless.verify import build_small, causal_lm_types, check_layouts, shrink
from padless.verify.reference import reference_verdicts

ROOT = Path(__file__).resolve().parents[2]
LAYOUTS = ("left-padded", "right-padded", "right-padded-no-mask", "packed-position-ids")
EXACT_PACKED = ("qwen2", "qwen3", "llama", "mistral", "gemma", "gemma2", "mixtral", "deepseek_v3", "gpt2", "phi3")
RECURRENT = ("jamba", "bamba", "falcon_h1", "mamba", "mamba2", "lfm2", "nemotron_h", "zamba2")
SLOW_RECURRENT = ("qwen3_next", "recurrent_gemma", "xlstm", "rwkv")
LEFT_LEAKS = ("recurrent_gemma", "xlstm", "rwkv")
MASK_WITHOUT_POSITIONS = ("gpt_oss", "bloom", "opt")
FAMILIES = (*EXACT_PACKED, *RECURRENT, *SLOW_RECURRENT, *MASK_WITHOUT_POSITIONS)


def page_module(name: str):
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_verdicts_are_the_known_ones_and_agree_with_the_reference(family):
    model = build_small(family)
    report = check_layouts(model, layouts=LAYOUTS, seeds=(0,), cache=False)
    assert report.allows("right-padded")
    assert report.allows("right-padded-no-mask")
    assert report["left-padded"].verdict == ("leaks" if family in LEFT_LEAKS else "exact")
    assert report["packed-position-ids"].verdict == ("exact" if family in EXACT_PACKED else "leaks")
    if family in (*RECURRENT, *SLOW_RECURRENT):
        assert report["packed-position-ids"].cause in ("recurrent-state", "convolution")
    elif family in MASK_WITHOUT_POSITIONS:
        assert report["packed-position-ids"].cause in ("position-ids-ignored", "attention-boundary")
    reference = reference_verdicts(model, LAYOUTS)
    assert {n: r.exact for n, r in reference.items()} == {n: report.allows(n) for n in LAYOUTS}


@pytest.mark.slow
@pytest.mark.parametrize("family", ["jamba", "mamba2", "lfm2", "recurrent_gemma", "gpt_oss", "opt"])
def test_no_leak_is_called_exact_in_bfloat16_at_default_initialisation(family):
    model = build_small(family).bfloat16()
    report = check_layouts(model, layouts=["left-padded", "right-padded", "packed-position-ids"], cache=False)
    assert report["packed-position-ids"].verdict == "leaks"
    assert report.allows("right-padded")
    assert report["left-padded"].verdict == ("leaks" if family in LEFT_LEAKS else "exact")


def test_numbers_drawn_for_each_token_leave_a_verdict_open():
    """PhiMoE's router samples in training where two experts are close: eight draws may well show nothing."""
    result = check_layouts(build_small("phimoe"), layouts=["right-padded"], seeds=(0,), cache=False)["right-padded"]
    assert result.verdict == "inconclusive"
    assert dict(result.modes)["eval-no-grad"] == "exact"
    assert "random" in result.why


def test_the_reference_finds_a_leak_and_names_what_raises():
    found = reference_verdicts(build_small("bamba"), ["right-padded", "packed-position-ids", "packed-seq-idx"])
    assert found["right-padded"].exact
    assert not found["packed-position-ids"].exact
    assert found["packed-position-ids"].difference > 0.01
    assert not found["packed-seq-idx"].exact
    assert "mamba_ssm" in found["packed-seq-idx"].raised


def test_every_architecture_that_transformers_names_is_in_the_committed_table():
    known = json.loads((ROOT / "docs" / "models.json").read_text())
    import transformers

    if known["_versions"]["transformers"] != transformers.__version__:
        pytest.skip("the table was made with another version of transformers")
    assert set(known) - {"_versions"} <= set(causal_lm_types())
    text = (ROOT / "docs" / "models.md").read_text()
    for name in causal_lm_types():
        listed = f"| {name} |" in text if "verdicts" in known.get(name, {}) else f"* {name}:" in text
        assert listed, name


def test_no_verdict_exact_in_the_table_is_contradicted_by_the_reference():
    known = json.loads((ROOT / "docs" / "models.json").read_text())
    rows = {name: row for name, row in known.items() if "reference" in row}
    assert len(rows) >= 165
    contradicted = {
        (name, layout)
        for name, row in rows.items()
        for layout, verdict in row["verdicts"].items()
        if verdict == "exact" and layout not in row["reference_exact"]
    }
    assert contradicted == set()


def test_no_verdict_exact_in_bfloat16_is_contradicted_by_the_reference():
    """Half precision hides weak leaks; what the table calls exact there has to be exact in float64."""
    known = json.loads((ROOT / "docs" / "models.json").read_text())
    page = page_module("models_page")
    rows = {name: row for name, row in known.items() if "verdicts" in row}
    run = {name: row for name, row in rows.items() if "verdicts" in row["bfloat16"]}
    assert len(run) >= len(rows) - 2  # XLNet and xLSTM raise in bfloat16
    assert {name: page.false_in_half(row) for name, row in run.items() if page.false_in_half(row)} == {}
    cells = [
        (row["bfloat16"]["verdicts"][layout], verdict)
        for row in run.values()
        for layout, verdict in row["verdicts"].items()
    ]
    assert sum(half == "inconclusive" != single for half, single in cells) < len(cells) / 100
    leaking = [half for half, single in cells if single in ("leaks", "differs")]
    assert len(leaking) > 350
    assert set(leaking) <= {"leaks", "differs", "inconclusive"}


def sampled() -> list[str]:
    """Every 31st of the architectures that could be measured, in alphabetical order."""
    known = json.loads((ROOT / "docs" / "models.json").read_text())
    return [name for name in causal_lm_types() if "verdicts" in known.get(name, {}).get("bfloat16", {})][8::31]


@pytest.mark.slow
@pytest.mark.parametrize("family", sampled())
def test_a_sample_of_all_architectures_gets_the_tables_verdicts_in_bfloat16(family):
    """At default initialisation, two layers: what leaks in float64 is not called exact, and little is left open."""
    row = json.loads((ROOT / "docs" / "models.json").read_text())[family]
    report = check_layouts(build_small(family, dtype="bfloat16"), layouts=LAYOUTS, seeds=(0,), cache=False)
    found = {name: result.verdict for name, result in report.layouts.items()}
    assert {name for name, verdict in found.items() if verdict == "exact"} <= set(row["reference_exact"])
    assert found == {name: row["bfloat16"]["verdicts"][name] for name in LAYOUTS}


def test_the_page_is_what_the_script_makes_of_the_measurements():
    known = json.loads((ROOT / "docs" / "models.json").read_text())
    assert page_module("models_page").page(known, causal_lm_types()) == (ROOT / "docs" / "models.md").read_text()


def test_discovery_builds_small_models_of_nearly_all_architectures():
    """Every twentieth of them: enough to notice a release of transformers that the rules do not fit."""
    types = causal_lm_types()
    assert len(types) > 150
    built, failed = [], []
    for model_type in types[::20]:
        try:
            model = build_small(model_type)
        except Exception as error:
            failed.append((model_type, str(error)[:80]))
            continue
        built.append(model_type)
        if model_type != "blt":  # its patcher and hash embeddings stay large; it cannot be run on ids alone anyway
            assert sum(p.numel() for p in model.parameters()) < 60_000_000, model_type
    assert len(built) >= 8, failed


def test_a_users_configuration_is_shrunk_without_touching_it():
    from transformers import AutoConfig

    config = AutoConfig.for_model(
        "jamba", hidden_size=4096, num_hidden_layers=32, attn_layer_period=8, attn_layer_offset=4
    )
    small = shrink(config)
    assert type(small) is type(config)
    assert config.hidden_size == 4096
    assert small.hidden_size == 64
    assert set(small.layers_block_type) == set(config.layers_block_type)
    qwen = shrink(AutoConfig.for_model("qwen2", rope_theta=5e5, tie_word_embeddings=True))
    assert qwen.tie_word_embeddings is True
    assert qwen.num_attention_heads * (getattr(qwen, "head_dim", None) or 16) == qwen.hidden_size


def test_an_unknown_architecture_is_refused():
    with pytest.raises(PadlessError, match="unknown to the installed transformers"):
        build_small("no-such-model")
