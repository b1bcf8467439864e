"""The analysis as one HTML file that needs nothing else: no network, no server."""

from __future__ import annotations

import html
import json
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from padless.analysis.analyze import Analysis
from padless.analysis.drawing import budget_sweep, drawing
from padless.analysis.settings import FRAMEWORKS
from padless.errors import PadlessError
from padless.files import write_text

__all__ = ["render", "write_html"]

_TITLES = {"pytorch": "PyTorch", "transformers": "Trainer", "trl": "TRL", "verl": "verl", "lightning": "Lightning"}
_COLUMNS = (
    ("occupancy", "occupancy", "{:.1%}"),
    ("step_time_ratio", "step time", "{:.3f}"),
    ("microbatches", "micro-batches", "{:,}"),
    ("padded_tokens", "padded tokens", "{:,}"),
    ("rank_imbalance", "rank imbalance", "{:.1%}"),
    ("neighbour_correlation", "neighbour correlation", "{:+.2f}"),
)


def write_html(analysis: Analysis, path: str | Path, *, title: str = "your data") -> None:
    """Write the page to ``path``.

    Raises:
        PadlessError: Plotly is not installed, or the file cannot be written.
    """
    page = render(analysis, title=title)
    try:
        write_text(path, page)
    except OSError as error:
        raise PadlessError(f"cannot write {path}: {error.strerror or error}") from error


def render(analysis: Analysis, *, title: str = "your data") -> str:
    """The page as text."""
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        raise PadlessError('the HTML page needs Plotly: pip install "padless[report]"') from None
    told = analysis.to_dict()
    sweep = budget_sweep(analysis)
    payload = {
        **{key: told[key] for key in ("lengths", "histogram", "setup", "strategies")},
        "recommendation": {"strategy": told["recommendation"]["strategy"]},
        "drawing": drawing(analysis),
        "sweep": sweep,
    }
    parts = {
        "title": _text(title),
        "subtitle": _text(_subtitle(analysis)),
        "strategy": _text(analysis.recommendation.strategy),
        "reason": _text(analysis.recommendation.reason),
        "settings": _settings(analysis.recommendation.settings),
        "warnings": _warnings(analysis),
        "tiles": _tiles(analysis),
        "histogram_label": _text(_histogram_label(analysis)),
        "times_label": _text(_label(analysis, "step_time_ratio", "Step time over the padding-free bound", "{:.2f}")),
        "occupancy_label": _text(_label(analysis, "occupancy", "Occupancy", "{:.0%}")),
        "table": _table(analysis),
        "sweep_table": _sweep_table(sweep),
        "footer": _text(_footer(analysis)),
        "css": _asset("page.css"),
        "js": _asset("page.js"),
        "plotly": get_plotlyjs(),
        # "</" would end the script element, whatever the JSON around it says.
        "data": json.dumps(payload).replace("</", "<\\/"),
    }
    # One pass over the template, not over what was put in: titles and code may hold braces.
    pieces = _asset("page.html").split("{{")
    return pieces[0] + "".join(parts[name] + rest for name, rest in (piece.split("}}", 1) for piece in pieces[1:]))


def _asset(name: str) -> str:
    return files("padless.analysis").joinpath(name).read_text(encoding="utf-8")


def _text(value: str) -> str:
    return html.escape(value)


def _subtitle(analysis: Analysis) -> str:
    setup = analysis.setup
    return (
        f"{analysis.lengths.count:,} sequences, {analysis.lengths.total:,} tokens; token budget {setup.token_budget:,},"
        f" {setup.ranks:,} rank{'s' if setup.ranks > 1 else ''}, {setup.sequences_per_step:,} sequences per step"
    )


def _settings(settings: Mapping[str, Any]) -> str:
    given = [name for name in FRAMEWORKS if name in settings]
    blocks = [
        f"<details{' open' if name == given[0] else ''}><summary>Settings for {_TITLES[name]}</summary>"
        f"<pre tabindex='0'><code>{_text(settings[name])}</code></pre></details>"
        for name in given
    ]
    return "".join(blocks)


