"""FlexAttention: a check ends on a CPU, where torch has no backward pass for it, and sees what the model hands on."""

from __future__ import annotations

import time

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from padless.tensors import flex_block_mask
from padless.verify import LAYOUTS, LayoutReport, build_small, check_layouts
from padless.verify.flex import plain_flex_attention


@pytest.fixture(scope="module")
def qwen2() -> LayoutReport:
    return check_layouts(build_small("qwen2", attn="flex_attention"), seeds=(0,), cache=False)


def drawn(queries: int = 200, keys: int = 200) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(2, 4, queries, 8, generator=generator)
    return (query, *(torch.randn(2, 2, keys, 8, generator=generator) for _ in range(2)))


def test_qwen2_with_flex_attention_is_exact_with_a_block_mask(qwen2):
    judged = {name: result.verdict for name, result in qwen2.layouts.items()}
    assert judged.pop("naive") == "leaks"
    assert judged.pop("packed-block-mask-bool") == "leaks"  # FlexAttention adds a mask to the scores
    assert qwen2["packed-block-mask-bool"].cause == "mask-added"
    assert set(judged) == set(LAYOUTS) - {"naive", "packed-block-mask-bool"}
    assert set(judged.values()) == {"exact"}
    flex = qwen2["packed-block-mask-flex"]
    assert flex.support == 0.0  # gradients were asked for, and there are none to foreign tokens
    assert dict(flex.modes) == dict.fromkeys(("train", "train-no-grad", "eval-no-grad"), "exact")
    assert qwen2.condition("several-rows", "packed-block-mask-flex").verdict == "exact"
    assert any("plain PyTorch" in note and "not the compiled kernel" in note for note in qwen2.notes)


def test_a_block_mask_takes_the_place_of_a_sliding_window():
    model = build_small("mistral", attn="flex_attention")
    layouts = ["packed-position-ids", "packed-block-mask-flex"]
    report = check_layouts(model, layouts=layouts, seeds=(0,), cache=False)
    assert report.safe == ("packed-position-ids",)
    assert report["packed-block-mask-flex"].verdict == "differs"
    assert report["packed-block-mask-flex"].cause == "window"


def test_a_mask_without_boundaries_is_caught():
    model = build_small("qwen2", attn="flex_attention")

    def causal_only(**keywords: object) -> torch.Tensor:
        rule = flex_block_mask(torch.zeros_like(keywords["input_ids"]))
        return model(**{**keywords, "attention_mask": rule}).logits

    result = check_layouts(model, layouts=["packed-block-mask-flex"], seeds=(0,), forward=causal_only, cache=False)
    assert result["packed-block-mask-flex"].verdict == "leaks"


def test_a_model_of_two_layers_is_checked_in_seconds_and_transformers_is_left_as_it_was():
    from transformers import masking_utils
    from transformers.integrations import flex_attention as integration

    before = (integration.compile_friendly_flex_attention, masking_utils.create_block_mask)
    started = time.process_time()
    check_layouts(build_small("qwen2", attn="flex_attention"), layouts=["packed-block-mask-flex"], cache=False)
    assert time.process_time() - started < 5
    assert before == (integration.compile_friendly_flex_attention, masking_utils.create_block_mask)


def test_other_attention_has_no_use_for_the_layout():
    result = check_layouts(build_small("qwen2"), layouts=["packed-block-mask-flex"], seeds=(0,), cache=False)
    assert result["packed-block-mask-flex"].verdict == "unsupported"
    assert "attn_implementation='flex_attention'" in result["packed-block-mask-flex"].why


@pytest.mark.parametrize("case", ["no mask", "documents", "all pairs", "by head", "empty rows"])
def test_plain_flex_attention_equals_torchs_own(case):
    query, key, value = drawn()
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 6, (2, 200), generator=generator).sort(1).values
    bias = torch.randn(2, 4, 200, 200, generator=generator)
    masks = {
        "no mask": lambda: None,
        "documents": lambda: flex_block_mask(ids, block_size=32),
        "all pairs": lambda: create_block_mask(
            lambda b, h, i, j: ids[b, i] == ids[b, j], 2, None, 200, 200, device="cpu", BLOCK_SIZE=32
        ),
        "by head": lambda: create_block_mask(
            lambda b, h, i, j: (i >= j) & (i - j < 7 * (h + 1)), 2, 4, 200, 200, device="cpu", BLOCK_SIZE=32
        ),
        "empty rows": lambda: create_block_mask(
            lambda b, h, i, j: i - j > 50, None, None, 200, 200, device="cpu", BLOCK_SIZE=32
        ),
    }
    options = {
        "score_mod": lambda score, b, h, i, j: torch.tanh(score) + bias[b, h, i, j],
        "block_mask": masks[case](),
        "scale": 0.3,
        "enable_gqa": True,
    }
    assert torch.allclose(
        plain_flex_attention(query, key, value, **options), flex_attention(query, key, value, **options), atol=1e-6
    )


def test_plain_flex_attention_reads_no_block_that_the_mask_does_not_list():
    """A rule that lets everything through is cut to the listed blocks, as the kernel cuts it."""
    query, key, value = drawn()
    everything = flex_block_mask(torch.arange(200).expand(2, -1) // 40, causal=False, block_size=40)
    assert everything.full_kv_num_blocks.unique().tolist() == [1]
    everything.mask_mod = lambda b, h, i, j: torch.ones_like(i, dtype=torch.bool)
    found = plain_flex_attention(query, key, value, block_mask=everything, enable_gqa=True)
    for start in range(0, 200, 40):
        part = slice(start, start + 40)
        own = plain_flex_attention(query[:, :, part], key[:, :, part], value[:, :, part], enable_gqa=True)
        assert torch.allclose(found[:, :, part], own, atol=1e-6)


def test_plain_flex_attention_has_gradients_and_none_over_a_boundary():
    query, key, value = (one.requires_grad_() for one in drawn(40, 40))
    mask = flex_block_mask(torch.tensor([0] * 25 + [1] * 15).expand(2, -1), block_size=16)
    out = plain_flex_attention(query, key, value, block_mask=mask, enable_gqa=True)
    out[:, :, 25:].square().sum().backward()
    assert float(key.grad[:, :, :25].abs().max()) == 0.0
    assert float(key.grad[:, :, 25:].abs().min(2).values.max()) > 0.0
    assert not torch.isnan(query.grad).any()


def test_a_block_mask_of_a_long_row_takes_memory_of_its_blocks_not_of_its_pairs():
    """131,072 tokens: a mask of all pairs would hold 17 thousand million cells; the blocks are 1,024 squared."""
    import gc

    from torch.profiler import ProfilerActivity, profile

    width = 131_072
    ids = (torch.arange(width) // 3_000)[None]
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        mask = flex_block_mask(ids)
    largest = max(event.cpu_memory_usage for event in seen.key_averages())
    assert mask.shape == (1, 1, width, width)
    assert 0 < largest < 256 * 1024 * 1024  # bytes that one kind of operation allocated, all calls together
