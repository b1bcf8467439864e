"""Packs: seconds against N, quality by distribution, the balance of their work."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from typing import Any

import numpy as np
from measure import Caps, clock, distributions, log_normal, side_by_side, timed
from peers import Packer, Peers

import padless
from padless import CostModel
from padless.planning import partition

__all__ = ["balance", "equal_peer", "huge", "quality", "speed"]

EQUAL = 1.0005  # a peer's plan is of equal quality with at most 0.05 % more packs


def _peer(peer: Packer, lengths: np.ndarray, capacity: int) -> dict[str, float]:
    """One call, or the median of three where a call is short."""
    call, count = peer.prepare(lengths, capacity)
    found, wall, cpu = timed(call)
    packs = count(found)
    del found
    if wall < 0.5:
        wall, cpu = clock(call, 3, warm=False).values()
    efficiency = int(lengths.sum(dtype=np.int64)) / (packs * capacity)
    return {"wall": wall, "cpu": cpu, "packs": packs, "efficiency": efficiency}


def speed(peers: Peers, sizes: list[int], cap: float) -> dict[str, Any]:
    """Log-normal lengths (int32) into 4,096: our whole plan (order and offsets) beside a stable argsort and peers."""
    caps, rows, capacity = Caps(cap), [], 4096
    for count in sizes:
        lengths = log_normal(count)
        plan = padless.pack(lengths, capacity)
        real = int(lengths.sum(dtype=np.int64))
        row: dict[str, Any] = {"sequences": count, "bound": int(plan.lower_bound), "planners": {}}
        calls = {
            "padless": lambda x=lengths: padless.pack(x, capacity),
            "padless first-fit-decreasing": lambda x=lengths: padless.pack(x, capacity, method="first-fit-decreasing"),
            "padless next-fit": lambda x=lengths: padless.pack(x, capacity, method="next-fit"),
            "numpy.argsort(kind='stable')": lambda x=lengths: np.argsort(x, kind="stable"),
        }
        times = side_by_side(calls, 5)
        row["argsort"] = times.pop("numpy.argsort(kind='stable')")
        for name, taken in times.items():
            packs = len(plan) if name == "padless" else len(calls[name]())
            row["planners"][name] = {**taken, "packs": packs, "efficiency": real / (packs * capacity)}
        del plan
        row["share_of_argsort"] = {how: times["padless"][how] / row["argsort"][how] for how in ("wall", "cpu")}
        for name, peer in peers.packers.items():
            found = caps.run(name, count, lambda p=peer, x=lengths: _peer(p, x, capacity))
            if found is not None:
                row["planners"][name] = found
        ours = row["planners"]["padless"]
        equal = {
            name: found["wall"]
            for name, found in row["planners"].items()
            if name in peers.packers and found["packs"] <= EQUAL * ours["packs"]
        }
        if equal:
            best = min(equal, key=lambda name: equal[name])
            row["fastest_equal_peer"] = {"name": best, "times_ours": equal[best] / ours["wall"]}
        rows.append(row)
        print(_line(row), flush=True)
    return {"rows": rows, "cap": cap, "stopped": caps.stopped}


def equal_peer(peers: Peers, sizes: list[int], cap: float) -> dict[str, Any]:
    """The fastest peer of equal quality at the largest size, whatever it takes; smaller sizes tell which it is."""
    caps, capacity, equal = Caps(cap), 4096, set(peers.packers)
    for count in sizes[:-1]:
        lengths = log_normal(count)
        most = EQUAL * len(padless.pack(lengths, capacity))
        for name, peer in peers.packers.items():
            found = caps.run(name, count, lambda p=peer, x=lengths: _peer(p, x, capacity))
            if found is not None and found["packs"] > most:
                equal.discard(name)
    able = [name for name in equal if name in caps.history]
    if not able:
        return {}
    lengths = log_normal(sizes[-1])
    ours = clock(lambda: padless.pack(lengths, capacity))
    row: dict[str, Any] = {"sequences": sizes[-1], "padless": {**ours, "packs": len(padless.pack(lengths, capacity))}}
    name = min(able, key=lambda name: (caps.predict(name, sizes[-1]), name))
    found = caps.run(name, sizes[-1], lambda: _peer(peers.packers[name], lengths, capacity), force=True)
    if found is not None:
        row |= {"name": name, "peer": found, "times_ours": found["wall"] / ours["wall"]}
    print(f"  {row | {'stopped': caps.stopped.get(name, '')}}", flush=True)
    return row


def _line(row: dict[str, Any]) -> str:
    each = ", ".join(f"{name} {v['wall']:.4g} s ({v['efficiency']:.4f})" for name, v in row["planners"].items())
    return f"  {row['sequences']:,}: argsort {row['argsort']['wall']:.4g} s, {each}"


def huge() -> dict[str, Any]:
    """10 and 100 million lengths in a process of their own, with the peak of its memory."""
    done = subprocess.run([sys.executable, __file__], capture_output=True, text=True, check=True)
    result: dict[str, Any] = json.loads(done.stdout)
    print(f"  {result}", flush=True)
    return result


def _huge() -> dict[str, Any]:
    """The two sizes take turns, so that both meet the same machine: most of what differs is how fast pages come."""
    padless.pack(log_normal(1000), 4096)
    inputs = {count: log_normal(count) for count in (10_000_000, 100_000_000)}
    samples: dict[int, list[tuple[float, float]]] = {count: [] for count in inputs}
    result: dict[str, Any] = {}
    for _ in range(7):
        for count, lengths in inputs.items():
            with open("/proc/self/clear_refs", "w") as reset:
                reset.write("5")  # the peak starts anew
            before = _memory("VmRSS")
            plan, wall, cpu = timed(lambda x=lengths: padless.pack(x, 4096))
            samples[count].append((wall, cpu))
            arrays = lengths.nbytes + plan.order.nbytes + plan.offsets.nbytes
            peak = _memory("VmHWM") - before + lengths.nbytes
            result[str(count)] = {"packs": len(plan), "arrays": arrays, "peak": peak}
            del plan
    for count, taken in samples.items():
        wall, cpu = np.median(taken, axis=0)
        result[str(count)] |= {"wall": wall, "cpu": cpu, "walls": [round(wall, 4) for wall, _ in taken]}
    small, large = result.values()
    result["ratio"] = {how: large[how] / small[how] for how in ("wall", "cpu")}
    result["peak_over_arrays"] = large["peak"] / large["arrays"]
    return result


def _memory(field: str) -> int:
    """Bytes, of this process."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith(field))


