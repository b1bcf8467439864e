"""Which layouts may this model be fed? Three independent tests on the model itself, in the modes that training uses."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from torch import nn

from padless.errors import PadlessError, choose
from padless.verify.amplify import HALF, amplified, extra_bytes, small_windows
from padless.verify.cache import cache_key, load_report, store_report
from padless.verify.conditions import find_conditions
from padless.verify.feeds import LAYOUTS
from padless.verify.flex import NOTE as PLAIN_FLEX
from padless.verify.flex import plain_flex
from padless.verify.judge import Findings
from padless.verify.notes import notes_about
from padless.verify.probe import Probe, Refused
from padless.verify.report import LayoutReport
from padless.verify.runs import Mode, Runner, modes_of
from padless.verify.snapshot import preserved
from padless.verify.subject import Subject

__all__ = ["DEFAULT_LENGTHS", "check_layouts"]

AS_IT_IS = "as it is"
DEFAULT_LENGTHS = (6, 1, 11, 9, 3)
"""Longer than convolution kernels and small windows, one of a single token, neighbours on both sides."""


def check_layouts(
    model: nn.Module,
    *,
    layouts: Iterable[str] | None = None,
    lengths: Sequence[int] = DEFAULT_LENGTHS,
    seeds: Sequence[int] = (0, 1),
    forward: Callable[..., Any] | None = None,
    keywords: Mapping[str, Any] | None = None,
    vocab_size: int | None = None,
    pad_token_id: int | None = None,
    copy_limit: int = 8 << 30,
    cache: bool | str | Path = True,
    progress: Callable[[str], None] | None = None,
) -> LayoutReport:
    """Find out in which layouts each token of ``model`` computes exactly what it computes in its sequence alone.

    Each verdict rests on three tests: *equality* with every sequence run alone; *independence* (change one sequence,
    or the padding: nothing else may move); *gradient support* (an output's gradient with respect to foreign tokens is
    exactly zero). They run in train mode with gradients, in train mode without, and in eval mode without; where
    gradient checkpointing is on, also in train mode without it. Dropout is set to zero meanwhile. They run on the
    model as it is, and for every seed on the same object made sensitive (all modes for the first seed, then training):
    parameters in float32, all-zero ones filled, weak mixing scaled up, attention windows shorter than the sequences.
    Naive concatenation, and padding without a mask, are controls that must be caught; where they are not, the verdict
    is ``inconclusive``.

    The model is handed back bit for bit: parameters, gradients, buffers, caches, mode, random state.

    Time: one to three seconds for two layers on a CPU; some 350 forward and 110 backward passes of at most 5 x 14
    tokens. Memory: the float32 copy (4 bytes for each parameter; for half precision models over ``copy_limit`` a small
    float32 model of the same architecture takes its place), less than two forward passes over those tokens, and a copy
    of the gradients that the model holds. A model of 7 billion parameters in bfloat16 needs 27 GB for the copy, or with
    the default limit next to nothing.

    Args:
        model: on its own device, in its own dtype. Any module that maps ``input_ids`` (B, T) to one output per token,
            (B, T, ...): ``.logits``, ``.last_hidden_state``, a tensor, or the first tensor of a tuple.
        layouts: names out of :data:`padless.verify.LAYOUTS`; all by default.
        lengths: tokens of the probed sequences; at least two sequences, one of them of five tokens or more.
        seeds: of tokens and fill values.
        forward: called in place of the model, with the same keywords, to return that output.
        keywords: sent along with every call; ``{"use_cache": False}`` by default, if the model takes it. With the
            cache left on, packing by position_ids leaks in every model of transformers.
        vocab_size: token ids are drawn below it; by default read off the model.
        pad_token_id: put into padding; by default the configuration's, or 0. No verdict may depend on it.
        copy_limit: bytes that the float32 copy may take.
        cache: keep the report on disk, keyed by architecture, code, versions, attention implementation, kernels and
            dtype; a folder, or True for ``$PADLESS_CACHE`` or ``~/.cache/padless``.
        progress: called with a line about each part.

    Returns:
        A :class:`LayoutReport`: ``.safe``, ``.best``, ``.explain()``, ``.to_dict()``.

    Raises:
        PadlessError: an unknown layout, unusable lengths, or a model that cannot be run on plain ``input_ids``.

    >>> from padless.verify import build_small
    >>> report = check_layouts(build_small("jamba"), layouts=["right-padded", "packed-position-ids"], cache=False)
    >>> report.safe, report["packed-position-ids"].verdict, report["packed-position-ids"].cause
    (('right-padded',), 'leaks', 'recurrent-state')
    """
    started = time.perf_counter()
    names = _names(layouts)
    if len(lengths) < 2 or min(lengths) < 1 or max(lengths) < 5:
        raise PadlessError(f"lengths={tuple(lengths)}: give two sequences or more, one of at least 5 tokens")
    if not seeds:
        raise PadlessError("seeds=() checks nothing: give one at least")
    subject = Subject.of(model, vocab_size=vocab_size, pad_token_id=pad_token_id)
    options = {"layouts": names, "lengths": list(lengths), "seeds": list(seeds), "keywords": dict(keywords or {})}
    key = None if cache is False or forward is not None else cache_key(model, subject, options)
    if key is not None and (known := load_report(cache, key)) is not None:
        return known
    findings = Findings(names)
    say = progress or (lambda line: None)
    with preserved(model), plain_flex(subject) as plain:
        runner = Runner(model, forward=forward, keywords=keywords)
        modes = modes_of(model)
        runner.position_start = _first_position(Probe.of(subject, runner, lengths, seeds[0]), modes)
        for seed in seeds:
            say(f"amplified, seed {seed}")
            _sensitive_pass(
                subject, runner, findings, lengths, seed, copy_limit, modes if seed == seeds[0] else modes[:1]
            )
        say(AS_IT_IS)
        _measure(Probe.of(subject, runner, lengths, seeds[0]), findings, subject, AS_IT_IS, modes)
        notes = notes_about(subject, runner) + [PLAIN_FLEX] * plain + findings.notes()
    environment = {**subject.environment(), "position_start": runner.position_start}
    report = LayoutReport(
        model=type(subject.inner).__name__,
        layouts=findings.results(subject),
        environment=environment,
        notes=tuple(notes),
        conditions=tuple(findings.conditions),
        seconds=round(time.perf_counter() - started, 2),
    )
    if key is not None:
        store_report(cache, key, report)
    return report


def _names(layouts: Iterable[str] | None) -> list[str]:
    if isinstance(layouts, str):
        raise PadlessError(f"layouts={layouts!r} is one name: pass a list")
    asked = list(LAYOUTS if layouts is None else layouts)
    for name in asked:
        choose("layout", name, LAYOUTS)
    if not asked:
        raise PadlessError("layouts=[] checks nothing: leave it out to check all")
    return [name for name in LAYOUTS if name in asked]


def _first_position(probe: Probe, modes: tuple[Mode, ...]) -> int:
    """Of one plain sequence; some mode must be able to run it, otherwise there is nothing to judge."""
    refusals = []
    for mode in reversed(modes):
        try:
            with probe.runner.mode(mode):
                return probe.first_position(mode)
        except Refused as refused:
            refusals.append(str(refused))
    raise PadlessError(f"the model cannot be run on input_ids alone: {refusals[0]} (pass forward= or vocab_size=)")


def _sensitive_pass(
    subject: Subject,
    runner: Runner,
    findings: Findings,
    lengths: Sequence[int],
    seed: int,
    copy_limit: int,
    modes: tuple[Mode, ...],
) -> None:
    """On the model with amplified parameters; over ``copy_limit`` on a small model of its architecture."""
    if extra_bytes(subject.model) > copy_limit:
        twin = subject.twin(seed) if subject.dtype in HALF else None
        if twin is None:
            findings.remark(f"the model is over copy_limit={copy_limit} bytes, so it was judged as it is only")
            findings.amplified &= subject.dtype not in HALF
            return
        findings.remark("equality in float32 was judged on a small model of the same architecture")
        start = runner.position_start
        subject, runner = twin, Runner(twin.model, keywords=runner.extra)
        runner.position_start = start
    with ExitStack() as stack:
        stack.enter_context(amplified(subject.model, seed=seed))
        shrunk = stack.enter_context(small_windows(subject.model, longest=max(lengths)))
        probe = Probe.of(subject, runner, lengths, seed, float32=True)
        findings.windows += [name for name in shrunk if name not in findings.windows]
        _measure(probe, findings, subject, f"amplified, seed {seed}", modes)
        if not findings.conditions:
            findings.conditions = find_conditions(probe, modes[0], subject, findings.exact())


def _measure(probe: Probe, findings: Findings, subject: Subject, label: str, modes: tuple[Mode, ...]) -> None:
    for mode in modes:
        with probe.runner.mode(mode):
            findings.measure(probe, mode, label, sensitive=label != AS_IT_IS, attention=subject.attention)
