"""Draw results.json as results.svg, and print the table for the README.

python benchmarks/packing/plot.py
"""

from __future__ import annotations

import json
from html import escape
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent


def main() -> None:
    results = json.loads((HERE / "results.json").read_text())
    bars = list(chart(results))
    (HERE / "results.svg").write_text(svg(bars))
    print(table(results))


def chart(results: dict[str, Any]) -> list[tuple[str, float, str, bool]]:
    """(label, share of the longest bar, text, ours)."""
    found: list[tuple[str, float, str, bool]] = []
    if "trl" in results:
        rates = results["trl"]["tokens_per_second"]
        most = max(rates.values())
        for name, title in (("trl", "datasets + TRL pack_dataset"), ("padless", "padless pack")):
            found.append((title, rates[name] / most, f"{rates[name]:,} tokens/s", name == "padless"))
    if "analyze" in results:
        part = results["analyze"]["qwen"]
        rates = {name: part["sequences"] / min(taken) for name, taken in part["seconds"].items()}
        most = max(rates.values())
        for name, title in (("tokenizer", "the tokenizer alone"), ("analyze", "padless analyze")):
            found.append((title, rates[name] / most, f"{rates[name]:,.0f} rows/s", name == "analyze"))
    for corpus, ways in results.get("efficiency", {}).get("corpora", {}).items():
        for way, part in ways.items():
            found.append((f"{corpus}, {way}", part["efficiency"], f"{part['efficiency']:.2%} full", True))
    return found


def svg(bars: list[tuple[str, float, str, bool]]) -> str:
    rows = []
    for i, (label, share, text, ours) in enumerate(bars):
        y = 10 + 26 * i
        colour = "#1768ac" if ours else "#9a9a94"
        rows.append(f'<text x="392" y="{y + 14}" text-anchor="end">{escape(label)}</text>')
        rows.append(f'<rect x="400" y="{y}" width="{300 * share:.1f}" height="19" fill="{colour}"/>')
        rows.append(f'<text x="{406 + 300 * share:.1f}" y="{y + 14}">{escape(text)}</text>')
    height = 26 * len(bars) + 20
    style = "text{font:13px system-ui,sans-serif;fill:#444}@media(prefers-color-scheme:dark){text{fill:#ddd}}"
    body = "\n".join(rows)
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 860 {height}" role="img" aria-label="Packing benchmark">'
    )
    return f"{head}\n<style>{style}</style>\n{body}\n</svg>\n"


def table(results: dict[str, Any]) -> str:
    """Plain figures of each part, and of the parts within it."""
    lines = ["| part | result |", "| --- | --- |"]
    for name, part in results.items():
        if name != "machine":
            lines.extend(f"| {title} | {figures} |" for title, figures in rows_of(name, part))
    return "\n".join(lines)


def rows_of(name: str, part: dict[str, Any]) -> list[tuple[str, str]]:
    """One row for the plain values of a dictionary, and those of the dictionaries in it."""
    plain = {key: value for key, value in part.items() if not isinstance(value, dict | list)}
    rows = [(name, ", ".join(f"{key} {value}" for key, value in plain.items()))] if plain else []
    for key, value in part.items():
        if isinstance(value, dict):
            rows.extend(rows_of(f"{name}: {key}", value))
    return rows


if __name__ == "__main__":
    main()
