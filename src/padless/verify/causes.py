"""From measurements to a likely mechanism: which module lets the influence in, and what kind of mistake that is."""

from __future__ import annotations

import re
from dataclasses import dataclass

from padless.verify.feeds import ALONE, PACKED, Feed, Place
from padless.verify.probe import Baseline, Measured, Probe, Refused
from padless.verify.runs import Mode
from padless.verify.trace import Culprit, Reach, find_culprit, find_reach

__all__ = ["CAUSES", "Cause", "find_cause"]

CAUSES = {
    "attention-boundary": "attention reads over the sequence boundary: its mask is built without the boundaries",
    "batch-statistics": "it mixes tokens of the whole batch, as batch statistics do",
    "boundary-off-by-one": "the boundary or window is off by one: the last token of the sequence before is read too",
    "cache-on": "the cache is on, and with it the mask is built without the boundaries: pass use_cache=False",
    "carried-state": "a state is carried from one call to the next",
    "convolution": "a causal convolution runs over the sequence boundary",
    "mask-added": "a bool mask is added to the scores instead of selecting them: pass an additive mask, or use sdpa",
    "nan-gradient": "gradients become NaN, parameters' included: padding whose embedding is all zero can do that",
    "not-causal": "earlier tokens read later ones",
    "padding-read": "padding is computed with and read by real tokens",
    "position-ids-ignored": "the model ignores position_ids: positions go on counting, and boundaries are not seen",
    "positions": "positions depend on what else is in the row",
    "recurrent-state": "a recurrent state is not reset at the sequence boundary",
    "router": "a choice without gradient, as of experts with a capacity, is made over all tokens together",
    "window": "the attention window or chunk is not applied as it is to a sequence alone",
    "unknown": "the mechanism was not found",
}

