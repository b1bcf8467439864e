"""One optimizer step as online RL hands it over: prompts left padded, responses right padded, in one block."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from padless.bench.workloads import Workload

__all__ = ["Batch", "add_rollout", "make_batch"]

Batch = dict[str, Any]


def make_batch(workload: Workload, *, device: str = "cpu", pad_id: int = 0) -> Batch:
    """The batch of the published method: every row as wide as the longest prompt and response allowed.

    Returns:
        ``input_ids``, ``attention_mask``, ``position_ids`` (N, P + R); ``response_mask``, ``advantages`` (N, R). Each
        sequence has one advantage, drawn from a normal distribution.
    """
    count, prompt_max = len(workload), workload.prompt_max
    ids = np.full((count, workload.width), pad_id, dtype=np.int64)
    mask = np.zeros_like(ids)
    for row, (prompt, response) in enumerate(zip(workload.prompts, workload.responses, strict=True)):
        cells = slice(prompt_max - len(prompt), prompt_max + len(response))
        ids[row, cells] = np.concatenate([prompt, response])
        mask[row, cells] = 1
    response_mask = mask[:, prompt_max:]
    draws = np.random.default_rng([workload.seed, 2]).standard_normal(count).astype(np.float32)
    arrays = {
        "input_ids": ids,
        "attention_mask": mask,
        "position_ids": np.maximum(mask.cumsum(axis=1) - 1, 0),
        "response_mask": response_mask,
        "advantages": draws[:, None] * response_mask.astype(np.float32),
    }
    return {name: torch.from_numpy(array).to(device) for name, array in arrays.items()}


def add_rollout(batch: Batch, log_probs: torch.Tensor, *, seed: int) -> Batch:
    """Give the batch the log-probabilities that the rollout recorded, (N, R).

    An inference engine with somewhat older weights sampled the responses: its log-probabilities are those of the
    policy, ``log_probs``, with noise of 0.1, so that ratios are not all 1 and some are clipped.
    """
    noise = np.random.default_rng([seed, 3]).normal(0.0, 0.1, size=tuple(log_probs.shape)).astype(np.float32)
    old = log_probs + torch.from_numpy(noise).to(log_probs)
    return {**batch, "old_log_probs": torch.where(batch["response_mask"].bool(), old, 0.0)}
