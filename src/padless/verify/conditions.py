"""Questions that one packed row of short sequences does not ask: several rows, long positions, router losses."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from padless.verify.feeds import PACKED, Feed
from padless.verify.judge import verdict_of
from padless.verify.notes import rope_kinds
from padless.verify.probe import Baseline, Probe, Refused
from padless.verify.report import Condition, Verdict
from padless.verify.runs import Mode
from padless.verify.snapshot import module_state, restore_modules
from padless.verify.subject import Subject

__all__ = ["find_conditions", "router_loss", "several_rows", "shared_frequencies"]

ROWS = 2
_LIMIT = 8
"""Positions that long-context frequencies begin after while they are probed."""


def find_conditions(probe: Probe, mode: Mode, subject: Subject, exact: Iterable[str]) -> list[Condition]:
    """All of them, on an amplified model in the mode that training uses; ``exact`` are layouts to ask about."""
    with probe.runner.mode(mode):
        try:
            base = probe.baseline(mode)
        except Refused:
            return []  # the layouts' own verdicts say so
        found = [several_rows(probe, mode, base, name) for name in exact if name in PACKED]
        found += shared_frequencies(probe, mode, subject)
        found += router_loss(probe, mode, subject)
    return found


def several_rows(probe: Probe, mode: Mode, base: Baseline, layout: str) -> Condition:
    """The three tests again with the sequences dealt to two packed rows, the shorter one with a tail of padding."""
    words = {
        "exact": "nothing moves over the edges of several packed rows",
        "leaks": "keep one packed row in a micro-batch",
        "differs": "several packed rows compute something else: keep one packed row in a micro-batch",
        "inconclusive": "it cannot be told from rounding",
    }
    try:
        found = probe.measure(layout, mode, base, rows=ROWS)
    except Refused as refused:
        why = f"the model raises on {ROWS} packed rows: {refused}"
        return Condition(name="several-rows", layout=layout, verdict="unsupported", why=why)
    verdict = verdict_of(found, base)
    return Condition(
        name="several-rows",
        layout=layout,
        verdict=verdict,
        difference=max(found.equality, found.independence),
        why=f"{ROWS} packed rows: outputs are {found.equality:.1e} away from each sequence alone and move by"
        f" {found.independence:.1e} with others' tokens; {words[verdict]}",
    )


def shared_frequencies(probe: Probe, mode: Mode, subject: Subject) -> list[Condition]:
    """Does a sequence over the original context change shorter ones? Only where RoPE chooses by the longest position.

    The model is made to believe that its original context is eight positions.
    """
    kinds = rope_kinds(getattr(subject.text_config, "rope_parameters", None)) & {"dynamic", "longrope"}
    if not kinds or max(map(len, probe.sequences)) <= _LIMIT:
        return []
    short = [ids[: _LIMIT - 1] for ids in probe.sequences if len(ids) > 1]  # dynamic RoPE is late by one in going back
    longest = max(probe.sequences, key=len)
    state = module_state(probe.runner.model)
    try:
        with short_context(probe.runner.model, _LIMIT) as changed:
            if not changed:
                return []
            return _frequencies(probe, mode, sorted(kinds)[0], short, longest)
    except Refused:
        return []
    finally:
        restore_modules(state)


def _frequencies(probe: Probe, mode: Mode, kind: str, short: list[Tensor], longest: Tensor) -> list[Condition]:
    alone = [probe.alone(ids, mode) for ids in short]
    scale = max(float(out.abs().max()) for out in alone) or 1.0
    floor = 200 * torch.finfo(torch.float32).eps
    # the control: the first tokens of the long sequence must move when the rest of it passes the limit
    opening = longest[: _LIMIT - 1]
    switch = _apart(probe.alone(longest, mode)[: len(opening)], probe.alone(opening, mode)) / scale
    cases: dict[str, tuple[list[Tensor], int]] = {
        "right-padded": ([*short, longest], 0),
        "packed-position-ids": ([*short, longest], 0),
        "right-padded-no-mask": (short, 2 * _LIMIT),
    }
    found = []
    for layout, (sequences, spare) in cases.items():
        try:
            feed = probe.feed(layout, sequences, spare=spare)
            output = probe.run(feed, mode).output
        except Refused:
            continue
        places = feed.places[: len(short)]
        moved = max(_apart(place.of(output), due) for place, due in zip(places, alone, strict=True)) / scale
        verdict: Verdict = "leaks" if moved > floor else "exact" if switch > floor else "inconclusive"
        by = "padding that positions run on through" if layout.endswith("no-mask") else "a longer sequence beside it"
        why = {
            "leaks": f"its {kind} RoPE chooses frequencies by the longest position of the micro-batch: {by}, past the"
            f" original context, moves outputs by {moved:.1e}",
            "exact": f"{by} does not change the frequencies of its {kind} RoPE",
            "inconclusive": f"its {kind} RoPE has the same frequencies on both sides of the original context",
        }[verdict]
        found.append(Condition(name="long-positions", layout=layout, verdict=verdict, difference=moved, why=why))
    return found


@contextmanager
def short_context(model: nn.Module, limit: int) -> Iterator[int]:
    """transformers' rotary modules take ``limit`` for the original context inside; yields how many do."""
    changed: list[tuple[Any, str, Any]] = []
    entries: list[tuple[dict[str, Any], Any]] = []
    count = 0
    try:
        for module in model.modules():
            parameters = getattr(getattr(module, "config", None), "rope_parameters", None)
            if not hasattr(module, "original_max_seq_len") or not isinstance(parameters, dict):
                continue
            count += 1
            for holder, name in (
                (module, "original_max_seq_len"),
                (module, "max_seq_len_cached"),
                (module.config, "max_position_embeddings"),
            ):
                if isinstance(getattr(holder, name, None), int):
                    changed.append((holder, name, getattr(holder, name)))
                    setattr(holder, name, limit)
            for own in (parameters, *parameters.values()):
                if isinstance(own, dict) and "original_max_position_embeddings" in own:
                    entries.append((own, own["original_max_position_embeddings"]))
                    own["original_max_position_embeddings"] = limit
        yield count
    finally:
        for own, value in reversed(entries):
            own["original_max_position_embeddings"] = value
        for holder, name, value in reversed(changed):
            setattr(holder, name, value)


