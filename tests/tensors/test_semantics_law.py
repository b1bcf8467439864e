"""The semantics law on random batches, in float64, on a small causal model that honours masks and positions."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from padless import regroup
from padless.logits import token_losses
from padless.loss import MODES, aggregate, denominators, target_mask
from support.batches import random_mask, span_of, token_batch

LAYOUTS = ("right-padded", "packed-position-ids", "packed-block-mask-bool")


class Causal(nn.Module):
    """Each token reads a decaying sum of its sequence so far; masked tokens are not read."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(60, 6, dtype=torch.float64)
        self.head = nn.Linear(6, 60, dtype=torch.float64)

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, position_ids: Tensor | None = None, **_: Any
    ) -> Tensor:
        place = torch.arange(input_ids.shape[1])
        distance = place[:, None] - place  # (T, T)
        read = (distance >= 0).expand(len(input_ids), -1, -1)
        if attention_mask is not None and attention_mask.ndim == 4:
            read = attention_mask[:, 0]
        elif attention_mask is not None:
            read = read & (attention_mask > 0)[:, None]
        elif position_ids is not None:
            segment = (position_ids == position_ids[:, :1]).cumsum(1)
            read = read & (segment[:, :, None] == segment[:, None])
        mixed = (read * 0.7 ** distance.clamp(min=0).double()) @ self.embedding(input_ids)
        return self.head(torch.tanh(mixed))


MODEL = Causal()


def alone(batch: dict[str, Any], mode: Any, norm: float | None) -> tuple[float, Tensor]:
    inside = span_of(batch["attention_mask"])
    rows = [{key: batch[key][i][inside[i]][None] for key in batch} for i in range(len(inside))]
    whole = denominators([target_mask(row["labels"]) for row in rows])
    parts = []
    for row in rows:
        wanted = target_mask(row["labels"])
        values = token_losses(MODEL(row["input_ids"], row["attention_mask"]), row["labels"], wanted)
        parts.append(aggregate(values, wanted, mode, denominators=whole, norm=norm))
    return finish(parts)


def finish(parts: list[Tensor]) -> tuple[float, Tensor]:
    total = torch.stack(parts).sum()
    grads = torch.autograd.grad(total, list(MODEL.parameters()))
    return total.item(), torch.cat([grad.flatten() for grad in grads])


@given(
    st.integers(0, 1 << 30),
    st.sampled_from(LAYOUTS),
    st.sampled_from(MODES),
    st.sampled_from(["balanced", "greedy", "fixed"]),
    st.sampled_from([1, 3]),
)
@settings(max_examples=150)
def test_no_budget_layout_method_or_mode_changes_the_loss_or_the_gradient_of_a_step(
    seed: int, layout: str, mode: Any, method: str, multiple: int
) -> None:
    rng = np.random.default_rng(seed)
    mask = random_mask(rng, int(rng.integers(1, 8)), int(rng.integers(1, 12)), holes=layout != "packed-position-ids")
    batch = token_batch(rng, mask)
    batch = {key: batch[key] for key in ("input_ids", "attention_mask", "labels")}
    norm = 3.0 if mode.endswith("norm") else None
    whole = denominators(target_mask(batch["labels"], mask))
    method = "best-fit-decreasing" if layout.startswith("packed") else method
    parts = []
    for micro in regroup(batch, int(rng.integers(12, 40)), layout=layout, method=method, multiple_of=multiple):
        labels = micro.inputs.pop("labels")
        wanted = target_mask(labels, document_ids=micro.document_ids)
        values = token_losses(MODEL(**micro.inputs), labels, wanted)
        parts.append(aggregate(values, wanted, mode, denominators=whole, document_ids=micro.document_ids, norm=norm))
    loss, gradient = finish(parts)
    expected, right = alone(batch, mode, norm)
    assert abs(loss - expected) <= 1e-12 * max(abs(expected), 1.0)
    assert (gradient - right).norm() <= 1e-12 * max(float(right.norm()), 1.0)
