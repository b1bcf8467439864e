"""Verdicts from measurements: worst over modes, seeds and dtypes, held against controls."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from padless.verify.causes import CAUSES, Cause, find_cause
from padless.verify.feeds import BLIND
from padless.verify.probe import Baseline, Measured, Probe, Refused
from padless.verify.report import Condition, LayoutResult, Verdict
from padless.verify.runs import Mode
from padless.verify.steadiness import Unsteady, find_unsteady
from padless.verify.subject import Subject

__all__ = ["Findings", "verdict_of"]

_WORST: tuple[Verdict, ...] = ("leaks", "differs", "inconclusive", "unsupported", "exact")
_SURE = 20.0
"""Between the tolerance and this multiple of it, a difference without foreign influence is not judged."""
_LARGE = 0.5
"""A difference of half the largest output is no rounding in any precision."""
_VISIBLE = 10.0
"""A control must show at least this multiple of the tolerance."""


@dataclass(slots=True, kw_only=True)
class Finding:
    """One layout in one mode of one pass."""

    mode: str
    label: str
    verdict: Verdict
    measured: Measured | None = None
    base: Baseline | None = None
    cause: Cause | None = None


def verdict_of(found: Measured, base: Baseline) -> Verdict:
    """The verdict of the measurements alone; a difference without foreign influence is ``differs``.

    Changed tokens may move last bits where experts group rows anew; with a gradient of exactly zero that is rounding.
    """
    if found.support:
        return "leaks"
    if found.independence > base.tolerance:
        return "leaks"
    if found.equality > min(_SURE * base.tolerance, _LARGE):
        return "differs"
    return "inconclusive" if found.equality > base.tolerance else "exact"


class Findings:
    """Collects what every pass and mode finds about every layout."""

    def __init__(self, names: list[str]) -> None:
        self.names = names
        self.amplified = True
        self.sensitive = False
        self.windows: list[str] = []
        self.conditions: list[Condition] = []
        self._found: dict[str, list[Finding]] = defaultdict(list)
        self._remarks: list[str] = []
        self._first = ""
        self._causes: dict[tuple[object, ...], Cause] = {}

    def remark(self, line: str) -> None:
        """Add a note, once."""
        if line not in self._remarks:
            self._remarks.append(line)

    def notes(self) -> list[str]:
        """What was remarked, as sentences."""
        return [line[0].upper() + line[1:] + "." for line in self._remarks]

    def measure(self, probe: Probe, mode: Mode, label: str, *, sensitive: bool, attention: str | None) -> None:
        """All layouts in one mode. ``sensitive``: the model is amplified.

        Controls count once there, or where the model could not be amplified: as it is, an untrained model may mix
        next to nothing.
        """
        controlled = sensitive or not self.sensitive
        self.sensitive |= sensitive
        first = self._first = self._first or label
        try:
            base = probe.baseline(mode)
        except Refused as refused:
            why = f"a sequence alone cannot be run in mode {mode.name}: {refused}"
            self._all(mode, label, "inconclusive", Cause(code="unknown", why=why))
            return
        if probe.width_multiple > 1:
            self.remark(f"in mode {mode.name} the model takes only widths that are multiples of {probe.width_multiple}")
        unsteady = find_unsteady(probe, mode, base)
        if unsteady is not None:
            self._unsteady(mode, label, unsteady)
            return
        blind = _blindness(probe, mode, base) if controlled else {}
        for name in self.names:
            if name == "packed-block-mask-flex" and attention != "flex_attention":
                cause = Cause(
                    code="", why=f"it needs attn_implementation='flex_attention', and the model has {attention!r}"
                )
                self._found[name].append(Finding(mode=mode.name, label=label, verdict="unsupported", cause=cause))
                continue
            if label != first and any(f.verdict == "leaks" and f.mode == mode.name for f in self._found[name]):
                continue  # it cannot become better
            self._found[name].append(self._judge(probe, name, mode, label, base, blind))

    def exact(self) -> list[str]:
        """The layouts of which nothing but ``exact`` was found so far."""
        return [n for n in self.names if self._found[n] and {f.verdict for f in self._found[n]} == {"exact"}]

    def results(self, subject: Subject) -> dict[str, LayoutResult]:
        """One result for each layout: the worst finding decides."""
        return {name: self._result(name) for name in self.names}

    def _judge(self, probe: Probe, name: str, mode: Mode, label: str, base: Baseline, blind: dict[str, str]) -> Finding:
        try:
            found = probe.measure(name, mode, base)
        except Refused as refused:
            raised = Cause(code="", why=f"the model raised in mode {mode.name}: {refused}")
            return Finding(mode=mode.name, label=label, verdict="unsupported", cause=raised)
        verdict = verdict_of(found, base)
        if verdict == "differs" and probe.single(name, mode, base) <= base.tolerance:
            verdict = "leaks"  # one sequence in this layout is right: the presence of others, or of padding, moves it
        blindness = blind.get("padded" if "padded" in name else "packed")
        cause: Cause | None = None
        if verdict == "exact" and blindness is not None:
            verdict, cause = "inconclusive", Cause(code="unknown", why=f"in mode {mode.name} {blindness}")
        elif verdict == "inconclusive":
            close = f"a difference of {found.equality:.1e} is too close to rounding ({base.noise:.1e}) to be judged"
            cause = Cause(code="unknown", why=close)
        elif verdict != "exact" and not self._explained(name, verdict):
            cause = self._cause(probe, name, mode, label, base, found)
        return Finding(mode=mode.name, label=label, verdict=verdict, measured=found, base=base, cause=cause)

    def _cause(self, probe: Probe, name: str, mode: Mode, label: str, base: Baseline, found: Measured) -> Cause:
        """Layouts whose boundaries a model does not read compute the same, for the same reason: it is sought once."""
        known = (mode.name, label, name == "naive", found.equality, found.independence, found.support)
        if known not in self._causes:
            self._causes[known] = find_cause(probe, name, mode, base, found)
        return self._causes[known]

    def _explained(self, name: str, verdict: Verdict) -> bool:
        rank = _WORST.index(verdict)
        return any(
            f.cause is not None and _WORST.index(f.verdict) <= rank and f.cause.code not in ("", "unknown")
            for f in self._found[name]
        )

    def _unsteady(self, mode: Mode, label: str, unsteady: Unsteady) -> None:
        if unsteady.code == "carried-state":
            where = f" It enters in {unsteady.module}." if unsteady.module else ""
            why = f"the same sequence gives outputs {unsteady.difference:.1e} apart; {CAUSES[unsteady.code]}.{where}"
            self._all(mode, label, "leaks", Cause(code=unsteady.code, why=why, module=unsteady.module))
            return
        where = f", first in {unsteady.module}" if unsteady.module else ""
        apart = f"{unsteady.difference:.1e} between two runs{where}"
        why = f"in mode {mode.name} the model is random beyond dropout ({apart})."
        if unsteady.code == "rare":
            why = (
                f"in mode {mode.name} the model draws random numbers for each token beyond dropout; those tried moved"
                f" outputs by {unsteady.difference:.1e}, and rarer ones may do more."
            )
        self._all(mode, label, "inconclusive", Cause(code="unknown", why=why, module=unsteady.module))

    def _all(self, mode: Mode, label: str, verdict: Verdict, cause: Cause) -> None:
        for name in self.names:
            self._found[name].append(Finding(mode=mode.name, label=label, verdict=verdict, cause=cause))

    def _result(self, name: str) -> LayoutResult:
        found = self._found[name]
        modes: dict[str, Verdict] = {}
        for finding in found:
            modes[finding.mode] = min(modes.get(finding.mode, "exact"), finding.verdict, key=_WORST.index)
        worst = min(modes.values(), key=_WORST.index)
        deciding = [finding for finding in found if finding.verdict == worst]
        told = next((f for f in deciding if f.cause is not None and f.cause.code not in ("", "unknown")), None)
        told = told or next((f for f in deciding if f.cause is not None), deciding[0])
        numbers = [f for f in deciding if f.measured is not None and f.base is not None]
        shown = told if told.measured is not None else max(numbers, key=_size) if numbers else None
        if worst == "exact" and numbers:
            shown = max(numbers, key=_size)
        cause = told.cause if worst != "exact" else None
        if worst == "exact" and not self.amplified:
            worst = "inconclusive"
            cause = Cause(
                code="unknown", why="it was judged in half precision only, which hides weak leaks: raise copy_limit"
            )
        supports = [f.measured.support for f in numbers if f.measured is not None and f.measured.support is not None]
        measured, base = (None, None) if shown is None else (shown.measured, shown.base)
        return LayoutResult(
            layout=name,
            verdict=worst,
            difference=None if measured is None else measured.equality,
            independence=None if measured is None else measured.independence,
            support=max(supports, default=None),
            noise=None if base is None else base.noise,
            tolerance=None if base is None else base.tolerance,
            cause="" if cause is None else cause.code,
            why="" if cause is None else cause.why + _only_in(modes, worst),
            module=None if cause is None else cause.module,
            modes=dict(modes),
        )


def _only_in(modes: dict[str, Verdict], worst: Verdict) -> str:
    there = [name for name, verdict in modes.items() if verdict == worst]
    return "" if len(there) in (0, len(modes)) else f" Only in {' and '.join(there)}."


def _size(finding: Finding) -> float:
    return (
        0.0 if finding.measured is None or finding.base is None else finding.measured.equality / finding.base.tolerance
    )


def _blindness(probe: Probe, mode: Mode, base: Baseline) -> dict[str, str]:
    """Why ``exact`` could not be believed, for padded and for packed layouts; empty where the controls are caught."""
    weak = "the model mixes tokens too weakly to judge"
    if base.mixing <= 0:
        return {"padded": weak, "packed": weak}
    found: dict[str, str] = {}
    for kind, name in (("padded", BLIND), ("packed", "naive")):
        try:
            equality, support = probe.control(name, mode, base)
        except Refused:
            continue
        if mode.grad and support is None:
            found[kind] = "no embedding of input_ids was found, so the gradient test could not run"
        elif equality < _VISIBLE * base.tolerance or support == 0:
            found[kind] = f"{weak}: even {name} moves outputs by {equality:.1e} only"
    return found
