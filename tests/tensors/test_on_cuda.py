"""The same laws with every tensor on a GPU; skipped where there is none."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from padless import compact, flatten, regroup, unflatten
from padless.logits import token_losses
from padless.loss import aggregate, denominators, target_mask
from padless.tensors import LAYOUTS, PACKED_LAYOUTS, flex_block_mask, rlhf
from support.batches import FIELDS, random_mask, rl_batch, token_batch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def on_gpu(batch: Any) -> Any:
    if isinstance(batch, dict):
        return {key: on_gpu(value) for key, value in batch.items()}
    return batch.cuda() if isinstance(batch, torch.Tensor) else batch


@pytest.mark.parametrize("layout", LAYOUTS)
def test_micro_batches_on_the_gpu_are_those_on_the_cpu(layout: str) -> None:
    rng = np.random.default_rng(0)
    batch = token_batch(rng, random_mask(rng, 9, 14, holes=layout not in PACKED_LAYOUTS))
    steps = [regroup(b, 40, layout=layout, fields=FIELDS, multiple_of=4) for b in (batch, on_gpu(batch))]
    for a, b in zip(*steps, strict=True):
        for key in ("input_ids", "labels", "advantages", "position_ids"):
            assert b.inputs[key].is_cuda
            assert torch.equal(a.inputs[key], b.inputs[key].cpu())
        assert torch.equal(a.document_ids, b.document_ids.cpu())
    a, b = (step.restore([m.inputs["advantages"] for m in step]) for step in steps)
    assert torch.equal(a, b.cpu())


def test_responses_compaction_flattening_and_losses() -> None:
    batch = rl_batch(np.random.default_rng(1), 6, 5, 7)
    step = regroup(on_gpu(batch), 40, fields=rlhf(), responses="block")
    restored = step.restore([m.inputs["advantages"] for m in step], span="response")
    assert torch.equal(restored.cpu(), batch["advantages"] * batch["response_mask"])
    small = compact(on_gpu(batch), fields=rlhf())
    assert torch.equal(small.restore(small.batch["input_ids"]).cpu(), batch["input_ids"])
    packed = flatten(on_gpu({key: batch[key] for key in ("input_ids", "attention_mask")}), pad_to=200)
    assert torch.equal(unflatten(packed.inputs["input_ids"], packed).cpu(), batch["input_ids"])
    assert flex_block_mask(packed.boundaries.segment_ids).kv_num_blocks.is_cuda
    labels = packed.inputs["input_ids"]
    wanted = target_mask(labels, document_ids=packed.document_ids)
    values = token_losses(torch.randn(*labels.shape, 64, device="cuda"), labels, wanted)
    loss = aggregate(values, wanted, denominators=denominators(wanted, document_ids=packed.document_ids))
    assert loss.is_cuda
    assert torch.isfinite(loss)
