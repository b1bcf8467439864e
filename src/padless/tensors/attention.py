"""Attention masks of packed rows: bool, additive, and FlexAttention's, from the sequence of each cell."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

from padless.errors import PadlessError, choose

__all__ = ["block_mask", "flex_block_mask", "mask_mod"]

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def block_mask(
    document_ids: Tensor,
    *,
    kind: Literal["bool", "additive"] = "bool",
    dtype: torch.dtype = torch.float32,
    causal: bool = True,
    window: int | None = None,
    keys: Tensor | None = None,
) -> Tensor:
    """A (B, 1, T, T) mask that lets each token see its own sequence only.

    Cells of document -1 see each other, so that no softmax runs over nothing. Models with a
    sliding window need ``window`` here: a 4-D mask replaces theirs.

    Args:
        document_ids: (B, T), the sequence of each cell.
        kind: ``"bool"`` (true: may attend; sdpa alone reads it so) or ``"additive"`` (0 and the dtype's minimum).
        dtype: of the additive mask: the model's.
        causal: tokens see no later ones.
        window: tokens see this many positions, themselves included.
        keys: (B, T), false where a cell may not be attended to: a hole in a row's mask.

    >>> block_mask(torch.tensor([[0, 0, 1, 1, 1]])).sum().item()
    9
    """
    choose("kind", kind, ("bool", "additive"))
    if document_ids.ndim != 2:
        raise PadlessError(f"document_ids have shape {tuple(document_ids.shape)}; expected (rows, T)")
    allowed = document_ids[:, :, None] == document_ids[:, None, :]  # (B, T, T)
    place = torch.arange(document_ids.shape[1], device=document_ids.device)
    distance = place[:, None] - place  # (T, T)
    if causal:
        allowed &= distance >= 0
    if window is not None:
        allowed &= distance.abs() < window
    if keys is not None:
        allowed &= keys[:, None, :].bool()
        allowed |= ~allowed.any(-1, keepdim=True) & (distance == 0)  # no softmax over nothing
    allowed = allowed[:, None]
    if kind == "bool":
        return allowed
    return torch.zeros(allowed.shape, dtype=dtype, device=allowed.device).masked_fill_(~allowed, torch.finfo(dtype).min)


def mask_mod(document_ids: Tensor, *, causal: bool = True, window: int | None = None) -> MaskMod:
    """The same rule as a FlexAttention ``mask_mod(batch, head, query, key)``; ``document_ids`` (B, T)."""

    def allowed(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        same = document_ids[batch, query] == document_ids[batch, key]
        if causal:
            same = same & (query >= key)
        if window is not None:
            same = same & ((query - key).abs() < window)
        return same

    return allowed


def flex_block_mask(
    document_ids: Tensor, *, causal: bool = True, window: int | None = None, block_size: int = 128
) -> Any:
    """A FlexAttention ``BlockMask`` from the documents' edges alone: memory grows with (T / block_size) squared.

    ``torch.nn.attention.flex_attention.create_block_mask`` evaluates the rule on all T x T pairs; sequences are
    contiguous, so each block of queries sees one contiguous range of key blocks.

    Args:
        document_ids: (B, T), the sequence of each cell, each sequence contiguous.
        causal: tokens see no later ones.
        window: tokens see this many positions, themselves included.
        block_size: of queries and keys.
    """
    from torch.nn.attention.flex_attention import BlockMask

    rows, width = document_ids.shape
    device = document_ids.device
    begins = torch.ones_like(document_ids, dtype=torch.bool)
    begins[:, 1:] = document_ids[:, 1:] != document_ids[:, :-1]
    place = torch.arange(width, device=device).expand(rows, width)
    start = torch.where(begins, place, 0).cummax(1).values  # (B, T) where the cell's sequence begins
    ends = torch.ones_like(begins)
    ends[:, :-1] = begins[:, 1:]
    stop = torch.where(ends, place, width).flip(1).cummin(1).values.flip(1)  # (B, T) its last cell
    low = start if window is None else torch.maximum(start, place - window + 1)
    high = place if causal else stop
    if window is not None and not causal:
        high = torch.minimum(stop, place + window - 1)
    blocks = -(-width // block_size)
    first, last = low[:, ::block_size], high[:, block_size - 1 :: block_size]  # of each query block: (B, Q)
    if last.shape[1] < blocks:
        last = torch.cat([last, high[:, -1:]], dim=1)
    key = torch.arange(blocks, device=device)
    touched = (key >= (first // block_size)[..., None]) & (key <= (last // block_size)[..., None])  # (B, Q, K)
    # A pair of blocks is full where even its extreme query still sees every key.
    tail = (torch.arange(1, blocks + 1, device=device) * block_size - 1).clamp(max=width - 1)
    most_low, least_high = low[:, tail], high[:, ::block_size]  # (B, Q)
    full = (key * block_size >= most_low[..., None]) & (tail <= least_high[..., None]) & touched
    if width % block_size:
        full[:, -1] = False
        full[:, :, -1] = False
    partial = touched & ~full

    def listed(flags: Tensor) -> tuple[Tensor, Tensor]:
        order = flags.to(torch.int8).argsort(dim=-1, descending=True, stable=True).to(torch.int32)
        return flags.sum(-1, dtype=torch.int32)[:, None], order[:, None]

    return BlockMask.from_kv_blocks(
        *listed(partial),
        *listed(full),
        BLOCK_SIZE=block_size,
        mask_mod=mask_mod(document_ids, causal=causal, window=window),
        seq_lengths=(width, width),
    )