def quality(mixes: dict[str, np.ndarray], peers: Peers, sizes: list[int], cap: float, narrow: bool) -> dict[str, Any]:
    """Packs of every planner on every distribution, and of ``optimal`` where best-fit leaves room."""
    rows, stopped, ended = [], {}, {}
    for distribution in distributions(mixes, 8):
        caps = Caps(cap)
        for count in sizes:
            late = {name: f"was over the cap of {cap:g} s before" for name, size in ended.items() if size <= count}
            caps.stopped |= {name: reason for name, reason in late.items() if name not in caps.stopped}
            lengths, capacity = distributions(mixes, count)[distribution]
            plan = padless.pack(lengths, capacity).check()
            bound = int(plan.lower_bound)
            call = functools.partial(padless.pack, lengths, capacity)
            planners: dict[str, Any] = {"padless": {**clock(call), "packs": len(plan)}}
            for name, peer in peers.packers.items():
                found = caps.run(name, count, functools.partial(_peer, peer, lengths, capacity))
                if found is not None:
                    planners[name] = found
                elif name not in ended:
                    ended[name] = count
            for found in planners.values():
                found["over_bound"] = found["packs"] / bound - 1
                found["efficiency"] = int(lengths.sum()) / (found["packs"] * capacity)
            row = {"distribution": distribution, "sequences": count, "capacity": capacity, "bound": bound}
            rows.append({**row, "planners": planners})
            each = ", ".join(f"{name} {found['packs']:,}" for name, found in planners.items())
            print(f"  {distribution}, {count:,}: bound {bound:,}, {each}", flush=True)
        if caps.stopped:
            stopped[distribution] = caps.stopped
    return {"rows": rows, "cap": cap, "stopped": stopped, "optimal": _optimal(narrow)}


