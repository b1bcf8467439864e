"""Put the tables of results/*.json into README.md, between its two marks.

python benchmarks/policy_update/plot.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
BEGIN, END = "<!-- results: written by plot.py -->", "<!-- end of results -->"


def table(model: dict[str, Any]) -> list[str]:
    """One model's arms."""
    titles = ("arm", "step", "spread", "vs `fixed`", "/ `packed`", "recovered", "occupancy", "overhead", "peak",
              "log-prob", "gradient", "update")  # fmt: skip
    lines = ["| " + " | ".join(titles) + " |", "| --- " + "| ---: " * 11 + "|"]
    for name, arm in model["arms"].items():
        memory = arm["peak_memory_bytes"]
        cells = [
            name + ("" if arm["valid"] else " (timing only)"),
            f"{arm['seconds']:.3g} s",
            f"{min(arm['seconds_all']):.3g} to {max(arm['seconds_all']):.3g}",
            f"{1 / model['ratio_to_fixed'][name]:.1f} x",
            f"{model['ratio_to_packed'][name]:.2f}",
            f"{model['gain_recovered'].get(name, float('nan')):.1%}",
            f"{arm['occupancy']:.1%}",
            f"{arm['overhead_seconds'] / arm['seconds']:.2%}",
            "-" if memory is None else f"{memory / 2**20:,.0f} MiB",
            *(f"{arm[f'{key}_difference']:.0e}" for key in ("max_logprob", "gradient", "update")),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    bare = model["leaks"].get("right-padded-no-mask", {}).get("seconds", {})
    if bare:
        told = "; ".join(f"{arm} {t['with_mask']:.3g} s" for arm, t in bare.items())
        lines += ["", f"With an attention mask: {told}."]
    return lines


def section(result: dict[str, Any]) -> list[str]:
    """One run."""
    report = result["report"]
    work, machine, versions = report["workload"], report["machine"], report["versions"]
    told = (
        f"{work['sequences']} sequences, {work['real_tokens']:,} tokens, longest {work['longest']:,};"
        f" `fixed` pads to {work['prompt_max']:,} + {work['response_max']:,} (scale {work['scale']:g});"
        f" token budget {report['token_budget']:,}; {work['repeats']} repeats. {machine['processor']},"
        f" {machine['threads']} threads, torch {versions['torch']}, transformers {versions['transformers']},"
        f" Python {versions['python']}; commit {result['commit']}; {work['run_seconds']:.0f} s in all."
    )
    lines = [f"### `{result['command']}`", "", told]
    for name, model in report["models"].items():
        size = work["models"][name]["parameters"]
        lines += ["", f"**{name}** ({size / 1e6:.1f} M parameters, random weights)", "", *table(model)]
    return [*lines, ""]


def main() -> None:
    """Rewrite the README."""
    parts: list[str] = []
    for name in ("default", "data", "longcot"):
        path = HERE / "results" / f"{name}.json"
        if path.exists():
            parts += section(json.loads(path.read_text()))
    readme = HERE / "README.md"
    text = readme.read_text()
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    readme.write_text(before + BEGIN + "\n\n" + "\n".join(parts) + "\n" + END + after)


if __name__ == "__main__":
    main()
