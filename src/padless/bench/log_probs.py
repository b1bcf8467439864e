"""Log-probabilities of the tokens that are there, without a float32 copy of the logits."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["gather_log_probs", "token_log_probs"]

_CELLS = 1 << 24
"""Logits converted to float32 at once: 64 MiB."""


def token_log_probs(logits: torch.Tensor, input_ids: torch.Tensor) -> torch.Tensor:
    """Log-probability of each token under the logits of the token before it; 0 for the first of a row.

    Values sit at the token they are about, like every response field of a batch.

    Args:
        logits: (rows, width, vocabulary).
        input_ids: (rows, width).

    Returns:
        (rows, width) in float32 (float64 for float64 logits).

    >>> token_log_probs(torch.zeros(1, 3, 4), torch.tensor([[0, 1, 2]]))
    tensor([[ 0.0000, -1.3863, -1.3863]])
    """
    values = gather_log_probs(logits[:, :-1], input_ids[:, 1:])
    return torch.cat([values.new_zeros(len(values), 1), values], dim=1)


def gather_log_probs(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """``log_softmax(logits)`` (..., V) at ``targets`` (...): forward and backward in slices."""
    apply: Any = _Gather.apply
    values: torch.Tensor = apply(logits.reshape(-1, logits.shape[-1]), targets.reshape(-1))
    return values.view(targets.shape)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        exact = torch.promote_types(logits.dtype, torch.float32)
        normalizer = torch.empty(len(logits), dtype=exact, device=logits.device)
        for part in _parts(logits):
            normalizer[part] = torch.logsumexp(logits[part].to(exact), dim=-1)
        ctx.save_for_backward(logits, targets, normalizer)
        return logits.gather(1, targets[:, None])[:, 0].to(exact) - normalizer

    @staticmethod
    def backward(ctx: Any, *given: torch.Tensor) -> Any:
        logits, targets, normalizer = ctx.saved_tensors
        upstream = given[0]
        gradient = torch.empty_like(logits)
        for part in _parts(logits):
            share = torch.exp(logits[part].to(normalizer.dtype) - normalizer[part, None])
            share *= -upstream[part, None]
            share.scatter_add_(1, targets[part, None], upstream[part, None])
            gradient[part] = share
        return gradient, None


def _parts(logits: torch.Tensor) -> list[slice]:
    size = max(1, _CELLS // max(1, logits.shape[-1]))
    return [slice(first, first + size) for first in range(0, len(logits), size)]
