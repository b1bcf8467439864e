"""regroup with a real report: what leaks is refused, what is exact is taken."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from padless import PadlessError, regroup
from padless.verify import check_layouts
from support.tiny_models import JAMBA, QWEN2

LAYOUTS = ("right-padded", "right-padded-no-mask", "packed-position-ids")


def built(config: dict[str, Any]) -> PreTrainedModel:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))


def batch_of(*lengths: int) -> dict[str, torch.Tensor]:
    width = max(lengths)
    mask = (torch.arange(width) < torch.tensor(lengths)[:, None]).long()  # (N, W)
    return {"input_ids": mask * 5, "attention_mask": mask}


@pytest.mark.slow
def test_a_hybrid_is_not_packed_unless_that_is_demanded_and_a_transformer_is() -> None:
    batch = batch_of(5, 2, 7)
    jamba = check_layouts(built(JAMBA), layouts=LAYOUTS)
    assert regroup(batch, 16, layout="auto", report=jamba).layout.startswith("right-padded")
    with pytest.raises(PadlessError, match="packed-position-ids") as refused:
        regroup(batch, 16, layout="packed", report=jamba)
    assert "right-padded" not in str(refused.value)  # the layout asked for, not the whole report
    assert regroup(batch, 16, layout="packed", report=jamba, unsafe=True).unsafe
    qwen2 = check_layouts(built(QWEN2), layouts=LAYOUTS)
    packed = regroup(batch, 16, layout="packed", report=qwen2)
    assert packed.layout == "packed-position-ids"
    assert not packed.unsafe
