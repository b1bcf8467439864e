"""A plain PyTorch loop on a tiny model (one process, DDP, FSDP2): the host alone (one wide batch), and with padless."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

import padless
from padless.logits import token_losses
from padless.loss import aggregate, denominators, target_mask
from support.trainers import CountTokens, Outcome, collate, sft_rows, tiny_model, whole

STEPS = 10
LR = 0.3


def losses_of(model: Any, batch: Any) -> torch.Tensor:
    """Per-token losses, (B, W)."""
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    return token_losses(logits, batch["labels"])


def host_loss(values: torch.Tensor, targets: torch.Tensor, mode: str) -> torch.Tensor:
    """What a careful loop writes: this rank's part of the step's loss, times the ranks whose gradients are averaged."""
    if mode != "token-mean":
        return ((values * targets).sum(1) / targets.sum(1)).mean()  # equally many rows on all ranks
    total, ranks = targets.sum().float(), 1
    if dist.is_initialized():
        ranks = dist.get_world_size()
        dist.all_reduce(total)
    return (values * targets).sum() * ranks / total


def shard(model: Any) -> Any:
    """FSDP2: each layer, then the rest."""
    from torch.distributed.fsdp import fully_shard

    for layer in model.model.layers:
        fully_shard(layer)
    return fully_shard(model)


def run(
    kind: str, *, regrouped: bool, mode: str, wrap: str = "ddp", rows: int = 8, high: int = 40, budget: int = 96
) -> Outcome:
    """Ten steps of ``rows`` rows per rank."""
    ranks, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    inner = tiny_model(kind)
    counter = CountTokens(inner)
    model = (
        inner if ranks == 1 else shard(inner) if wrap == "fsdp2" else torch.nn.parallel.DistributedDataParallel(inner)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    group = dist.group.WORLD if ranks > 1 else None
    data = sft_rows(rows * STEPS * ranks, high=high)
    losses, norms = [], []
    for start in range(0, len(data), rows * ranks):
        batch = collate(data[start + rank * rows : start + (rank + 1) * rows])
        targets = target_mask(batch["labels"], batch["attention_mask"])
        if regrouped:
            counts = denominators(targets, process_group=group)
            sync: Any = "microbatch" if wrap == "fsdp2" else "step"
            micro_batches = padless.regroup(batch, budget, process_group=group, sync=sync)
            step = padless.accumulate(micro_batches, model, optimizer, denominators=counts, max_norm=1.0)
            for micro in step:
                held = target_mask(micro.inputs["labels"], document_ids=micro.document_ids)
                values = losses_of(model, micro.inputs)
                step.backward(aggregate(values, held, mode, denominators=counts))  # type: ignore[arg-type]
            loss, norm = step.loss, step.grad_norm
        else:
            loss = host_loss(losses_of(model, batch), targets, mode)
            loss.backward()
            norm = whole(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
            optimizer.step()
            optimizer.zero_grad()
        told = loss.detach().clone()
        if ranks > 1:
            dist.all_reduce(told)
        losses.append(float(told) / ranks)
        norms.append(float(norm))  # type: ignore[arg-type]
    return Outcome(
        losses=losses,
        grad_norms=norms,
        parameters={name: whole(value.detach()).clone() for name, value in inner.named_parameters()},
        logs=[],
        padded_tokens=counter.total,
    )
