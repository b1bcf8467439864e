"""Several ranks with sharded parameters (FSDP2, gloo): who waits for whom, before and after global regrouping.

    python benchmarks/trainers/ranks.py --ranks 4        # writes ranks.json beside this file

Ranks meet in every micro-batch, so a micro-step takes as long as its slowest rank. Each rank's own processor time of
every forward and backward is measured; the makespan is the sum of the slowest, and a rank's idle share is what it does
not work of it. On a machine with fewer cores than ranks the wall clock would measure the machine instead.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

import padless
from padless.bench.measure import machine, versions
from padless.bench.models import build
from padless.logits import token_losses
from padless.loss import aggregate, denominators, target_mask

HERE = Path(__file__).resolve().parent
ARMS = ("fixed rows", "own rows, budget", "global regrouping")


def lengths(count: int, cap: int) -> np.ndarray:
    """Prompt and response together, of the RL mix."""
    folder = os.environ.get("PADLESS_DATA")
    rng = np.random.default_rng(0)
    if folder and (Path(folder) / "lengths.npz").exists():
        with np.load(Path(folder) / "lengths.npz") as stored:
            held = stored["mix_rl_gsm8k_heavy.lengths"].astype(int)
    else:
        held = rng.lognormal(np.log(500), 1.0, size=4000).astype(int)
    held = held[(held >= 8) & (held <= cap)]
    return rng.choice(held, size=count, replace=False)


def batch_of(chosen: np.ndarray, vocabulary: int, seed: int) -> dict[str, torch.Tensor]:
    """Right-padded rows, (rows, longest)."""
    generator = torch.Generator().manual_seed(seed)
    width = int(chosen.max())
    mask = (torch.arange(width) < torch.from_numpy(chosen)[:, None]).long()
    ids = torch.randint(2, vocabulary, mask.shape, generator=generator) * mask
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def work(setting: argparse.Namespace) -> None:
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(1)
    built = build(setting.model, seed=0)
    for layer in built.model.model.layers:
        fully_shard(layer)
    model: Any = fully_shard(built.model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    mine = lengths(setting.sequences, setting.cap)[rank::ranks]
    batch = batch_of(mine, built.vocabulary, rank)
    found = {}
    for arm in ARMS:
        spent = [step(arm, batch, model, optimizer, setting) for _ in range(setting.repeats + 1)][1:]
        found[arm] = np.median(np.array(spent), axis=0).tolist()
    told: list[Any] = [None] * ranks
    dist.all_gather_object(told, found)
    if rank == 0:
        Path(setting.out).write_text(json.dumps(report(told, setting), indent=2) + "\n")
    dist.destroy_process_group()


def step(arm: str, batch: Any, model: Any, optimizer: Any, setting: argparse.Namespace) -> list[float]:
    """Processor seconds of each micro-batch on this rank."""
    group: Any = dist.group.WORLD
    counts = denominators(target_mask(batch["labels"], batch["attention_mask"]), process_group=group)
    if arm == "fixed rows":  # the host's: so many rows each, every one as wide as its longest
        made: Any = padless.regroup(batch, 2**40, method="fixed", max_sequences=setting.rows)
    else:
        exchange: Any = "never" if arm.startswith("own") else "rows"
        made = padless.regroup(batch, setting.budget, process_group=group, exchange=exchange)
    spent = []
    run = padless.accumulate(made, model, optimizer, denominators=counts)
    for micro in run:
        begun = time.thread_time()
        inputs = micro.inputs
        logits = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits
        targets = target_mask(inputs["labels"], inputs["attention_mask"])
        run.backward(aggregate(token_losses(logits, inputs["labels"]), targets, denominators=counts))
        spent.append(time.thread_time() - begun)
    return spent


def report(told: list[dict[str, list[float]]], setting: argparse.Namespace) -> dict[str, Any]:
    rows = []
    for arm in ARMS:
        seconds = np.array([found[arm] for found in told])  # (R, K)
        makespan = float(seconds.max(axis=0).sum())
        idle = 1 - seconds.sum(axis=1) / makespan  # (R,)
        rows.append(
            {
                "arm": arm,
                "micro_batches": seconds.shape[1],
                "makespan_seconds": makespan,
                "idle_share_per_rank": [round(float(share), 4) for share in idle],
                "idle_share": round(float(idle.mean()), 4),
            }
        )
    git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=HERE, capture_output=True, text=True, check=False)
    return {
        "machine": machine("cpu"),
        "versions": versions(),
        "commit": git.stdout.strip(),
        "setting": {key: value for key, value in vars(setting).items() if key != "out"},
        "arms": rows,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="qwen2")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--sequences", type=int, default=128)
    parser.add_argument("--rows", type=int, default=4, help="rows of a micro-batch in the first arm")
    parser.add_argument("--budget", type=int, default=4096)
    parser.add_argument("--cap", type=int, default=2048, help="longer sequences are left out")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=1800)
    parser.add_argument("--out", default=str(HERE / "ranks.json"))
    setting = parser.parse_args()
    if "RANK" in os.environ:
        work(setting)
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    processes = []
    for rank in range(setting.ranks):
        names: dict[str, Any] = {
            "RANK": rank,
            "WORLD_SIZE": setting.ranks,
            "LOCAL_RANK": rank,
            "MASTER_PORT": port,
            "OMP_NUM_THREADS": 1,
        }
        names |= {"MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": 1}
        environment = {**os.environ, **{name: str(value) for name, value in names.items()}}
        processes.append(subprocess.Popen([sys.executable, __file__, *sys.argv[1:]], env=environment))
    end = time.monotonic() + setting.seconds
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
    for row in json.loads(Path(setting.out).read_text())["arms"]:
        shares = " ".join(f"{share:.1%}" for share in row["idle_share_per_rank"])
        print(f"{row['arm']:18} {row['makespan_seconds']:8.2f} s  idle {row['idle_share']:.1%} ({shares})")


if __name__ == "__main__":
    main()
