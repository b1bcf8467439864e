"""Is the model a function of its input? States carried between calls, and randomness beyond dropout."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from padless.verify.feeds import ALONE, draw
from padless.verify.probe import Baseline, Probe
from padless.verify.runs import Mode
from padless.verify.snapshot import module_state, restore_modules
from padless.verify.trace import find_culprit

__all__ = ["Unsteady", "find_unsteady"]

_SEEDS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Unsteady:
    """The same call did not give the same output."""

    code: str
    """``carried-state``; ``random``; ``rare`` where tokens draw random numbers and none of those tried mattered."""
    difference: float
    module: str | None


def find_unsteady(probe: Probe, mode: Mode, base: Baseline) -> Unsteady | None:
    """Run one sequence again, after another one, and with other random numbers."""
    longest = max(probe.sequences, key=len)
    # an earlier call may have left a state behind that every later call shares: this pair is what tells them apart
    first = probe.alone(longest, mode)
    probe.alone(draw([len(longest) + 2], probe.tokens, seed=probe.seed + 9)[0], mode)
    second = probe.alone(longest, mode)
    apart = _apart(first, second, base)
    if apart > 0 and apart > 10 * base.rerun:
        return _carried(probe, mode, longest, apart, base)
    if base.rerun > base.tolerance:
        return _carried(probe, mode, longest, base.rerun, base)
    return _random(probe, mode, base) if probe.draws(mode) else None


def _random(probe: Probe, mode: Mode, base: Baseline) -> Unsteady | None:
    """All sequences under other random numbers: what a model draws may matter to few tokens only."""
    feed = probe.feed("right-padded-no-mask")
    first = probe.run(feed, mode).output.detach()
    worst = 0.0
    for _ in range(_SEEDS):
        probe.runner.seed += 1
        other = probe.run(feed, mode).output.detach()
        worst = max(worst, *(_apart(place.of(first), place.of(other), base) for place in feed.places))
    probe.runner.seed -= _SEEDS
    longest = max(probe.sequences, key=len)
    if worst <= base.tolerance:
        rare = _draws_for_each_token(probe, mode, longest)
        return Unsteady(code="rare", difference=worst, module=None) if rare else None
    return Unsteady(code="random", difference=worst, module=_where(probe, mode, longest, base, reseed=True))


class _Draws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the random numbers of the largest draw. Dropout, whose rates are zero, and attention draw none."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.largest: int = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if torch.Tag.nondeterministic_seeded in func.tags and not re.search("dropout|attention", str(func)):
            sizes = [
                one.numel() for one in (out if isinstance(out, tuple | list) else (out,)) if isinstance(one, Tensor)
            ]
            self.largest = max(self.largest, *sizes, 0)
        return out


def _draws_for_each_token(probe: Probe, mode: Mode, ids: Tensor) -> bool:
    """Sampled routers do, and a tie that their choice decides may be rare; layer drop draws one number."""
    with _Draws() as draws:
        probe.alone(ids, mode)
    return bool(draws.largest >= len(ids))


def _carried(probe: Probe, mode: Mode, ids: Tensor, apart: float, base: Baseline) -> Unsteady:
    """With its buffers and attributes put back, a model that carries a state repeats itself; a random one does not."""
    state = module_state(probe.runner.model)
    first = probe.alone(ids, mode)
    restore_modules(state)
    second = probe.alone(ids, mode)
    code = "carried-state" if _apart(first, second, base) < apart / 2 else "random"
    return Unsteady(code=code, difference=apart, module=_where(probe, mode, ids, base, reseed=False))


def _where(probe: Probe, mode: Mode, ids: Tensor, base: Baseline, *, reseed: bool) -> str | None:
    feed = probe.feed(ALONE, [ids])
    if not reseed:  # the first of the two runs comes after another sequence, the second after the same one
        probe.alone(draw([len(ids) + 2], probe.tokens, seed=probe.seed + 9)[0], mode)
    pair = (feed.places[0], feed.places[0])
    culprit = find_culprit(probe.runner, mode, feed, feed, [pair], tolerance=1e-6, reseed=reseed)
    return str(culprit) if culprit is not None and culprit.name else None


def _apart(one: Tensor, other: Tensor, base: Baseline) -> float:
    found = float((one.float() - other.float()).abs().max()) / base.scale
    return found if found == found else float("inf")
