"""verl alone against verl with padless: plans at real lengths, and whole policy-update steps on a CPU.

    PYTHONPATH=tests PADLESS_DATA=... .venv-verl/bin/python benchmarks/verl/bench.py

Plans are made by verl's own ``rearrange_micro_batches`` and by the one that padless puts in its place. Steps run
verl's real `TrainingWorker` with the FSDP2 engine in float32 (old log-probs, then one update). Writes result.json.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch

from padless import CostModel
from padless.integrations.verl import install, uninstall
from padless.integrations.verl_balance import assign
from padless.integrations.verl_engine import rearranger
from padless.integrations.verl_options import VerlOptions
from padless.integrations.verl_plan import Request, plan_ranks
from support.verl_steps import rl_mix
from support.verl_worker import make_batch, make_model, make_worker, step

HERE = Path(__file__).resolve().parent
OVERHEAD = 500
JOBS = ((64, 1, 16_384), (128, 1, 16_384), (256, 8, 16_384), (1024, 8, 16_384))


def as_batch(lengths: np.ndarray) -> Any:
    from verl.utils import tensordict_utils as tu

    rows = [torch.zeros(int(length), dtype=torch.long) for length in lengths]
    fields = {"input_ids": torch.nested.as_nested_tensor(rows, layout=torch.jagged)}
    return tu.get_tensordict(fields, non_tensor_dict={"use_remove_padding": False})


def stock_plan(parts: list[np.ndarray], budget: int) -> list[list[list[int]]]:
    """verl's plan of each rank: the number of micro-batches is the largest that any rank wants."""
    from verl.utils.seqlen_balancing import rearrange_micro_batches

    counts = [len(rearrange_micro_batches(as_batch(part), budget)[1]) for part in parts]
    return [rearrange_micro_batches(as_batch(part), budget, min_num_micro_batch=max(counts))[1] for part in parts]


def padless_plan(parts: list[np.ndarray], budget: int) -> list[list[list[int]]]:
    if len(parts) == 1:
        from verl.utils.seqlen_balancing import rearrange_micro_batches

        return [rearranger(rearrange_micro_batches, VerlOptions())(as_batch(parts[0]), budget)[1]]
    plans = plan_ranks(parts, Request(token_budget=budget))
    return [[group.tolist() for group in plan] for plan in plans]


def assigned_by_padless(lengths: np.ndarray, ranks: int, budget: int, by_verl: list[list[int]]) -> list[list[int]]:
    return assign(lengths, ranks, Request(token_budget=budget), known=lambda *_: by_verl)