def _optimal(every: bool) -> list[dict[str, Any]]:
    rng, rows = np.random.default_rng(0), []
    cases = {
        "mean 0.22 of 512": (rng.normal(113, 17, 20_000), 1, 512),
        "mean 0.35 of 512": (rng.normal(179, 27, 20_000), 1, 512),
        "short questions at 384": (rng.lognormal(np.log(150), 0.35, 90_000), 30, 384),
        "mean 0.30 of 4,096, coarsened": (rng.normal(1229, 184, 20_000), 1, 4096),
    }
    for name, (draw, low, capacity) in list(cases.items())[: None if every else 1]:
        lengths = np.clip(draw, low, capacity).astype(np.int64)
        plan, wall, cpu = timed(lambda n=lengths, c=capacity: padless.pack(n, c, method="optimal", time_limit=60))
        best_fit = len(padless.pack(lengths, capacity))
        rows.append(
            {"lengths": name, "best_fit": best_fit, "optimal": len(plan), "bound": int(plan.lower_bound),
             "wall": wall, "cpu": cpu}
        )  # fmt: skip
        print(f"  {rows[-1]}", flush=True)
    return rows


def balance(mixes: dict[str, np.ndarray], peers: Peers) -> dict[str, Any]:
    """Work of the packs (length + length^2 / 24,576) with the fewest packs, and 512 sequences dealt to 64 ranks."""
    cost = CostModel(per_microbatch=0, per_token=1, per_token_squared=1 / 24_576)
    pool, result = mixes["mix_rl_gsm8k_heavy"], {"work": [], "equal_counts": []}
    for seed in range(5):
        lengths = np.random.default_rng(seed).choice(pool, 10_000)
        row: dict[str, Any] = {}
        for how in ("ranks", "work"):
            plan = padless.pack(lengths, 32_768, cost=cost, balance=how).check()
            row[how] = {"packs": len(plan), "bound": int(plan.lower_bound), "spread": _spread(plan.group_costs())}
        row["time"] = clock(lambda n=lengths: padless.pack(n, 32_768, cost=cost, balance="work"))
        result["work"].append(row)
        lengths = np.random.default_rng(seed).choice(pool, 512)
        sums = np.bincount(partition(lengths, 64, equal_counts=True), weights=lengths)
        bound = max(sums.mean(), equal_counts_bound(lengths, 64))
        result["equal_counts"].append({"over_mean": _spread(sums), "bound": bound / sums.mean() - 1})
    if (verl := peers.batchers.get("verl")) is not None:
        result["beside_verl"] = _beside_verl(verl, np.random.default_rng(0).choice(pool, 2000), cost)
    print(f"  {result}", flush=True)
    return result


def _beside_verl(verl: Any, lengths: np.ndarray, cost: CostModel) -> dict[str, Any]:
    """2,000 lengths at 32k without padding, where both keep the budget."""
    call, groups = verl.prepare(lengths, 32_768, 1)
    found, wall, cpu = timed(call)
    work = np.array([(g + g.astype(float) ** 2 / 24_576).sum() for g in groups(found)])
    plan = padless.pack(lengths, 32_768, cost=cost, balance="work")
    ours = clock(lambda: padless.pack(lengths, 32_768, cost=cost, balance="work"))
    return {
        "verl": {"wall": wall, "cpu": cpu, "microbatches": len(work), "spread": _spread(work)},
        "padless": {**ours, "microbatches": len(plan), "spread": _spread(plan.group_costs())},
    }


def _spread(work: np.ndarray) -> float:
    return float(work.max() / work.mean() - 1)


def equal_counts_bound(lengths: np.ndarray, parts: int) -> float:
    """The j longest share parts with the shortest there are, or two of them share one; no equal division is better."""
    down, up = np.sort(lengths)[::-1], np.sort(lengths)
    top, low, beside = np.cumsum(down), np.cumsum(up), len(lengths) // parts - 1
    bounds = [top[0] + low[beside - 1]]
    for j in range(2, parts + 1):
        apart = (top[j - 1] + low[beside * j - 1]) / j
        bounds.append(min(apart, down[j - 2] + down[j - 1] + low[beside - 2]))
    return float(max(bounds))


if __name__ == "__main__":
    print(json.dumps(_huge(), default=float))
