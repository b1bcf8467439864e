"""Several ranks with sharded parameters (FSDP2, gloo): who waits for whom, before and after global regrouping.

    python benchmarks/trainers/ranks.py --ranks 4        # prints a table; bench.py calls it and keeps the result

Ranks meet in every micro-batch, to gather parameters: a micro-step takes as long as its slowest rank. What is measured
is each rank's processor time for every forward and backward of the real run, with all ranks at work and talking to each
other. The makespan is the sum over micro-steps of the slowest rank; a rank's idle share is the part of it that the rank
does not work. The wall clock would measure the machine where it has fewer cores than ranks; it is given beside.

All arms run the same rows from the same weights (the learning rate is 0, all else of the step is done), so that their
losses and gradient norms can be compared.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from transformers.trainer_pt_utils import BatchRebalanceSampler

import padless
from padless.bench.models import build
from padless.logits import token_losses
from padless.loss import aggregate, denominators, target_mask

ARMS = ("fixed rows", "batch_rebalance", "own rows, budget", "global regrouping")
"""The host's default; its own option, which deals out the rows of all ranks; a budget on each rank's own rows; ours."""


def lengths(setting: argparse.Namespace) -> np.ndarray:
    """(N,) prompt and response together, of the RL mix; log-normal stand-ins without the data folder."""
    folder = os.environ.get("PADLESS_DATA")
    rng = np.random.default_rng(setting.seed)
    if folder and (Path(folder) / "lengths.npz").exists():
        with np.load(Path(folder) / "lengths.npz") as stored:
            held = stored["mix_rl_gsm8k_heavy.lengths"].astype(float)
    else:
        held = rng.lognormal(np.log(500), 1.0, size=4000).clip(16, 8407)
    scaled = np.maximum(np.round(held * setting.scale), 4).astype(int)
    return rng.choice(scaled, size=setting.sequences, replace=False)


def rows_of(chosen: np.ndarray, vocabulary: int) -> list[torch.Tensor]:
    """Random tokens of these lengths."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(2, vocabulary, (int(size),), generator=generator) for size in chosen]


