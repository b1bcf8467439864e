"""TRL's SFT and GRPO, and FSDP2 over four processes: the host's default, its own best options, and padless.

    python benchmarks/trainers/bench.py            # all of it, writes result.json beside this file
    python benchmarks/trainers/bench.py --quick    # a short look, writes nothing unless --out is given

Arms take turns, repeat by repeat, on the same rows; figures are medians over the repeats. The end says what holds.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import logging
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

# ruff: noqa: E402 (the libraries read these when they are imported)
os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", TRL_EXPERIMENTAL_SILENCE="1")
warnings.filterwarnings("ignore")

import datasets
import grpo
import sft
import torch
import transformers
from arms import WARM_UP, compare, source

from padless import CostModel
from padless.bench.measure import machine, versions
from padless.bench.models import build
from padless.tuning.search import language_model_step

HERE = Path(__file__).resolve().parent
SAME = 1e-3  # relative difference of losses and gradient norms up to which two arms trained the same (float32)
NOISE = 0.05  # a median within this share is not a difference
IDLE = 0.05
OTHER_STEPS = ("host, group_by_length", "host, packing")  # only where an epoch has several steps does it show
PARTS = ("sft", "grpo", "ranks")


def calibrated(setting: argparse.Namespace) -> CostModel:
    """What micro-batches of this model cost here, in processor seconds, as ``padless tune`` measures it."""
    model = build(setting.model, seed=0).model
    most = setting.sft_budget

    def step(rows: int, width: int) -> float:
        begun = time.process_time()
        language_model_step(model, rows, width)
        return time.process_time() - begun

    shapes = [(1, 16), (1, 64), (1, 256), (1, most // 2), (4, 64), (16, 32), (2, most // 8), (8, most // 16)]
    return CostModel.calibrate(step, shapes=shapes, repeats=3, max_seconds=90)


def claims(result: dict[str, Any]) -> list[tuple[bool, str]]:
    """What ought to hold, and whether it does."""
    found = []
    for part, least in (("sft", 1.5), ("grpo", 3.0)):
        rows = {row["arm"]: row for row in result.get(part, [])}
        if not rows:
            continue
        ours = rows["padless"]
        exact = [row for row in rows.values() if _same(row)]
        worst = max(ours["loss_difference"], ours["gradient_difference"])
        found.append((_same(ours), f"{part}: padless trains the same as the host (largest difference {worst:.0e})"))
        times = ours["times_host"]
        told = f"{part}: padless is {_both(times)} as fast as the host's default; at least {least} x on both clocks"
        found.append((min(times.values()) >= least, told))
        best = max((row for row in exact if row is not ours), key=lambda row: row["times_host"]["cpu"])
        times = {kind: _against(ours, best, kind) for kind in ("wall", "cpu")}
        told = f"{part}: padless is {_both(times)} as fast as the host's best exact arm ({best['arm']})"
        found.append((min(times.values()) >= 1 - NOISE, f"{told}; at least 1 x, less {NOISE:.0%} of noise"))
    if "ranks" in result:
        rows = {row["arm"]: row for row in result["ranks"]["arms"]}
        ours, host = rows["global regrouping"], rows["fixed rows"]
        told = f"ranks: idle share {ours['idle_share']:.1%} with global regrouping, {host['idle_share']:.1%} before"
        told = f"{told} ({result['ranks']['sequences']} sequences, {len(ours['idle_share_per_rank'])} processes)"
        found.append((ours["idle_share"] < IDLE, f"{told}; under {IDLE:.0%}"))
        best = min(row["makespan_seconds"] for name, row in rows.items() if name != "global regrouping")
        told = f"ranks: makespan {ours['makespan_seconds']:.2f} s, {host['makespan_seconds']:.2f} s with fixed rows,"
        found.append((ours["makespan_seconds"] <= best * (1 + NOISE), f"{told} {best:.2f} s in the best other arm"))
        worst = max(abs(row["grad_norm"] / host["grad_norm"] - 1) for row in rows.values())
        found.append(
            (worst <= SAME, f"ranks: gradient norms of all arms are the same (largest difference {worst:.0e})")
        )
    return found


def _both(times: dict[str, float]) -> str:
    return f"{times['wall']:.2f} x (processor time: {times['cpu']:.2f} x)"


def _against(ours: dict[str, Any], other: dict[str, Any], kind: str) -> float:
    """Median over the repeats of how much faster an arm is than another on the same rows."""
    pairs = zip(ours["times_host_each"][kind], other["times_host_each"][kind], strict=True)
    return statistics.median(mine / its for mine, its in pairs)


def _same(row: dict[str, Any]) -> bool:
    """Whether an arm's optimizer steps are the host's: by what it does, and by what it logged."""
    if row["arm"] in OTHER_STEPS:
        return False
    held = (row["loss_difference"], row["gradient_difference"])
    return all(value is not None and value <= SAME for value in held)


def table(rows: list[dict[str, Any]]) -> str:
    """One line for each arm."""
    lines = [
        f"{'':32}{'s/step':>8} {'cpu s':>7} {'x host':>7} {'in cpu':>7} {'tokens/s':>9} {'real':>9} {'most':>6}  same"
    ]
    for row in rows:
        times = row["times_host"]
        lines.append(
            f"{row['arm']:32}{row['step_seconds']:8.3f} {row['step_cpu_seconds']:7.3f}"
            f" {times['wall']:6.2f}x {times['cpu']:6.2f}x"
            f" {row['real_tokens_per_second']:9,.0f} {row['occupancy']:9.1%} {row['most_positions']:6,}"
            f"  {'yes' if _same(row) else 'no'}"
        )
    return "\n".join(lines)


def run_ranks(setting: argparse.Namespace, folder: str) -> dict[str, Any]:
    """`ranks.py` in processes of its own."""
    out = Path(folder) / "ranks.json"
    told: dict[str, Any] = {
        "model": setting.model,
        "ranks": setting.ranks,
        "sequences": setting.sequences,
        "scale": setting.ranks_scale,
        "budget": setting.ranks_budget,
        "repeats": setting.ranks_repeats,
        "out": out,
    }
    options = [word for name, value in told.items() for word in (f"--{name}", str(value))]
    subprocess.run([sys.executable, str(HERE / "ranks.py"), *options], check=True)
    found: dict[str, Any] = json.loads(out.read_text())
    found["setting"].pop("out")
    return found


def options() -> argparse.Namespace:
    """Command line; ``--quick`` makes everything small."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen2", help="a built-in model of padless bench, or a config")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--sft-scale", type=float, default=0.25, help="lengths are multiplied by it")
    parser.add_argument("--sft-steps", type=int, default=2, help="optimizer steps of a repeat")
    parser.add_argument("--sft-step", type=int, default=32, help="rows of an optimizer step")
    parser.add_argument("--sft-budget", type=int, default=4096)
    parser.add_argument("--grpo-scale", type=float, default=0.2)
    parser.add_argument("--grpo-steps", type=int, default=2)
    parser.add_argument("--grpo-step", type=int, default=32, help="completions of an optimizer step")
    parser.add_argument("--grpo-budget", type=int, default=4096)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--sequences", type=int, default=128)
    parser.add_argument("--ranks-scale", type=float, default=0.2)
    parser.add_argument("--ranks-budget", type=int, default=4096)
    parser.add_argument("--ranks-repeats", type=int, default=4)
    parser.add_argument("--only", choices=PARTS, help="one part; the others stay in --out")
    parser.add_argument("--quick", action="store_true", help="shorter lengths, fewer repeats")
    parser.add_argument("--out", type=Path)
    setting = parser.parse_args()
    if setting.quick:
        setting.repeats, setting.sft_steps, setting.grpo_steps, setting.ranks_repeats = 2, 1, 1, 1
        setting.sft_scale, setting.grpo_scale, setting.ranks_scale = 0.2, 0.125, 0.125
        setting.grpo_budget = setting.ranks_budget = 2048
    elif setting.out is None:
        setting.out = HERE / "result.json"
    return setting


