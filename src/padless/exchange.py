"""What ranks say to each other: agreement first, then numbers, then the rows that move."""

from __future__ import annotations

import hashlib
import math
import pickle
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor

from padless.errors import PadlessError

__all__ = ["agree", "communication_device", "fingerprint", "gather_table", "send_parts", "sum_over_ranks", "swap"]


def communication_device(group: Any) -> torch.device:
    """Where the group's backend wants its tensors: the current accelerator for NCCL and its like, else the CPU."""
    backend = str(dist.get_backend(group))
    if "gloo" in backend or "mpi" in backend or not torch.accelerator.is_available():
        return torch.device("cpu")
    kind = torch.accelerator.current_accelerator()
    assert kind is not None
    return torch.device(kind.type, torch.accelerator.current_device_index())


def sum_over_ranks(values: Tensor, group: Any) -> tuple[Tensor, int]:
    """The sum of ``values`` over the group's ranks, on the values' device, and the number of ranks."""
    moved = values.to(communication_device(group), copy=True)
    dist.all_reduce(moved, group=group)
    return moved.to(values.device), dist.get_world_size(group)


def fingerprint(options: Mapping[str, Any]) -> int:
    """A 63-bit number that differs where options do; the same in every process."""
    text = repr(sorted((name, repr(value)) for name, value in options.items()))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def agree(
    group: Any, *, what: str, options: Mapping[str, Any], error: BaseException | None, numbers: Sequence[int] = ()
) -> npt.NDArray[np.int64]:
    """Let every rank say whether it is fine and how it was called, before anything of variable size is exchanged.

    One ``all_gather`` of a few integers. Where a rank failed or options differ, all ranks learn it from the same
    integers, and every one of them raises: none is left waiting.

    Args:
        group: the process group; every rank of it must call this.
        what: the name of the operation, for messages.
        options: what must be equal on all ranks.
        error: what went wrong on this rank, or None.
        numbers: integers of this rank that the others need, as many on each.

    Returns:
        (ranks, len(numbers)) the numbers of all ranks.

    Raises:
        PadlessError: on every rank, naming the ranks and the reason; the failed rank raises its own error.
    """
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    row = [int(error is not None), fingerprint(options), *(int(number) for number in numbers)]
    table = gather_table(np.array([row], dtype=np.int64), np.ones(size, dtype=np.int64), group)
    failed = np.flatnonzero(table[:, 0])
    if not len(failed) and (table[:, 1] == table[0, 1]).all():
        return table[:, 2:]
    told: list[Any] = [None] * size
    text = "" if error is None else f"{type(error).__name__}: {error}"
    dist.all_gather_object(told, (text, {name: repr(value) for name, value in options.items()}), group=group)
    if len(failed):
        if error is not None:
            raise error
        reasons = "; ".join(f"rank {r}: {told[r][0]}" for r in failed.tolist())
        raise PadlessError(f"{what} failed on another rank, so rank {rank} stops too: {reasons}")
    names = dict.fromkeys(name for _, given in told for name in given)
    differing = []
    for name in names:
        values = [given.get(name, "missing") for _, given in told]
        if len(set(values)) > 1:
            ranks_of = {value: [r for r in range(size) if values[r] == value] for value in dict.fromkeys(values)}
            differing.append(f"{name} is " + " and ".join(f"{value} on ranks {r}" for value, r in ranks_of.items()))
    raise PadlessError(f"{what} was called with different options on different ranks: {'; '.join(differing)}")


def gather_table(rows: npt.NDArray[np.int64], counts: npt.NDArray[np.int64], group: Any) -> npt.NDArray[np.int64]:
    """Integer rows (n, C) of all ranks behind one another, (sum of counts, C); ``counts`` (ranks,) is known to all."""
    device = communication_device(group)
    most = int(counts.max())
    sent = torch.zeros((most, rows.shape[1]), dtype=torch.int64)
    sent[: len(rows)] = torch.from_numpy(rows)
    sent = sent.to(device)
    received = [torch.empty_like(sent) for _ in counts]
    dist.all_gather(received, sent, group=group)
    table = torch.stack(received).cpu().numpy()  # (R, most, C)
    return np.concatenate([table[r, :count] for r, count in enumerate(counts.tolist())])