def batch_of(rows: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Right-padded rows, (rows, longest)."""
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    width = torch.tensor([len(row) for row in rows])
    mask = (torch.arange(ids.shape[1]) < width[:, None]).long()
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


class Bench:
    """The sharded model of this rank and the rows of all ranks."""

    def __init__(self, setting: argparse.Namespace) -> None:
        self.setting = setting
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.group: Any = dist.group.WORLD
        built = build(setting.model, seed=0)
        self.vocabulary = built.vocabulary
        for layer in built.model.model.layers:
            fully_shard(layer)
        self.model: Any = fully_shard(built.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.0, weight_decay=0.0)
        self.lengths = lengths(setting)
        self.rows = rows_of(self.lengths, self.vocabulary)
        self.mine = batch_of(self.rows[self.rank :: self.ranks])
        self.counts = denominators(
            target_mask(self.mine["labels"], self.mine["attention_mask"]), process_group=self.group
        )
        self.cost = self.calibrated()

    def calibrated(self) -> padless.CostModel:
        """What a micro-batch costs here: measured on all ranks at once, in lockstep, and fitted to all of it."""
        budget = self.setting.budget
        shapes = [(1, 16), (1, 128), (1, budget // 2), (4, 64), (16, 32), (8, budget // 16), (2, budget // 4)]
        held = []
        for turn in range(3):
            for rows, width in shapes:
                batch = batch_of([torch.randint(2, self.vocabulary, (width,)) for _ in range(rows)])
                spent = self.step([batch], update=False)["seconds"][0]
                if turn:
                    held.append((rows, width, spent))
        told: list[Any] = [None] * self.ranks
        dist.all_gather_object(told, held)
        by_shape = {shape: [s for part in told for r, w, s in part if (r, w) == shape] for shape in shapes}
        return padless.CostModel.fit((r, w, float(np.median(spent))) for (r, w), spent in by_shape.items())

    def micro_batches(self, arm: str) -> Any:
        """What this rank runs in one optimizer step."""
        setting = self.setting
        if arm == "fixed rows":
            mine = self.rows[self.rank :: self.ranks]
            return [batch_of(mine[at : at + setting.rows]) for at in range(0, len(mine), setting.rows)]
        if arm == "batch_rebalance":
            sampler = BatchRebalanceSampler(
                self.lengths.tolist(),
                effective_batch_size=len(self.lengths),
                dp_size=self.ranks,
                grad_accum=len(self.lengths) // self.ranks // setting.rows,
                rank=self.rank,
            )
            return [batch_of([self.rows[at] for at in group]) for group in sampler]
        exchange: Any = "never" if arm.startswith("own") else "rows"
        return padless.regroup(
            self.mine, setting.budget, process_group=self.group, exchange=exchange, cost=self.cost, sync="microbatch"
        )

    def step(self, made: Iterable[Any], *, update: bool = True) -> dict[str, Any]:
        """One optimizer step; processor seconds of each micro-batch on this rank."""
        begun = time.perf_counter()
        optimizer = self.optimizer if update else None
        run = padless.accumulate(
            made, self.model, optimizer, denominators=self.counts, max_norm=1e9 if update else None
        )
        spent = []
        for micro in run:
            start = time.thread_time()
            inputs = getattr(micro, "inputs", micro)
            logits = self.model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits
            targets = target_mask(inputs["labels"], inputs["attention_mask"])
            run.backward(aggregate(token_losses(logits, inputs["labels"]), targets, denominators=self.counts))
            spent.append(time.thread_time() - start)
        if not update:
            self.model.zero_grad()
        return {
            "seconds": spent,
            "wall": time.perf_counter() - begun,
            "loss": float(run.loss),
            "grad_norm": None if run.grad_norm is None else float(run.grad_norm),
        }

    def measure(self) -> dict[str, Any]:
        """All arms in turns; medians over the repeats. The calibration has warmed everything up."""
        held: dict[str, list[dict[str, Any]]] = {arm: [] for arm in ARMS}
        planned: dict[str, Any] = {}
        for turn in range(self.setting.repeats):
            for arm in ARMS:
                begun = time.perf_counter()
                made = self.micro_batches(arm)
                if hasattr(made, "plan"):
                    plan = made.plan
                    planned[arm] = 1.0 - float(plan.group_costs().sum()) / plan.ranks / float(plan.makespan())
                told = self.step(made)
                told["wall"] = time.perf_counter() - begun
                if self.rank == 0:
                    print(f"  repeat {turn + 1}  {arm:20} {told['wall']:7.2f} s on the wall", flush=True)
                held[arm].append(told)
        return {
            arm: {
                "seconds": np.median([one["seconds"] for one in held[arm]], axis=0).tolist(),
                "wall": float(np.median([one["wall"] for one in held[arm]])),
                "loss": held[arm][0]["loss"],
                "grad_norm": held[arm][0]["grad_norm"],
                "positions": sum(getattr(m, "inputs", m)["input_ids"].numel() for m in self.micro_batches(arm)),
                "planned_idle_share": planned.get(arm),
            }
            for arm in ARMS
        }


def report(told: list[dict[str, Any]], bench: Bench) -> dict[str, Any]:
    """Makespan and idle shares of every arm, from what all ranks measured."""
    rows = []
    for arm in ARMS:
        parts = [found[arm] for found in told]
        seconds = np.array([part["seconds"] for part in parts])  # (R, K)
        makespan = float(seconds.max(axis=0).sum())
        idle = 1 - seconds.sum(axis=1) / makespan  # (R,)
        rows.append(
            {
                "arm": arm,
                "micro_batches": seconds.shape[1],
                "makespan_seconds": makespan,
                "work_seconds": float(seconds.sum()),
                "idle_share_per_rank": [round(float(share), 4) for share in idle],
                "idle_share": round(float(idle.mean()), 4),
                "planned_idle_share": parts[0]["planned_idle_share"],
                "occupancy": float(bench.lengths.sum()) / sum(part["positions"] for part in parts),
                "wall_seconds": max(part["wall"] for part in parts),
                "loss": float(np.mean([part["loss"] for part in parts])),
                "grad_norm": parts[0]["grad_norm"],
            }
        )
    return {
        "setting": vars(bench.setting),
        "cores": os.cpu_count(),
        "sequences": len(bench.lengths),
        "real_tokens": int(bench.lengths.sum()),
        "cost": bench.cost.to_dict(),
        "arms": rows,
    }


def work(setting: argparse.Namespace) -> None:
    """One rank."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    bench = Bench(setting)
    told: list[Any] = [None] * bench.ranks
    dist.all_gather_object(told, bench.measure())
    if bench.rank == 0:
        Path(setting.out).write_text(json.dumps(report(told, bench), indent=2) + "\n")
    dist.destroy_process_group()


def launch(setting: argparse.Namespace) -> None:
    """Start the ranks and wait; all end when one fails or time runs out."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {"WORLD_SIZE": setting.ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": 1}
    processes = []
    for rank in range(setting.ranks):
        names = {**shared, "RANK": rank, "LOCAL_RANK": rank}
        environment = {**os.environ, **{name: str(value) for name, value in names.items()}}
        processes.append(subprocess.Popen([sys.executable, __file__, *sys.argv[1:]], env=environment))
    end = time.monotonic() + setting.seconds
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))
    try:
        while any(process.poll() is None for process in processes) and time.monotonic() < end:
            if any(process.returncode for process in processes):
                break
            time.sleep(0.2)
    finally:
        for process in processes:
            process.kill()
    if any(process.wait() for process in processes):
        sys.exit("a rank failed or ran out of time")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen2")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--sequences", type=int, default=128)
    parser.add_argument("--rows", type=int, default=8, help="rows of a micro-batch in the host's arms")
    parser.add_argument("--scale", type=float, default=0.25, help="lengths are multiplied by it")
    parser.add_argument("--budget", type=int, default=4096)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=1800)
    parser.add_argument("--out", required=True, help="where to write the result")
    setting = parser.parse_args()
    if "RANK" in os.environ:
        work(setting)
        return
    launch(setting)
    for row in json.loads(Path(setting.out).read_text())["arms"]:
        shares = " ".join(f"{share:.1%}" for share in row["idle_share_per_rank"])
        print(f"{row['arm']:18} {row['makespan_seconds']:8.2f} s  idle {row['idle_share']:.1%} ({shares})")


if __name__ == "__main__":
    main()
