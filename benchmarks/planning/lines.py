"""What the planners promise, each line with the measured figure, its limit and whether it holds."""

from __future__ import annotations

from typing import Any

__all__ = ["judge", "table"]

#: over the proven lower bound: (mix, sequences) -> limit
MICROBATCH = {
    ("mix_rl_gsm8k_heavy", 256): 1.09,
    ("mix_rl_longcot", 256): 1.035,
    ("mix_rl_gsm8k_heavy", 1024): 1.035,
    ("mix_rl_longcot", 1024): 1.025,
    ("mix_rl_gsm8k_heavy", 4096): 1.035,
    ("mix_rl_longcot", 4096): 1.015,
}
PLAN_SECONDS = {256: 0.005, 4096: 0.050}


class _Lines(list[dict[str, Any]]):
    def add(self, line: str, figure: float, limit: float, *, at_least: bool = False, note: str = "") -> None:
        holds = figure >= limit if at_least else figure <= limit
        sign = ">=" if at_least else "<="
        self.append({"line": line, "figure": figure, "limit": f"{sign} {limit:g}", "holds": bool(holds), "note": note})


def judge(result: dict[str, Any]) -> list[dict[str, Any]]:
    """One entry per promise that the result has figures for."""
    lines = _Lines()
    _microbatches(result, lines)
    _packs(result, lines)
    _balance(result, lines)
    _speed(result, lines)
    return list(lines)


def _microbatches(result: dict[str, Any], lines: _Lines) -> None:
    for row in result.get("microbatch", ()):
        where = f"{row['mix']}, {row['sequences']} on {row['ranks']}"
        note = (
            f"{row['over_perfect']:.4f} over perfect packing, which is out of reach: no padded plan can be under"
            f" {row['bound_over_perfect']:.4f} of it"
        )
        limit = MICROBATCH[row["mix"], row["sequences"]]
        lines.add(f"step time over the proven bound: {where}", row["over_bound"], limit, note=note)
        peers = {name: found for name, found in row["peers"].items() if "over_bound" in found}
        if peers:
            best = min(peers, key=lambda name: peers[name]["over_bound"])
            ratio = peers[best]["ours_over_bound"] / peers[best]["over_bound"]
            lines.add(f"step time over the best peer's: {where}", ratio, 1, note=best)
    if draws := result.get("random_draws"):
        lines.add(
            f"draws over budget, of {draws['draws']:,}", draws["padless"]["share_over_budget"], 0, note=_verl(draws)
        )
        worse = draws["10% more budget"]
        lines.add(
            "cost of 10 % more budget, worst draw",
            worse["worst"],
            0.01,
            note=f"{worse['share_worse_by_1%']:.2%} of draws over 1 %",
        )


def _verl(draws: dict[str, Any]) -> str:
    verl = draws.get("verl")
    if verl is None:
        return ""
    return (
        f"verl: {verl['share_over_budget']:.1%} of draws over, largest {verl['largest_over_budget']:.1f} x the budget"
    )


def _packs(result: dict[str, Any], lines: _Lines) -> None:
    quality = result.get("packs", {"rows": (), "optimal": ()})
    for row in quality["rows"]:
        planners = dict(row["planners"])
        ours = planners.pop("padless")
        where = f"{row['distribution']}, {row['sequences']:,}"
        note = f"{ours['packs']:,} packs, L2 bound {row['bound']:,}"
        if planners:
            best = min(planners, key=lambda name: planners[name]["packs"])
            ratio = ours["packs"] / planners[best]["packs"]
            lines.add(
                f"packs over the best peer's: {where}", ratio, 1, note=f"{note}, {best} {planners[best]['packs']:,}"
            )
    for row in quality["optimal"]:
        if "coarsened" not in row["lengths"]:
            note = (
                f"{row['best_fit']:,} best-fit, {row['optimal']:,} optimal, bound {row['bound']:,}, {row['wall']:.1f} s"
            )
            lines.add(f"packs of optimal over the bound: {row['lengths']}", row["optimal"] - row["bound"], 4, note=note)


def _balance(result: dict[str, Any], lines: _Lines) -> None:
    if (found := result.get("balance")) is None:
        return
    lines.add(
        "work max / mean - 1, 10,000 lengths at 32k, worst of 5", max(r["work"]["spread"] for r in found["work"]), 0.01
    )
    lines.add(
        "packs over the bound in those plans", max(r["work"]["packs"] - r["work"]["bound"] for r in found["work"]), 0
    )
    slowest = max((r["time"] for r in found["work"]), key=lambda taken: taken["wall"])
    lines.add("seconds of such a plan, slowest of 5", slowest["wall"], 0.05, note=f"cpu {slowest['cpu']:.4f}")
    over = max(r["over_mean"] - r["bound"] for r in found["equal_counts"])
    lines.add("512 on 64 ranks, equal counts: imbalance over the bound's", over, 0.02)


def _speed(result: dict[str, Any], lines: _Lines) -> None:
    rows = result.get("pack_speed", {}).get("rows", ())
    if rows and (row := rows[-1]):
        where = f"{row['sequences']:,} lengths"
        for how in ("wall", "cpu"):
            lines.add(f"pack, share of a stable argsort ({how}): {where}", row["share_of_argsort"][how], 0.35)
    compared = next((row for row in reversed(rows) if "fastest_equal_peer" in row), None)
    if peer := result.get("equal_peer", {}).get("peer"):
        found = result["equal_peer"]
        line = f"times faster than the fastest equal peer: {found['sequences']:,} lengths"
        note = f"{found['name']}, {peer['wall']:.2f} s, {peer['packs']:,} packs beside {found['padless']['packs']:,}"
        lines.add(line, found["times_ours"], 5, at_least=True, note=note)
    elif compared is not None:  # the largest size that a peer of equal quality was run at
        best = compared["fastest_equal_peer"]
        line = f"times faster than the fastest equal peer: {compared['sequences']:,} lengths"
        lines.add(line, best["times_ours"], 5, at_least=True, note=best["name"])
    if huge := result.get("huge"):
        lines.add(
            "100 million over 10 million lengths (wall)",
            huge["ratio"]["wall"],
            12,
            note=f"cpu {huge['ratio']['cpu']:.1f}",
        )
        lines.add("peak memory over input and output arrays, 100 million", huge["peak_over_arrays"], 3)
    for row in result.get("microbatch", ()):
        if row["sequences"] in PLAN_SECONDS:
            line = f"seconds of balanced: {row['mix']}, {row['sequences']} on {row['ranks']}"
            lines.add(line, row["wall"], PLAN_SECONDS[row["sequences"]], note=f"cpu {row['cpu']:.4f}")
    for row in result.get("large", ()):
        if (row["sequences"], row["ranks"]) == (1_000_000, 64):
            lines.add("seconds of balanced: one million on 64", row["wall"], 3, note=f"cpu {row['cpu']:.2f}")


def table(lines: list[dict[str, Any]]) -> str:
    shown = []
    for line in lines:
        mark = "holds" if line["holds"] else "FAILS"
        note = f"  ({line['note']})" if line["note"] else ""
        shown.append(f"{mark}  {line['line']}: {line['figure']:.4g} {line['limit']}{note}")
    return "\n".join(shown)
