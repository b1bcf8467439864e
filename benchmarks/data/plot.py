"""The committed result as Markdown tables."""

from __future__ import annotations

import json
from pathlib import Path


def main() -> None:
    result = json.loads((Path(__file__).parent / "result.json").read_text())
    print("| sampler | occupancy | makespan / perfect | neighbour correlation | step spread | over budget | not seen |")
    print("|---|---|---|---|---|---|---|")
    for name, row in result["quality"].items():
        correlation = row["neighbour_correlation"]
        print(
            f"| {name} | {row['occupancy']:.3f} | {row['makespan_over_perfect']:.3f}"
            f" | {'-' if correlation is None else format(correlation, '.2f')} | {row['step_size_spread']:.3f}"
            f" | {row['over_budget']:.1%} | {row['not_seen']} |"
        )
    speed = result["speed"]
    print(
        f"\n{speed['sequences']:,} lengths: built in {speed['construct_seconds']:.2f} s, first micro-batch after"
        f" {speed['first_micro_batch_seconds']:.2f} s, memory {speed['memory_over_lengths']:.1f} x the length array.\n"
    )
    print("| million sequences a second | 1 rank | 8 | 64 | 512 |\n|---|---|---|---|---|")
    for name, rates in speed["sequences_per_second"].items():
        print(f"| {name} |" + "|".join(f" {rates[r] / 1e6:.2f} " for r in ("1", "8", "64", "512")) + "|")
    loader = result["loader"]
    print(
        f"\nLoader with 2 workers, steps of 20 ms: {loader['waiting_share']:.1%} of the time waiting"
        f" ({loader['waiting_ms']:.1f} ms a step)."
    )


if __name__ == "__main__":
    main()
