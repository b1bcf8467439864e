"""Draw result.json: seconds against sequences for every planner, and makespan over the bound."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import plotly.graph_objects as go
from plotly.subplots import make_subplots

HERE = Path(__file__).parent


def main() -> None:
    result = json.loads((HERE / "result.json").read_text())
    figure = make_subplots(
        rows=1, cols=2, subplot_titles=("packing: seconds", "micro-batches: makespan over the bound")
    )
    rows = result["pack_speed"]
    names = [name for name in rows[0] if isinstance(rows[0][name], dict)]
    for name in names:
        points = [(row["sequences"], row[name]["wall"]) for row in rows if name in row]
        figure.add_scatter(x=[p[0] for p in points], y=[p[1] for p in points], name=name, mode="lines+markers")
    cases = [
        f"{row['mix'].removeprefix('mix_rl_')} {row['sequences']} on {row['ranks']}" for row in result["microbatch"]
    ]
    bars = (
        ("balanced", lambda r: r["over_bound"]),
        ("greedy", lambda r: r["greedy_over_perfect"] / r["bound_over_perfect"]),
    )
    for name, value in bars:
        figure.add_trace(go.Bar(x=cases, y=[value(r) for r in result["microbatch"]], name=name), row=1, col=2)
    figure.update_xaxes(type="log", title="sequences", row=1, col=1)
    figure.update_yaxes(type="log", row=1, col=1)
    figure.update_yaxes(range=[1, 2.4], row=1, col=2)
    target = sys.argv[1] if len(sys.argv) > 1 else str(HERE / "plot.html")
    figure.write_html(target, include_plotlyjs=True)


if __name__ == "__main__":
    main()
