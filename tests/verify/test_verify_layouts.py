"""The check on real models: what it finds, how long it takes, and that it leaves no trace."""

from __future__ import annotations

import copy
import json
import time

import pytest
import torch
from torch import nn

from padless import PadlessError
from padless.verify import LAYOUTS, LayoutReport, build_small, check_layouts, shrink
from support.broken import decoder


@pytest.fixture(scope="module")
def qwen2() -> LayoutReport:
    return check_layouts(build_small("qwen2"), cache=False)


def test_a_check_of_two_layers_takes_under_five_seconds():
    model = build_small("llama")
    started = time.process_time()
    check_layouts(model, cache=False)
    assert time.process_time() - started < 5


def test_qwen2_is_exact_in_every_layout_but_concatenation(qwen2):
    judged = {name: result.verdict for name, result in qwen2.layouts.items()}
    assert judged.pop("naive") == "leaks"
    assert judged.pop("packed-block-mask-flex") == "unsupported"
    assert set(judged) == set(LAYOUTS) - {"naive", "packed-block-mask-flex"}
    assert set(judged.values()) == {"exact"}
    assert qwen2.best == "right-padded-no-mask"
    assert qwen2.allows("packed-position-ids")
    assert not qwen2.allows("naive")
    assert not qwen2.allows("no such layout")


