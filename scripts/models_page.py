"""The page docs/models.md out of what scripts/models_table.py measured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

COLUMNS = {
    "right-padded": "right",
    "right-padded-no-mask": "right, no mask",
    "left-padded": "left",
    "packed-position-ids": "packed",
    "packed-cu-seqlens": "cu_seqlens",
    "packed-seq-idx": "seq_idx",
    "packed-block-mask-additive": "mask, additive",
    "packed-block-mask-bool": "mask, bool",
}
MARKS = {"exact": "exact", "leaks": "**leaks**", "differs": "**differs**", "inconclusive": "?", "unsupported": "-"}

HEAD = """# Which layouts each architecture can take

Verdicts of `padless.verify.check_layouts` for every causal language model that the installed transformers names. Each
one is built small with random weights and run on a CPU with its default attention, without optional kernels, and with
`use_cache=False`. They hold for these versions, this attention and these kernels: run `padless verify` on your model.

* **right**: right padded, mask and positions. **right, no mask**: tokens only. **left**: left padded, mask and
  positions that start at the first token. **packed**: one row, `position_ids` that restart. **cu_seqlens**,
  **seq_idx**: the same with `cu_seq_lens_q` and its kin, with `seq_idx`. **mask**: the same with a 4-D block mask.
* exact: outputs and gradients are those of each sequence alone. **leaks**: other sequences or padding move them.
  **differs**: the layout computes something else even for one sequence, a lost attention window for instance.
  ?: cannot be judged, see below. -: the model raises, or its installation lacks the kernel.
* reason: why `packed` is not exact or, where it is, the first other column that is not.
* reference: whether a slow float64 comparison of outputs and all parameters' gradients agrees in every column.
* bfloat16: whether the same architecture, built in bfloat16 at its default initialisation, gets the same verdicts.

