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
        part = results["analyze"]
        rates = {
            "alone": part["rows"] / min(part["tokenizer_alone_seconds"]),
            "ours": part["rows"] / min(part["analyze_seconds"]),
        }
        most = max(rates.values())
        found.append(("the tokenizer alone", rates["alone"] / most, f"{rates['alone']:,.0f} rows/s", False))
        found.append(("padless analyze", rates["ours"] / most, f"{rates['ours']:,.0f} rows/s", True))
    for name, value in results.get("efficiency", {}).items():
        if isinstance(value, float) and value <= 1 and name != "load":
            found.append((f"full at 8k: {name}", value, f"{value:.2%}", True))
    return found


def svg(bars: list[tuple[str, float, str, bool]]) -> str:
    rows = []
    for i, (label, share, text, ours) in enumerate(bars):
        y = 10 + 26 * i
        colour = "#1768ac" if ours else "#9a9a94"
        rows.append(f'<text x="292" y="{y + 14}" text-anchor="end">{escape(label)}</text>')
        rows.append(f'<rect x="300" y="{y}" width="{300 * share:.1f}" height="19" fill="{colour}"/>')
        rows.append(f'<text x="{306 + 300 * share:.1f}" y="{y + 14}">{escape(text)}</text>')
    height = 26 * len(bars) + 20
    style = "text{font:13px system-ui,sans-serif;fill:#444}@media(prefers-color-scheme:dark){text{fill:#ddd}}"
    body = "\n".join(rows)
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 760 {height}" role="img" aria-label="Packing benchmark">'
    )
    return f"{head}\n<style>{style}</style>\n{body}\n</svg>\n"


def table(results: dict[str, Any]) -> str:
    lines = ["| part | result |", "| --- | --- |"]
    for name, part in results.items():
        if name == "machine":
            continue
        plain = {k: v for k, v in part.items() if not isinstance(v, dict | list)}
        lines.append(f"| {name} | {', '.join(f'{k} {v}' for k, v in plain.items())} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
