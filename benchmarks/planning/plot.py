"""Draw result.json: seconds against N for every planner, and what its plans are worth beside it.

python benchmarks/planning/plot.py [RESULT.json] [FILE.html]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
from plotly.colors import qualitative
from plotly.subplots import make_subplots

HERE = Path(__file__).parent
TITLES = (
    "Packs: seconds",
    "Packs: empty share of the capacity",
    "Micro-batches: seconds (8 ranks, 32k)",
    "Micro-batches: padding share",
    "Step time over the proven bound",
    "Largest micro-batch over the budget",
)
FLOOR = 1e-5  # an empty share of nothing is drawn here: the axis is logarithmic


def main() -> None:
    result = json.loads(Path(sys.argv[1] if len(sys.argv) > 1 else HERE / "result.json").read_text())
    figure = make_subplots(rows=3, cols=2, subplot_titles=TITLES, vertical_spacing=0.09)
    colors = _colors(result)
    _against_n(figure, 1, result["pack_speed"]["rows"], colors, lambda found: 1 - found["efficiency"])
    _argsort(figure, result["pack_speed"]["rows"])
    _against_n(figure, 2, result["microbatch_speed"]["rows"], colors, lambda found: 1 - found["occupancy"])
    _steps(figure, result["microbatch"], colors)
    figure.update_xaxes(type="log", title="sequences", row=1)
    figure.update_xaxes(type="log", title="sequences", row=2)
    figure.update_yaxes(type="log", row=1)
    figure.update_yaxes(type="log", row=2)
    figure.update_yaxes(type="log", row=3)
    machine = result["machine"]
    figure.update_layout(
        height=1400,
        title=f"Planners on one thread of {machine['cpu']}",
        barmode="group",
    )
    figure.write_html(sys.argv[2] if len(sys.argv) > 2 else HERE / "plot.html", include_plotlyjs=True)


def _colors(result: dict[str, Any]) -> dict[str, str]:
    names: dict[str, None] = {}
    for section in ("pack_speed", "microbatch_speed"):
        for row in result[section]["rows"]:
            names |= dict.fromkeys(row["planners"])
    palette = qualitative.Dark24
    return {name: palette[at % len(palette)] for at, name in enumerate(names)}


def _against_n(figure: go.Figure, at: int, rows: list[dict[str, Any]], colors: dict[str, str], waste: Any) -> None:
    for name in dict.fromkeys(name for row in rows for name in row["planners"]):
        points = [(row["sequences"], row["planners"][name]) for row in rows if name in row["planners"]]
        ours = name.startswith("padless")
        style = {
            "x": [count for count, _ in points], "name": name, "legendgroup": name, "mode": "lines+markers",
            "line": {"color": colors[name], "width": 4 if ours else 1.5},
        }  # fmt: skip
        figure.add_scatter(y=[found["wall"] for _, found in points], row=at, col=1, **style)
        empty = [max(waste(found), FLOOR) for _, found in points]
        figure.add_scatter(y=empty, row=at, col=2, showlegend=False, **style)


def _argsort(figure: go.Figure, rows: list[dict[str, Any]]) -> None:
    style = {"mode": "lines", "line": {"color": "gray", "dash": "dot"}, "name": "numpy.argsort(kind='stable')"}
    figure.add_scatter(x=[r["sequences"] for r in rows], y=[r["argsort"]["wall"] for r in rows], row=1, col=1, **style)


def _steps(figure: go.Figure, rows: list[dict[str, Any]], colors: dict[str, str]) -> None:
    cases = [f"{r['mix'].removeprefix('mix_rl_')} {r['sequences']} on {r['ranks']}" for r in rows]
    ours = {"color": colors.get("padless balanced", "black")}
    style = {"x": cases, "name": "padless balanced", "legendgroup": "padless balanced", "showlegend": False}
    figure.add_bar(y=[r["over_bound"] for r in rows], row=3, col=1, marker=ours, **style)
    figure.add_bar(y=[r["largest_over_budget"] for r in rows], row=3, col=2, marker=ours, **style)
    for name in dict.fromkeys(name for row in rows for name in row["peers"]):
        for col, key in ((1, "over_bound"), (2, "largest_over_budget")):
            values = [row["peers"].get(name, {}).get(key) for row in rows]
            marker = {"color": colors.get(name, "gray")}
            figure.add_bar(
                x=cases, y=values, name=name, legendgroup=name, showlegend=False, marker=marker, row=3, col=col
            )


if __name__ == "__main__":
    main()
