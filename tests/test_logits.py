"""Log-probabilities and entropies without logits for padding equal those from all logits, gradients included."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from padless import PadlessError, flatten
from padless.logits import cross_entropy, log_probs, select_before_head, token_losses
from padless.loss import target_mask
from support.batches import random_mask, rl_batch, token_batch
from support.trainers import tiny_model


def model_of(kind: str) -> Any:
    """``gemma2`` caps its logits and ``cohere`` scales them, after the output layer."""
    if kind in ("qwen2", "jamba"):
        return tiny_model(kind)
    from transformers import AutoConfig, AutoModelForCausalLM

    common = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "use_cache": False,
    }
    torch.manual_seed(0)
    capped = {"final_logit_softcapping": 0.5} if kind == "gemma2" else {"logit_scale": 0.25}
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **common, **capped)).float()


def stock(model: Any, inputs: dict[str, Any], mask: torch.Tensor, temperature: float) -> tuple[Any, Any]:
    logits = model(**inputs).logits[:, :-1].float() / temperature
    normal = logits.log_softmax(-1)
    picked = normal.gather(-1, inputs["input_ids"][:, 1:, None])[..., 0]
    spread = -(normal.exp() * normal).sum(-1)
    return tuple(torch.nn.functional.pad(v * mask[:, 1:], (1, 0)) for v in (picked, spread))  # type: ignore[return-value]


@pytest.mark.parametrize("kind", ["qwen2", "jamba", "gemma2", "cohere"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_and_entropy_equal_those_from_all_logits(kind: str, temperature: float) -> None:
    model = model_of(kind)
    batch = rl_batch(np.random.default_rng(0), 4, 4, 6)
    inputs = {key: batch[key] for key in ("input_ids", "attention_mask")}
    mask = torch.nn.functional.pad(batch["response_mask"], (4, 0))
    expected = stock(model, inputs, mask, temperature)
    weights = torch.randn_like(expected[0])
    right = torch.autograd.grad(((expected[0] + expected[1]) * weights).sum(), list(model.parameters()))
    got = log_probs(model, inputs, mask, temperature=temperature, entropy=True)
    assert got.entropy is not None
    torch.testing.assert_close(got.values, expected[0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(got.entropy, expected[1], atol=1e-5, rtol=1e-5)
    grads = torch.autograd.grad(((got.values + got.entropy) * weights).sum(), list(model.parameters()))
    difference = torch.cat([(a - b).flatten() for a, b in zip(grads, right, strict=True)])
    assert difference.norm() <= 1e-5 * torch.cat([g.flatten() for g in right]).norm()


def test_logits_are_built_for_targets_alone() -> None:
    model = tiny_model("qwen2")
    sizes: list[tuple[int, ...]] = []
    model.get_output_embeddings().register_forward_hook(lambda _, __, out: sizes.append(tuple(out.shape)))
    batch = rl_batch(np.random.default_rng(1), 4, 4, 6)
    mask = torch.nn.functional.pad(batch["response_mask"], (4, 0))
    log_probs(model, {key: batch[key] for key in ("input_ids", "attention_mask")}, mask)
    assert sizes == [(1, int(mask.sum()), 64)]


def test_a_micro_batch_without_targets_runs_and_reaches_every_parameter() -> None:
    model = tiny_model("qwen2")
    inputs = {"input_ids": torch.ones(2, 5, dtype=torch.long), "attention_mask": torch.ones(2, 5, dtype=torch.long)}
    got = log_probs(model, inputs, torch.zeros(2, 5), entropy=True)
    assert torch.equal(got.values, torch.zeros(2, 5))
    (got.values.sum() + got.entropy.sum()).backward()
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())


def test_packed_rows_and_wrapped_models() -> None:
    model = tiny_model("qwen2")
    rng = np.random.default_rng(2)
    batch = token_batch(rng, random_mask(rng, 5, 8, holes=False))
    packed = flatten({key: batch[key] for key in ("input_ids", "attention_mask", "labels")})
    labels = packed.inputs["labels"]
    call = {key: value for key, value in packed.inputs.items() if key != "labels"}
    expected = token_losses(model(**call).logits, labels)

    class Wrapper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = model

        def forward(self, **inputs: Any) -> Any:
            return self.module(**inputs)

    for outer in (model, Wrapper()):
        torch.testing.assert_close(cross_entropy(outer, packed.inputs, labels), expected, atol=1e-5, rtol=1e-5)
    mask = target_mask(labels, document_ids=packed.document_ids)
    torch.testing.assert_close(cross_entropy(model, packed.inputs, labels, mask), expected, atol=1e-5, rtol=1e-5)


def test_what_cannot_be_done_is_refused() -> None:
    model = tiny_model("qwen2")
    inputs = {"input_ids": torch.ones(2, 3, dtype=torch.long)}
    with pytest.raises(PadlessError, match="row 1: its first token is marked"):
        log_probs(model, inputs, torch.tensor([[0, 1, 1], [1, 1, 1]]))
    with pytest.raises(PadlessError, match="the mask has shape"):
        log_probs(model, inputs, torch.ones(2, 4))
    with pytest.raises(PadlessError, match="does not name its output layer"):
        log_probs(nn.Linear(2, 2), inputs, torch.tensor([[0, 1, 1], [0, 1, 1]]))
    with pytest.raises(PadlessError, match="ran 0 times"), select_before_head(model, torch.zeros(1).long(), (2, 3)):
        pass
    wrong = model.model.layers[0].mlp.down_proj  # not (B, W, features of the head): fails in the output, not in silence
    with pytest.raises((PadlessError, RuntimeError)):
        log_probs(model, inputs, torch.tensor([[0, 1, 1], [0, 1, 1]]), head=wrong)
