"""Reports on disk: found again for the same architecture, never for another one or for changed code."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from padless.verify import build_small, check_layouts
from padless.verify.cache import cache_folder, cache_key
from padless.verify.subject import Subject
from support.broken import Layer, decoder


def key_of(model, **options) -> str | None:
    return cache_key(model, Subject.of(model), options)


def test_the_second_check_is_read_from_disk(tmp_path, monkeypatch):
    model = build_small("qwen2")
    first = check_layouts(model, layouts=["right-padded"], seeds=(0,))
    again = check_layouts(build_small("qwen2", seed=5), layouts=["right-padded"], seeds=(0,))
    assert not first.from_cache
    assert again.from_cache
    assert again["right-padded"] == first["right-padded"]
    other = check_layouts(model, layouts=["right-padded-no-mask"], seeds=(0,))
    assert not other.from_cache
    stored = list((Path(os.environ["PADLESS_CACHE"]) / "verify").glob("*.json"))
    assert len(stored) == 2
    for path in stored:
        path.write_text("damaged")
    assert not check_layouts(model, layouts=["right-padded"], seeds=(0,)).from_cache


def test_a_folder_that_cannot_be_written_to_is_no_error(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    assert check_layouts(decoder(), layouts=["right-padded"], seeds=(0,), cache=blocked).allows("right-padded")


def test_the_key_follows_configuration_dtype_modes_and_options():
    model = build_small("qwen2")
    base = key_of(model, seeds=[0])
    assert key_of(build_small("qwen2", seed=1), seeds=[0]) == base
    assert key_of(model, seeds=[1]) != base
    assert key_of(build_small("qwen3"), seeds=[0]) != base
    assert key_of(build_small("qwen2", attn="eager"), seeds=[0]) != base
    assert key_of(build_small("qwen2").bfloat16(), seeds=[0]) != base
    checkpointed = build_small("qwen2")
    checkpointed.gradient_checkpointing_enable()
    assert key_of(checkpointed, seeds=[0]) != base


def test_the_key_follows_the_code_and_patched_modules_are_never_cached(monkeypatch):
    base = key_of(decoder())
    assert key_of(decoder("convolution")) != base

    def forward(self, hidden, documents, positions):
        return hidden + self.attention(self.norm1(hidden), documents, positions)

    monkeypatch.setattr(Layer, "forward", forward)
    assert key_of(decoder()) != base
    patched = decoder()
    patched.head.forward = lambda hidden: hidden
    assert key_of(patched) is None
    hooked = decoder()
    hooked.head.register_forward_hook(lambda *_: None)
    assert key_of(hooked) is None


def test_the_folder_comes_from_the_argument_then_the_environment(tmp_path, monkeypatch):
    assert cache_folder(tmp_path) == tmp_path
    monkeypatch.setenv("PADLESS_CACHE", str(tmp_path / "own"))
    assert cache_folder() == tmp_path / "own"
    monkeypatch.delenv("PADLESS_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "xdg" / "padless"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_environment_says_what_the_verdicts_hold_for(dtype):
    environment = Subject.of(build_small("qwen2").to(dtype)).environment()
    assert environment["dtype"] == str(dtype).removeprefix("torch.")
    assert environment["attention"] == "sdpa"
    assert environment["device"] == "cpu"
    assert environment["torch"] == torch.__version__