def router_loss(probe: Probe, mode: Mode, subject: Subject) -> list[Condition]:
    """What the auxiliary loss of a mixture of experts depends on: padding's tokens, and how rows are grouped."""
    if getattr(subject.text_config, "output_router_logits", None) is None:
        return []
    found: list[Condition] = []
    for layout in ("right-padded", "right-padded-no-mask"):
        feed = probe.feed(layout)
        whole, repadded = _router_loss(probe, feed, mode), _router_loss(probe, probe.repadded(feed), mode)
        if whole is None or repadded is None:
            return []
        moved = abs(repadded - whole) / (abs(whole) or 1.0)
        padding: Verdict = "leaks" if moved > 1e-5 else "exact"
        why = f"the router loss moves by {moved:.1e} of itself with the tokens of padding" + (
            ": pass the mask, or leave that loss out" if padding == "leaks" else ""
        )
        found.append(Condition(name="router-loss", layout=layout, verdict=padding, difference=moved, why=why))
    parts = [_router_loss(probe, probe.feed("right-padded", [ids]), mode) for ids in probe.sequences]
    sizes = [len(ids) for ids in probe.sequences]
    whole = _router_loss(probe, probe.feed("right-padded"), mode)
    if whole is None or any(part is None for part in parts):
        return found
    mean = sum(n * float(part or 0.0) for n, part in zip(sizes, parts, strict=True)) / sum(sizes)
    apart = abs(mean - whole) / (abs(whole) or 1.0)
    why = (
        f"cut into micro-batches of one sequence, the router loss is {apart:.1e} of itself away: it is a product of"
        " means over the micro-batch, so that no regrouping keeps it"
    )
    verdict: Verdict = "differs" if apart > 1e-5 else "exact"
    return [*found, Condition(name="router-loss", layout="any regrouping", verdict=verdict, difference=apart, why=why)]


def _router_loss(probe: Probe, feed: Feed, mode: Mode) -> float | None:
    """The model's ``aux_loss`` on one micro-batch, or None where it has none."""
    keywords = {**probe.runner.extra, **feed.keywords, "output_router_logits": True}
    try:
        with torch.no_grad():
            result = probe.runner.call(**{key: value for key, value in keywords.items() if probe.runner.takes(key)})
    except Exception:  # a model that cannot return it has no such loss
        return None
    value = getattr(result, "aux_loss", None)
    return float(value) if isinstance(value, Tensor) and value.numel() == 1 else None


def _apart(one: Tensor, other: Tensor) -> float:
    found = float((one.detach().float() - other.detach().float()).abs().max())
    return found if found == found else float("inf")
