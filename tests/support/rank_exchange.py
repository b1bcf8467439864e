"""What single ranks of the exchange tests run: one process group, many checks, results by name."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from tensordict import TensorDict

import padless
from padless import regroup
from padless.tensors import MROPE, PACKED_LAYOUTS, Field, rlhf
from support.batches import FIELDS, leaf, random_mask, rl_batch, span_of, token_batch

ROWS = (5, 2, 0, 7)
"""Rows on each rank: more than micro-batches, fewer, none."""


def batch_of(rank: int, *, rows: int | None = None, holes: bool = True) -> dict[str, Any]:
    """A batch of every kind of column, of another width on every rank."""
    rng = np.random.default_rng(rank)
    count = ROWS[rank] if rows is None else rows
    batch = token_batch(rng, random_mask(rng, count, 9 + rank, holes=holes))
    batch["uid"] = [f"{rank}.{i}" for i in range(count)]
    batch["numbers"] = np.array([{"n": i} for i in range(count)], dtype=object)
    counts = rng.integers(0, 3, count)
    batch["num_patches"] = torch.from_numpy(counts)
    batch["pixels"] = torch.arange(int(counts.sum()) * 2).view(-1, 2) + 1000 * rank
    batch["mrope"] = batch["position_ids"].expand(3, *batch["position_ids"].shape) + torch.arange(3)[:, None, None]
    batch["double"] = torch.randn(count, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(rank))
    batch["complex"] = torch.complex(batch["advantages"], batch["advantages"])
    batch["tag"] = f"rank {rank}"
    return dict(reversed(batch.items())) if rank % 2 else batch  # the order of the keys is nobody's business


EVERY = {
    **FIELDS,
    "numbers": Field(span="row"),
    "num_patches": Field(span="row"),
    "pixels": Field(span="flat", counts="num_patches"),
    "mrope": MROPE,
    "double": Field(span="row"),
    "complex": Field(),
}


def error_of(call: Any) -> tuple[str, float]:
    """The message of the error that ``call`` ends with, and after how many seconds."""
    start = time.monotonic()
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - start
    return "no error", time.monotonic() - start


def check_step(batch: dict[str, Any], step: Any) -> dict[str, Any]:
    """Everything comes back to its owner, bit for bit; what the micro-batches held, for the comparison over ranks."""
    inside = span_of(batch["attention_mask"])
    micros = list(step)
    for key in ("input_ids", "advantages", "nested.flags", "nested.half", "complex"):
        values = leaf(batch, key)
        expected = values.masked_fill(~inside.view(*inside.shape, *(1,) * (values.ndim - 2)), 0)
        assert torch.equal(step.restore([leaf(m.inputs, key) for m in micros]), expected), key
    assert torch.equal(step.restore([m.inputs["double"] for m in micros], span="row"), batch["double"])
    for micro in micros:
        inputs = micro.inputs
        assert inputs["tag"] == batch["tag"]
        if not micro.weight:
            assert (inputs["labels"] == -100).all()
            assert micro.real_tokens == len(micro.indices) == 0
            assert (micro.document_ids == -1).all()
            continue
        names = [tuple(map(int, name.split("."))) for name in inputs["uid"]]
        base = np.concatenate([[0], np.cumsum(ROWS)])
        assert [int(base[r]) + i for r, i in names] == micro.indices.tolist()
        assert [item["n"] for item in inputs["numbers"]] == [i for _, i in names]
        pixels = inputs["pixels"]
        expected_pixels = [
            p.tolist() for r, i in names for p in batch_of(r)["pixels"].split(batch_of(r)["num_patches"].tolist())[i]
        ]
        assert ([] if pixels is None else pixels.tolist()) == expected_pixels
        assert micro.padded_tokens <= step.plan.token_budget
    return {
        "steps": len(step),
        "weights": [m.weight for m in micros],
        "uid": [name for m in micros if m.weight for name in m.inputs["uid"]],
        "tokens": sum(m.real_tokens for m in micros),
        "plan": (step.plan.order.tolist(), step.plan.offsets.tolist()),
    }


def everything() -> dict[str, Any]:
    """All checks of four ranks with 5, 2, 0 and 7 rows."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=40))
    group, rank = dist.group.WORLD, dist.get_rank()
    batch = batch_of(rank)
    found: dict[str, Any] = {}
    for exchange in ("rows", "never"):
        step = regroup(batch, 24, fields=EVERY, process_group=group, exchange=exchange, multiple_of=2)
        found[exchange] = check_step(batch, step)
        laddered = regroup(batch, 24, fields=EVERY, process_group=group, exchange=exchange, ladder=2)
        found[f"{exchange} widths"] = [m.inputs["input_ids"].shape[1] for m in laddered]
    solid = batch_of(rank, holes=False)
    for layout in PACKED_LAYOUTS:
        step = regroup(solid, 24, fields=EVERY, process_group=group, layout=layout)
        assert torch.equal(
            step.restore([m.inputs["input_ids"] for m in step]), solid["input_ids"] * solid["attention_mask"]
        )
    found["absent"] = absent(rank, batch, group)
    found["policies"] = policies(rank, group)
    found["responses"] = responses(rank, group)
    found["gradient"] = gradient(rank, group)
    found["fallback"] = fallback(batch, group)
    found["boxed"] = boxed(rank, group)
    found["atoms"] = atoms(batch, group)
    found["given"] = given(batch, group)
    found["errors"] = errors(rank, batch, group)
    found["after"] = check_step(batch, regroup(batch, 24, fields=EVERY, process_group=group))["steps"]
    dist.destroy_process_group()
    return found