Regenerate with `python scripts/models_table.py`.
"""


def page(known: dict[str, Any], types: Sequence[str] = ()) -> str:
    """The whole page; ``types`` are all architectures, to name those that were not measured."""
    versions = known["_versions"]
    rows = {name: row for name, row in sorted(known.items()) if name != "_versions"}
    judged = {name: row for name, row in rows.items() if "verdicts" in row}
    lines = [HEAD, f"torch {versions['torch']}, transformers {versions['transformers']}.", "", "## Counts", ""]
    lines += _counts(judged, len(rows))
    lines += ["", "## Verdicts", ""]
    titles = ["architecture", "attention", *COLUMNS.values(), "reason", "reference", "bfloat16"]
    lines += [_row(titles), _row(["---"] * len(titles))]
    for name, row in judged.items():
        verdicts = [MARKS[row["verdicts"][layout]] for layout in COLUMNS]
        lines.append(_row([name, row["attention"] or "none", *verdicts, _reason(row), agreement(row), _half(row)]))
    lines += ["", "## Not settled", "", "Where a verdict is ?, or the reference does not agree:", ""]
    lines += [f"* {name}: {line}" for name, row in judged.items() for line in _unsettled(row)] or ["* none"]
    lines += ["", "## Other verdicts in bfloat16", ""]
    lines += [f"* {name}: {line}" for name, row in judged.items() for line in _changed(row)] or ["* none"]
    lines += [
        "",
        "## Not built",
        "",
        "A small configuration could not be made, or the model needs more than tokens:",
        "",
    ]
    others = {name: row for name, row in rows.items() if name not in judged}
    lines += [f"* {name}: {_plain(row.get('not_built') or row.get('not_run'))}" for name, row in others.items()]
    missing = [name for name in types if name not in rows]
    if missing:
        lines += ["", "## Not measured yet", "", "`python scripts/models_table.py` goes on with these:", ""]
        lines += [f"* {name}: not measured" for name in missing]
    return "\n".join(lines) + "\n"


def false_in_half(row: dict[str, Any], dtype: str = "bfloat16") -> list[str]:
    """Layouts called exact in half precision that the reference does not find exact."""
    verdicts = row.get(dtype, {}).get("verdicts", {})
    exact = set(row.get("reference_exact", verdicts))
    return [layout for layout, verdict in verdicts.items() if verdict == "exact" and layout not in exact]


def agreement(row: dict[str, Any]) -> str:
    """``agrees``, or the layouts in which the reference says otherwise."""
    if "reference" not in row:
        return "failed"
    apart = disagreements(row)
    return "agrees" if not apart else "not in " + ", ".join(COLUMNS[layout] for layout in apart)


def disagreements(row: dict[str, Any]) -> list[str]:
    """Layouts that one side calls exact and the other does not; what raises, or cannot be judged, is neither."""
    exact = set(row["reference_exact"])
    return [
        layout
        for layout, verdict in row["verdicts"].items()
        if verdict in ("exact", "leaks", "differs") and (verdict == "exact") != (layout in exact)
    ]


def _counts(judged: dict[str, Any], total: int) -> list[str]:
    lines = [
        f"{total} architectures; {len(judged)} were built and run.",
        "",
        _row(["layout", "exact", "leaks", "differs", "cannot be judged", "unsupported"]),
        _row(["---"] * 6),
    ]
    for layout, title in COLUMNS.items():
        found = [row["verdicts"][layout] for row in judged.values()]
        kinds = ("exact", "leaks", "differs", "inconclusive", "unsupported")
        lines.append(_row([title, *(str(found.count(kind)) for kind in kinds)]))
    agreeing = sum(agreement(row) == "agrees" for row in judged.values())
    compared = sum("reference" in row for row in judged.values())
    false = sum(row["verdicts"][layout] == "exact" for row in judged.values() for layout in _false(row))
    seconds = sorted(row["cpu_seconds"] for row in judged.values())
    lines += [
        "",
        (
            f"The reference could be computed for {compared} and agrees in every column with {agreeing} of them;"
            f" verdicts `exact` that it contradicts: {false}."
        ),
        *_half_counts(judged),
        f"A check took {seconds[len(seconds) // 2]} s of CPU time in the median, {seconds[-1]} s at most.",
    ]
    return lines


def _half_counts(judged: dict[str, Any]) -> list[str]:
    """What half precision adds, in one sentence; nothing where it was not measured."""
    rows = [row for row in judged.values() if "verdicts" in row.get("bfloat16", {})]
    if not rows:
        return []
    cells = [(row["bfloat16"]["verdicts"][layout], row["verdicts"][layout]) for row in rows for layout in COLUMNS]
    same = sum(one == other for one, other in cells)
    unsure = sum(one == "inconclusive" and other != "inconclusive" for one, other in cells)
    false = sum(len(false_in_half(row)) for row in rows)
    line = (
        f"In bfloat16 at default initialisation, two layers, {len(rows)} of them could be run: {same} of {len(cells)}"
        f" verdicts are the same, {unsure} can no longer be judged; verdicts `exact` that the reference contradicts:"
        f" {false}."
    )
    return [line]


def _half(row: dict[str, Any]) -> str:
    half = row.get("bfloat16")
    if half is None:
        return "not measured"
    if "verdicts" not in half:
        return "not run"
    return "same" if half["verdicts"] == row["verdicts"] else "other"


def _changed(row: dict[str, Any]) -> list[str]:
    """Verdicts that bfloat16 changes, layouts with the same change together."""
    half = row.get("bfloat16", {})
    if "not_run" in half:
        return [f"not run: {_plain(half['not_run'])}"]
    groups: dict[tuple[str, str], list[str]] = {}
    for layout, verdict in half.get("verdicts", {}).items():
        if verdict != row["verdicts"][layout]:
            groups.setdefault((row["verdicts"][layout], verdict), []).append(layout)
    return [
        f"{', '.join(COLUMNS[layout] for layout in layouts)}: {before} in float32, {after} in bfloat16:"
        f" {_plain(half['why'].get(layouts[0], ''))}"
        for (before, after), layouts in groups.items()
    ]


def _false(row: dict[str, Any]) -> list[str]:
    return disagreements(row) if "reference" in row else []


def _reason(row: dict[str, Any]) -> str:
    causes = row["causes"]
    for layout in ("packed-position-ids", *COLUMNS):
        if row["verdicts"][layout] in ("leaks", "differs"):
            cause = causes.get(layout, "")
            return cause if layout == "packed-position-ids" else f"{COLUMNS[layout]}: {cause}"
    return ""


def _unsettled(row: dict[str, Any]) -> list[str]:
    unknown = [layout for layout, verdict in row["verdicts"].items() if verdict == "inconclusive"]
    lines = []
    if unknown:
        why = _plain(row["why"].get(unknown[0], ""))
        lines.append(f"{', '.join(COLUMNS[layout] for layout in unknown)}: {why}")
    if "reference" not in row:
        lines.append(f"no reference: {_plain(row.get('reference_failed'))}")
    for layout in _false(row):
        measured = row["reference"][layout]
        lines.append(f"{COLUMNS[layout]}: {row['verdicts'][layout]}, reference difference {measured}")
    return lines


def _row(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _plain(text: Any) -> str:
    return " ".join(str(text).replace("|", "/").replace("<", "").replace(">", "").split())
