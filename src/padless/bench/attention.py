"""Attention over one packed row without a dense mask: the padding-free reference pays for nothing it does not need.

transformers builds a T x T mask for packed rows under ``sdpa``; FlashAttention's variable-length kernels, which the
padding-free baseline uses on a GPU, do not. This runs ``sdpa`` on each sequence of the row on its own (on CUDA in half
precision torch's variable-length kernel, where it is there), so that `packed` costs what its tokens cost.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import pairwise
from typing import Any

import torch

__all__ = ["NAME", "register", "segments"]

NAME = "padless_segments"
"""What the attention is called in ``model.config._attn_implementation``."""

_BOUNDS: ContextVar[tuple[int, ...]] = ContextVar("_BOUNDS", default=())


@contextmanager
def segments(model: Any, bounds: Sequence[int]) -> Iterator[None]:
    """Inside, ``model`` attends within the sequences of one packed row only.

    The boundaries travel beside the model, not through it: many architectures drop the arguments that would carry them.

    Args:
        model: a transformers model.
        bounds: where each sequence begins in the row, and where the last one ends (cu_seqlens).
    """
    register()
    config = model.config
    before, token = config._attn_implementation, _BOUNDS.set(tuple(int(b) for b in bounds))
    config._attn_implementation = NAME
    try:
        yield
    finally:
        config._attn_implementation = before
        _BOUNDS.reset(token)


def register() -> None:
    """Make the attention known to transformers; it gets no mask."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, _forward)


def _forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """``query`` (1, heads, T, size), ``key`` and ``value`` (1, key heads, T, size) -> (1, T, heads, size)."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    bounds = _BOUNDS.get()
    if not bounds or bounds[-1] != query.shape[2]:
        raise RuntimeError(f"{NAME} needs the boundaries of the packed row: run the model inside segments()")
    if _has_kernel(query, dropout):
        return _varlen(query, key, value, bounds, scaling), None
    parts = []
    for first, last in pairwise(bounds):
        cut = slice(first, last)
        parts.append(
            sdpa_attention_forward(
                module, query[:, :, cut], key[:, :, cut], value[:, :, cut], None, dropout, scaling, **kwargs
            )[0]
        )
    return torch.cat(parts, dim=1), None


def _has_kernel(query: torch.Tensor, dropout: float) -> bool:
    if not query.is_cuda or query.dtype not in (torch.bfloat16, torch.float16) or dropout:
        return False
    try:
        from torch.nn.attention.varlen import varlen_attn  # noqa: F401
    except ImportError:
        return False
    return True


def _varlen(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bounds: tuple[int, ...], scaling: float | None
) -> torch.Tensor:
    from torch.nn.attention.varlen import varlen_attn

    offsets = torch.tensor(bounds, dtype=torch.int32, device=query.device)
    longest = max(b - a for a, b in pairwise(bounds))
    q, k, v = (x[0].transpose(0, 1).contiguous() for x in (query, key, value))  # (T, heads, size)
    groups = q.shape[1] // k.shape[1]
    if groups > 1:
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    out: Any = varlen_attn(q, k, v, offsets, offsets, longest, longest, scale=scaling, window_size=(-1, 0))
    values: torch.Tensor = out[0] if isinstance(out, tuple) else out
    return values[None]