def absent(rank: int, batch: dict[str, Any], group: Any) -> list[list[float]]:
    """A rank that has no batch at all, only its place."""
    found = []
    for exchange in ("rows", "never"):
        ids = None if rank == 2 else np.arange(len(batch["uid"])) + 100 * rank
        step = regroup(
            None if rank == 2 else batch, 24, fields=EVERY, process_group=group, exchange=exchange, atoms=ids
        )
        restored = step.restore([m.inputs["input_ids"] for m in step])
        expected = batch["input_ids"] * span_of(batch["attention_mask"])
        assert len(restored) == 0 if rank == 2 else torch.equal(restored, expected)
        found.append([m.weight for m in step])
    return found


def policies(rank: int, group: Any) -> list[str]:
    batch = batch_of(rank, holes=False)
    inside, place = batch["attention_mask"].bool(), batch["attention_mask"].cumsum(1)
    size = batch["attention_mask"].sum(1, keepdim=True)
    expected = {
        "truncate": batch["input_ids"] * (inside & (place <= 6)),
        "split": batch["input_ids"] * inside,
        "drop": batch["input_ids"] * (inside & (size <= 6)),
        "alone": batch["input_ids"] * inside,
    }
    for policy, right in expected.items():
        for exchange in ("rows", "never"):
            step = regroup(batch, 6, fields=EVERY, process_group=group, overlong=policy, exchange=exchange)
            assert torch.equal(step.restore([m.inputs["input_ids"] for m in step]), right), policy
    return sorted(expected)


def responses(rank: int, group: Any) -> bool:
    batch = rl_batch(np.random.default_rng(rank), ROWS[rank], 3 + rank, 4 + rank)
    for how, budget in (("sequence", 30), ("block", 30), ("sequence", 5), ("block", 5)):
        step = regroup(batch, budget, fields=rlhf(), process_group=group, responses=how, overlong="split")
        restored = step.restore([m.inputs["old_log_probs"] for m in step], span="response")
        assert torch.equal(restored, batch["old_log_probs"] * batch["response_mask"])
    return True


def gradient(rank: int, group: Any) -> bool:
    """Gradients of restored outputs travel back to the rank that computed them."""
    batch = batch_of(rank)
    step = regroup(batch, 24, fields=EVERY, process_group=group)
    outputs = [m.inputs["advantages"].clone().requires_grad_() for m in step]
    restored = step.restore(outputs)
    (restored * restored.detach()).sum().backward()
    for output, micro in zip(outputs, step, strict=True):
        expected = output.detach() if micro.weight else torch.zeros_like(output)
        assert torch.equal(torch.zeros_like(output) if output.grad is None else output.grad, expected)
    return True


