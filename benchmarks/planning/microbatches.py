"""Micro-batches: modelled step time over the bound, seconds against N, budgets kept."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from typing import Any

import numpy as np
from measure import MIXES, Caps, clock, timed
from peers import Peers

import padless

__all__ = ["first_call", "large", "quality", "random_draws", "speed"]

OVERHEAD = 500  # tokens' worth of time per micro-batch: the default cost
#: sequences, ranks, budget
CASES = ((256, 8, 16_384), (1024, 8, 16_384), (4096, 64, 32_768))


def perfect(lengths: np.ndarray, ranks: int, budget: int) -> float:
    """Perfect packing and balance: steps needed x overhead + real tokens / ranks, never under the longest sequence."""
    steps = -(-int(lengths.sum()) // (ranks * budget))
    return float(max(OVERHEAD * steps + lengths.sum() / ranks, OVERHEAD + lengths.max()))


def padded(groups: list[np.ndarray]) -> np.ndarray:
    """Tokens that the device computes in each micro-batch."""
    return np.array([len(group) * int(group.max()) for group in groups])


def makespan(tokens: np.ndarray, ranks: int) -> float:
    """Modelled time of the step: the ranks meet in every micro-step, the slowest sets its time."""
    steps = -(-len(tokens) // ranks)
    cost = np.zeros(steps * ranks)  # a rank without a micro-batch waits
    cost[: len(tokens)] = OVERHEAD + tokens
    return float(cost.reshape(steps, ranks).max(axis=1).sum())


def quality(mixes: dict[str, np.ndarray], peers: Peers, draws: int, allowance: float) -> list[dict[str, Any]]:
    """Mean over draws; a peer gets as many of the same draws as fit into ``allowance`` seconds, at least one.

    Without an allowance peers get one draw, and none of the largest case.
    """
    rows = []
    for count, ranks, budget in CASES:
        for mix in MIXES:
            pool, steps, largest = np.minimum(mixes[mix], budget), [], 0
            for seed in range(draws):
                lengths = np.random.default_rng(seed).choice(pool, count)
                plan = padless.microbatch(lengths, budget, ranks=ranks).check()
                greedy = padless.microbatch(lengths, budget, ranks=ranks, method="greedy")
                steps.append((lengths, plan.lower_bound, plan.makespan(), greedy.makespan()))
                largest = max(largest, int(plan.group_tokens.max()))
            base = np.array([perfect(lengths, ranks, budget) for lengths, *_ in steps])
            bound, ours, greedy_time = np.array([step[1:] for step in steps]).T
            lengths = steps[-1][0]
            row: dict[str, Any] = {
                "mix": mix, "sequences": count, "ranks": ranks, "budget": budget, "draws": draws,
                "over_perfect": float(np.mean(ours / base)), "over_bound": float(np.mean(ours / bound)),
                "bound_over_perfect": float(np.mean(bound / base)),
                "greedy_over_bound": float(np.mean(greedy_time / bound)), "largest_over_budget": largest / budget,
                **clock(lambda n=lengths, b=budget, r=ranks: padless.microbatch(n, b, ranks=r), 9),
                "peers": {},
            }  # fmt: skip
            for name, peer in peers.batchers.items() if allowance or count < 4096 else ():
                row["peers"][name] = _beside(peer, steps, ranks, budget, allowance)
            rows.append(row)
            print(f"  {_line(row)}", flush=True)
    return rows


def _beside(peer: Any, steps: list[Any], ranks: int, budget: int, allowance: float) -> dict[str, Any]:
    started, over, ours, seconds, worst = time.perf_counter(), [], [], [], 0.0
    shares = []
    for lengths, bound, span, _ in steps:
        try:
            call, groups = peer.prepare(lengths, budget, ranks)
            found, wall, _ = timed(call)
        except Exception as error:  # a peer may fail in any way
            return {"failed": f"{type(error).__name__}: {error}"[:200]}
        tokens = padded(groups(found))
        over.append(makespan(tokens, ranks) / bound)
        ours.append(span / bound)
        seconds.append(wall)
        worst = max(worst, tokens.max() / budget)
        shares.append(np.mean(tokens > budget))
        if time.perf_counter() - started > allowance:
            break
    return {
        "draws": len(over), "over_bound": float(np.mean(over)), "ours_over_bound": float(np.mean(ours)),
        "wall": float(np.median(seconds)), "largest_over_budget": float(worst),
        "share_of_microbatches_over_budget": float(np.mean(shares)),
    }  # fmt: skip


def _line(row: dict[str, Any]) -> str:
    text = f"{row['mix']} {row['sequences']} on {row['ranks']}: perfect x {row['over_perfect']:.4f}, "
    text += f"bound x {row['over_bound']:.4f}, {row['wall'] * 1e3:.1f} ms, greedy x {row['greedy_over_bound']:.2f}"
    for name, found in row["peers"].items():
        shown = found.get("failed") or f"x {found['over_bound']:.3f}, {found['wall'] * 1e3:.1f} ms"
        text += f"; {name} {shown}"
    return text


def speed(mixes: dict[str, np.ndarray], peers: Peers, sizes: list[int], cap: float) -> dict[str, Any]:
    """Seconds, occupancy and step time over the bound of one step of N sequences on 8 ranks at 32k."""
    caps, own, rows, ranks, budget = Caps(cap), Caps(max(cap, 40)), [], 8, 32_768
    for count in sizes:
        lengths = np.minimum(np.random.default_rng(0).choice(mixes["mix_rl_gsm8k_heavy"], count), budget)
        row: dict[str, Any] = {"sequences": count, "ranks": ranks, "budget": budget, "planners": {}}
        bound = np.nan
        for method in ("balanced", "greedy"):
            call = lambda m=method, n=lengths: padless.microbatch(n, budget, ranks=ranks, method=m)  # noqa: E731
            name = f"padless {method}"
            if (found := own.run(name, count, lambda c=call: timed(c))) is None:
                continue
            plan, wall, cpu = found
            if wall < 0.5:
                wall, cpu = clock(call, 3, warm=False).values()
            bound = plan.lower_bound if method == "balanced" else bound
            row["planners"][name] = {
                "wall": wall, "cpu": cpu, "occupancy": plan.occupancy, "over_bound": plan.makespan() / bound,
                "largest_over_budget": float(plan.group_tokens.max() / budget),
            }  # fmt: skip
        for name, peer in peers.batchers.items():
            found = caps.run(name, count, lambda p=peer, n=lengths, b=bound: _step(p, n, budget, ranks, b))
            if found is not None:
                row["planners"][name] = found
        rows.append(row)
        each = ", ".join(f"{name} {v['wall']:.4g} s ({v['occupancy']:.3f})" for name, v in row["planners"].items())
        print(f"  {count:,}: {each}", flush=True)
    return {"rows": rows, "cap": cap, "stopped": caps.stopped | own.stopped}


def _step(peer: Any, lengths: np.ndarray, budget: int, ranks: int, bound: float) -> dict[str, float]:
    call, groups = peer.prepare(lengths, budget, ranks)
    found, wall, cpu = timed(call)
    tokens = padded(groups(found))
    if wall < 0.5:
        wall, cpu = clock(call, 3, warm=False).values()
    return {
        "wall": wall, "cpu": cpu, "occupancy": float(lengths.sum() / tokens.sum()),
        "over_bound": makespan(tokens, ranks) / bound, "largest_over_budget": float(tokens.max() / budget),
    }  # fmt: skip


def large(mixes: dict[str, np.ndarray], sizes: list[int]) -> list[dict[str, Any]]:
    """``balanced`` for many sequences, on one rank and on 64."""
    rows = []
    for count in sizes:
        lengths = np.minimum(np.random.default_rng(0).choice(mixes["mix_rl_gsm8k_heavy"], count), 32_768)
        for ranks in (1, 64):
            plan = padless.microbatch(lengths, 32_768, ranks=ranks)
            timing = clock(lambda n=lengths, r=ranks: padless.microbatch(n, 32_768, ranks=r), 3, warm=False)
            rows.append({"sequences": count, "ranks": ranks, "over_bound": 1 + plan.gap, **timing})
            print(f"  {rows[-1]}", flush=True)
    return rows


def random_draws(mixes: dict[str, np.ndarray], peers: Peers, draws: int) -> dict[str, Any]:
    """Padded tokens over the budget in random draws, ours and verl's; and what 10 % more budget ever costs ours.

    A draw: 1 to 128 lengths of either mix, clipped at a budget of 4,000 to 40,000, on 1 to 16 ranks (verl: one).
    """
    from peers import Batcher  # the annotation below

    verl: Batcher | None = peers.batchers.get("verl")
    rng = np.random.default_rng(0)
    ours, theirs, more_costs = np.zeros(draws), np.zeros(draws), np.zeros(draws)
    for draw in range(draws):
        ranks, budget = int(rng.integers(1, 17)), int(rng.integers(4_000, 40_000))
        pool = mixes[MIXES[int(rng.integers(2))]]
        lengths = np.minimum(rng.choice(pool, int(rng.integers(1, 129))), budget)
        plan = padless.microbatch(lengths, budget, ranks=ranks).check()
        ours[draw] = plan.group_tokens.max() / budget
        more = padless.microbatch(lengths, int(budget * 1.1), ranks=ranks)
        more_costs[draw] = more.makespan() / plan.makespan() - 1
        if verl is not None:
            call, groups = verl.prepare(lengths, budget, 1)
            theirs[draw] = padded(groups(call())).max() / budget
        if draw % 1000 == 999:
            print(f"  {draw + 1:,} draws", flush=True)
    result = {
        "draws": draws,
        "padless": {"largest_over_budget": ours.max(), "share_over_budget": float(np.mean(ours > 1))},
        "10% more budget": {"worst": more_costs.max(), "share_worse_by_1%": float(np.mean(more_costs > 0.01))},
    }
    if verl is not None:
        result["verl"] = {"largest_over_budget": theirs.max(), "share_over_budget": float(np.mean(theirs > 1))}
    print(f"  {result}", flush=True)
    return result


def first_call() -> dict[str, float]:
    """Seconds of the first plan in a fresh process, imports included: compiling, then loading what was compiled."""
    code = "import time; t = time.perf_counter(); import padless; padless.{0}; print(time.perf_counter() - t)"
    calls = {"microbatch": "microbatch([3, 4, 5] * 99, 64, ranks=2)", "pack": "pack([3, 4, 5] * 99, 64)"}
    result = {}
    for name, call in calls.items():
        with tempfile.TemporaryDirectory() as folder:
            for state in ("compiling", "cached"):
                done = subprocess.run(
                    [sys.executable, "-c", code.format(call)],
                    env={**os.environ, "NUMBA_CACHE_DIR": folder}, capture_output=True, text=True, check=True,
                )  # fmt: skip
                result[f"{name}, {state}"] = float(done.stdout)
    print(f"  {result}", flush=True)
    return result
