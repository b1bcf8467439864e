"""What ranks say to each other: counts, agreement, and the rows that move."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["sum_over_ranks"]


def communication_device(group: Any) -> torch.device:
    """Where the group's backend wants its tensors: the current accelerator for NCCL and its like, else the CPU."""
    backend = str(dist.get_backend(group))
    if "gloo" in backend or "mpi" in backend:
        return torch.device("cpu")
    return torch.device(torch.accelerator.current_accelerator() or "cpu")


def sum_over_ranks(values: Tensor, group: Any) -> tuple[Tensor, int]:
    """The sum of ``values`` over the group's ranks, on the values' device, and the number of ranks."""
    moved = values.to(communication_device(group), copy=True)
    dist.all_reduce(moved, group=group)
    return moved.to(values.device), dist.get_world_size(group)
