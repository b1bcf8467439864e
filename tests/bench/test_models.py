"""Models: built in, from a config, from a checkpoint; and what cannot be built says why in one line."""

from __future__ import annotations

import json

import pytest
import torch

from padless import PadlessError
from padless.bench.models import BUILT_IN, build, pick_device, pick_dtype
from support.tiny_models import JAMBA, QWEN2, config_file


@pytest.mark.parametrize("name", ["qwen2", "jamba", "bamba"])
def test_built_in_models_run_and_have_the_layers_that_their_name_promises(name):
    built = build(name)
    with torch.no_grad():
        assert built.model(input_ids=torch.ones(1, 5, dtype=torch.long)).logits.shape == (1, 5, built.vocabulary)
    kinds = {type(module).__name__ for module in built.model.modules()}
    wanted = {
        "qwen2": {"Qwen2Attention", "Qwen2MLP"},
        "jamba": {"JambaAttention", "JambaMambaMixer", "JambaMLP", "JambaSparseMoeBlock"},
        "bamba": {"BambaAttention", "BambaMixer"},
    }
    assert wanted[name] <= kinds
    assert built.model.config.use_cache is False
    assert built.source == "random weights"


def test_real_sizes_have_the_shapes_of_the_published_configs():
    with torch.device("meta"):
        from transformers import AutoConfig, AutoModelForCausalLM

        counts = {}
        for name in ("qwen2.5-1.5b", "qwen2.5-7b"):
            config = BUILT_IN[name]()
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model(config.pop("model_type"), **config))
            counts[name] = sum(p.numel() for p in model.parameters())
    assert counts == {"qwen2.5-1.5b": 1_543_714_304, "qwen2.5-7b": 7_615_616_512}


def test_equal_seeds_give_equal_weights(tmp_path):
    path = config_file(tmp_path, "tiny", QWEN2)
    one, same, other = (next(build(path, seed=seed).model.parameters()) for seed in (1, 1, 2))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)


def test_a_folder_with_a_config_gets_random_weights_and_one_with_weights_gets_those(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(QWEN2))
    built = build(str(folder))
    assert (built.source, built.name) == ("random weights", "model")
    saved = tmp_path / "saved"
    built.model.save_pretrained(saved)
    loaded = build(str(saved), seed=5)
    assert loaded.source == "checkpoint"
    for a, b in zip(built.model.parameters(), loaded.model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_dropout_is_off_even_where_the_config_has_it(tmp_path):
    built = build(config_file(tmp_path, "tiny", {**QWEN2, "attention_dropout": 0.5}))
    built.model.train()
    ids = torch.arange(20)[None]
    assert torch.equal(built.model(input_ids=ids).logits, built.model(input_ids=ids).logits)


def test_precision_is_as_asked_for(tmp_path):
    assert next(build(config_file(tmp_path, "t", QWEN2), dtype="bfloat16").model.parameters()).dtype == torch.bfloat16


def test_only_models_with_a_mamba_1_scan_say_that_it_was_replaced(tmp_path):
    assert build(config_file(tmp_path, "j", JAMBA)).linear_scan
    assert not build(config_file(tmp_path, "q", QWEN2)).linear_scan


BAD = {
    "no-type": ({"hidden_size": 8}, "no model_type"),
    "unknown-type": ({"model_type": "nonesuch"}, "cannot be built"),
    "wrong-type": ({**QWEN2, "vocab_size": "many"}, "cannot be built"),
    "negative": ({**QWEN2, "hidden_size": -4}, "cannot be built"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_config_that_cannot_be_built_is_named(tmp_path, name):
    config, message = BAD[name]
    with pytest.raises(PadlessError, match=message):
        build(config_file(tmp_path, name, config))


def test_a_broken_config_file_a_folder_without_one_and_an_unknown_name_are_refused(tmp_path):
    (tmp_path / "broken.json").write_text("{")
    with pytest.raises(PadlessError, match=r"broken\.json cannot be built: JSONDecodeError"):
        build(str(tmp_path / "broken.json"))
    with pytest.raises(PadlessError, match=r"has no config\.json"):
        build(str(tmp_path))
    with pytest.raises(PadlessError, match="'qwen3' is unknown; name one of qwen2, jamba"):
        build("qwen3")


def test_devices_and_precisions_that_are_not_there_are_refused():
    if not torch.cuda.is_available():
        with pytest.raises(PadlessError, match="torch sees no CUDA device: use --device cpu"):
            pick_device("cuda")
    with pytest.raises(PadlessError, match="choose one of 'cpu', 'cuda'"):
        pick_device("tpu")
    with pytest.raises(PadlessError, match="'float32', 'bfloat16'"):
        pick_dtype("float8")
