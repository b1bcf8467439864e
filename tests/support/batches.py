"""Random batches for the tensor laws: zeros on both sides, holes, prompts and responses, and the reference runs."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from padless.tensors import Field


def random_mask(rng: np.random.Generator, rows: int, width: int, *, holes: bool = True) -> Tensor:
    """(rows, width) masks with real tokens anywhere: padding on either side or both, holes where asked for."""
    mask = np.zeros((rows, width), dtype=np.int64)
    for i in range(rows):
        length = int(rng.integers(1, width + 1))
        start = int(rng.integers(0, width - length + 1))
        mask[i, start : start + length] = 1
        if holes and length > 2 and rng.random() < 0.5:
            inside = rng.integers(start + 1, start + length - 1, size=int(rng.integers(1, 3)))
            mask[i, inside] = 0
    return torch.from_numpy(mask)


def span_of(mask: Tensor) -> Tensor:
    """True from the first to the last real token of each row, holes included."""
    left = mask.cumsum(1) > 0
    right = mask.flip(1).cumsum(1).flip(1) > 0
    return left & right


def token_batch(rng: np.random.Generator, mask: Tensor, *, vocabulary: int = 60) -> dict[str, Any]:
    """Ids, labels, positions, floats of several dtypes, row fields and objects; padding holds rubbish everywhere."""
    rows, width = mask.shape
    draw = torch.Generator().manual_seed(int(rng.integers(1 << 30)))

    def integers(low: int, high: int) -> Tensor:
        return torch.randint(low, high, (rows, width), generator=draw)

    start = (mask.cumsum(1) == 0).sum(1, keepdim=True)
    return {
        "input_ids": integers(2, vocabulary),
        "attention_mask": mask,
        "labels": torch.where(integers(0, 4) > 0, integers(2, vocabulary), -100),
        "position_ids": (torch.arange(width) - start).clamp(min=0),
        "advantages": torch.randn(rows, width, generator=draw),
        "nested": {"flags": integers(0, 2).bool(), "half": torch.randn(rows, width, 3, generator=draw).bfloat16()},
        "rewards": torch.randn(rows, generator=draw),
        "uid": [f"row {i}" for i in range(rows)],
    }


FIELDS = {"advantages": Field(pad=0.0), "flags": Field(), "half": Field(pad=0.0)}


def rl_batch(rng: np.random.Generator, rows: int, prompt: int, response: int) -> dict[str, Any]:
    """Prompts left padded to ``prompt`` columns, responses right padded to ``response``."""
    lengths = rng.integers(1, prompt + 1, rows), rng.integers(1, response + 1, rows)
    column = torch.arange(prompt + response)
    begin, end = (torch.from_numpy(part)[:, None] for part in (prompt - lengths[0], prompt + lengths[1]))
    mask = ((column >= begin) & (column < end)).long()
    draw = torch.Generator().manual_seed(int(rng.integers(1 << 30)))
    return {
        "input_ids": torch.randint(2, 60, mask.shape, generator=draw) * mask,
        "attention_mask": mask,
        "responses": torch.randint(2, 60, (rows, response), generator=draw),
        "response_mask": mask[:, prompt:],
        "old_log_probs": torch.randn(rows, response, generator=draw),
        "advantages": torch.randn(rows, response, generator=draw),
    }


def leaf(batch: Any, key: str) -> Any:
    """``batch["a"]["b"]`` for ``"a.b"``."""
    for part in key.split("."):
        batch = batch[part]
    return batch