def fallback(batch: dict[str, Any], group: Any) -> int:
    """A backend without all_to_all sends the same from point to point."""
    real, calls = dist.all_to_all_single, []

    def refused(*args: Any, **kwargs: Any) -> None:
        calls.append(1)
        raise RuntimeError("Backend gloo does not support alltoall_base")

    dist.all_to_all_single = refused
    try:
        check_step(batch, regroup(batch, 24, fields=EVERY, process_group=group))
    finally:
        dist.all_to_all_single = real
    return len(calls)


def boxed(rank: int, group: Any) -> bool:
    batch = {k: v for k, v in batch_of(rank).items() if k in ("input_ids", "attention_mask", "labels", "nested")}
    step = regroup(TensorDict(batch, batch_size=[ROWS[rank]]), 24, fields=FIELDS, process_group=group)
    restored = step.restore([m.inputs["nested", "half"] for m in step])
    assert all(isinstance(m.inputs, TensorDict) for m in step)
    return torch.equal(restored, batch["nested"]["half"] * span_of(batch["attention_mask"])[..., None])


def atoms(batch: dict[str, Any], group: Any) -> bool:
    """Rows of one id meet in one micro-batch, whichever ranks they came from."""
    ids = np.arange(len(batch["uid"])) % 3  # ids 0, 1, 2 on every rank
    step = regroup(batch, 96, fields=EVERY, process_group=group, atoms=ids)
    where: dict[int, int] = {}
    every = np.concatenate([np.arange(n) % 3 for n in ROWS])
    for g, members in enumerate(step.plan):
        for name in every[members].tolist():
            assert where.setdefault(name, g) == g
    return True


def given(batch: dict[str, Any], group: Any) -> str:
    lengths = np.concatenate([span_of(batch_of(r)["attention_mask"]).sum(1).numpy() for r in range(len(ROWS))])
    plan = padless.microbatch(lengths, 40, ranks=4, method="greedy")
    step = regroup(batch, fields=EVERY, process_group=group, plan=plan)
    check_step(batch, step)
    return str(step.plan.method)


def errors(rank: int, batch: dict[str, Any], group: Any) -> dict[str, tuple[str, float]]:
    """Every rank hears of what is wrong on one of them."""

    def call(**changed: Any) -> Any:
        return lambda: regroup(
            changed.pop("batch", batch), **{"token_budget": 24, "fields": EVERY, "process_group": group, **changed}
        )

    odd = dict(batch, mystery=torch.zeros(2, 2))
    found = {
        "options": error_of(call(multiple_of=2 if rank == 1 else 1)),
        "layout": error_of(call(layout="right-padded-no-mask" if rank == 0 else "padded")),
        "bad batch": error_of(call(batch=odd if rank == 3 else batch)),
        "no mask": error_of(call(batch={} if rank == 0 else batch)),
        "missing key": error_of(call(batch={k: v for k, v in batch.items() if k != "double"} if rank == 2 else batch)),
        "absent": error_of(call(batch=None if rank == 1 else {k: batch[k] for k in batch if k != "double" or rank})),
        "dtype": error_of(call(batch=dict(batch, double=batch["double"].float()) if rank == 2 else batch)),
        "too long": error_of(call(token_budget=3)),
        "budget": error_of(call(token_budget=0)),
        "no batch": error_of(lambda: regroup(None, 24, fields=EVERY, process_group=group)),
        "nobody": error_of(lambda: regroup(batch_of(rank, rows=0), 24, fields=EVERY, process_group=group)),
        "gradient": error_of(call(batch=dict(batch, double=batch["double"].clone().requires_grad_(rank == 0)))),
        "plan": error_of(call(plan=padless.microbatch([3], 8, ranks=4) if rank == 1 else None)),
    }
    step = regroup(batch, 24, fields=EVERY, process_group=group)
    outputs = [m.inputs["advantages"] for m in step]
    found["restore"] = error_of(lambda: step.restore(outputs[: len(outputs) - (rank == 0)]))
    found["restore shape"] = error_of(lambda: step.restore([o.double() for o in outputs] if rank == 1 else outputs))
    return found
