"""Planners: quality, speed and balance, ours and others', one thread, one run.

    PADLESS_DATA=FOLDER python benchmarks/planning/bench.py [--quick] [--peers FOLDER] [--json FILE]

``FOLDER`` of PADLESS_DATA holds ``lengths.npz`` (measured lengths). Peers are used as their packages ship them:
those of the environment, and those that ``pip install --no-deps --target FOLDER axolotl llamafactory`` puts
into ``--peers``. A peer that cannot be imported is named in the result with the reason.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("NUMBA_NUM_THREADS", "1")

import numpy as np

import padless
from padless import CostModel
from padless.planning.balance import partition

HERE = Path(__file__).parent
CASES = [
    ("mix_rl_gsm8k_heavy", 256, 8, 16_384),
    ("mix_rl_longcot", 256, 8, 16_384),
    ("mix_rl_gsm8k_heavy", 1024, 8, 16_384),
    ("mix_rl_longcot", 1024, 8, 16_384),
    ("mix_rl_gsm8k_heavy", 4096, 64, 32_768),
    ("mix_rl_longcot", 4096, 64, 32_768),
]


def clock(function: Callable[[], Any], repeats: int = 5) -> dict[str, float]:
    """Median wall and CPU seconds; the first, untimed call compiles."""
    function()
    wall, cpu = [], []
    for _ in range(repeats):
        w, c = time.perf_counter(), time.process_time()
        function()
        wall.append(time.perf_counter() - w)
        cpu.append(time.process_time() - c)
    return {"wall": float(np.median(wall)), "cpu": float(np.median(cpu))}


def perfect(lengths: np.ndarray, ranks: int, budget: int) -> float:
    """Perfect packing and balance: steps needed x overhead + real tokens / ranks, never under the longest sequence."""
    steps = -(-int(lengths.sum()) // (ranks * budget))
    return max(500 * steps + lengths.sum() / ranks, 500 + lengths.max())


def microbatch_quality(pools: dict[str, np.ndarray], draws: int) -> list[dict[str, Any]]:
    rows = []
    for mix, count, ranks, budget in CASES:
        pool, found = np.minimum(pools[mix], budget), []
        for seed in range(draws):
            lengths = np.random.default_rng(seed).choice(pool, count)
            ours = padless.microbatch(lengths, budget, ranks=ranks)
            greedy = padless.microbatch(lengths, budget, ranks=ranks, method="greedy")
            base = perfect(lengths, ranks, budget)
            found.append((ours.makespan() / base, 1 + ours.gap, ours.lower_bound / base, greedy.makespan() / base))
        mean = np.mean(found, axis=0)
        timing = clock(lambda n=lengths, b=budget, r=ranks: padless.microbatch(n, b, ranks=r))
        rows.append(
            {"mix": mix, "sequences": count, "ranks": ranks, "budget": budget, "over_perfect": mean[0],
             "over_bound": mean[1], "bound_over_perfect": mean[2], "greedy_over_perfect": mean[3], **timing}
        )  # fmt: skip
        print(rows[-1], flush=True)
    return rows


def pack_speed(peers: dict[str, Callable[..., Any]], sizes: list[int]) -> list[dict[str, Any]]:
    rows = []
    for count in sizes:
        draw = np.random.default_rng(0).lognormal(np.log(350), 0.9, count)
        lengths = np.clip(draw, 8, 4096).astype(np.int32)
        plan = padless.pack(lengths, 4096)
        repeats = 5 if count <= 10**6 else 3
        row: dict[str, Any] = {
            "sequences": count, "packs": len(plan), "bound": int(plan.lower_bound),
            "padless": clock(lambda x=lengths: padless.pack(x, 4096), repeats),
            "argsort": clock(lambda x=lengths: np.argsort(x, kind="stable"), repeats),
        }  # fmt: skip
        row["share_of_argsort"] = row["padless"]["wall"] / row["argsort"]["wall"]
        for name, peer in peers.items():
            if count > 10**5:
                continue
            started = time.perf_counter()
            packs = peer(lengths, 4096)
            row[name] = {"wall": time.perf_counter() - started, "packs": packs}
        rows.append(row)
        print(row, flush=True)
    return rows


def distributions(pools: dict[str, np.ndarray], count: int) -> dict[str, tuple[np.ndarray, int]]:
    rng = np.random.default_rng(0)
    return {
        "sft log-normal": (np.clip(rng.lognormal(np.log(350), 0.9, count), 8, 4096).astype(np.int64), 4096),
        "rl mix": (rng.choice(pools["mix_rl_gsm8k_heavy"], count).astype(np.int64), 32_768),
        "web": (np.clip(rng.lognormal(np.log(600), 1.3, count), 8, 8192).astype(np.int64), 8192),
        "bimodal": (np.where(np.arange(count) % 3 == 0, 2060, 1010), 4096),
        "uniform": (rng.integers(1, 4097, count), 4096),
    }


def pack_quality(pools: dict[str, np.ndarray], peers: dict[str, Callable[..., Any]]) -> list[dict[str, Any]]:
    rows = []
    for name, (lengths, capacity) in distributions(pools, 10_000).items():
        plan = padless.pack(lengths, capacity)
        row: dict[str, Any] = {"distribution": name, "packs": len(plan), "bound": int(plan.lower_bound)}
        row.update({peer: run(lengths, capacity) for peer, run in peers.items()})
        rows.append(row)
        print(row, flush=True)
    rng = np.random.default_rng(0)
    for name, mean, spread, capacity in (("narrow 0.22", 113, 17, 512), ("narrow 0.35", 179, 27, 512)):
        rows.append(optimal_row(name, np.clip(rng.normal(mean, spread, 20_000), 1, capacity), capacity))
    rows.append(optimal_row("short questions", np.clip(rng.lognormal(np.log(150), 0.35, 90_000), 30, 384), 384))
    rows.append(optimal_row("narrow, 4096", np.clip(rng.normal(1229, 184, 20_000), 1, 4096), 4096))
    return rows


def optimal_row(name: str, lengths: np.ndarray, capacity: int) -> dict[str, Any]:
    lengths = lengths.astype(np.int64)
    started = time.perf_counter()
    plan = padless.pack(lengths, capacity, method="optimal", time_limit=60)
    row = {"distribution": name, "packs": len(padless.pack(lengths, capacity)), "optimal": len(plan),
           "bound": int(plan.lower_bound), "seconds": time.perf_counter() - started}  # fmt: skip
    print(row, flush=True)
    return row


def balance(pools: dict[str, np.ndarray]) -> dict[str, Any]:
    cost = CostModel(per_microbatch=0, per_token=1, per_token_squared=1 / 24_576)
    result: dict[str, Any] = {"work": []}
    for seed in range(5):
        lengths = np.random.default_rng(seed).choice(pools["mix_rl_gsm8k_heavy"], 10_000)
        row: dict[str, Any] = {}
        for how in ("ranks", "work"):
            plan = padless.pack(lengths, 32_768, cost=cost, balance=how).check()
            work = plan.group_costs()
            row[how] = {"packs": len(plan), "bound": int(plan.lower_bound), "spread": work.max() / work.mean() - 1}
        row["time"] = clock(lambda n=lengths: padless.pack(n, 32_768, cost=cost, balance="work"))
        result["work"].append(row)
    result["equal_counts"] = []
    for seed in range(5):
        lengths = np.random.default_rng(seed).choice(pools["mix_rl_gsm8k_heavy"], 512)
        sums = np.bincount(partition(lengths, 64, equal_counts=True), weights=lengths)
        bound = max(sums.mean(), equal_counts_bound(lengths, 64))
        result["equal_counts"].append({"over_mean": sums.max() / sums.mean() - 1, "bound": bound / sums.mean() - 1})
    print(result, flush=True)
    return result


def equal_counts_bound(lengths: np.ndarray, parts: int) -> float:
    """The j longest share parts with the shortest there are, or two of them share one; no equal division is better."""
    down, up = np.sort(lengths)[::-1], np.sort(lengths)
    top, low, beside = np.cumsum(down), np.cumsum(up), len(lengths) // parts - 1
    bounds = [top[0] + low[beside - 1]]
    for j in range(2, parts + 1):
        apart = (top[j - 1] + low[beside * j - 1]) / j
        bounds.append(min(apart, down[j - 2] + down[j - 1] + low[beside - 2]))
    return float(max(bounds))


def random_draws(pools: dict[str, np.ndarray], draws: int) -> dict[str, Any]:
    """Budget kept in random draws, and how much a larger budget ever costs a heuristic plan."""
    rng = np.random.default_rng(0)
    over, worst, worse = 0, 0.0, 0
    for _ in range(draws):
        ranks, budget = int(rng.integers(1, 17)), int(rng.integers(4_000, 40_000))
        pool = pools["mix_rl_longcot" if rng.random() < 0.5 else "mix_rl_gsm8k_heavy"]
        lengths = np.minimum(rng.choice(pool, int(rng.integers(1, 300))), budget)
        plan = padless.microbatch(lengths, budget, ranks=ranks)
        over += int(plan.group_tokens.max() > budget)
        more = padless.microbatch(lengths, int(budget * 1.1), ranks=ranks)
        change = more.makespan() / plan.makespan() - 1
        worst, worse = max(worst, change), worse + (change > 0.01)
    return {"draws": draws, "over_budget": over, "worst_cost_of_10%_more_budget": worst, "worse_by_more_than_1%": worse}


def large(pools: dict[str, np.ndarray], quick: bool) -> list[dict[str, Any]]:
    rows = []
    for count in (10_000, 100_000) if quick else (10_000, 100_000, 1_000_000):
        lengths = np.minimum(np.random.default_rng(0).choice(pools["mix_rl_gsm8k_heavy"], count), 32_768)
        for ranks in (1, 64):
            plan = padless.microbatch(lengths, 32_768, ranks=ranks)
            timing = clock(lambda n=lengths, r=ranks: padless.microbatch(n, 32_768, ranks=r), 3)
            rows.append({"sequences": count, "ranks": ranks, "gap": plan.gap, **timing})
            print(rows[-1], flush=True)
    return rows


def first_call() -> dict[str, float]:
    """Seconds of the first plan in a fresh process: compiling, then loading what was compiled."""
    code = "import time; t = time.perf_counter(); import padless; padless.{0}; print(time.perf_counter() - t)"
    calls = {"microbatch": "microbatch([3, 4, 5] * 99, 64, ranks=2)", "pack": "pack([3, 4, 5] * 99, 64)"}
    result = {}
    for name, call in calls.items():
        import tempfile

        with tempfile.TemporaryDirectory() as folder:
            for state in ("compiling", "cached"):
                done = subprocess.run(
                    [sys.executable, "-c", code.format(call)],
                    env={**os.environ, "NUMBA_CACHE_DIR": folder}, capture_output=True, text=True, check=True,
                )  # fmt: skip
                result[f"{name}, {state}"] = float(done.stdout)
    return result


def find_peers(folder: str | None) -> tuple[dict[str, Callable[..., int]], dict[str, str]]:
    """Peers' own packing functions, each as (lengths, capacity) -> packs; and why others are missing."""
    if folder:
        sys.path.append(folder)
    found: dict[str, Callable[..., int]] = {}
    missing: dict[str, str] = {
        "verl, grain, NeMo-RL, Megatron-Bridge, fairseq, lhotse, transformers, histogram packing": "no adapter here yet"
    }
    for name, make in (("trl bfd", _trl), ("axolotl multipack", _axolotl), ("llama-factory knapsack", _llama_factory)):
        try:
            run = make()
            run(np.array([3, 4, 5]), 10)
            found[name] = run
        except Exception as error:  # a peer may fail in any way; it is reported
            missing[name] = f"{type(error).__name__}: {error}"[:200]
    return found, missing


