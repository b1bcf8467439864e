"""How much a searched plan ever loses by more budget, or by one constraint less.

    PADLESS_DATA=FOLDER python scripts/planning_monotone.py --draws 10000

Each draw plans 1 to 300 measured lengths on 1 to 16 ranks with a budget of 4,000 to 40,000, again with 10 % more, and
every fourth time with and without a constraint. ``FOLDER`` holds ``lengths.npz``. Exit code 1 where a budget is
exceeded.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

import padless

CONSTRAINTS: tuple[dict[str, Any], ...] = (
    {"max_sequences": 8},
    {"multiple_of": 64},
    {"microbatches_multiple_of": 2},
    {"ladder": 8},
)


def main() -> int:
    """Draw, plan, report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with np.load(Path(os.environ["PADLESS_DATA"]) / "lengths.npz") as stored:
        pools = [stored[f"{mix}.lengths"] for mix in ("mix_rl_gsm8k_heavy", "mix_rl_longcot")]
    rng = np.random.default_rng(options.seed)
    losses: dict[str, list[float]] = {}
    over = 0
    for draw in range(options.draws):
        ranks, budget = int(rng.integers(1, 17)), int(rng.integers(4_000, 40_000))
        lengths = np.minimum(rng.choice(pools[draw % 2], int(rng.integers(1, 300))), budget // 64 * 64)
        plan = padless.microbatch(lengths, budget, ranks=ranks)
        more = padless.microbatch(lengths, budget * 11 // 10, ranks=ranks)
        over += int(plan.group_tokens.max() > budget)
        losses.setdefault("10 % more budget", []).append(more.makespan() / plan.makespan() - 1)
        if draw % 4 == 0:
            constraint = CONSTRAINTS[draw // 4 % len(CONSTRAINTS)]
            held = padless.microbatch(lengths, budget, ranks=ranks, **constraint)
            losses.setdefault(f"without {constraint}", []).append(plan.makespan() / held.makespan() - 1)
    print(f"{options.draws} draws, {over} over budget")
    for name, values in losses.items():
        loss = np.array(values)
        print(
            f"{name}: {len(loss)} draws, slower by more than 1 % in {int((loss > 0.01).sum())}"
            f" ({(loss > 0.01).mean():.2%}), more than 0.5 % in {int((loss > 0.005).sum())}, worst {loss.max():.2%}"
        )
    return int(over > 0)


if __name__ == "__main__":
    sys.exit(main())
