"""A loop with Accelerate on a tiny model: the host alone (one wide batch per step), and with padless."""

from __future__ import annotations

from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState

import padless
from padless.loss import aggregate, denominators, target_mask
from support.loop_runs import STEPS, host_loss, losses_of, shard
from support.trainers import CountTokens, Outcome, collate, sft_rows, tiny_model, whole


def run(
    kind: str,
    *,
    regrouped: bool,
    mode: str,
    mixed_precision: str = "no",
    wrap: str = "ddp",
    rows: int = 8,
    high: int = 40,
    budget: int = 96,
) -> Outcome:
    """Ten steps of ``rows`` rows per rank. On CPUs Accelerate leaves its FSDP plugin aside: the model comes sharded."""
    AcceleratorState._reset_state(reset_partial_state=False)  # each run has its own precision
    accelerator = Accelerator(cpu=True, mixed_precision=mixed_precision)
    ranks = accelerator.num_processes
    inner = tiny_model(kind)
    counter = CountTokens(inner)
    data = sft_rows(rows * STEPS * ranks, high=high)
    loader: Any = torch.utils.data.DataLoader(data, batch_size=rows, collate_fn=collate)
    model = shard(inner) if wrap == "fsdp2" and ranks > 1 else accelerator.prepare(inner)
    optimizer, loader = accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.3), loader)
    group = torch.distributed.group.WORLD if ranks > 1 else None
    losses, norms = [], []
    for batch in loader:
        targets = target_mask(batch["labels"], batch["attention_mask"])
        if regrouped:
            counts = denominators(targets, process_group=group)
            micro_batches = padless.regroup(batch, budget, process_group=group)
            step = padless.accumulate(micro_batches, model, optimizer, denominators=counts, max_norm=1.0)
            for micro in step:
                values = losses_of(model, micro.inputs)
                held = target_mask(micro.inputs["labels"], micro.inputs["attention_mask"])
                step.backward(aggregate(values, held, mode, denominators=counts))  # type: ignore[arg-type]
            loss, norm = step.loss, step.grad_norm
        else:
            loss = host_loss(losses_of(model, batch), targets, mode)
            accelerator.backward(loss)
            norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(float(accelerator.reduce(loss.detach().clone(), reduction="mean")))
        norms.append(float(norm))
    return Outcome(
        losses=losses,
        grad_norms=norms,
        parameters={name: whole(value.detach()).clone() for name, value in inner.named_parameters()},
        logs=[],
        padded_tokens=counter.total,
    )


def both(kind: str, mode: str) -> tuple[Outcome, Outcome]:
    """The host alone and with padless, on this rank."""
    return run(kind, regrouped=False, mode=mode), run(kind, regrouped=True, mode=mode)
