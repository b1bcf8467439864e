"""The slow second opinion that verdicts are tested against: float64, plain loops, outputs and parameter gradients."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from padless.verify.feeds import ALONE, Feed, build_feed
from padless.verify.runs import MODES, Mode, Runner
from padless.verify.snapshot import preserved
from padless.verify.subject import Subject

__all__ = ["Reference", "reference_verdicts"]

_APART = 1e-4
"""Models with parts in float32 stay below 1e-5 of this measure; mistakes are above 1e-2."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """Largest relative difference to the sequences alone, of outputs or of parameter gradients; None if it raised."""

    difference: float | None
    raised: str = ""

    @property
    def exact(self) -> bool:
        """Whether outputs and gradients are those of the sequences alone."""
        return self.difference is not None and self.difference < _APART


def reference_verdicts(
    model: nn.Module, layouts: Sequence[str], *, lengths: Sequence[int] = (7, 2, 13, 5), seed: int = 7
) -> dict[str, Reference]:
    """Compare layouts with running one sequence after the other, on a float64 copy with random weights of unit gain.

    It shares the layouts' definition with :func:`padless.verify.check_layouts` and nothing else: no perturbation, no
    embeddings, no noise estimate. For every layout, in training and in evaluation: outputs at each token, and the
    gradient of a random weighted sum of all outputs with respect to all parameters.
    """
    double = copy.deepcopy(model).double()
    setter: Any = getattr(double, "set_experts_implementation", None)
    if setter is not None:
        setter("eager")  # the grouped kernel has no float64
    _randomise(double, seed)
    subject = Subject.of(double)
    generator = torch.Generator().manual_seed(seed)
    sequences = [subject.tokens[torch.randint(len(subject.tokens), (n,), generator=generator)] for n in lengths]
    worst: dict[str, Reference] = {name: Reference(difference=0.0) for name in layouts}
    with preserved(double):
        runner = Runner(double)
        for mode in MODES[::2]:  # training with gradients, evaluation without
            with runner.mode(mode):
                feeds = [_feed(ALONE, [ids], subject) for ids in sequences]
                due = _collect(runner, mode, feeds, seed)
                for name in layouts:
                    worst[name] = _worse(
                        worst[name], _compare(runner, mode, _feed(name, sequences, subject), due, seed)
                    )
    return worst


def _feed(layout: str, sequences: Sequence[Tensor], subject: Subject) -> Feed:
    return build_feed(layout, sequences, device=subject.device, dtype=torch.float64, pad=subject.pad)


def _compare(runner: Runner, mode: Mode, feed: Feed, due: list[Tensor], seed: int) -> Reference:
    try:
        found = _collect(runner, mode, [feed], seed)
    except Exception as error:
        return Reference(difference=None, raised=f"{type(error).__name__}: {' '.join(str(error).split())[:200]}")
    apart = 0.0
    for one, other in zip(found, due, strict=True):
        scale = float(other.abs().max()) if other.numel() else 0.0
        difference = float((one - other).abs().max()) if other.numel() else 0.0
        apart = max(apart, difference / (scale or 1.0) if difference == difference else float("inf"))
    return Reference(difference=apart)


def _worse(one: Reference, other: Reference) -> Reference:
    if one.difference is None or other.difference is None:
        return one if one.difference is None else other
    return one if one.difference > other.difference else other


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
    parameters = [p for p in runner.model.parameters() if p.requires_grad]
    grads = torch.autograd.grad(total, parameters, allow_unused=True)
    return [*outputs, torch.cat([g.detach().double().flatten() for g in grads if g is not None])]


def _randomise(model: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator).to(parameter)
            if parameter.dim() >= 2:
                parameter.add_(noise / max(1, parameter.shape[-1]) ** 0.5)
            else:
                parameter.add_(0.1 * noise)
