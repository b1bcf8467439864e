"""What single ranks of the loss and accumulation tests run."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from padless import PadlessError, accumulate, regroup
from padless.logits import token_losses
from padless.loss import aggregate, denominators, target_mask
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
    rank = dist.get_rank()
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


def everything(steps: list[list[dict[str, Any]]]) -> dict[str, Any]:
    """Training runs on this rank's rows (``steps[step][rank]``), by name, and what a rank hears of uneven windows."""
    rank, ranks = join()
    batches = [step[rank] for step in steps]
    found = {
        "qwen2 ddp": train("qwen2", "ddp", batches),
        "qwen2 fsdp2": train("qwen2", "fsdp2", batches),
        "qwen2 never": train("qwen2", "ddp", batches, exchange="never"),
        "jamba ddp" if ranks == 2 else "jamba fsdp2": train("jamba", "ddp" if ranks == 2 else "fsdp2", batches),
        "skip fsdp2": train("qwen2", "fsdp2", batches, spoil=True),
        "clip fsdp2": train("qwen2", "fsdp2", batches, max_norm=0.05, mode="seq-mean-token-mean", sync="microbatch"),
        "windows": uneven_windows(),
    }
    if ranks == 2:
        found["skip ddp"] = train("qwen2", "ddp", batches, spoil=True)
        found["clip ddp"] = train("qwen2", "ddp", batches, max_norm=0.05, mode="seq-mean-token-mean", sync="microbatch")
    dist.destroy_process_group()
    return found


def train(
    kind: str,
    how: str,
    batches: list[dict[str, Any]],
    *,
    mode: Any = "token-mean",
    max_norm: float | None = None,
    spoil: bool = False,
    sync: Any = "step",
    exchange: Any = "rows",
) -> dict[str, Any]:
    """Optimizer steps on this rank's rows, with padless, on a DDP or FSDP2 model.

    With ``spoil``, the loss of the last micro-step of each step is NaN on rank 0.
    """
    from support.trainers import tiny_model

    group = dist.group.WORLD
    model = wrap(tiny_model(kind), how)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    out: dict[str, Any] = {"losses": [], "norms": [], "weights": [], "skipped": 0, "kept": []}
    for batch in batches:
        whole = denominators(target_mask(batch["labels"], batch["attention_mask"]), process_group=group)
        step = regroup(batch, 24, process_group=group, exchange=exchange)
        run = accumulate(
            step,
            model,
            optimizer,
            denominators=whole,
            mode=mode,
            max_norm=max_norm,
            sync=sync,
            skip_nonfinite=spoil,
        )
        out["kept"].append([])
        for i, micro in enumerate(run):
            labels = micro.inputs.pop("labels")
            wanted = target_mask(labels, document_ids=micro.document_ids)
            values = token_losses(model(**micro.inputs).logits, labels, wanted)
            loss = aggregate(values, wanted, mode, denominators=whole, document_ids=micro.document_ids)
            if spoil and i == len(step) - 1 and dist.get_rank() == 0:
                loss = loss * float("nan")
            kept = run.backward(loss, targets=denominators(wanted, document_ids=micro.document_ids))
            out["weights"].append(micro.weight)
            out["kept"][-1].append((kept, micro.indices.tolist()))
        out["skipped"] += run.skipped
        total = run.loss.clone()
        dist.all_reduce(total)
        out["losses"].append(float(total) / dist.get_world_size())
        out["norms"].append(None if run.grad_norm is None else float(run.grad_norm))
    return {**out, "parameters": parameters_of(model)}
