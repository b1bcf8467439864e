"""The figures of result.json as the last part of README.md.

python benchmarks/planning/tables.py [RESULT.json]
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import lines

HERE = Path(__file__).parent
HEADING = "## Figures"


def main() -> None:
    result = json.loads(Path(sys.argv[1] if len(sys.argv) > 1 else HERE / "result.json").read_text())
    readme = HERE / "README.md"
    kept = readme.read_text().split(HEADING)[0]
    parts = [_about(result), _promises(result), _microbatches(result), _budget(result), _pack_speed(result)]
    parts += [_pack_quality(result), _optimal(result), _step_speed(result), _rest(result)]
    readme.write_text(kept + "\n\n".join([HEADING, *filter(None, parts)]) + "\n")


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    head = list(head)
    return "\n".join("| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *rows))


def _seconds(value: float) -> str:
    if value < 1:
        return f"{value * 1e3:.2g} ms" if value < 0.0995 else f"{value * 1e3:.0f} ms"
    return f"{value:.1f} s" if value < 100 else f"{value:.0f} s"


def _mix(row: dict[str, Any]) -> str:
    return f"{row['mix'].removeprefix('mix_rl_').replace('_', '-')}, {row['sequences']} on {row['ranks']}"


def _about(result: dict[str, Any]) -> str:
    machine, runs = result["machine"], result["runs"].values()
    commits, load = sorted({run["commit"] for run in runs}), max(run["load"] for run in runs)
    quick = [name for name, run in result["runs"].items() if run["quick"]]
    text = f"Measured at commit {' and '.join(commits)} on {machine['cores']} cores of {machine['cpu']}, one thread. "
    text += f"Load when a section began: up to {load:.1f}. Seconds in all: {sum(run['seconds'] for run in runs):.0f}."
    if quick:
        text += f" Quick (fewer draws, smaller sizes, peers capped at a second): {', '.join(quick)}."
    text += f" Peers: {', '.join(f'{name} {version}' for name, version in result['peers'].items())}."
    text += f" Missing: {', '.join(result['missing_peers'])}."
    if load > 2 * machine["cores"]:
        text += " The machine was busy with other work: wall seconds are several times too long and ratios noisy."
    return text


def _promises(result: dict[str, Any]) -> str:
    table = _table(
        ("", "line", "figure", "limit", ""),
        (
            (
                "holds" if each["holds"] else "**fails**",
                each["line"],
                f"{each['figure']:.4g}",
                each["limit"],
                each["note"],
            )
            for each in lines.judge(result)
        ),
    )
    return f"### Lines\n{table}"


def _microbatches(result: dict[str, Any]) -> str:
    rows = result["microbatch"]
    peers = list(dict.fromkeys(name for row in rows for name in row["peers"]))

    def cells(row: dict[str, Any]) -> Iterable[str]:
        yield _mix(row)
        yield f"{row['over_bound']:.3f} ({_seconds(row['wall'])})"
        yield f"{row['greedy_over_bound']:.2f}"
        for name in peers:
            found = row["peers"].get(name, {"failed": "-"})
            if "failed" in found:
                yield found["failed"]
                continue
            beyond = found["largest_over_budget"]
            over = f", {beyond:.1f} x budget" if beyond > 1 else ""
            yield f"{found['over_bound']:.2f} ({_seconds(found['wall'])}{over})"

    table = _table(("modelled step time over the proven bound", "balanced", "greedy", *peers), map(cells, rows))
    return f"### Micro-batches\n{table}"


def _budget(result: dict[str, Any]) -> str:
    if (draws := result.get("random_draws")) is None:
        return ""
    shown = [
        (name, f"{draws[name]['largest_over_budget']:.2f}", f"{draws[name]['share_over_budget']:.1%}")
        for name in ("padless", "verl")
        if name in draws
    ]
    return f"{draws['draws']:,} random draws:\n\n" + _table(("", "largest padded tokens / budget", "draws over"), shown)


def _against_n(section: dict[str, Any], first: str, worth: str) -> str:
    rows = section["rows"]
    names = list(dict.fromkeys(name for row in rows for name in row["planners"]))

    def cell(row: dict[str, Any], name: str) -> str:
        found = row["planners"].get(name)
        return f"{_seconds(found['wall'])} ({found[worth]:.4f})" if found else "-"

    table = _table(
        (first, *(f"{row['sequences']:,}" for row in rows)),
        ((name, *(cell(row, name) for row in rows)) for name in names),
    )
    reasons = "; ".join(f"{name}: {reason}" for name, reason in section["stopped"].items())
    return table + (f"\n\nNot run further: {reasons}." if reasons else "")


def _pack_speed(result: dict[str, Any]) -> str:
    section = result["pack_speed"]
    sorting = " / ".join(_seconds(row["argsort"]["wall"]) for row in section["rows"])
    table = _against_n(section, "log-normal into 4,096: seconds (efficiency)", "efficiency")
    text = f"### Packs\n{table}\n\n`numpy.argsort(kind='stable')` of the same arrays: {sorting}."
    if peer := (found := result.get("equal_peer", {})).get("peer"):
        ours = found["padless"]
        text += (
            f" The fastest equal peer at {found['sequences']:,} lengths, {found['name']}, takes"
            f" {_seconds(peer['wall'])} for {peer['packs']:,} packs, padless {_seconds(ours['wall'])}"
            f" for {ours['packs']:,}."
        )
    return text


def _pack_quality(result: dict[str, Any]) -> str:
    rows = result["packs"]["rows"]
    names = list(dict.fromkeys(name for row in rows for name in row["planners"]))
    return _table(
        ("packs", "L2 bound", *names),
        (
            (
                f"{row['distribution']}, {row['sequences']:,}",
                f"{row['bound']:,}",
                *(f"{row['planners'][name]['packs']:,}" if name in row["planners"] else "-" for name in names),
            )
            for row in rows
        ),
    )


def _optimal(result: dict[str, Any]) -> str:
    rows = result["packs"]["optimal"]
    return _table(
        ("narrow lengths", "best-fit", "`optimal`", "bound", "seconds"),
        (
            (r["lengths"], f"{r['best_fit']:,}", f"{r['optimal']:,}", f"{r['bound']:,}", f"{r['wall']:.1f}")
            for r in rows
        ),
    )


def _step_speed(result: dict[str, Any]) -> str:
    table = _against_n(result["microbatch_speed"], "gsm8k-heavy, 8 ranks, 32k: seconds (real / padded)", "occupancy")
    return f"### One step of N sequences\n{table}"


def _rest(result: dict[str, Any]) -> str:
    parts = []
    if beside := result["balance"].get("beside_verl"):
        rows = [
            (name, str(found["microbatches"]), f"{found['spread']:.2%}", _seconds(found["wall"]))
            for name, found in beside.items()
        ]
        head = ("2,000 lengths at 32k, no padding", "micro-batches", "work max / mean - 1", "seconds")
        parts.append("### Balance\n" + _table(head, rows))
    if first := result.get("first_call"):
        text = ", ".join(f"{name} {value:.1f} s" for name, value in first.items())
        parts.append(f"First plan of a fresh process, imports included: {text}.")
    if huge := result.get("huge"):
        large = huge["100000000"]
        parts.append(
            f"100 million lengths: {large['wall']:.1f} s, peak memory {large['peak'] / 2**30:.1f} GiB with arrays of "
            f"{large['arrays'] / 2**30:.1f} GiB."
        )
    return "\n\n".join(parts)


if __name__ == "__main__":
    main()