def _warnings(analysis: Analysis) -> str:
    if not analysis.warnings:
        return ""
    items = "".join(f"<li>{_text(notice.message)}</li>" for notice in analysis.warnings)
    head = '<section class="warnings" aria-labelledby="warnings-h"><h2 id="warnings-h">Warnings</h2>'
    return f"{head}<ul>{items}</ul></section>"


def _tiles(analysis: Analysis) -> str:
    facts, data = analysis.lengths, analysis.data
    tiles = [
        ("sequences", f"{facts.count:,}"),
        ("mean length", f"{facts.mean:,.1f}"),
        ("median", f"{facts.p50:,.0f}"),
        ("90th percentile", f"{facts.p90:,.0f}"),
        ("99th percentile", f"{facts.p99:,.0f}"),
        ("longest", f"{facts.max:,}"),
        ("empty rows", f"{data.empty:,}"),
        ("dropped, truncated", f"{data.dropped:,}, {data.truncated:,}"),
    ]
    if analysis.model is not None:
        memory = analysis.model.memory(analysis.setup.token_budget)
        tiles.append(("activations, estimated", f"{memory['activations_gib']:,.1f} GiB"))
        tiles.append(("with checkpointing", f"{memory['activations_checkpointed_gib']:,.1f} GiB"))
    return "".join(f"<div><dt>{_text(name)}</dt><dd>{_text(value)}</dd></div>" for name, value in tiles)


def _histogram_label(analysis: Analysis) -> str:
    facts = analysis.lengths
    return (
        f"Histogram of {facts.count:,} sequence lengths from {facts.min:,} to {facts.max:,} tokens; median"
        f" {facts.p50:,.0f}, 99th percentile {facts.p99:,.0f}"
    )


def _label(analysis: Analysis, key: str, title: str, form: str) -> str:
    values = (f"{name} {form.format(getattr(found, key))}" for name, found in analysis.figures.items())
    return f"{title}: {', '.join(values)}"


def _table(analysis: Analysis) -> str:
    head = "".join(f"<th scope='col'>{title}</th>" for _, title, _ in _COLUMNS)
    body = []
    for name, found in analysis.figures.items():
        values = [getattr(found, key) for key, _, _ in _COLUMNS]
        cells = "".join(
            f"<td>{'-' if value is None else form.format(value)}</td>"
            for value, (_, _, form) in zip(values, _COLUMNS, strict=True)
        )
        chosen = " class='chosen'" if name == analysis.recommendation.strategy else ""
        body.append(f"<tr{chosen}><th scope='row'>{name}</th>{cells}</tr>")
    return f"<table><thead><tr><th scope='col'>strategy</th>{head}</tr></thead><tbody>{''.join(body)}</tbody></table>"


def _sweep_table(sweep: Mapping[str, Any]) -> str:
    names: Sequence[str] = list(sweep["strategies"])
    head = "".join(f"<th scope='col'>{name}</th>" for name in names)
    body = []
    for i, budget in enumerate(sweep["budgets"]):
        points = [sweep["strategies"][name] for name in names]
        cells = "".join(f"<td>{p['occupancy'][i]:.1%} / {p['microbatches'][i]:,.1f}</td>" for p in points)
        body.append(f"<tr><th scope='row'>{budget:,}</th>{cells}</tr>")
    return (
        "<table><caption>Occupancy / micro-batches per step</caption><thead><tr><th scope='col'>token budget</th>"
        f"{head}</tr></thead><tbody>{''.join(body)}</tbody></table>"
    )


def _footer(analysis: Analysis) -> str:
    from padless import __version__

    cost = analysis.setup.cost
    return (
        f"padless {__version__}. Modelled time of a micro-batch: {cost.per_microbatch:g} + {cost.per_token:g} per token"
        f" + {cost.per_token_squared:g} per token squared (cost model: {cost.source}); a micro-step lasts as long as"
        f" its slowest rank. {analysis.simulated:,} of {analysis.epoch:,} sequences were scheduled."
    )
