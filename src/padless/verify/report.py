"""What a check of a model's layouts found: verdicts with figures, in words, as JSON, as a table, as a page."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from html import escape
from pathlib import Path
from typing import Any, Literal, get_args

from padless.errors import PadlessError, choose
from padless.files import write_text

__all__ = ["VERDICTS", "Condition", "LayoutReport", "LayoutResult", "Verdict"]

Verdict = Literal["exact", "leaks", "differs", "inconclusive", "unsupported"]
VERDICTS: tuple[str, ...] = get_args(Verdict)

_DENSE = ("sdpa", "eager", None)
_BY_SPEED = (
    "packed-cu-seqlens",
    "packed-seq-idx",
    "packed-fla",
    "packed-position-ids",
    "packed-block-mask-flex",
    "right-padded-no-mask",
    "right-padded",
    "packed-block-mask-bool",
    "packed-block-mask-additive",
    "left-padded",
)
_SPEED_WITH_DENSE_MASKS = (
    "right-padded-no-mask",
    "right-padded",
    "packed-position-ids",
    "packed-cu-seqlens",
    "packed-seq-idx",
    "packed-fla",
    "packed-block-mask-bool",
    "packed-block-mask-additive",
    "left-padded",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutResult:
    """One layout's verdict and what it rests on; differences are relative to the largest output.

    Attributes:
        layout: its name.
        verdict: ``exact``; ``leaks`` (other sequences or padding move outputs or gradients); ``differs`` (the layout
            computes something else even for one sequence); ``inconclusive`` (the model cannot be judged);
            ``unsupported`` (the model raises on it, or has no use for it).
        difference: largest difference to each sequence alone.
        independence: largest movement of a sequence when others', or the padding's, tokens were changed.
        support: largest gradient with respect to a foreign token over the largest to an own one; None if not measured.
        noise: rounding of the same computation in other batch shapes.
        tolerance: what ``difference`` and ``independence`` were held against.
        cause: a short code of the likely mechanism, ``""`` where all is well.
        why: the same in words, with figures and the module where it enters.
        module: that module's name and class, where it was found.
        modes: verdict for each way in which training calls the model.
    """

    layout: str
    verdict: Verdict
    difference: float | None = None
    independence: float | None = None
    support: float | None = None
    noise: float | None = None
    tolerance: float | None = None
    cause: str = ""
    why: str = ""
    module: str | None = None
    modes: Mapping[str, str] = field(default_factory=dict)

    def explain(self) -> str:
        """One or two sentences: the verdict, what moved and by how much, and the likely reason."""
        if self.verdict == "exact":
            figures = [f"difference {_figure(self.difference)}, rounding alone gives {_figure(self.noise)}"]
            figures += ["nothing foreign moves it"] + ["no foreign gradient"] * (self.support is not None)
            return f"{self.layout} is exact ({', '.join(figures)})."
        said = {"leaks": "leaks", "differs": "computes something else"}.get(self.verdict, f"is {self.verdict}")
        return f"{self.layout} {said}: {self.why}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """A verdict on something that a layout's own does not cover.

    Attributes:
        name: ``several-rows`` (more than one packed row in a micro-batch), ``long-positions`` (dynamic and LongRoPE:
            a micro-batch with positions past the original context), ``router-loss`` (the auxiliary loss of experts).
        layout: the layout it was asked of; ``any regrouping`` where the cut into micro-batches is what
            matters.
        verdict: as of a layout; ``leaks`` and ``differs`` say that the layout is exact only without this.
        difference: relative to the largest output, or to the loss; None if it was not measured.
        why: in words, with figures.
    """

    name: str
    layout: str
    verdict: Verdict
    difference: float | None = None
    why: str = ""

    def explain(self) -> str:
        """One line."""
        return f"{self.layout} with {self.name}: {self.verdict}; {self.why}."


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutReport:
    """Verdicts for one model, as ``check_layouts`` returns them; ``regroup(layout="auto", report=...)`` takes it.

    Attributes:
        model: its class.
        layouts: results by layout name.
        environment: what the verdicts hold for: attention implementation, dtype, device, versions, kernels.
        notes: what else a user should know, router losses and long-context RoPE for example.
        conditions: verdicts on several packed rows, positions past the original context, router losses.
        seconds: how long the check took.
        from_cache: the verdicts were read from disk.
    """

    model: str
    layouts: Mapping[str, LayoutResult]
    environment: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    conditions: tuple[Condition, ...] = ()
    seconds: float = 0.0
    from_cache: bool = False

    def __getitem__(self, layout: str) -> LayoutResult:
        choose("layout", layout, tuple(self.layouts))
        return self.layouts[layout]

    @property
    def safe(self) -> tuple[str, ...]:
        """The layouts that are exact, fastest first."""
        return tuple(name for name in self._by_speed() if self.allows(name))

    @property
    def best(self) -> str | None:
        """The fastest exact layout, or None.

        With variable-length kernels (FlashAttention, FlexAttention) packing is fastest. Under sdpa and eager a packed
        row pays for a dense mask over all its tokens, so right padding comes first there.
        """
        return next(iter(self.safe), None)

    def allows(self, layout: str) -> bool:
        """Whether a layout was found exact. Layouts that were not checked are not allowed."""
        result = self.layouts.get(layout)
        return result is not None and result.verdict == "exact"

    def explain(self, layout: str | None = None) -> str:
        """The verdicts in plain words: of one layout, or of all, the dangerous ones first."""
        if layout is not None:
            return self[layout].explain()
        order = ("leaks", "differs", "inconclusive", "exact", "unsupported")
        results = sorted(self.layouts.values(), key=lambda result: order.index(result.verdict))
        lines = [f"{self.model}: use {self.best}." if self.best else f"{self.model}: no layout is proven safe."]
        return "\n".join([*lines, *(result.explain() for result in results), *self.remarks()])

    def remarks(self) -> tuple[str, ...]:
        """The conditions that are not exact, in words, and the notes."""
        return (*(one.explain() for one in self.conditions if one.verdict != "exact"), *self.notes)

    def condition(self, name: str, layout: str) -> Condition | None:
        """What was found about a layout under one of the conditions, or None where that was not asked."""
        return next((one for one in self.conditions if (one.name, one.layout) == (name, layout)), None)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types; :meth:`from_dict` reads them back."""
        return {
            "model": self.model,
            "best": self.best,
            "safe": list(self.safe),
            "layouts": {name: {**asdict(result), "modes": dict(result.modes)} for name, result in self.layouts.items()},
            "environment": dict(self.environment),
            "notes": list(self.notes),
            "conditions": [asdict(one) for one in self.conditions],
            "seconds": self.seconds,
            "from_cache": self.from_cache,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> LayoutReport:
        """The report that :meth:`to_dict` gave."""
        try:
            layouts = {name: LayoutResult(**result) for name, result in data["layouts"].items()}
            rest = {name: data[name] for name in ("model", "environment", "seconds", "from_cache")}
            conditions = tuple(Condition(**one) for one in data["conditions"])
            return cls(layouts=layouts, notes=tuple(data["notes"]), conditions=conditions, **rest)
        except (KeyError, TypeError, AttributeError) as error:
            raise PadlessError(f"not a layout report: {error!r}") from None

    def to_json(self, path: str | Path | None = None) -> str:
        """JSON text, also written to ``path``."""
        text = json.dumps(self.to_dict(), indent=2)
        if path is not None:
            write_text(path, text + "\n")
        return text

    def to_html(self, path: str | Path | None = None) -> str:
        """A self-contained page, also written to ``path``."""
        text = _page(self)
        if path is not None:
            write_text(path, text)
        return text

    def __rich__(self) -> Any:
        """A table for ``rich.print``, and below it each reason once: many layouts share one."""
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        table = Table(title=f"{self.model}: best {self.best or 'none'}")
        for name in ("layout", "verdict", "difference", "noise", "why"):
            table.add_column(name, no_wrap=True)
        reasons = list(dict.fromkeys(result.why for result in self.layouts.values() if result.why))
        style = {"exact": "green", "leaks": "bold red", "differs": "red", "inconclusive": "yellow"}
        for name, result in self.layouts.items():
            verdict = Text(result.verdict, style=style.get(result.verdict, "dim"))
            figures = (_figure(result.difference), _figure(result.noise))
            why = f"[{reasons.index(result.why) + 1}]" if result.why else ""
            table.add_row(Text(name), verdict, *figures, Text(why))
        return Group(table, *(Text(f"[{i}] {reason}") for i, reason in enumerate(reasons, 1)))

    def _repr_html_(self) -> str:
        return _table(self)

    def _by_speed(self) -> list[str]:
        dense = self.environment.get("attention") in _DENSE
        known = _SPEED_WITH_DENSE_MASKS if dense else _BY_SPEED
        return [name for name in known if name in self.layouts]


def _figure(value: float | None) -> str:
    return "-" if value is None else "0" if value == 0 else f"{value:.1e}"


def _table(report: LayoutReport) -> str:
    rows = "".join(
        f'<tr class="{result.verdict}"><td>{escape(name)}</td><td>{result.verdict}</td>'
        f"<td>{_figure(result.difference)}</td><td>{_figure(result.independence)}</td>"
        f"<td>{_figure(result.support)}</td><td>{_figure(result.noise)}</td><td>{escape(result.why)}</td></tr>"
        for name, result in report.layouts.items()
    )
    heads = ("layout", "verdict", "difference to alone", "moved by others", "foreign gradient", "noise", "why")
    return (
        f"<table><thead><tr>{''.join(f'<th>{head}</th>' for head in heads)}</tr></thead><tbody>{rows}</tbody></table>"
    )


def _page(report: LayoutReport) -> str:
    facts = "".join(f"<li>{escape(str(k))}: {escape(str(v))}</li>" for k, v in report.environment.items())
    notes = "".join(f"<p>{escape(note)}</p>" for note in report.remarks())
    style = (
        "body{font:15px/1.45 system-ui,sans-serif;max-width:70rem;margin:2rem auto;padding:0 1rem;color:#1b1f24}"
        "table{border-collapse:collapse;width:100%}"
        "td,th{text-align:left;padding:.35rem .6rem;border-bottom:1px solid #ddd;vertical-align:top}"
        "tr.exact td:nth-child(2){color:#116329}tr.leaks td:nth-child(2),tr.differs td:nth-child(2)"
        "{color:#b42318;font-weight:600}tr.inconclusive td:nth-child(2){color:#8a6100}tr.unsupported td{color:#777}"
    )
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Layouts of {escape(report.model)}</title>'
        f"<style>{style}</style></head><body><h1>Layouts of {escape(report.model)}</h1>"
        f"<p>Fastest exact layout: <strong>{escape(report.best or 'none')}</strong></p>"
        f"{_table(report)}{notes}<h2>Holds for</h2><ul>{facts}</ul></body></html>"
    )
