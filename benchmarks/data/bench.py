"""Samplers on real lengths: occupancy, order, size of steps, speed, memory, loader wait. Writes result.json."""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from padless import CostModel
from padless.data import PaddedCollator, TokenBudgetSampler
from padless.metrics import Meter, Neighbours

HERE = Path(__file__).parent
BUDGET, PER_STEP, RANKS = 16_384, 256, 8
Groups = Iterable[tuple[int, list[list[int]]]]  # (optimizer step, the ranks' micro-batches of one micro-step)


def lengths_of(name: str) -> np.ndarray:
    folder = os.environ.get("PADLESS_DATA")
    if folder:
        with np.load(Path(folder) / "lengths.npz") as stored:
            return stored[f"{name}.lengths"].astype(np.int32)
    draw = np.random.default_rng(0).lognormal(np.log(270), 0.95, 16_594)
    return np.clip(draw, 5, 12_421).astype(np.int32)


def judge(lengths: np.ndarray, micro_steps: Groups) -> dict[str, Any]:
    """The same figures for every sampler, from nothing but the rows of its micro-batches."""
    real = padded = over = count = 0
    largest, lost = 0, set(range(len(lengths)))
    chain, steps = Neighbours(), {}
    makespan = 0.0
    for step, groups in micro_steps:
        costs = [500.0]
        for rank, group in enumerate(groups):
            if not group:
                continue
            held = lengths[group]
            tokens = len(group) * int(held.max())
            real, padded, count = real + int(held.sum()), padded + tokens, count + 1
            over, largest = over + (tokens > BUDGET), max(largest, tokens)
            costs.append(500.0 + tokens)
            lost.difference_update(group)
            steps[step] = steps.get(step, 0) + int(held.sum())
            if rank == 0:
                chain.add(float(held.mean()))
        makespan += max(costs)
    sizes = np.array(list(steps.values()), dtype=float)
    return {
        "occupancy": real / padded,
        "neighbour_correlation": None if math.isnan(chain.correlation) else chain.correlation,
        "step_size_spread": float(sizes.std() / sizes.mean()),
        "makespan_over_perfect": makespan / (real / RANKS),
        "micro_batches": count,
        "over_budget": over / count,
        "largest": largest,
        "not_seen": len(lost),
    }


def padless_steps(lengths: np.ndarray, **options: Any) -> Iterator[tuple[int, list[list[int]]]]:
    chosen = {"token_budget": BUDGET, "sequences_per_step": PER_STEP, "ranks": RANKS, **options}
    samplers = [TokenBudgetSampler(lengths, rank=rank, **chosen) for rank in range(RANKS)]
    for batches in zip(*samplers, strict=True):
        yield batches[0].step, [[i for i, w in zip(b, b.weights, strict=True) if w] for b in batches]


def fixed_rows(order: list[int]) -> Iterator[tuple[int, list[list[int]]]]:
    """A host's default: the order cut into micro-batches of as many rows for each rank."""
    rows = PER_STEP // RANKS
    for step, start in enumerate(range(0, len(order), PER_STEP)):
        members = order[start : start + PER_STEP]
        yield step, [members[r * rows : (r + 1) * rows] for r in range(RANKS)]


def rebalanced(lengths: np.ndarray, accumulation: int) -> Iterator[tuple[int, list[list[int]]]]:
    from transformers.trainer_pt_utils import BatchRebalanceSampler

    runs = [
        list(BatchRebalanceSampler(lengths.tolist(), PER_STEP, RANKS, accumulation, rank=rank, drop_last=False))
        for rank in range(RANKS)
    ]
    for number, groups in enumerate(zip(*runs, strict=True)):
        yield number // accumulation, [list(group) for group in groups]


def lhotse_steps(lengths: np.ndarray) -> Iterator[tuple[int, list[list[int]]]]:
    from lhotse.dataset.sampling.base import TokenConstraint
    from lhotse.dataset.sampling.dynamic_bucketing import DynamicBucketingSampler

    class Text:
        def __init__(self, index: int, tokens: int) -> None:
            self.id, self.num_tokens = str(index), tokens

    texts = [Text(i, int(n)) for i, n in enumerate(lengths)]
    runs = []
    for rank in range(RANKS):
        sampler = DynamicBucketingSampler(
            texts, constraint=TokenConstraint(max_tokens=BUDGET), num_buckets=30, shuffle=True, world_size=RANKS,
            rank=rank, seed=0,
        )  # fmt: skip
        runs.append([[int(text.id) for text in batch] for batch in sampler])
    # It knows no optimizer steps: each micro-step is one.
    for step in range(max(map(len, runs))):
        yield step, [run[step] if step < len(run) else [] for run in runs]


