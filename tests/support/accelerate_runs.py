"""A loop with Accelerate on a tiny model: the host alone (one wide batch per step), and with padless."""

from __future__ import annotations

from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState

import padless
from padless.logits import token_losses
from padless.loss import aggregate, denominators, target_mask
from support.trainers import CountTokens, Outcome, collate, sft_rows, tiny_model

STEPS = 10


def losses_of(model: Any, batch: Any) -> torch.Tensor:
    """Per-token losses, (B, W)."""
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    return token_losses(logits, batch["labels"])


def run(kind: str, *, regrouped: bool, mode: str, mixed_precision: str = "no") -> Outcome:
    """Ten steps of eight rows per rank."""
    AcceleratorState._reset_state(reset_partial_state=False)  # each run has its own precision
    accelerator = Accelerator(cpu=True, mixed_precision=mixed_precision)
    ranks = accelerator.num_processes
    inner = tiny_model(kind)
    counter = CountTokens(inner)
    loader: Any = torch.utils.data.DataLoader(sft_rows(8 * STEPS * ranks), batch_size=8, collate_fn=collate)
    model, optimizer, loader = accelerator.prepare(inner, torch.optim.SGD(inner.parameters(), lr=0.3), loader)
    group = torch.distributed.group.WORLD if ranks > 1 else None
    losses, norms = [], []
    for batch in loader:
        targets = target_mask(batch["labels"], batch["attention_mask"])
        if regrouped:
            counts = denominators(targets, process_group=group)
            step = padless.accumulate(
                padless.regroup(batch, 96, process_group=group), model, optimizer, denominators=counts, max_norm=1.0
            )
            for micro in step:
                values = losses_of(model, micro.inputs)
                held = target_mask(micro.inputs["labels"], micro.inputs["attention_mask"])
                step.backward(aggregate(values, held, mode, denominators=counts))  # type: ignore[arg-type]
            loss, norm = step.loss, step.grad_norm
        else:
            values = losses_of(model, batch)
            if mode == "token-mean":
                loss = (values * targets).sum() / targets.sum()
            else:
                loss = ((values * targets).sum(1) / targets.sum(1)).mean()
            accelerator.backward(loss)
            norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(float(accelerator.reduce(loss.detach().clone(), reduction="mean")))
        norms.append(float(norm))
    return Outcome(
        losses=losses,
        grad_norms=norms,
        parameters={name: value.detach().clone() for name, value in inner.named_parameters()},
        logs=[],
        padded_tokens=counter.total,
    )


def both(kind: str, mode: str) -> tuple[Outcome, Outcome]:
    """The host alone and with padless, on this rank."""
    return run(kind, regrouped=False, mode=mode), run(kind, regrouped=True, mode=mode)
