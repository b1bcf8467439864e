"""Write result.json as the tables of README.md and as result.svg.

python benchmarks/trainers/plot.py
"""

from __future__ import annotations

import json
from html import escape
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
BEGIN, END = "<!-- results: written by plot.py -->", "<!-- end of results -->"


def head(result: dict[str, Any]) -> list[str]:
    """Where all parts were measured."""
    machine, versions = result["machine"], result["versions"]
    names = ", ".join(f"{name} {versions[name]}" for name in ("torch", "transformers", "trl") if name in versions)
    told = f"{machine['processor']}, {result['threads']} thread, {names}, Python {versions['python']}."
    return [f"{told} Lengths: {result['lengths']}.", ""]


def run_of(result: dict[str, Any], part: str) -> list[str]:
    """How one part was measured."""
    run = result["runs"][part]
    told, repeats = run["setting"], "ranks_repeats" if part == "ranks" else "repeats"
    size = f"lengths times {told[f'{part}_scale']:g}, token budget {told[f'{part}_budget']:,}, {told[repeats]} repeats"
    load = f"load average before {run['load_before']:.1f}"
    return [f"{size}; commit {run['commit']}{', quick' if run['quick'] else ''}; {load}.", ""]


def arms(rows: list[dict[str, Any]]) -> list[str]:
    """Arms of SFT or GRPO."""
    lines = [
        "| arm | step | vs host | processor | vs host | from, to | tokens/s | occupancy | passes | most | same steps |",
        "| --- | ---: | ---: | ---: | ---: | --- | ---: | ---: | ---: | ---: | --- |",
    ]
    for row in rows:
        each = row["times_host_each"]["cpu"]
        cells = [
            row["arm"],
            f"{row['step_seconds']:.3g} s",
            f"{row['times_host']['wall']:.2f} x",
            f"{row['step_cpu_seconds']:.3g} s",
            f"{row['times_host']['cpu']:.2f} x",
            f"{min(each):.2f} to {max(each):.2f}",
            f"{row['real_tokens_per_second']:,.0f}",
            f"{row['occupancy']:.1%}",
            f"{row['passes_per_step']:.1f}",
            f"{row['most_positions']:,}",
            f"yes ({row['gradient_difference']:.0e})" if row["exact"] else "no",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return [*lines, ""]


def ranks(found: dict[str, Any]) -> list[str]:
    """Arms of several processes."""
    lines = [
        f"{found['sequences']} sequences, {found['real_tokens']:,} real tokens; {found['cores']} cores.",
        "",
        "| arm | makespan | idle | idle of each rank | planned idle | micro-batches | occupancy | wall clock |",
        "| --- | ---: | ---: | --- | ---: | ---: | ---: | ---: |",
    ]
    for row in found["arms"]:
        planned = row["planned_idle_share"]
        cells = [
            row["arm"],
            f"{row['makespan_seconds']:.2f} s",
            f"{row['idle_share']:.1%}",
            ", ".join(f"{share:.1%}" for share in row["idle_share_per_rank"]),
            "-" if planned is None else f"{planned:.1%}",
            str(row["micro_batches"]),
            f"{row['occupancy']:.1%}",
            f"{row['wall_seconds']:.1f} s",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return [*lines, ""]


def svg(result: dict[str, Any]) -> str:
    """Bars: speed against the host's default (processor time), and idle shares."""
    bars: list[tuple[str, float, str, bool]] = []
    for part in ("sft", "grpo"):
        rows = result.get(part, [])
        most = max((row["times_host"]["cpu"] for row in rows), default=1.0)
        for row in rows:
            times = row["times_host"]["cpu"]
            ours = row["arm"].startswith("padless")
            bars.append((f"{part.upper()}: {row['arm']}", times / most, f"{times:.2f} x", ours))
    for row in result.get("ranks", {}).get("arms", []):
        share = row["idle_share"]
        bars.append((f"idle: {row['arm']}", share, f"{share:.1%}", row["arm"] == "global regrouping"))
    rows = []
    for at, (label, share, text, ours) in enumerate(bars):
        y = 10 + 26 * at
        colour = "#1768ac" if ours else "#9a9a94"
        rows.append(f'<text x="292" y="{y + 14}" text-anchor="end">{escape(label)}</text>')
        rows.append(f'<rect x="300" y="{y}" width="{300 * share:.1f}" height="19" fill="{colour}"/>')
        rows.append(f'<text x="{306 + 300 * share:.1f}" y="{y + 14}">{escape(text)}</text>')
    style = "text{font:13px system-ui,sans-serif;fill:#444}@media(prefers-color-scheme:dark){text{fill:#ddd}}"
    view = f'viewBox="0 0 720 {26 * len(bars) + 20}" role="img" aria-label="Trainer benchmark"'
    body = "\n".join(rows)
    return f'<svg xmlns="http://www.w3.org/2000/svg" {view}>\n<style>{style}</style>\n{body}\n</svg>\n'


def main() -> None:
    result = json.loads((HERE / "result.json").read_text())
    lines = head(result)
    for part, title in (("sft", "SFT (`mix_sft_general`)"), ("grpo", "GRPO (`mix_rl_gsm8k_heavy`)")):
        if part in result:
            lines += [f"**{title}**", "", *run_of(result, part), *arms(result[part])]
    if "grpo" in result:
        told = (
            f"{row['seconds_by_part']['reference']:.2f} of {row['step_seconds']:.2f} s ({row['arm']})"
            for row in result["grpo"]
        )
        lines += [f"The reference's pass takes {', '.join(told)} of a GRPO step.", ""]
    if "ranks" in result:
        lines += ["**Four processes, FSDP2**", "", *run_of(result, "ranks"), *ranks(result["ranks"])]
    lines += [f"* {'holds' if claim['holds'] else 'FAILS'}: {claim['claim']}" for claim in result["claims"]]
    readme = HERE / "README.md"
    before, rest = readme.read_text().split(BEGIN)
    _, after = rest.split(END)
    readme.write_text(f"{before}{BEGIN}\n\n" + "\n".join(lines) + f"\n\n{END}{after}")
    (HERE / "result.svg").write_text(svg(result))


if __name__ == "__main__":
    main()