def _trl() -> Callable[..., int]:
    import datasets
    from trl.data_utils import pack_dataset

    def run(lengths: np.ndarray, capacity: int) -> int:
        rows = datasets.Dataset.from_dict({"input_ids": [[0] * int(n) for n in lengths]})
        packed = pack_dataset(rows, capacity, strategy="bfd", map_kwargs={"batch_size": len(lengths)})
        return len(packed)

    return run


def _axolotl() -> Callable[..., int]:
    module = importlib.import_module("axolotl.utils.samplers.multipack")

    def run(lengths: np.ndarray, capacity: int) -> int:
        return len(module.pack_group(lengths, 0, capacity, len(lengths), len(lengths), False))

    return run


def _llama_factory() -> Callable[..., int]:
    module = importlib.import_module("llamafactory.data.processors.processor_utils")

    def run(lengths: np.ndarray, capacity: int) -> int:
        return len(module.greedy_knapsack(lengths.tolist(), capacity))

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer draws, at most a million lengths")
    parser.add_argument("--peers", help="folder that pip installed peers into")
    parser.add_argument("--json", default=str(HERE / "result.json"))
    options = parser.parse_args()
    folder = os.environ.get("PADLESS_DATA")
    if not folder:
        sys.exit("set PADLESS_DATA to the folder that holds lengths.npz")
    with np.load(Path(folder) / "lengths.npz") as stored:
        pools = {mix: stored[f"{mix}.lengths"] for mix in ("mix_rl_gsm8k_heavy", "mix_rl_longcot")}
    peers, missing = find_peers(options.peers)
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False, cwd=HERE
    )
    result: dict[str, Any] = {
        "machine": {"cpu": platform.processor() or platform.machine(), "cores": os.cpu_count()},
        "versions": {"python": platform.python_version(), "numpy": np.__version__, "padless": padless.__version__},
        "commit": commit.stdout.strip(),
        "quick": options.quick,
        "load": os.getloadavg(),
        "missing_peers": missing,
    }
    sizes = [10_000, 100_000, 1_000_000] + ([] if options.quick else [10_000_000])
    sections: dict[str, Callable[[], Any]] = {
        "first_call": first_call,
        "microbatch": lambda: microbatch_quality(pools, 5 if options.quick else 20),
        "packs": lambda: pack_quality(pools, peers),
        "balance": lambda: balance(pools),
        "pack_speed": lambda: pack_speed(peers, sizes),
        "large": lambda: large(pools, options.quick),
        "random_draws": lambda: random_draws(pools, 300 if options.quick else 10_000),
    }
    for name, section in sections.items():
        result[name] = section()
        Path(options.json).write_text(json.dumps(result, indent=1, default=float) + "\n")


if __name__ == "__main__":
    main()
