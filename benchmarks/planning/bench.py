"""Planners: seconds, quality and balance, ours and others', one thread, one run.

    PADLESS_DATA=FOLDER python benchmarks/planning/bench.py [--quick] [--peers FOLDER ...] [--json FILE]

``FOLDER`` of PADLESS_DATA holds ``lengths.npz`` (measured lengths). Peers are those of the environment and of
``--peers``: folders with installed packages, or with sub-folders that hold them (see README.md). A peer that cannot
be had is named in the result with the reason. ``--quick`` takes about a minute, the whole about twelve on a quiet core.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

for name in ("OMP", "MKL", "OPENBLAS", "NUMBA", "RAYON"):  # before anything that starts threads is imported
    os.environ[f"{name}_NUM_THREADS"] = "1"

# ruff: noqa: E402
import lines
import measure
import microbatches
import numpy as np
import packs
import peers

import padless

HERE = Path(__file__).parent
SLOW = ("equal_peer", "huge", "first_call")  # sections that --quick leaves out


def machine() -> dict[str, Any]:
    info = Path("/proc/cpuinfo")
    models = [line.split(": ")[1] for line in info.read_text().splitlines() if line.startswith("model name")]
    cpu = models[0] if models else platform.processor() or platform.machine()
    return {"cpu": cpu, "cores": os.cpu_count()}


def commit() -> str:
    found = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False, cwd=HERE
    )
    return found.stdout.strip()


def warm() -> None:
    """Load the kernels, then keep what was imported from being looked through before every timed call."""
    padless.microbatch(np.arange(1, 200), 1000, ranks=2)
    padless.pack(measure.log_normal(1000), 4096)
    padless.pack(np.arange(1, 200), 200, method="optimal")
    gc.collect()
    gc.freeze()


def sections(mixes: dict[str, np.ndarray], found: peers.Peers, quick: bool, cap: float) -> dict[str, Callable[[], Any]]:
    sizes = [10**power for power in range(3, 6 if quick else 8)]
    table: dict[str, Callable[[], Any]] = {
        "microbatch": lambda: microbatches.quality(mixes, found, 3 if quick else 20, 0 if quick else cap / 7),
        "balance": lambda: packs.balance(mixes, found),
        "large": lambda: microbatches.large(mixes, sizes[1:4]),
        "pack_speed": lambda: packs.speed(found, sizes, cap),
        "equal_peer": lambda: packs.equal_peer(found, sizes, min(cap, 3)),
        "huge": packs.huge,
        "packs": lambda: packs.quality(mixes, found, sizes[: 2 if quick else 3], cap / 5, not quick),
        "microbatch_speed": lambda: microbatches.speed(mixes, found, sizes, cap),
        "random_draws": lambda: microbatches.random_draws(mixes, found, 300 if quick else 10_000),
        "first_call": microbatches.first_call,
    }
    return {name: section for name, section in table.items() if not quick or name not in SLOW}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--quick", action="store_true", help="fewer draws, at most 100,000 lengths, peers up to a second"
    )
    parser.add_argument("--peers", nargs="*", default=[], help="folders that pip installed peers into")
    parser.add_argument("--cap", type=float, help="CPU seconds after which a peer gets no larger input (30; quick: 1)")
    parser.add_argument("--only", nargs="*", help="names of sections; the others keep what the JSON file holds")
    parser.add_argument("--json", default=str(HERE / "result.json"))
    options = parser.parse_args()
    folder = os.environ.get("PADLESS_DATA")
    if not folder:
        sys.exit("set PADLESS_DATA to the folder that holds lengths.npz")
    warnings.simplefilter("ignore")
    cap = options.cap or (1 if options.quick else 30)
    started, target = time.perf_counter(), Path(options.json)
    mixes = measure.pools(folder)
    found = peers.find(options.peers)
    print(f"peers: {found.versions}\nmissing: {found.missing}", flush=True)
    result: dict[str, Any] = json.loads(target.read_text()) if options.only and target.exists() else {}
    result |= {
        "machine": machine(),
        "versions": {"python": platform.python_version(), "numpy": np.__version__, "padless": padless.__version__},
        "peers": found.versions,
        "missing_peers": found.missing,
    }
    for name, section in sections(mixes, found, options.quick, cap).items():
        if options.only and name not in (asked.replace("-", "_") for asked in options.only):
            continue
        print(f"{name} (after {time.perf_counter() - started:.0f} s, {time.process_time():.0f} s CPU)", flush=True)
        run = {"commit": commit(), "quick": options.quick, "cap": cap, "load": os.getloadavg()[0]}
        warm()
        begun = time.perf_counter()
        result[name] = section()
        result.setdefault("runs", {})[name] = {**run, "seconds": time.perf_counter() - begun}
        result["lines"] = lines.judge(result)
        target.write_text(json.dumps(result, indent=1, default=float) + "\n")
    print(lines.table(result["lines"]) + f"\n{time.perf_counter() - started:.0f} s", flush=True)


if __name__ == "__main__":
    main()