_RECURRENT = re.compile(
    r"mamba|ssm|ssd|mixer|rwkv|lstm|\bgru|recurren|delta|linearattention|lightning|retention|kda|rglru|rg_lru"
    r"|timemix|shortconv|short_conv|linear_attn|xlstm|hyena|gla\b|kimi.*attention|ttt",
    re.IGNORECASE,
)
_CONVOLUTION = re.compile(r"conv(?!ert)", re.IGNORECASE)
_STATISTICS = re.compile(r"batch_?norm|batchstat|instance_?norm|sync_?norm", re.IGNORECASE)
_ROUTER = re.compile(r"router|expert|moe|sparse.*(mlp|block)|topk|capacity", re.IGNORECASE)
_ATTENTION = re.compile(r"attn|attention", re.IGNORECASE)
_POSITION = re.compile(r"rotary|position|rope|alibi|wpe", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """A code out of :data:`CAUSES`, a sentence with figures, and the module where it enters."""

    code: str
    why: str
    module: str | None = None


def find_cause(probe: Probe, layout: str, mode: Mode, base: Baseline, found: Measured) -> Cause:
    """The likely mechanism of a layout that is not exact. Costs a few forward passes."""
    moved = found.independence > base.tolerance or bool(found.support)
    tolerance = max(10 * base.noise, 1e-6)
    try:
        culprit = _entry(probe, layout, mode, found, moved, tolerance)
        code = _code(probe, layout, mode, base, found, moved, culprit)
    except Refused as refused:
        return Cause(
            code="unknown", why=f"{_figures(found, moved)}; looking for the reason, the model raised: {refused}"
        )
    where = f" It enters in {culprit}." if culprit is not None and culprit.name else ""
    return Cause(
        code=code,
        why=f"{_figures(found, moved)}; {CAUSES[code]}{_detail(culprit)}.{where}",
        module=str(culprit) if culprit is not None and culprit.name else None,
    )


def _figures(found: Measured, moved: bool) -> str:
    if not moved:
        return f"outputs are {found.equality:.1e} away from each sequence alone, though nothing foreign moves them"
    parts = []
    others = "padding" if found.padding >= found.independence > 0 else "other sequences"
    if found.independence > 0:
        parts.append(f"outputs move by {found.independence:.1e} when the tokens of {others} change")
    if found.support:
        parts.append(f"foreign tokens have {found.support:.1e} of the own tokens' gradient")
    return " and ".join(parts)


def _detail(culprit: Culprit | None) -> str:
    reach = None if culprit is None else culprit.reach
    if reach is None:
        return ""
    tokens = "token" if reach.foreign == 1 else "tokens"
    return f" ({reach.foreign} foreign {tokens} read directly{_where_else(reach)})"


def _where_else(reach: Reach) -> str:
    return ", later ones too" if reach.later else ", also of other rows" if reach.rows else ""


def _entry(probe: Probe, layout: str, mode: Mode, found: Measured, moved: bool, tolerance: float) -> Culprit | None:
    """The module in which the influence enters."""
    feed = probe.feed(layout)
    if not moved:
        worst = max(range(len(found.by_sequence)), key=found.by_sequence.__getitem__)
        alone = probe.feed(ALONE, [probe.sequences[worst]])
        pair = (alone.places[0], feed.places[worst])
        return find_culprit(probe.runner, mode, alone, feed, [pair], tolerance=tolerance)
    other, kept = _changed(probe, feed, found)
    pairs = [(place, place) for place in kept]
    culprit = find_culprit(probe.runner, mode, feed, other, pairs, tolerance=tolerance)
    if culprit is None or not culprit.name:
        return culprit
    reach = find_reach(lambda: probe.run(feed, mode), probe.runner.model, feed, culprit)
    return Culprit(name=culprit.name, kind=culprit.kind, reach=reach)


def _changed(probe: Probe, feed: Feed, found: Measured) -> tuple[Feed, list[Place]]:
    if found.padding >= found.independence > 0:
        return probe.repadded(feed), list(feed.places)
    return probe.perturbed(feed, parity=found.parity)


def _code(
    probe: Probe, layout: str, mode: Mode, base: Baseline, found: Measured, moved: bool, culprit: Culprit | None
) -> str:
    kind = "" if culprit is None else f"{culprit.name.rsplit('.', 1)[-1]} {culprit.kind}"
    reach = None if culprit is None else culprit.reach
    if found.support == float("inf"):
        return "nan-gradient"
    if _STATISTICS.search(kind):
        return "batch-statistics"
    by_class = _by_class(kind, reach)
    if moved and layout not in PACKED and layout != "naive":
        return _padded_code(found, kind, by_class, reach)
    ignored = probe.runner.takes("position_ids") and layout != "naive" and probe.same_without(layout, mode, base)
    if ignored and by_class not in ("recurrent-state", "convolution", "router"):
        return "position-ids-ignored"
    if layout == "packed-block-mask-bool" and moved and by_class in ("attention-boundary", "not-causal"):
        return "mask-added"
    if layout in PACKED and moved and _cured_without_cache(probe, layout, mode, base):
        return "cache-on"
    if moved:
        return by_class or ("router" if found.support == 0 else "unknown")
    if _POSITION.search(kind):
        return "positions"
    return "window" if probe.wrong_from(layout, mode, base) > 0 else by_class or "unknown"


def _cured_without_cache(probe: Probe, layout: str, mode: Mode, base: Baseline) -> bool:
    extra = probe.runner.extra
    if extra.get("use_cache") is False or not probe.runner.takes("use_cache"):
        return False
    probe.runner.extra = {**extra, "use_cache": False}
    try:
        return probe.distance(layout, mode, base) <= base.tolerance
    finally:
        probe.runner.extra = extra


def _padded_code(found: Measured, kind: str, by_class: str, reach: Reach | None) -> str:
    """Rows of their own: what crosses them is no attention, and what comes from padding is read there."""
    if found.padding < found.independence or by_class == "router" or (reach is not None and reach.rows):
        return "router" if by_class == "router" or found.support == 0 else "batch-statistics"
    return by_class if by_class in ("recurrent-state", "convolution", "not-causal") else "padding-read"


def _by_class(kind: str, reach: Reach | None) -> str:
    """By what a module is called, and by what it reads directly."""
    attention = bool(_ATTENTION.search(kind))
    if _RECURRENT.search(kind):
        return "recurrent-state"
    if _CONVOLUTION.search(kind):
        return "convolution"
    if _ROUTER.search(kind):
        return "router"
    if reach is None:
        return "attention-boundary" if attention else ""
    if reach.later or reach.rows:
        return "not-causal" if attention else "batch-statistics"
    if reach.adjacent and not reach.all_read and not attention:
        return "convolution"
    if reach.adjacent and reach.foreign == 1:
        return "boundary-off-by-one"
    return "attention-boundary" if attention else "recurrent-state"
