"""From result.json: reports/verl.html (Plotly), and the tables of README.md and docs/recipes/verl.md."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

HERE = Path(__file__).resolve().parent
PAGES = (HERE / "README.md", HERE.parents[1] / "docs" / "recipes" / "verl.md")
COLOURS = {"verl": "#b4b4b4", "padless": "#1f77b4", "padless, own assignment": "#0b3d66", "verl, packed": "#e0a458"}
PLANS = (
    ("occupancy", "real / computed tokens"),
    ("peak_over_budget", "largest micro-batch / budget"),
    ("time_over_bound", "modelled time / bound"),
)


def job(row: dict[str, Any]) -> str:
    return f"{row['sequences']} on {row['ranks']}"


def draw(result: dict[str, Any]) -> go.Figure:
    titles = [title for _, title in PLANS] + ["seconds of a step (CPU, one thread)"]
    figure = make_subplots(rows=2, cols=2, subplot_titles=titles)
    seen: set[str] = set()

    def add(rows: list[dict[str, Any]], label: Any, value: str, place: tuple[int, int]) -> None:
        for arm, colour in COLOURS.items():
            mine = [row for row in rows if row["arm"] == arm]
            if mine:
                x, y = [label(row) for row in mine], [row[value] for row in mine]
                bar = go.Bar(x=x, y=y, name=arm, legendgroup=arm, marker_color=colour, showlegend=arm not in seen)
                seen.add(arm)
                figure.add_trace(bar, row=place[0], col=place[1])

    for index, (value, _) in enumerate(PLANS):
        add(result["plans"], job, value, (index // 2 + 1, index % 2 + 1))
    add(result["steps"], lambda row: row["model"], "seconds", (2, 2))
    figure.update_layout(barmode="group", template="plotly_white", height=760, title=f"verl, commit {result['commit']}")
    return figure


def tables(result: dict[str, Any]) -> str:
    setting = f"lengths of `{result['lengths']}`, mean of {result['draws']} draws (largest: of all)"
    lines = [
        f"Plans, {setting}, budget 16,384 tokens, overhead 500 tokens; time is modelled, over the bound:",
        "",
        "| sequences, ranks | arm | micro-batches | occupancy | largest / budget | time / bound | planning |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in result["plans"]:
        lines.append(
            f"| {row['sequences']}, {row['ranks']} | {row['arm']} | {row['micro_batches']:.1f} | {row['occupancy']:.3f}"
            f" | {row['peak_over_budget']:.2f} | {row['time_over_bound']:.2f} | {row['seconds'] * 1e3:.0f} ms |"
        )
    scales = "64 sequences, lengths and budget at 1/8 (Qwen2) and 1/32 (Jamba), medians"
    lines += [
        "",
        f"Steps (old log-probs, one update) of verl's `TrainingWorker`, FSDP2 in float32 on one CPU thread, {scales}:",
        "",
        "| model | arm | seconds | micro-batches | occupancy | largest / budget |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for row in result["steps"]:
        note = " (timing only: it leaks)" if row["model"] == "jamba" and "packed" in row["arm"] else ""
        lines.append(
            f"| {row['model']} | {row['arm']}{note} | {row['seconds']:.2f} | {row['micro_batches']}"
            f" | {row['occupancy']:.3f} | {row['peak_over_budget']:.2f} |"
        )
    versions = ", ".join(f"{name} {number}" for name, number in result["versions"].items())
    machine = f"{result['machine']['cpu']}, one thread, Python {result['machine']['python']}"
    lines += ["", f"{machine}; {versions}; commit {result['commit']}."]
    return "\n".join(lines)


def main() -> None:
    result = json.loads((HERE / "result.json").read_text())
    page = HERE.parents[1] / "reports" / "verl.html"
    page.parent.mkdir(exist_ok=True)
    draw(result).write_html(page, include_plotlyjs=True)
    block = f"<!-- result -->\n{tables(result)}\n<!-- end of result -->"
    for file in PAGES:
        text = re.sub(r"<!-- result -->.*?<!-- end of result -->", lambda _: block, file.read_text(), flags=re.DOTALL)
        file.write_text(text)
    print(f"{page} and {len(PAGES)} tables written")


if __name__ == "__main__":
    main()
