"""One recommendation, from the modelled figures, with its reason."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from padless.analysis.figures import Figures
from padless.analysis.model import ModelFacts

__all__ = ["NOTHING", "Recommendation", "recommend"]

NOTHING = "change nothing"

_WORTH = 0.05  # a change has to save this share of the step time
_RESHAPES = 0.15  # changing which sequences share a step has to save this much more
_PACKS = 0.05  # packing has to save this much more than what is safe for any model


@dataclass(frozen=True, slots=True, kw_only=True)
class Recommendation:
    """What to do.

    Attributes:
        strategy: a strategy, or ``"change nothing"``.
        reason: why, with the figures it rests on.
        saving: modelled share of the step time that it saves over what is done now.
        settings: what to set, by name, and text to paste by framework.
    """

    strategy: str
    reason: str
    saving: float
    settings: Mapping[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return {
            "strategy": self.strategy,
            "reason": self.reason,
            "saving": self.saving,
            "settings": dict(self.settings),
        }


def recommend(figures: Mapping[str, Figures], *, current: str, model: ModelFacts | None) -> Recommendation:
    """Choose among strategies, preferring what changes less.

    Regrouping inside the optimizer step changes nothing but the time, on any model; so a strategy that draws other
    steps (``pool``, ``range``) has to be 15 % faster than that, and packing 5 %, on a model whose layers could keep
    packed sequences apart. ``sorted`` is for evaluation and never recommended. What saves less than 5 % is not worth
    a change.
    """
    now = figures[current].step_time_ratio
    chosen = min(("step-balanced", "step-greedy"), key=lambda name: (figures[name].step_time_ratio, name))
    if figures["step-balanced"].step_time_ratio <= 1.01 * figures[chosen].step_time_ratio:
        chosen = "step-balanced"
    best = figures[chosen].step_time_ratio
    extra = ""
    drawn = min(("pool", "range"), key=lambda name: figures[name].step_time_ratio)
    if figures[drawn].step_time_ratio < best * (1 - _RESHAPES):
        chosen, best = drawn, figures[drawn].step_time_ratio
        extra = (
            " It changes which sequences share an optimizer step (neighbour correlation"
            f" {_signed(figures[drawn].neighbour_correlation)}); more sequences per step would do without."
        )
    packed = figures["packed"].step_time_ratio
    if packed < best * (1 - _PACKS) and now - packed > _WORTH * now:
        if model is not None and not model.recurrent:
            chosen, best = "packed", packed
            extra = f" {model.name} has attention only; still, run padless verify on it before you train on packs."
        else:
            extra += _why_not_packed(packed, best, model)
    saving = 1.0 - best / now
    if saving < _WORTH:
        return Recommendation(strategy=NOTHING, reason=_nothing(figures, current, chosen, saving), saving=0.0)
    reason = (
        f"{chosen} takes {best:.2f} times the padding-free bound where {current} takes {now:.2f}:"
        f" {saving:.0%} less time per step (modelled). Occupancy {figures[chosen].occupancy:.1%} in"
        f" {figures[chosen].microbatches:,} micro-batches instead of {figures[current].occupancy:.1%} in"
        f" {figures[current].microbatches:,}." + extra
    )
    return Recommendation(strategy=chosen, reason=reason, saving=saving)


def _why_not_packed(packed: float, best: float, model: ModelFacts | None) -> str:
    if model is None:
        return (
            f" Packing would save another {1 - packed / best:.0%}, if your model keeps packed sequences apart: padless"
            " verify tells; then analyze again with --model."
        )
    return (
        f" Packing would be {1 - packed / best:.0%} faster, but {model.name} has recurrent layers, which carry one"
        " sequence's state into the next: not recommended."
    )


def _nothing(figures: Mapping[str, Figures], current: str, best: str, saving: float) -> str:
    return (
        f"{current} already computes {figures[current].occupancy:.1%} real tokens and takes"
        f" {figures[current].step_time_ratio:.2f} times the padding-free bound; the best alternative ({best}) would"
        f" save {max(saving, 0.0):.1%} of the step time."
    )


def _signed(value: float | None) -> str:
    return "unknown" if value is None else f"{value:+.2f}"
