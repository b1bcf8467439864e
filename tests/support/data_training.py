"""A small model trained with TokenBudgetSampler: alone, on ranks, killed, resumed."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from padless.data import PaddedCollator, TokenBudgetSampler

VOCABULARY = 17


def rows(count: int = 90) -> list[dict[str, Any]]:
    rng = np.random.default_rng(0)
    return [{"input_ids": rng.integers(0, VOCABULARY, n).tolist()} for n in rng.integers(2, 40, count)]


class Recurrent(nn.Module):
    """A causal recurrent model: right padding cannot reach the loss, a wrong step would."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCABULARY, 12)
        self.mix = nn.GRU(12, 12, batch_first=True)
        self.head = nn.Linear(12, VOCABULARY)

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        """Sum over the targets."""
        logits = self.head(self.mix(self.embed(batch["input_ids"]))[0])
        return nn.functional.cross_entropy(
            logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten(), reduction="sum"
        )


def sampler_of(data: list[dict[str, Any]], grouping: str, **ranks: int) -> TokenBudgetSampler:
    lengths = [len(row["input_ids"]) for row in data]
    return TokenBudgetSampler(
        lengths,
        targets=[n - 1 for n in lengths],
        token_budget=60,
        sequences_per_step=16,
        grouping=grouping,
        seed=4,
        **ranks,
    )


def train(folder: str, grouping: str, epochs: int = 2, die_after: int | None = None) -> dict[str, Any]:
    """Train from the folder's checkpoint, if there is one; SIGKILL on every rank in mid-step."""
    distributed = int(os.environ.get("WORLD_SIZE", 1)) > 1
    if distributed:
        dist.init_process_group("gloo")
    data, model = rows(), Recurrent()
    sampler = sampler_of(data, grouping)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    _load(Path(folder), model, optimizer, sampler)
    seen: list[tuple[int, int]] = []
    done = 0
    while sampler.epoch < epochs:
        loader = torch.utils.data.DataLoader(sampler.rows(data), batch_sampler=sampler, collate_fn=PaddedCollator())
        for batch in sampler.follow(loader):
            (model.loss(batch) / max(sampler.current.step_targets, 1)).backward()
            seen += [
                (sampler.current.epoch, i) for i, w in zip(sampler.current, sampler.current.weights, strict=True) if w
            ]
            if sampler.at_step_boundary:
                _sum_gradients(model, distributed)
                optimizer.step()
                optimizer.zero_grad()
            done += 1
            if die_after is not None:
                _save(Path(folder), model, optimizer, sampler, distributed)
                if done >= die_after and not sampler.at_step_boundary:
                    os.kill(os.getpid(), signal.SIGKILL)
    return {"model": model.state_dict(), "seen": seen, "position": sampler.state_dict()["position"]}


def _sum_gradients(model: nn.Module, distributed: bool) -> None:
    for parameter in model.parameters():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        if distributed:
            dist.all_reduce(parameter.grad)


def _save(folder: Path, model: nn.Module, optimizer: Any, sampler: TokenBudgetSampler, distributed: bool) -> None:
    """Written by rank 0; in the middle of a step the gradients of all ranks so far belong to it."""
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()]
    if distributed:
        for gradient in gradients:
            dist.all_reduce(gradient)
    if not distributed or dist.get_rank() == 0:
        state = {
            "model": model.state_dict(), "optimizer": optimizer.state_dict(), "sampler": sampler.state_dict(),
            "gradients": gradients,
        }  # fmt: skip
        torch.save(state, folder / "new.pt")
        (folder / "new.pt").replace(folder / "checkpoint.pt")
    if distributed:
        dist.barrier()


def _load(folder: Path, model: nn.Module, optimizer: Any, sampler: TokenBudgetSampler) -> None:
    if not (folder / "checkpoint.pt").exists():
        return
    state = torch.load(folder / "checkpoint.pt", weights_only=False)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    sampler.load_state_dict(state["sampler"])
    if sampler.rank == 0:
        for parameter, gradient in zip(model.parameters(), state["gradients"], strict=True):
            parameter.grad = gradient


def build_unlike(seeds: list[int]) -> str:
    """Every rank builds a sampler with a seed of its own; the refusal, or nothing."""
    dist.init_process_group("gloo")
    try:
        sampler = TokenBudgetSampler([3, 4, 5, 6], token_budget=9, sequences_per_step=2, seed=seeds[dist.get_rank()])
    except ValueError as error:
        return str(error)
    return " ".join(str(i) for batch in sampler for i, w in zip(batch, batch.weights, strict=True) if w)