def quality(lengths: np.ndarray) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    arms: dict[str, Any] = {
        "random order, 32 rows": lambda: fixed_rows(rng.permutation(len(lengths)).tolist()),
        "padless step (default)": lambda: padless_steps(lengths),
        "padless step, overhead 500": lambda: padless_steps(lengths, cost=CostModel(per_microbatch=500)),
        "padless step, balanced": lambda: padless_steps(lengths, method="balanced"),
        "padless step, balanced, overhead 500": lambda: padless_steps(
            lengths, method="balanced", cost=CostModel(per_microbatch=500)
        ),
        "padless pool": lambda: padless_steps(lengths, grouping="pool"),
        "padless range": lambda: padless_steps(lengths, grouping="range"),
        "padless sorted": lambda: padless_steps(lengths, grouping="sorted"),
        "padless none": lambda: padless_steps(lengths, grouping="none"),
    }
    try:
        import torch
        from transformers.trainer_pt_utils import LengthGroupedSampler

        generator = torch.Generator().manual_seed(0)
        arms["transformers group_by_length"] = lambda: fixed_rows(
            list(LengthGroupedSampler(PER_STEP, lengths=lengths.tolist(), generator=generator))
        )
        arms["transformers batch_rebalance"] = lambda: rebalanced(lengths, 1)
        arms["transformers batch_rebalance, 2"] = lambda: rebalanced(lengths, 2)
    except ImportError as error:
        print(f"without transformers: {error}", file=sys.stderr)
    try:
        import lhotse  # noqa: F401

        arms["lhotse dynamic bucketing"] = lambda: lhotse_steps(lengths)
    except ImportError as error:
        print(f"without lhotse: {error}", file=sys.stderr)
    table = {}
    for name, arm in arms.items():
        table[name] = judge(lengths, arm())
        print(name, {k: round(v, 4) if isinstance(v, float) else v for k, v in table[name].items()}, flush=True)
    return table


def speed(base: np.ndarray, count: int) -> dict[str, Any]:
    lengths = base[np.random.default_rng(0).integers(0, len(base), count)]
    common = {"token_budget": BUDGET, "sequences_per_step": PER_STEP, "rank": 0}
    for grouping in ("step", "pool", "range"):  # compile
        list(islice(TokenBudgetSampler(lengths[:20_000], ranks=8, grouping=grouping, **common), 80))
    began = time.perf_counter()
    sampler = TokenBudgetSampler(lengths, ranks=8, **common)
    told: dict[str, Any] = {"sequences": count, "construct_seconds": time.perf_counter() - began}
    next(iter(sampler))
    told["first_micro_batch_seconds"] = time.perf_counter() - began
    tracemalloc.start()
    next(iter(TokenBudgetSampler(lengths, ranks=8, **common)))
    told["memory_over_lengths"] = tracemalloc.get_traced_memory()[1] / lengths.nbytes
    tracemalloc.stop()
    rates: dict[str, dict[str, float]] = {}
    for grouping in ("step", "pool", "range"):
        for ranks in (1, 8, 64, 512):
            iterator = iter(TokenBudgetSampler(lengths, ranks=ranks, grouping=grouping, **common))
            next(iterator)
            best = 0.0
            for _ in range(8):  # the best of several short windows: other load on the machine only slows
                began, first, steps = time.process_time(), next(iterator).step, 0
                while time.process_time() - began < 0.15:
                    steps = next(iterator).step
                best = max(best, (steps - first) * PER_STEP / (time.process_time() - began))
            rates.setdefault(grouping, {})[str(ranks)] = best
            print(grouping, ranks, f"{best / 1e6:.2f} M sequences/s", flush=True)
    return {**told, "sequences_per_second": rates}


def loader_wait(lengths: np.ndarray) -> dict[str, float]:
    from torch.utils.data import DataLoader

    lengths = lengths[lengths <= 4096][:6000]
    data = [{"input_ids": np.ones(n, dtype=np.int64)} for n in lengths]
    sampler = TokenBudgetSampler(lengths, token_budget=BUDGET, sequences_per_step=PER_STEP, grouping="pool")
    meter = Meter()
    loader = DataLoader(data, batch_sampler=sampler, collate_fn=PaddedCollator(), num_workers=2)  # type: ignore[arg-type]
    for batch in meter.watch(sampler.follow(loader), skip_first=True):
        time.sleep(0.020)
        meter.add_batch(batch)
        meter.step()
    return {"steps": meter.steps, "waiting_share": meter.waiting_share, "waiting_ms": 1e3 * meter.waiting / meter.steps}


def _commit() -> str:
    asked = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(asked, capture_output=True, text=True, cwd=HERE, check=False).stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=10_000_000, help="sequences of the speed part")
    parser.add_argument("--out", type=Path, default=HERE / "result.json")
    parser.add_argument(
        "--only", choices=["quality", "speed", "loader"], nargs="*", default=["quality", "speed", "loader"]
    )
    chosen = parser.parse_args()
    lengths = lengths_of("mix_sft_general")
    result: dict[str, Any] = json.loads(chosen.out.read_text()) if chosen.out.exists() else {}
    result["setting"] = {
        "lengths": "mix_sft_general" if os.environ.get("PADLESS_DATA") else "log-normal stand-in",
        "token_budget": BUDGET, "sequences_per_step": PER_STEP, "ranks": RANKS, "machine": platform.processor() or
        platform.machine(), "cores": os.cpu_count(), "load": os.getloadavg()[0], "python": platform.python_version(),
        "numpy": np.__version__,
        "commit": _commit(),
    }  # fmt: skip
    if "quality" in chosen.only:
        result["quality"] = quality(lengths)
    if "speed" in chosen.only:
        result["speed"] = speed(lengths, chosen.count)
    if "loader" in chosen.only:
        result["loader"] = loader_wait(lengths)
    chosen.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