def test_the_report_travels_as_json_and_shows_as_table_and_page(qwen2, tmp_path):
    again = LayoutReport.from_dict(json.loads(qwen2.to_json(tmp_path / "report.json")))
    assert again.to_dict() == qwen2.to_dict() == json.loads((tmp_path / "report.json").read_text())
    assert qwen2.to_dict()["layouts"]["packed-position-ids"]["verdict"] == "exact"
    page = qwen2.to_html(tmp_path / "report.html")
    assert all(name in page for name in LAYOUTS)
    assert "<script" not in page
    from rich.console import Console

    console = Console(width=200, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(qwen2)
    shown = console.export_text()
    assert "naive" in shown
    assert "leaks" in shown
    assert "naive leaks: outputs move by" in qwen2.explain()
    assert qwen2.explain("right-padded").startswith("right-padded is exact")
    with pytest.raises(PadlessError, match="choose one of"):
        qwen2.explain("sideways")
    with pytest.raises(PadlessError, match="not a layout report"):
        LayoutReport.from_dict({"model": "x"})


class Awkward(nn.Module):
    """Has all the state that a careless check would disturb."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = decoder()
        self.norm = nn.BatchNorm1d(64, affine=False)
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.cache: dict[str, torch.Tensor] = {}
        self.seen: list[int] = []

    def forward(self, input_ids, attention_mask=None, position_ids=None):
        out = self.inner(input_ids, attention_mask, position_ids)
        self.norm(out.detach().flatten(0, 1))
        self.steps += 1
        self.cache["last"] = out.detach()
        self.seen.append(input_ids.shape[1])
        self.late = True
        return out


def test_the_model_is_handed_back_bit_for_bit():
    model = Awkward()
    model.train()
    model.inner.layers[1].eval()
    model.inner.head.weight.requires_grad_(False)
    model.cache["first"] = kept = torch.ones(2)
    for parameter in model.inner.layers.parameters():
        parameter.grad = torch.randn_like(parameter)
    torch.manual_seed(3)
    state = copy.deepcopy(model.state_dict())
    grads = [(p, p.grad, None if p.grad is None else p.grad.clone()) for p in model.parameters()]
    flags = [p.requires_grad for p in model.parameters()]
    storage = [p.data_ptr() for p in model.parameters()]
    modes = [m.training for m in model.modules()]
    random = torch.get_rng_state()

    check_layouts(model, layouts=["right-padded", "packed-position-ids"], cache=False)

    after = model.state_dict()
    assert list(after) == list(state)
    assert all(torch.equal(after[name], value) for name, value in state.items())
    assert all(p.grad is grad and (grad is None or torch.equal(grad, old)) for p, grad, old in grads)
    assert [p.requires_grad for p in model.parameters()] == flags
    assert [p.data_ptr() for p in model.parameters()] == storage
    assert [m.training for m in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), random)
    assert list(model.cache) == ["first"]
    assert model.cache["first"] is kept
    assert torch.equal(kept, torch.ones(2))
    assert model.seen == []
    assert not hasattr(model, "late")
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_an_error_inside_leaves_no_trace_either():
    model = decoder()
    before = copy.deepcopy(model.state_dict())

    def fail(line: str) -> None:
        if line == "as it is":
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        check_layouts(model, layouts=["right-padded"], cache=False, progress=fail)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not model.training


def test_the_cache_left_on_is_a_leak_and_the_cure_is_named():
    report = check_layouts(build_small("llama"), layouts=["packed-position-ids"], keywords={}, cache=False)
    assert report["packed-position-ids"].verdict == "leaks"
    assert report["packed-position-ids"].cause == "cache-on"
    assert "use_cache=False" in report["packed-position-ids"].why


def test_eager_attention_adds_a_bool_mask_and_so_leaks():
    report = check_layouts(
        build_small("llama", attn="eager"),
        layouts=["packed-block-mask-bool", "packed-block-mask-additive"],
        seeds=(0,),
        cache=False,
    )
    assert report["packed-block-mask-bool"].cause == "mask-added"
    assert report["packed-block-mask-additive"].verdict == "exact"


def test_gradient_checkpointing_is_checked_with_and_without():
    model = build_small("llama")
    model.gradient_checkpointing_enable()
    report = check_layouts(model, layouts=["packed-position-ids"], seeds=(0,), cache=False)
    assert dict(report["packed-position-ids"].modes) == dict.fromkeys(
        ("train", "train-no-grad", "eval-no-grad", "train-no-checkpointing"), "exact"
    )
    assert model.model.gradient_checkpointing or any(
        getattr(m, "gradient_checkpointing", False) for m in model.modules()
    )


def test_reentrant_checkpointing_has_its_gradients_tested_too():
    model = build_small("llama")
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    result = check_layouts(model, layouts=["right-padded"], seeds=(0,), cache=False)["right-padded"]
    assert result.verdict == "exact"
    assert result.support == 0.0
    assert all(p.grad is None for p in model.parameters())


def test_adapters_are_checked_as_they_are_wrapped():
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(build_small("jamba"), LoraConfig(r=4, target_modules=["q_proj", "in_proj"]))
    report = check_layouts(model, layouts=["right-padded", "packed-position-ids"], seeds=(0,), cache=False)
    assert report.model == "JambaForCausalLM"
    assert report.safe == ("right-padded",)
    assert report["packed-position-ids"].cause == "recurrent-state"


def test_any_callable_on_top_of_a_model_can_be_checked():
    model = build_small("qwen2")

    def with_ones(**keywords):
        """What some collators send: an all-ones mask beside packed positions, which switches the boundaries off."""
        keywords.setdefault("attention_mask", torch.ones_like(keywords["input_ids"]))
        return {"scores": model(**keywords).logits}

    report = check_layouts(model, forward=with_ones, layouts=["right-padded", "packed-position-ids"], seeds=(0,))
    assert report["right-padded"].verdict == "exact"
    assert report["packed-position-ids"].verdict == "leaks"


def test_a_small_model_stands_in_where_a_float32_copy_is_too_large():
    model = build_small("recurrent_gemma").bfloat16()
    report = check_layouts(model, layouts=["left-padded", "right-padded"], copy_limit=1000, cache=False)
    assert report.safe == ("right-padded",)
    assert any("small model of the same architecture" in note for note in report.notes)
    toy = check_layouts(decoder().bfloat16(), layouts=["right-padded"], copy_limit=1000, cache=False)
    assert toy["right-padded"].verdict == "inconclusive"
    assert "copy_limit" in toy["right-padded"].why


def test_long_windows_are_shortened_while_the_model_is_probed():
    from transformers import AutoConfig, AutoModelForCausalLM

    config = shrink(AutoConfig.for_model("mistral"))
    config.sliding_window = 4096
    model = AutoModelForCausalLM.from_config(config)
    result = check_layouts(model, layouts=["packed-block-mask-additive"], seeds=(0,), cache=False)
    assert result["packed-block-mask-additive"].verdict != "exact"
    assert result["packed-block-mask-additive"].cause == "window"
    assert model.config.sliding_window == 4096


def test_what_cannot_be_judged_is_refused_with_the_reason():
    model = decoder()
    with pytest.raises(PadlessError, match=r"layout='packed' is unknown; choose one of 'left-padded'"):
        check_layouts(model, layouts=["packed"])
    with pytest.raises(PadlessError, match="is one name: pass a list"):
        check_layouts(model, layouts="naive")
    with pytest.raises(PadlessError, match="checks nothing"):
        check_layouts(model, layouts=[])
    with pytest.raises(PadlessError, match="two sequences or more"):
        check_layouts(model, lengths=(8,))
    with pytest.raises(PadlessError, match=r"a torch.nn.Module is needed, not function"):
        check_layouts(decoder)
    with pytest.raises(PadlessError, match="cannot be run on input_ids alone"):
        check_layouts(nn.Sequential(nn.Linear(2, 2)), vocab_size=10, cache=False)
    with pytest.raises(PadlessError, match="pass vocab_size="):
        check_layouts(nn.Linear(2, 2))
    with pytest.raises(PadlessError, match=r"one output per token is needed"):
        check_layouts(model, forward=lambda **keywords: model(**keywords).mean(1), cache=False)


def test_router_losses_and_long_context_rope_are_noted():
    report = check_layouts(build_small("mixtral"), layouts=["right-padded"], seeds=(0,), cache=False)
    assert any("router loss" in note for note in report.notes)
    from transformers import AutoConfig, AutoModelForCausalLM

    config = shrink(AutoConfig.for_model("llama"))
    config.rope_parameters = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    model = AutoModelForCausalLM.from_config(config)
    report = check_layouts(model, layouts=["right-padded"], seeds=(0,), cache=False)
    assert any("dynamic RoPE" in note and "256 positions" in note for note in report.notes)
