"""What regrouping itself costs: reading, planning, gathering, restoring, and exchanging rows between processes.

    python benchmarks/regroup/bench.py                 # prints a table, writes benchmarks/regroup/result.json

CPU seconds of the process (not wall time), the least of the repeats, so that other load matters little. The step beside
it is one forward and backward of a Qwen2 decoder (hidden 256, 4 layers) on the same micro-batches, measured on a few of
them and scaled by their tokens.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import padless
from padless.tensors import rlhf
from padless.tensors.rows import read_rows

HERE = Path(__file__).parent


def lengths(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Prompts and responses of an RL mix: quantiles of the built-in workload, or the mix itself under PADLESS_DATA."""
    rng = np.random.default_rng(0)
    folder = os.environ.get("PADLESS_DATA")
    if folder:
        with np.load(Path(folder) / "lengths.npz") as stored:
            name = "mix_rl_gsm8k_heavy"
            pick = rng.integers(0, len(stored[f"{name}.prompt_lengths"]), count)
            return stored[f"{name}.prompt_lengths"][pick], stored[f"{name}.response_lengths"][pick]
    prompts = np.clip(rng.lognormal(np.log(120), 0.6, count), 16, 2875)
    responses = np.clip(rng.lognormal(np.log(300), 1.2, count), 8, 8192)
    return prompts.astype(np.int64), responses.astype(np.int64)


def batch_of(prompts: np.ndarray, responses: np.ndarray) -> dict[str, Any]:
    """Prompts left padded, responses right padded: ids, mask and four response fields."""
    p, r = int(prompts.max()), int(responses.max())
    column = torch.arange(p + r)
    begin, end = p - torch.from_numpy(prompts)[:, None], p + torch.from_numpy(responses)[:, None]
    mask = ((column >= begin) & (column < end)).long()
    batch = {"input_ids": mask * torch.randint(1, 500, mask.shape), "attention_mask": mask}
    batch["response_mask"] = mask[:, p:].contiguous()
    for name in ("old_log_probs", "ref_log_prob", "advantages"):
        batch[name] = torch.randn(len(prompts), r)
    return batch


def least(run: Callable[[], Any], repeats: int) -> float:
    best = float("inf")
    for _ in range(repeats):
        start = time.process_time()
        run()
        best = min(best, time.process_time() - start)
    return best


def model() -> Any:
    from transformers import AutoModelForCausalLM, Qwen2Config

    config = Qwen2Config(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=1024,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=16384,
        use_cache=False,
    )
    return AutoModelForCausalLM.from_config(config)


def step_seconds(regrouped: padless.tensors.Regrouped) -> float:
    """CPU seconds of forward and backward over all micro-batches, from the three nearest the mean size."""
    net = model()
    sizes = regrouped.plan.group_tokens
    chosen = np.argsort(np.abs(sizes - sizes.mean()))[:3]
    spent = 0.0
    for i in chosen.tolist():
        inputs = {k: v for k, v in regrouped[i].inputs.items() if k in ("input_ids", "attention_mask")}
        start = time.process_time()
        net(**inputs, labels=inputs["input_ids"]).loss.backward()
        spent += time.process_time() - start
    return spent * float(sizes.sum() / sizes[chosen].sum())


def one_process(rows: int, budget: int, layout: str, repeats: int) -> dict[str, Any]:
    batch = batch_of(*lengths(rows))
    regrouped = padless.regroup(batch, budget, fields=rlhf(), layout=layout, unsafe=True)
    outputs = [m.inputs["old_log_probs"] for m in regrouped]
    parts = {
        "read": least(lambda: read_rows(batch, rlhf()), repeats),
        "regroup": least(lambda: padless.regroup(batch, budget, fields=rlhf(), layout=layout, unsafe=True), repeats),
        "make": least(lambda: list(regrouped), repeats),
        "restore": least(lambda: regrouped.restore(outputs, span="response"), repeats),
    }
    total = parts["regroup"] + parts["make"] + parts["restore"]
    step = step_seconds(regrouped) if layout != "packed" else None
    return {
        "rows": rows,
        "layout": layout,
        "real_tokens": regrouped.plan.real_tokens,
        "padded_cells_given": int(batch["input_ids"].numel()),
        "micro_batches": len(regrouped),
        "cpu_seconds": {name: round(value, 5) for name, value in parts.items()},
        "step_cpu_seconds": None if step is None else round(step, 3),
        "share_of_step": None if step is None else round(total / step, 5),
    }


def _rank(rank: int, ranks: int, port: int, rows: int, budget: int, repeats: int, out: str) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=ranks, timeout=timedelta(seconds=120))
    prompts, responses = lengths(rows)
    batch = batch_of(prompts[rank::ranks], responses[rank::ranks])
    group = dist.group.WORLD

    def run() -> padless.tensors.Regrouped:
        return padless.regroup(batch, budget, fields=rlhf(), process_group=group)

    regrouped = run()
    outputs = [m.inputs["old_log_probs"] for m in regrouped]
    wall = []
    for _ in range(repeats):
        dist.barrier()
        start = time.perf_counter()
        run()
        wall.append(time.perf_counter() - start)
    found = {"regroup_cpu": least(run, repeats), "regroup_wall": min(wall)}
    found["restore_cpu"] = least(lambda: regrouped.restore(outputs, span="response"), repeats)
    if rank == 0:
        found["micro_batches"] = len(regrouped)
        Path(out).write_text(json.dumps(found))
    dist.destroy_process_group()


def many_processes(ranks: int, rows: int, budget: int, repeats: int) -> dict[str, Any]:
    import socket
    import tempfile

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        out = f"{folder}/out.json"
        mp.spawn(_rank, args=(ranks, port, rows, budget, repeats, out), nprocs=ranks)
        found = json.loads(Path(out).read_text())
    return {"ranks": ranks, "rows": rows, **{k: round(v, 5) for k, v in found.items()}}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--budget", type=int, default=12288)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, default=HERE / "result.json")
    options = parser.parse_args()
    torch.set_num_threads(1)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=HERE).stdout
    result: dict[str, Any] = {
        "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} CPUs, one thread",
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "padless": padless.__version__},
        "commit": commit.strip(),
        "token_budget": options.budget,
        "one_process": [],
        "processes": [],
    }
    for rows in (32, 256, 1024):
        for layout in ("padded", "packed"):
            found = one_process(rows, options.budget, layout, options.repeats)
            result["one_process"].append(found)
            print(found)
    for ranks in (2, 4):
        found = many_processes(ranks, 256, options.budget, options.repeats)
        result["processes"].append(found)
        print(found)
    options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
