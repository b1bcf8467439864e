"""FlexAttention on a CPU: torch has no backward pass there, and compiles C++ for each shape; plain PyTorch stands in.

transformers compiles both the mask of every shape and the attention of every shape and mode, minutes for a check of
two layers, and then the training pass raises. What the check asks of a model, which tokens its layers hand to the
attention under which mask, needs no kernel.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from padless.verify.subject import Subject

__all__ = ["NOTE", "plain_flex", "plain_flex_attention"]

NOTE = (
    "FlexAttention was run in plain PyTorch, block mask and all: on a CPU torch has no backward pass for it. The"
    " masks that the model builds and hands on were judged, not the compiled kernel."
)
_INTEGRATION = "transformers.integrations.flex_attention"
_KEPT = "_padless_allowed"
_MASKS = "transformers.masking_utils"


@contextmanager
def plain_flex(subject: Subject) -> Iterator[bool]:
    """FlexAttention of transformers in plain PyTorch inside, where the model uses it on a CPU; yields whether."""
    if subject.attention != "flex_attention" or subject.device.type != "cpu":
        yield False
        return
    replaced: list[tuple[Any, str, Any]] = []
    try:
        for module, name, made in (
            (_INTEGRATION, "compile_friendly_flex_attention", lambda _: plain_flex_attention),
            (_INTEGRATION, "create_block_mask", _uncompiled),
            (_MASKS, "create_block_mask", _uncompiled),
        ):
            holder = sys.modules.get(module)
            if holder is not None and hasattr(holder, name):
                old = getattr(holder, name)
                replaced.append((holder, name, old))
                setattr(holder, name, made(old))
        yield True
    finally:
        for holder, name, old in replaced:
            setattr(holder, name, old)


def plain_flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable[..., Tensor] | None = None,
    block_mask: Any = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    **_: Any,
) -> Tensor:
    """What ``torch.nn.attention.flex_attention.flex_attention`` computes, with gradients on every device.

    The blocks that the mask lists are honoured: a full block is not asked, a block that is not listed is not read.

    Args:
        query: (B, H, T, D).
        key, value: (B, H, S, D); with ``enable_gqa`` fewer heads, which are shared.
        score_mod: of (score, batch, head, query, key), scalars.
        block_mask: a ``BlockMask``, or None for all pairs.
        scale: of the scores; 1 / sqrt(D) by default.

    Returns:
        (B, H, T, D); zero where a query sees nothing.
    """
    if enable_gqa:
        shared = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(shared, 1), value.repeat_interleave(shared, 1)
    precise = torch.promote_types(query.dtype, torch.float32)
    scores = query.to(precise) @ key.to(precise).transpose(-1, -2)  # (B, H, T, S)
    scores = scores * (query.shape[-1] ** -0.5 if scale is None else scale)
    places = [torch.arange(size, device=query.device) for size in scores.shape]
    if score_mod is not None:
        scores = _over_all(score_mod, first=(0,))(scores, *places)
    if block_mask is not None:
        allowed = _allowed(block_mask, places)  # (B, H, T, S)
        scores = scores.masked_fill(~allowed, float("-inf"))
        seen = allowed.any(-1, keepdim=True)
        scores = scores.masked_fill(~seen, 0.0)  # no softmax over nothing, which has no gradient
        return ((scores.softmax(-1) * seen) @ value.to(precise)).to(query.dtype)
    return (scores.softmax(-1) @ value.to(precise)).to(query.dtype)


def _allowed(block_mask: Any, places: list[Tensor]) -> Tensor:
    """The pairs that a block mask lets through: its rule in partial blocks, everything in full ones.

    All layers of a forward pass are given the same mask, so it keeps them.
    """
    rows, heads, queries, keys = (len(place) for place in places)
    known: Tensor | None = getattr(block_mask, _KEPT, None)
    if known is not None and known.shape == (rows, heads, queries, keys):
        return known
    rule = _over_all(block_mask.mask_mod, first=())(*places)  # (B, H, T, S)
    tall, wide = block_mask.BLOCK_SIZE
    partial = _listed(block_mask.kv_num_blocks, block_mask.kv_indices)
    cells = partial.repeat_interleave(tall, -2).repeat_interleave(wide, -1)[..., :queries, :keys]
    allowed = rule & cells.expand(rows, heads, queries, keys)
    if block_mask.full_kv_num_blocks is not None:
        full = _listed(block_mask.full_kv_num_blocks, block_mask.full_kv_indices)
        cells = full.repeat_interleave(tall, -2).repeat_interleave(wide, -1)[..., :queries, :keys]
        allowed = allowed | cells
    setattr(block_mask, _KEPT, allowed)
    return allowed


def _listed(counts: Tensor, indices: Tensor) -> Tensor:
    """(..., Q, K) true where a block of keys is among the first ``counts`` (..., Q) of ``indices`` (..., Q, K)."""
    named = torch.arange(indices.shape[-1], device=indices.device) < counts[..., None]
    return torch.zeros_like(named).scatter(-1, indices.long(), named)


def _over_all(rule: Callable[..., Tensor], *, first: tuple[int, ...]) -> Callable[..., Tensor]:
    """A rule on one (batch, head, query, key) over all of them; ``first`` maps what comes before these four."""
    inner = (*(0 for _ in first),)
    for axis in (3, 2, 1, 0):
        dims = tuple(0 if place == axis else None for place in range(4))
        rule = torch.vmap(rule, in_dims=(*inner, *dims))
    return rule


def _uncompiled(create: Callable[..., Any]) -> Callable[..., Any]:
    def create_block_mask(*args: Any, **options: Any) -> Any:
        return create(*args, **{**options, "_compile": False})

    return create_block_mask
