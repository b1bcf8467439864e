"""The slow second opinion that verdicts are tested against: float64, plain loops, outputs and parameter gradients."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from padless.verify.feeds import ALONE, Feed, build_feed
from padless.verify.runs import MODES, Mode, NoDropout, Runner
from padless.verify.snapshot import preserved
from padless.verify.subject import Subject

__all__ = ["Reference", "reference_verdicts"]

_APART = {torch.float64: 1e-4, torch.float32: 1e-3}
"""Models with parts in float32 stay below 1e-5 of this measure; mistakes are above 1e-2."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """Largest relative difference to the sequences alone, of outputs or of parameter gradients; None if it raised."""

    difference: float | None
    raised: str = ""
    dtype: torch.dtype = torch.float64

    @property
    def exact(self) -> bool:
        """Whether outputs and gradients are those of the sequences alone."""
        return self.difference is not None and self.difference < _APART[self.dtype]


def reference_verdicts(
    model: nn.Module, layouts: Sequence[str], *, lengths: Sequence[int] = (7, 2, 13, 5), seed: int = 7
) -> dict[str, Reference]:
    """Compare layouts with running one sequence after the other: outputs, and gradients of all parameters.

    It shares the layouts' definition with :func:`padless.verify.check_layouts` and nothing else: no perturbation, no
    embeddings, no noise estimate. A float64 copy of the model is compared twice, with its own weights and with random
    ones of unit gain, padded with its padding token and with another one; the worst counts. Models that have no float64
    (a kernel without it, masks that overflow to NaN) are compared in float32.
    """
    found: dict[str, Reference] = {}
    for dtype in (torch.float64, torch.float32):
        try:
            found = _at(model, layouts, lengths, seed, dtype)
        except Exception:
            if dtype == torch.float32:
                raise
            continue
        known = [one.difference for name, one in found.items() if name != "naive" and one.difference is not None]
        if all(value != float("inf") for value in known):
            break
    return found


def _at(
    model: nn.Module, layouts: Sequence[str], lengths: Sequence[int], seed: int, dtype: torch.dtype
) -> dict[str, Reference]:
    other = copy.deepcopy(model).to(dtype)
    setter: Any = getattr(other, "set_experts_implementation", None)
    if setter is not None:
        setter("eager")  # the grouped kernel has no float64
    subject = Subject.of(other)
    generator = torch.Generator().manual_seed(seed)
    sequences = [subject.tokens[torch.randint(len(subject.tokens), (n,), generator=generator)] for n in lengths]
    worst = {name: Reference(difference=0.0, dtype=dtype) for name in layouts}
    with preserved(other):
        runner = Runner(other)
        start = 0
        for randomised in (False, True):
            if randomised:
                _randomise(other, seed)
            for mode in (MODES[0], MODES[2]):  # training with gradients, evaluation without
                with runner.mode(mode), NoDropout():
                    due = _collect(
                        runner, mode, [_feed(ALONE, [ids], subject, dtype, 0, start) for ids in sequences], seed
                    )
                    if not randomised and mode is MODES[0]:
                        start = _start(runner, mode, sequences, subject, dtype, due)
                    for name in layouts:
                        pads = (subject.pad, int(subject.tokens[-1])) if "padded" in name else (subject.pad,)
                        for pad in pads:
                            feed = _feed(name, sequences, subject, dtype, pad, start)
                            worst[name] = _worse(worst[name], _compare(runner, mode, feed, due, seed, dtype))
    return worst


def _start(
    runner: Runner, mode: Mode, sequences: Sequence[Tensor], subject: Subject, dtype: torch.dtype, due: list[Tensor]
) -> int:
    """The first position of a sequence: whichever of 0, 2 and padding + 1 gives back the outputs without positions."""
    for start in (0, 2, subject.pad + 1):
        feed = _feed(ALONE, [sequences[0]], subject, dtype, 0, start)
        positions = torch.arange(len(sequences[0]))[None] + start
        given = Feed(layout=ALONE, keywords={**feed.keywords, "position_ids": positions}, places=feed.places)
        try:
            if bool(torch.isclose(_collect(runner, mode, [given], 0)[0], due[0], atol=1e-4).all()):
                return start
        except Exception:  # positions that its table does not have
            continue
    return 0


def _feed(layout: str, sequences: Sequence[Tensor], subject: Subject, dtype: torch.dtype, pad: int, start: int) -> Feed:
    return build_feed(layout, sequences, device=subject.device, dtype=dtype, pad=pad, start=start)


def _compare(runner: Runner, mode: Mode, feed: Feed, due: list[Tensor], seed: int, dtype: torch.dtype) -> Reference:
    try:
        found = _collect(runner, mode, [feed], seed)
    except Exception as error:
        return Reference(difference=None, raised=f"{type(error).__name__}: {' '.join(str(error).split())[:200]}")
    apart = 0.0
    for one, other in zip(found, due, strict=True):
        scale = float(other.abs().max()) if other.numel() else 0.0
        difference = float((one - other).abs().max()) if other.numel() else 0.0
        apart = max(apart, difference / (scale or 1.0) if difference == difference else float("inf"))
    return Reference(difference=apart, dtype=dtype)


def _worse(one: Reference, other: Reference) -> Reference:
    if one.difference is None or other.difference is None:
        return one if one.difference is None else other
    return one if one.difference >= other.difference else other


def _collect(runner: Runner, mode: Mode, feeds: Sequence[Feed], seed: int) -> list[Tensor]:
    """Outputs of all sequences, in order, then, with gradients, the gradient of each parameter."""
    outputs: list[Tensor] = []
    total: Any = 0.0
    generator = torch.Generator().manual_seed(seed)
    for feed in feeds:
        keywords = {k: v for k, v in {"use_cache": False, **feed.keywords}.items() if runner.takes(k)}
        torch.manual_seed(seed)
        with torch.set_grad_enabled(mode.grad):
            result = runner.call(**keywords)
            output = getattr(result, "logits", None)
            output = output if output is not None else result[0] if isinstance(result, tuple) else result
        for place in feed.places:
            own = place.of(output)
            outputs.append(own.detach().double())
            total = total + (own * torch.randn(own.shape, generator=generator).to(own)).sum()
    if not mode.grad:
        return outputs
    runner.model.zero_grad(set_to_none=True)
    total.backward()  # as training does; some custom functions fill .grad themselves
    grads = [p.grad for p in runner.model.parameters() if p.grad is not None]
    return [*outputs, torch.cat([grad.detach().double().flatten() for grad in grads])]


def _randomise(model: nn.Module, seed: int) -> None:
    """Move the trainable weights. Frozen ones may be part of the architecture, such as RoFormer's table of sines."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.requires_grad:
                continue
            noise = torch.randn(parameter.shape, generator=generator).to(parameter)
            if parameter.dim() >= 2:
                parameter.add_(noise / max(1, parameter.shape[-1]) ** 0.5)
            else:
                parameter.add_(0.1 * noise)
