"""Log-probabilities of the tokens that are there, without a float32 copy of the logits."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["gather_log_probs", "token_log_probs"]

_CELLS = {"cpu": 1 << 19}
"""Logits worked on at once, by device: on the CPU as many as its caches hold (2 MiB of float32)."""

_MOST_CELLS = 1 << 24
"""Elsewhere: 64 MiB."""


def token_log_probs(logits: torch.Tensor, input_ids: torch.Tensor, *, columns: int | None = None) -> torch.Tensor:
    """Log-probability of each token under the logits of the token before it; 0 for the first of a row.

    Values sit at the token they are about, like every response field of a batch.

    Args:
        logits: (rows, width, vocabulary).
        input_ids: (rows, width).
        columns: only of the last so many tokens of each row; ``None``: of all.

    Returns:
        (rows, width), or (rows, columns), in float32 (float64 for float64 logits).

    >>> token_log_probs(torch.zeros(1, 3, 4), torch.tensor([[0, 1, 2]]))
    tensor([[ 0.0000, -1.3863, -1.3863]])
    >>> token_log_probs(torch.zeros(1, 3, 4), torch.tensor([[0, 1, 2]]), columns=2)
    tensor([[-1.3863, -1.3863]])
    """
    width = input_ids.shape[1]
    columns = width if columns is None else columns
    first = max(1, width - columns)  # the first token that has one before it
    values = gather_log_probs(logits, input_ids[:, first:], start=first - 1)
    return torch.nn.functional.pad(values, (columns - values.shape[1], 0))


def gather_log_probs(logits: torch.Tensor, targets: torch.Tensor, *, start: int = 0) -> torch.Tensor:
    """``log_softmax(logits[:, start : start + n])`` (rows, n, vocabulary) at ``targets`` (rows, n).

    Forward and backward go through the logits in pieces, where they are: slicing them first would copy them.
    """
    apply: Any = _Gather.apply
    values: torch.Tensor = apply(logits, targets, start)
    return values


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, targets: torch.Tensor, start: int) -> torch.Tensor:
        exact = torch.promote_types(logits.dtype, torch.float32)
        used = logits[:, start : start + targets.shape[1]]
        normalizer = torch.empty(targets.shape, dtype=exact, device=logits.device)
        for part in _parts(used):
            normalizer[part] = torch.logsumexp(used[part].to(exact), dim=-1)
        ctx.save_for_backward(logits, targets, normalizer)
        ctx.start = start
        return used.gather(2, targets[..., None])[..., 0].to(exact) - normalizer

    @staticmethod
    def backward(ctx: Any, *given: torch.Tensor) -> Any:
        logits, targets, normalizer = ctx.saved_tensors
        start, stop = ctx.start, ctx.start + targets.shape[1]
        upstream = given[0]
        gradient = torch.empty_like(logits)
        gradient[:, :start] = 0
        gradient[:, stop:] = 0
        used, to = logits[:, start:stop], gradient[:, start:stop]
        for part in _parts(used):
            # In float32 and float64 the work is done in the gradient's own place.
            share = to[part] if to.dtype == normalizer.dtype else torch.empty_like(to[part], dtype=normalizer.dtype)
            torch.sub(used[part].to(normalizer.dtype), normalizer[part][..., None], out=share)
            share.exp_().mul_(-upstream[part][..., None])
            share.scatter_add_(2, targets[part][..., None], upstream[part][..., None])
            if to.dtype != normalizer.dtype:
                to[part] = share
        return gradient, None, None


def _parts(logits: torch.Tensor) -> list[tuple[slice, slice]]:
    """Rows and columns of each piece."""
    rows, width, vocabulary = logits.shape
    lines = max(1, _CELLS.get(logits.device.type, _MOST_CELLS) // max(1, vocabulary))
    high, wide = max(1, lines // max(1, width)), max(1, min(lines, width))
    return [
        (slice(row, row + high), slice(column, column + wide))
        for row in range(0, rows, high)
        for column in range(0, width, wide)
    ]
