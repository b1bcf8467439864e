"""Draw result.json: occupancy, peak and modelled time of plans, seconds of steps. Writes result.html (Plotly)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

HERE = Path(__file__).resolve().parent
COLOURS = {"verl": "#b4b4b4", "padless": "#1f77b4", "padless, own assignment": "#0b3d66", "verl, packed": "#e0a458"}
PLANS = (
    ("occupancy", "real / computed tokens"),
    ("peak_over_budget", "largest micro-batch / budget"),
    ("time_over_bound", "modelled time / bound"),
)


def job(row: dict[str, Any]) -> str:
    return f"{row['sequences']} on {row['ranks']}"


def main() -> None:
    result = json.loads((HERE / "result.json").read_text())
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
    figure.write_html(HERE / "result.html", include_plotlyjs=True)


if __name__ == "__main__":
    main()
