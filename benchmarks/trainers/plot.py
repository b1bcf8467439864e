"""Draw result.json and ranks.json: speed of each trainer arm, idle share of each rank. Writes result.html (Plotly)."""

from __future__ import annotations

import json
from pathlib import Path

import plotly.graph_objects as go
from plotly.subplots import make_subplots

HERE = Path(__file__).resolve().parent
GREY, BLUE = "#b4b4b4", "#1f77b4"


def main() -> None:
    result = json.loads((HERE / "result.json").read_text())
    titles = ["SFT: real tokens per second", "GRPO: real tokens per second", "idle share per rank (FSDP2)"]
    figure = make_subplots(rows=1, cols=3, subplot_titles=titles)
    for column, part in enumerate(("sft", "grpo"), start=1):
        rows = result.get(part, [])
        bar = go.Bar(
            x=[row["arm"] for row in rows],
            y=[row["real_tokens_per_second"] for row in rows],
            text=[f"{row['times_host']:.2f} x" for row in rows],
            marker_color=[BLUE if row["arm"] == "padless" else GREY for row in rows],
            showlegend=False,
        )
        figure.add_trace(bar, row=1, col=column)
    ranks = HERE / "ranks.json"
    if ranks.exists():
        for arm in json.loads(ranks.read_text())["arms"]:
            shares = arm["idle_share_per_rank"]
            bar = go.Bar(x=[f"rank {rank}" for rank in range(len(shares))], y=shares, name=arm["arm"])
            figure.add_trace(bar, row=1, col=3)
    figure.update_layout(template="plotly_white", height=460, title=f"Trainers, commit {result['commit']}")
    figure.write_html(HERE / "result.html", include_plotlyjs=True)


if __name__ == "__main__":
    main()
