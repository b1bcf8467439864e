"""Take the figures of README.md: the default run, long chains of thought, and (with --data) real texts.

    python benchmarks/policy_update/bench.py [--data FILE --tokenizer T] [--only default,longcot,data]

Writes results/NAME.json and says which of the expectations hold. Run it on a quiet machine.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ORDER = ("fixed", "truncate", "greedy", "balanced")
LIMITS = {
    "max_logprob_difference": 1e-4,
    "loss_difference": 1e-5,
    "gradient_difference": 1e-5,
    "update_difference": 1e-3,
}


def commit() -> str:
    """The commit that is checked out, marked if files differ from it."""
    told = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=HERE, capture_output=True, text=True)
    return told.stdout.strip() or "unknown"


def not_faster(slow: dict[str, Any], fast: dict[str, Any]) -> bool:
    """Whether ``slow`` takes as long as ``fast`` or longer, within two standard errors of the rounds' ratios."""
    pairs = zip(slow["seconds_all"], fast["seconds_all"], strict=False)  # common rounds
    apart = [math.log(a / b) for a, b in pairs]
    error = statistics.stdev(apart) / len(apart) ** 0.5 if len(apart) > 1 else 0.0
    return statistics.mean(apart) + 2 * error >= 0


def expectations(name: str, model: dict[str, Any]) -> list[tuple[str, bool]]:
    """What should hold for a model, and whether it does."""
    arms = model["arms"]
    checks = [
        (f"{a} is slower than {b}, or as fast within the spread", not_faster(arms[a], arms[b]))
        for a, b in pairwise(ORDER)
    ]
    for arm in ORDER:
        told = [(key, arms[arm][key]) for key in LIMITS]
        worst = ", ".join(f"{key.removesuffix('_difference')} {value:.1e}" for key, value in told)
        checks.append((f"{arm} equals each sequence alone and fixed: {worst}", all(v <= LIMITS[k] for k, v in told)))
    gain = model["gain_recovered"]["balanced"]
    checks.append((f"balanced recovers {gain:.1%} of the gain, at least 97 %", gain >= 0.97))
    share = arms["balanced"]["overhead_seconds"] / arms["balanced"]["seconds"]
    checks.append((f"planning and tensor work is {share:.2%} of balanced's step, under 2 %", share < 0.02))
    ratio = model["ratio_to_packed"]["balanced"]
    if name == "qwen2":
        checks.append((f"balanced takes {ratio:.2f} x packed, at most 1.10", ratio <= 1.10))
    if name == "jamba":
        leak = model["leaks"]["packed"]
        told = f"packed is timing only: it leaks {leak['max_logprob_difference']:.1e}"
        checks.append((told, not arms["packed"]["valid"] and not leak["exact"]))
    return checks


def main() -> int:
    """Run, write, and say what holds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="a file of prompts and responses")
    parser.add_argument("--tokenizer", default="qwen")
    parser.add_argument("--only", default="default,longcot,data", help="which runs, with commas")
    given = parser.parse_args()
    runs: dict[str, list[str]] = {"default": [], "longcot": ["--workload", "longcot-rl"]}
    if given.data is not None:
        runs["data"] = ["--data", str(given.data), "--tokenizer", given.tokenizer]
    (HERE / "results").mkdir(exist_ok=True)
    failed = 0
    for name in given.only.split(","):
        if name not in runs:
            continue
        done = subprocess.run(
            [sys.executable, "-m", "padless", "bench", *runs[name], "--json", "-"], stdout=subprocess.PIPE, text=True
        )
        if not done.stdout:
            return done.returncode or 1
        report = json.loads(done.stdout)
        shown = [Path(word).name if word == str(given.data) else word for word in runs[name]]
        result = {"command": " ".join(["padless bench", *shown]), "commit": commit(), "report": report}
        (HERE / "results" / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")
        print(f"{name}: {report['workload']['run_seconds']:.0f} s")
        for model, found in report["models"].items():
            for told, holds in expectations(model, found):
                failed += not holds
                print(f"  {'holds' if holds else 'FAILS'}  {model}: {told}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
