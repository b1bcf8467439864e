"""Batches on their way from a loader's worker to the training process."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.data import get_worker_info

__all__ = ["in_one_block"]

_ALIGNED = 64  # bytes: every tensor starts where any type may


def in_one_block(batch: dict[str, Any]) -> dict[str, Any]:
    """A batch whose tensors lie in one block of memory, if this is a worker process; otherwise as it is.

    A worker sends each storage as a file of its own, and the training process fetches each with a handshake of about a
    third of a millisecond, in which nothing else runs there. One block is one handshake, whatever the batch holds.
    """
    if get_worker_info() is None:
        return batch
    plain = {key: value for key, value in batch.items() if _is_plain(value)}
    if len(plain) < 2:
        return batch
    starts, total = [], 0
    for tensor in plain.values():
        starts.append(total)
        total += -(-tensor.numel() * tensor.element_size() // _ALIGNED) * _ALIGNED
    block = torch.empty(total, dtype=torch.uint8)
    moved = {}
    for (key, tensor), start in zip(plain.items(), starts, strict=True):
        size = tensor.numel() * tensor.element_size()
        moved[key] = block[start : start + size].view(tensor.dtype).view(tensor.shape)
        moved[key].copy_(tensor)
    return {**batch, **moved}


def _is_plain(value: Any) -> bool:
    return (
        type(value) is Tensor
        and value.device.type == "cpu"
        and value.layout is torch.strided
        and value.numel() > 0
        and not value.requires_grad
        and not value.is_quantized
    )