def judge(parts: list[np.ndarray], groups: list[list[list[int]]], budget: int) -> dict[str, float]:
    """Occupancy, peak, and the modelled time over that of perfect packing on perfectly balanced ranks."""
    cost = CostModel(per_microbatch=OVERHEAD)
    rows = [np.array([len(group) for group in mine]) for mine in groups]
    widths = [np.array([part[group].max() for group in mine]) for part, mine in zip(parts, groups, strict=True)]
    tokens = [r * w for r, w in zip(rows, widths, strict=True)]
    real, ranks = sum(int(part.sum()) for part in parts), len(parts)
    costs = np.stack([cost.padded(r, w) for r, w in zip(rows, widths, strict=True)])  # (R, K), micro-steps in order
    bound = real / ranks + OVERHEAD * -(-real // (ranks * budget))
    return {
        "micro_batches": len(groups[0]),
        "computed_tokens": int(sum(t.sum() for t in tokens)),
        "occupancy": real / sum(int(t.sum()) for t in tokens),
        "peak_over_budget": max(int(t.max()) for t in tokens) / budget,
        "time_over_bound": float(costs.max(axis=0).sum()) / bound,
    }


def bench_plans(draws: int) -> list[dict[str, Any]]:
    from verl.utils.seqlen_balancing import calculate_workload, get_seqlen_balanced_partitions

    results = []
    for count, ranks, budget in JOBS:
        found: dict[str, list[dict[str, float]]] = {}
        for seed in range(draws):
            prompts, responses = rl_mix(count, seed)
            lengths = np.minimum(prompts + responses, budget)
            workload = calculate_workload(torch.as_tensor(lengths))
            by_verl = get_seqlen_balanced_partitions(workload.tolist(), ranks, equal_size=True)
            arms = {
                "verl": (by_verl, stock_plan),
                "padless": (by_verl, padless_plan),
                "padless, own assignment": (assigned_by_padless(lengths, ranks, budget, by_verl), padless_plan),
            }
            for name, (assigned, planner) in arms.items():
                if ranks == 1 and "own" in name:
                    continue
                parts = [lengths[rows] for rows in assigned]
                start = time.perf_counter()
                groups = planner(parts, budget)
                seconds = time.perf_counter() - start
                found.setdefault(name, []).append(judge(parts, groups, budget) | {"seconds": seconds})
        for name, runs in found.items():
            mean = {key: float(np.mean([run[key] for run in runs])) for key in runs[0]}
            mean["peak_over_budget"] = max(run["peak_over_budget"] for run in runs)
            results.append({"sequences": count, "ranks": ranks, "token_budget": budget, "arm": name, **mean})
            print(json.dumps(results[-1]), flush=True)
    return results


def bench_steps(folder: Path, kind: str, scale: int, hidden: int, rows: int, repeats: int) -> list[dict[str, Any]]:
    """Seconds of a step by arm, interleaved; the first round of each arm is not counted."""
    prompts, responses = (-(-lengths // scale) for lengths in rl_mix(rows))
    budget = 16_384 // scale
    data = make_batch(prompts, responses)
    path = make_model(kind, folder, hidden=hidden)
    options = VerlOptions(cost=CostModel(per_microbatch=OVERHEAD / scale), on_leak="ignore")
    arms = {"verl": {}, "padless": {}, "verl, packed": {"use_remove_padding": True}}
    workers = {}
    for name, settings in arms.items():
        uninstall()
        workers[name] = make_worker(path, budget, **settings)
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    shapes: dict[str, list[tuple[int, int]]] = {}
    for repeat in range(repeats + 1):
        for name, worker in workers.items():
            (install(options) if name == "padless" else uninstall())
            start = time.perf_counter()
            out = step(worker, data)
            if repeat:
                seconds[name].append(time.perf_counter() - start)
            shapes[name] = out["update_shapes"]
    uninstall()
    results = []
    real = int((prompts + responses).sum())
    for name in arms:
        tokens = [r * w for r, w in shapes[name]]
        results.append(
            {
                "model": kind,
                "sequences": rows,
                "scale": scale,
                "token_budget": budget,
                "arm": name,
                "seconds": statistics.median(seconds[name]),
                "seconds_all": seconds[name],
                "micro_batches": len(tokens),
                "computed_tokens": sum(tokens),
                "occupancy": real / sum(tokens),
                "peak_over_budget": max(tokens) / budget,
            }
        )
        print(json.dumps(results[-1]), flush=True)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--draws", type=int, default=10)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, default=HERE / "result.json")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    os.environ.setdefault("MASTER_PORT", "29611")
    git = ["git", "-C", str(HERE), "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(git, capture_output=True, text=True, check=False)
    result: dict[str, Any] = {
        "machine": {"cpu": platform.machine(), "threads": 1, "python": platform.python_version()},
        "versions": {name: version(name) for name in ("verl", "torch", "transformers", "padless", "numpy")},
        "commit": commit.stdout.strip(),
        "lengths": "mix_rl_gsm8k_heavy" if os.environ.get("PADLESS_DATA") else "log-normal stand-in",
        "draws": asked.draws,
        "plans": bench_plans(asked.draws),
        "steps": [],
    }
    asked.json.write_text(json.dumps(result, indent=1) + "\n")
    with tempfile.TemporaryDirectory() as folder:
        for kind, scale, hidden in (("qwen2", 8, 128), ("jamba", 32, 64)):
            result["steps"] += bench_steps(Path(folder), kind, scale, hidden, 64, asked.repeats)
    asked.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
