"""The benchmark as one HTML page: no script, no request, readable offline, on a phone, in the dark."""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import Any

from padless.bench.arms import MASKED
from padless.bench.equality import LIMITS
from padless.bench.report_parts import bars, drawing, facts, histogram, number, seconds, table
from padless.bench.report_style import STYLE
from padless.bench.results import ArmResult, BenchReport, ModelResult
from padless.errors import PadlessError
from padless.files import write_text

__all__ = ["ARM_TEXTS", "render_html", "write_html"]

ARM_TEXTS = {
    "fixed": "prompts left padded and responses right padded to the longest allowed; a fixed number of rows",
    "truncate": "the same rows, rolled to the left and cut to their own longest",
    "greedy": "sorted, cut by a token budget: the published rule",
    "balanced": "sorted, cut where the modelled time of the whole step is least",
    "packed": "all sequences of a micro-batch behind one another in one row, without padding",
}
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


def write_html(report: BenchReport, path: str | Path) -> Path:
    """Write the page; folders on the way are made.

    Raises:
        PadlessError: the path cannot be written.
    """
    target = Path(path)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        write_text(target, render_html(report))
    except OSError as error:
        raise PadlessError(f"cannot write {target}: {error.strerror}") from None
    return target


def render_html(report: BenchReport) -> str:
    """The page as text. Charts are HTML and SVG made here; there is no script."""
    body = "".join(
        [
            _head(report),
            _workload(report),
            *(_model(model) for model in report.models.values()),
            _machine(report),
        ]
    )
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        f'<link rel="icon" href="data:,"><title>padless bench</title><style>{STYLE}</style></head>'
        f"<body><main>{body}</main></body></html>\n"
    )


def _head(report: BenchReport) -> str:
    cards = []
    for name, model in report.models.items():
        arms = model.arms
        if "fixed" in arms and "balanced" in arms:
            times = 1 / model.ratio_to("fixed")["balanced"]
            cards.append(_card(f"{times:.1f} x", f"{name}: <b>balanced</b> is faster than <b>fixed</b>"))
        if "balanced" in model.gain_recovered:
            share = model.gain_recovered["balanced"]
            cards.append(_card(f"{share:.1%}", f"{name}: recovered of the time that padding-free training saves"))
    return (
        "<h1>What padding costs, and what comes back</h1>"
        "<p>One policy-update step of online RL: reference pass, clipped policy gradient, optimizer step."
        " Every arm trains the same sequences from the same weights; only how they are cut into micro-batches differs."
        "</p>"
        + (f"<p><b>{escape(report.disturbed)}</b></p>" if report.disturbed else "")
        + f'<div class="cards">{"".join(cards)}</div>'
    )


def _card(value: str, told: str) -> str:
    plain = told.replace("<b>", "").replace("</b>", "")
    return f'<div class="card"><b>{escape(value)}</b><span>{escape(plain)}</span></div>'


def _workload(report: BenchReport) -> str:
    work = report.workload
    width = work["prompt_max"] + work["response_max"]
    scale = f" Lengths and maxima are scaled by {work['scale']:g}." if work["scale"] != 1 else ""
    return (
        "<h2>Sequences</h2>"
        f"<p>{work['sequences']} sequences of <code>{escape(work['name'])}</code>: {escape(work['source'])}.{scale}"
        f" Prompts have {work['prompt_mean']:.0f} tokens on average and at most {work['prompt_max']:,}, responses"
        f" {work['response_mean']:.0f} and at most {work['response_max']:,}; {work['truncated']} were cut.</p>"
        f"<figure><figcaption>Tokens in a sequence, up to the width that <i>fixed</i> computes.</figcaption>"
        f"{histogram(report.lengths, width)}</figure>"
    )


def _model(model: ModelResult) -> str:
    told = model.described
    scan = (
        " Its recurrent scan, and on the CPU the short convolution before it, are the benchmark's own, linear in the"
        " width and equal to the stock ones: the stock scan's"
        " backward pass grows with the square of the width, which would flatter every arm but <i>fixed</i>."
        if told["linear_scan"]
        else ""
    )
    arms = list(model.arms.values())
    slowest = max(max(arm.seconds_all) for arm in arms)
    return (
        f"<h2>{escape(model.name)}</h2>"
        f"<p>{told['type']}, {told['parameters'] / 1e6:.1f} M parameters, {told['layers']} layers, {told['weights']}."
        f"{scan}</p>"
        "<figure><h3>Time of one step</h3>"
        "<figcaption>Median; the mark spans the fastest and the slowest repeat.</figcaption>"
        + bars([_time_bar(arm, model) for arm in arms], full=slowest)
        + "</figure><figure><h3>Occupancy</h3><figcaption>Real tokens as a share of those computed.</figcaption>"
        + bars(
            [(arm.name, _share(arm), None, f"{_share(arm):.1%}{_told_valid(arm)}") for arm in arms],
            full=1.0,
        )
        + f"</figure><h3>Figures</h3>{_figures(model)}"
        "<figure><h3>The micro-batches</h3><figcaption>Each rectangle is one micro-batch, rows by columns, at the same"
        " scale in every arm; colored is real, grey is padding.</figcaption>" + drawing(arms) + "</figure>"
        f"<h3>Nothing else changed</h3>{_equality(model)}{_layouts(model)}{_cost(model)}"
    )


def _time_bar(arm: ArmResult, model: ModelResult) -> tuple[str, float, tuple[float, float], str]:
    faster = model.ratio_to("fixed").get(arm.name)
    told = seconds(arm.seconds) + ("" if not faster or arm.name == "fixed" else f" · {1 / faster:.1f} x")
    return arm.name, arm.seconds, (min(arm.seconds_all), max(arm.seconds_all)), told + _told_valid(arm)