def main() -> None:
    setting = options()
    for library in (transformers, datasets):
        library.utils.logging.disable_progress_bar()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=HERE, capture_output=True, text=True, check=False)
    result: dict[str, Any] = {"runs": {}}
    if setting.only and setting.out is not None and setting.out.exists():
        result |= json.loads(setting.out.read_text())  # the other parts stay
    result |= {"machine": machine("cpu"), "threads": torch.get_num_threads(), "versions": versions()}
    result |= {"lengths": source()}
    about = {
        "commit": git.stdout.strip(),
        "quick": setting.quick,
        "load_before": os.getloadavg()[0],
        "setting": {key: value for key, value in vars(setting).items() if key != "out"},
    }
    begun = time.perf_counter()
    tell = functools.partial(print, flush=True)
    with tempfile.TemporaryDirectory() as folder:
        if setting.only != "ranks":
            setting.cost = calibrated(setting)
            about["cost"] = setting.cost.to_dict()
            for module in (sft, grpo):
                name = module.__name__
                if setting.only in (None, name):
                    tell(name)
                    result[name] = compare(quiet(module, setting, folder), list(module.ARMS), setting.repeats, tell)
                    for row in result[name]:
                        row["exact"] = _same(row)
        if setting.only in (None, "ranks"):
            tell("ranks")
            result["ranks"] = run_ranks(setting, folder)
    about["seconds"] = round(time.perf_counter() - begun, 1)
    result["runs"] |= {part: about for part in PARTS if setting.only in (None, part)}
    for name in ("sft", "grpo"):
        if name in result:
            print(f"\n{name}\n{table(result[name])}")
    print()
    result["claims"] = [{"holds": holds, "claim": text} for holds, text in claims(result)]
    for claim in result["claims"]:
        print("holds" if claim["holds"] else "FAILS", claim["claim"])
    if setting.out is not None:
        setting.out.write_text(json.dumps(result, indent=2) + "\n")
    sys.exit(0 if all(claim["holds"] for claim in result["claims"]) else 1)


def quiet(module: Any, setting: argparse.Namespace, folder: str) -> Any:
    """An arm's run without what trainers print."""

    def run(arm: str, repeat: int) -> Any:
        given = setting
        if repeat == WARM_UP:
            given = argparse.Namespace(**{**vars(setting), "sft_scale": 0.02, "grpo_scale": 0.02})
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
            return module.run(arm, repeat, given, folder)

    return run


if __name__ == "__main__":
    main()
