"""Pieces of the HTML report: bars, the drawing of micro-batches, the histogram, tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

import numpy as np

from padless.bench.arms import MASKED, Shape
from padless.bench.results import ArmResult

__all__ = ["bars", "drawing", "facts", "histogram", "number", "seconds", "table"]

_COLUMNS = 1000  # of the drawing's coordinate system
_MOST_ROWS = 1500  # drawn of one arm; more cannot be told apart


def color(arm: str) -> str:
    """The class that colors an arm."""
    return MASKED.get(arm, arm)


def seconds(value: float) -> str:
    """Seconds with three figures.

    >>> seconds(12.345), seconds(0.0123)
    ('12.3 s', '0.0123 s')
    """
    return f"{value:.3g} s" if value < 100 else f"{value:.0f} s"


def number(value: float | None, *, digits: int = 2) -> str:
    """A difference, in powers of ten; a dash where nothing was measured."""
    if value is None:
        return "-"
    return "0" if value == 0 else f"{value:.{digits - 1}e}"


def bars(rows: Iterable[tuple[str, float, tuple[float, float] | None, str]], *, full: float) -> str:
    """Horizontal bars: (arm, value, smallest and largest, what to say); ``full`` is as long as the track."""
    parts = []
    for arm, value, spread, told in rows:
        mark = ""
        if spread is not None:
            low, high = (100 * min(end / full, 1.0) for end in spread)
            mark = f'<div class="spread" style="left:{low:.3f}%;width:{high - low:.3f}%"></div>'
        parts.append(
            f'<div class="bar"><div class="name">{escape(arm)}</div><div class="track">'
            f'<div class="fill {color(arm)}" style="width:{100 * value / full:.3f}%"></div>{mark}</div>'
            f'<div class="value">{told}</div></div>'
        )
    return f'<div class="bars">{"".join(parts)}</div>'


def drawing(arms: Sequence[ArmResult]) -> str:
    """Every micro-batch as a rectangle of rows and columns, all arms at one scale: area is what the device computes."""
    widest = max(shape.width for arm in arms for shape in arm.steps[0].micros)
    scale = _COLUMNS / widest
    return "".join(_draw_arm(arm, scale) for arm in arms)


def _draw_arm(arm: ArmResult, scale: float) -> str:
    height, gap = 7.0, 9.0  # of a row; between micro-batches
    x = y = shelf = 0.0
    parts, drawn, left_out = [], 0, 0
    for shape in arm.steps[0].micros:
        if drawn + len(shape.lengths) > _MOST_ROWS:
            left_out += 1
            continue
        drawn += len(shape.lengths)
        wide, high = shape.width * scale, shape.rows * height
        if x and x + wide > _COLUMNS + 0.5:
            x, y, shelf = 0.0, y + shelf + gap, 0.0
        parts.append(_draw_shape(arm.name, shape, x, y, scale, height))
        x, shelf = x + wide + gap, max(shelf, high)
    share = arm.real_tokens / arm.padded_tokens
    more = f"; {left_out} more not drawn" if left_out else ""
    count = len(arm.steps[0].micros)
    head = (
        f'<div class="head"><b>{escape(arm.name)}</b><span class="soft">{count} micro-batch{"es" if count > 1 else ""},'
        f" {arm.padded_tokens:,} tokens computed, {arm.real_tokens:,} real ({share:.0%}){more}</span></div>"
    )
    return (
        f'<div class="shapes">{head}<svg viewBox="-1 -1 {_COLUMNS + 2} {y + shelf + 2:.1f}" role="img"'
        f' aria-label="Micro-batches of {escape(arm.name)}">{"".join(parts)}</svg></div>'
    )


def _draw_shape(arm: str, shape: Shape, x: float, y: float, scale: float, height: float) -> str:
    """A rectangle for what is computed, and a bar for each sequence in it."""
    told = f"{shape.rows} x {shape.width} = {shape.rows * shape.width:,} tokens, {sum(shape.lengths):,} real"
    area = f'width="{shape.width * scale:.2f}" height="{shape.rows * height:.2f}"'
    parts = [f"<g><title>{told}</title>", f'<rect class="padding" x="{x:.2f}" y="{y:.2f}" {area}/>']
    packed = shape.rows == 1 and len(shape.lengths) > 1
    for i, (length, start) in enumerate(zip(shape.lengths, shape.starts, strict=True)):
        row = 0 if packed else i
        shade = " other" if i % 2 else ""
        parts.append(
            f'<rect class="{color(arm)}{shade}" x="{x + start * scale:.2f}" y="{y + row * height + 0.6:.2f}"'
            f' width="{max(length * scale, 0.6):.2f}" height="{height - 1.2:.2f}"/>'
        )
    return "".join(parts) + "</g>"


def histogram(lengths: Sequence[int], width: int) -> str:
    """How many sequences are how long, from 0 to the width that ``fixed`` computes."""
    counts, edges = np.histogram(np.asarray(lengths), bins=30, range=(0, width))
    top = max(int(counts.max()), 1)
    columns = "".join(
        f'<div style="height:{100 * count / top:.2f}%" title="{int(low)} to {int(high)} tokens: {count}"></div>'
        for count, low, high in zip(counts, edges[:-1], edges[1:], strict=True)
    )
    return (
        f'<div class="histogram" role="img" aria-label="Histogram of sequence lengths">{columns}</div>'
        f'<div class="axis"><span>0</span><span>highest column: {top}</span><span>{width:,} tokens</span></div>'
    )


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table that scrolls sideways by itself where it is wider than the page; cells are HTML."""
    head = "".join(f"<th>{cell}</th>" for cell in header)
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def facts(pairs: Iterable[tuple[str, Any]]) -> str:
    """Names and what they are."""
    body = "".join(f"<tr><th>{escape(name)}</th><td>{escape(str(value))}</td></tr>" for name, value in pairs)
    return f'<div class="scroll"><table class="facts"><tbody>{body}</tbody></table></div>'