def _told_valid(arm: ArmResult) -> str:
    if arm.valid:
        return ""
    return " <small>timing only</small>" if arm.name == "packed" else ' <small class="wrong">differs</small>'


def _share(arm: ArmResult) -> float:
    return arm.real_tokens / arm.padded_tokens


def _figures(model: ModelResult) -> str:
    packed, gain = model.ratio_to("packed"), model.gain_recovered
    rows = []
    for name, arm in model.arms.items():
        memory = arm.peak_memory_bytes
        rows.append(
            [
                escape(name),
                seconds(arm.seconds),
                seconds(arm.part("reference")),
                seconds(arm.part("train")),
                f"{arm.overhead_share:.2%}",
                str(len(arm.steps[0].micros)),
                f"{arm.real_tokens / arm.seconds:,.0f}",
                "-" if memory is None else f"{memory / 2**20:,.0f} MiB",
                f"{packed[name]:.2f}" if name in packed else "-",
                f"{gain[name]:.1%}" if name in gain else "-",
            ]
        )
    header = [
        "arm", "step", "reference", "train", "overhead", "micros", "real tokens/s", "peak memory", "/ packed",
        "recovered",
    ]  # fmt: skip
    return (
        '<p class="soft">Train holds the optimizer; overhead is planning and tensor work; / packed is the time over'
        " that of padding-free training; recovered is the share of the time it saves.</p>" + table(header, rows)
    )


def _equality(model: ModelResult) -> str:
    names = ("max_logprob_difference", "loss_difference", "gradient_difference", "update_difference")
    limits = (LIMITS.logprob, LIMITS.loss, LIMITS.gradient, LIMITS.update)
    rows = []
    for name, arm in model.arms.items():
        cells = [number(arm.differences[key]) for key in names]
        verdict = "equal" if arm.valid else '<span class="wrong">differs</span>'
        if name == "packed" and not arm.valid:
            verdict = '<span class="wrong">leaks: timing only</span>'
        rows.append([escape(name), *cells, verdict])
    rows.append(["<i>limit in float32</i>", *(number(limit, digits=1) for limit in limits), ""])
    steps = f"{model.updates} optimizer step{'s' if model.updates > 1 else ''}"
    return (
        "<p>The largest difference from each sequence run alone and from <i>fixed</i>: log-probabilities of real tokens"
        f" (absolute), loss, gradient of the first step, and the change of all parameters after {steps} (norm of the"
        " difference over the norm).</p>" + table(["arm", "log-probability", "loss", "gradient", "update", ""], rows)
    )


def _layouts(model: ModelResult) -> str:
    if not model.leaks:
        return ""
    rows = [
        [
            escape(name),
            number(told["max_logprob_difference"]),
            number(told["foreign_influence"]),
            "exact" if told["exact"] else '<span class="wrong">not exact</span>',
        ]
        for name, told in model.leaks.items()
    ]
    text = (
        "<h3>Layouts</h3><p>Measured in this run: the difference of log-probabilities from each sequence alone, and how"
        " far they moved when all other sequences and the padding were exchanged.</p>"
    ) + table(["layout", "difference", "foreign influence", ""], rows)
    bare = model.leaks.get("right-padded-no-mask", {})
    times = bare.get("seconds", {})
    if times:
        pairs = [
            [escape(arm), seconds(told["with_mask"]), seconds(told["without_mask"])] for arm, told in times.items()
        ]
        text += "<p>Right-padded rows need no attention mask in this model, so these arms go without one.</p>" + table(
            ["arm", "with mask", "without"], pairs
        )
    elif bare and not bare.get("used"):
        text += "<p>This model needs the attention mask; right-padded arms have one.</p>"
    return text


def _cost(model: ModelResult) -> str:
    cost = model.cost
    if cost.source == "default" and not model.calibration_seconds:
        return ""
    return (
        f'<p class="soft">The cost model that <i>balanced</i> planned with was {escape(cost.source)} in'
        f" {seconds(model.calibration_seconds)}: {cost.per_microbatch:.3g} s per micro-batch, {cost.per_column:.3g} s"
        f" per column, {cost.per_token:.3g} s per token, {cost.per_token_squared:.3g} s per token squared.</p>"
    )


def _machine(report: BenchReport) -> str:
    work = report.workload
    pairs: list[tuple[str, Any]] = [
        *((name, value) for name, value in report.machine.items() if value is not None),
        *report.versions.items(),
        ("padless", report.padless),
        ("token budget", f"{report.token_budget:,} padded tokens of a micro-batch"),
        ("rows", f"{work['rows']} of a micro-batch in fixed and truncate"),
        ("repeats", work["repeats"]),
        ("precision", work["dtype"]),
        ("optimizer", ", ".join(f"{key} {value}" for key, value in work["optimizer"].items())),
        ("seed", work["seed"]),
        ("whole run", seconds(report.seconds)),
    ]
    arms = [name for model in report.models.values() for name in model.arms]
    texts = [(name, _arm_text(name)) for name in dict.fromkeys(arms)]
    return f"<h2>What was measured</h2><h3>Arms</h3>{facts(texts)}<h3>Where and how</h3>{facts(pairs)}"


def _arm_text(name: str) -> str:
    if name in MASKED:
        return f"{ARM_TEXTS[MASKED[name]]}, with an attention mask"
    return ARM_TEXTS[name]
