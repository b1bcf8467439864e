"""What single ranks of the loss and accumulation tests run."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from padless import PadlessError, accumulate, regroup
from padless.loss import Denominators, aggregate, denominators, target_mask
from padless.windows import windows

TIMEOUT = timedelta(seconds=40)


def join() -> tuple[int, int]:
    dist.init_process_group("gloo", timeout=TIMEOUT)
    return dist.get_rank(), dist.get_world_size()


def two_epochs_of_windows() -> int:
    """Optimizer steps of two epochs of two items on each rank, a window of two examples."""
    join()
    steps = 0
    for _ in range(2):
        steps += sum(1 for _ in windows([1, 1], examples=2, size=lambda n: (0, n), process_group=dist.group.WORLD))
    return steps


def uneven_windows() -> str:
    """What a rank hears when another one runs out of micro-batches."""
    rank, _ = join()
    try:
        list(windows([1] * (2 + rank), examples=4, size=lambda n: (0, n), process_group=dist.group.WORLD))
    except PadlessError as error:
        return str(error)
    return "no error"


def wrap(model: nn.Module, how: str) -> nn.Module:
    if how == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.model.layers:  # type: ignore[union-attr]
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def full(parameter: Tensor) -> Tensor:
    whole = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
    return whole.detach().clone()


def parameters_of(model: nn.Module) -> dict[str, Tensor]:
    return {name.removeprefix("module."): full(p) for name, p in model.named_parameters()}


def train(
    kind: str,
    how: str,
    batches: list[list[dict[str, Any]]],
    options: dict[str, Any],
    mode: str,
    max_norm: float | None = None,
    spoil: int | None = None,
) -> dict[str, Any]:
    """Optimizer steps on this rank's rows (``batches[step][rank]``) with padless, on a DDP or FSDP2 model."""
    from support.trainers import tiny_model

    rank, _ = join()
    group = dist.group.WORLD
    model = wrap(tiny_model(kind), how)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses, norms, weights, skipped = [], [], [], 0
    for number, step_batches in enumerate(batches):
        batch = step_batches[rank]
        whole = denominators(target_mask(batch["labels"], batch["attention_mask"]), process_group=group)
        step = regroup(batch, process_group=group, **options)
        spoiled = number == spoil
        run = accumulate(
            step, model, optimizer, denominators=whole, mode=mode, max_norm=max_norm, skip_nonfinite=spoil is not None
        )
        for i, micro in enumerate(run):
            weights.append(micro.weight)
            labels = micro.inputs.pop("labels")
            wanted = target_mask(labels, document_ids=micro.document_ids)
            logits = model(**micro.inputs).logits
            from padless.logits import token_losses

            values = token_losses(logits, labels, wanted)
            loss = aggregate(values, wanted, mode, denominators=whole, document_ids=micro.document_ids)
            if spoiled and i == len(step) - 1 and rank == 0:  # the last micro-step, on one rank
                loss = loss * float("nan")
            counts = denominators(wanted, document_ids=micro.document_ids)
            run.backward(loss, targets=Denominators(targets=counts.targets, sequences=counts.sequences))
        skipped += run.skipped
        total = run.loss.clone()
        dist.all_reduce(total)
        losses.append(float(total) / dist.get_world_size())
        norms.append(None if run.grad_norm is None else float(run.grad_norm))
    return {
        "losses": losses,
        "norms": norms,
        "weights": weights,
        "skipped": skipped,
        "parameters": parameters_of(model),
    }