class _Swap(torch.autograd.Function):
    """``all_to_all`` of rows of one tensor; gradients travel the same way back."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, sends: list[int], receives: list[int], group: Any) -> Tensor:
        ctx.sends, ctx.receives, ctx.group = sends, receives, group
        return _all_to_all(values, sends, receives, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _all_to_all(grad.contiguous(), ctx.receives, ctx.sends, ctx.group), None, None, None


def swap(values: Tensor, sends: Sequence[int], receives: Sequence[int], group: Any) -> Tensor:
    """Send ``sends[r]`` entries of ``values`` (n, ...) to each rank r, in order; receive ``receives[r]`` from each.

    Differentiable; works on any device (staged where the backend needs another).
    """
    device = communication_device(group)
    moved = values.to(device).contiguous()
    swapped: Tensor = _Swap.apply(moved, list(sends), list(receives), group)  # type: ignore[no-untyped-call]
    return swapped.to(values.device)


def _all_to_all(values: Tensor, sends: list[int], receives: list[int], group: Any) -> Tensor:
    out = values.new_empty((sum(receives), *values.shape[1:]))
    if not math.prod(values.shape[1:]):
        return out  # entries without a byte
    # Bytes travel: backends differ in the dtypes that they take.
    sent, received = _byte_rows(values), _byte_rows(out)
    try:
        dist.all_to_all_single(received, sent, receives, sends, group=group)
    except (RuntimeError, NotImplementedError) as error:
        # A backend without all_to_all says so at once, on every rank, before it sends anything.
        if not any(hint in str(error).lower() for hint in ("not support", "not implement", "unsupported")):
            raise
        _point_to_point(received, sent, sends, receives, group)
    return out


def _byte_rows(values: Tensor) -> Tensor:
    """The same memory as (n, bytes of one entry) uint8."""
    return values.view(len(values), math.prod(values.shape[1:])).view(torch.uint8)


def _point_to_point(out: Tensor, values: Tensor, sends: list[int], receives: list[int], group: Any) -> None:
    rank = dist.get_rank(group)
    to, into = list(values.split(sends)), list(out.split(receives))  # type: ignore[no-untyped-call]
    into[rank].copy_(to[rank])
    operations = []
    for other in range(len(sends)):
        if other == rank:
            continue
        peer = dist.get_global_rank(group, other) if group is not None else other
        if sends[other]:
            operations.append(dist.P2POp(dist.isend, to[other].contiguous(), peer, group))
        if receives[other]:
            operations.append(dist.P2POp(dist.irecv, into[other], peer, group))
    for request in dist.batch_isend_irecv(operations) if operations else []:
        request.wait()


def send_parts(parts: Sequence[Sequence[Tensor]], group: Any) -> list[list[Tensor]]:
    """Send a list of byte tensors to each rank and receive one from each: all columns in one message.

    Args:
        parts: for each rank, 1-D uint8 tensors, as many for every rank and on every rank.
        group: the process group.

    Returns:
        For each rank, the tensors that it sent, as slices of one buffer on the communication device.
    """
    device = communication_device(group)
    size = len(parts)
    lengths = torch.tensor([[len(part) for part in to] for to in parts], dtype=torch.int64)  # (R, columns)
    columns = lengths.shape[1]
    coming = swap(lengths.flatten(), [columns] * size, [columns] * size, group).view(size, columns)
    flat = [part.to(device) for to in parts for part in to]
    buffer = torch.cat(flat) if flat else torch.empty(0, dtype=torch.uint8, device=device)
    received = _all_to_all(buffer, lengths.sum(1).tolist(), coming.sum(1).tolist(), group)
    slices = list(received.split(coming.flatten().tolist()))  # type: ignore[no-untyped-call]
    return [slices[r * columns : (r + 1) * columns] for r in range(size)]


def as_bytes(tensor: Tensor) -> Tensor:
    """The bytes of a tensor, (n,) uint8; any dtype."""
    return tensor.detach().contiguous().flatten().view(torch.uint8)


def from_bytes(parts: Sequence[Tensor], dtype: torch.dtype, rest: tuple[int, ...], device: torch.device) -> Tensor:
    """Entries (n, *rest) out of the bytes of several parts, behind one another."""
    whole = torch.cat(list(parts))  # a fresh buffer: aligned for every dtype
    return whole.view(dtype).view(-1, *rest).to(device)


def objects_to_bytes(objects: Any) -> Tensor:
    """Pickled objects as (n,) uint8; ranks of one job trust each other."""
    return torch.frombuffer(bytearray(pickle.dumps(objects)), dtype=torch.uint8)


def objects_from_bytes(part: Tensor) -> Any:
    """What `objects_to_bytes` was given."""
    return pickle.loads(part.cpu().numpy().tobytes())
