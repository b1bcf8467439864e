"""One optimizer step over many micro-batches: gradient synchronisation, scaling, clipping, and when to step."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from padless.errors import PadlessError, choose, shown
from padless.exchange import sum_over_ranks
from padless.loss import Denominators, Mode
from padless.windows import Window, Windows, count_windows, windows

__all__ = ["Accumulation", "Window", "Windows", "accumulate", "count_windows", "windows"]

Item = TypeVar("Item")


def accumulate(
    micro_batches: Iterable[Item],
    model: nn.Module | Sequence[nn.Module],
    optimizer: torch.optim.Optimizer | None = None,
    *,
    denominators: Denominators | None = None,
    mode: Mode = "token-mean",
    scaler: Any = None,
    max_norm: float | None = None,
    scheduler: Any = None,
    skip_nonfinite: bool = False,
    sync: Literal["step", "microbatch"] = "step",
    process_group: Any = None,
) -> Accumulation[Item]:
    """Iterate over one optimizer step's micro-batches; when they are done, the optimizer has stepped.

    Gradients are zeroed before the first micro-batch. Under DDP and FSDP they are reduced over ranks with the last
    micro-batch only; the others run without synchronisation. At the end they are unscaled, clipped once, and applied.
    Leaving the loop early (an exception, ``break``) applies nothing.

    Args:
        micro_batches: a `Regrouped`, or any iterable; every rank has as many.
        model: the module whose gradients are reduced (DDP, FSDP, FSDP2 or plain), or several.
        optimizer: stepped at the end; None leaves stepping, and all that belongs to it, to the caller.
        denominators: the step's, as given to `padless.loss.aggregate`: needed to correct for skipped micro-batches.
        mode: the loss's aggregation mode.
        scaler: a ``torch.amp.GradScaler``.
        max_norm: clip the gradient's norm to it, once per step.
        scheduler: a learning-rate scheduler, stepped with the optimizer.
        skip_nonfinite: leave out micro-steps in which any rank's loss is not finite. Ranks tell each other before
            every backward, and gradients are reduced in every micro-batch, since any may turn out to be the last.
        sync: ``"microbatch"`` reduces gradients in every micro-batch (under FSDP less memory, more traffic).
        process_group: the ranks whose gradients are averaged; by default all of them, if the model is distributed.

    >>> model = nn.Linear(2, 1, bias=False)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> step = accumulate([torch.ones(1, 2), torch.ones(3, 2)], model, optimizer, max_norm=1.0)
    >>> for rows in step:
    ...     used = step.backward(model(rows).sum() / 4)
    >>> step.stepped, round(step.grad_norm.item(), 4)
    (True, 1.4142)
    """
    choose("sync", sync, ("step", "microbatch"))
    if skip_nonfinite and denominators is None:
        raise PadlessError("skip_nonfinite takes targets out of the denominators: give denominators=")
    if optimizer is None and (scaler is not None or max_norm is not None or scheduler is not None):
        raise PadlessError("scaler, max_norm and scheduler act when the optimizer steps: give optimizer=")
    models = [model] if isinstance(model, nn.Module) else list(model)
    group = process_group
    if group is None and dist.is_available() and dist.is_initialized() and any(map(_is_distributed, models)):
        group = dist.group.WORLD
    return Accumulation(
        micro_batches=micro_batches,
        models=models,
        optimizer=optimizer,
        denominators=denominators,
        mode=mode,
        scaler=scaler,
        max_norm=max_norm,
        scheduler=scheduler,
        skip_nonfinite=skip_nonfinite,
        every=sync == "microbatch" or skip_nonfinite,
        group=group,
    )


@dataclass(slots=True, kw_only=True, eq=False)
class Accumulation(Iterable[Item]):
    """The running optimizer step. Iterate over it once and call `backward` once per micro-batch.

    Attributes:
        loss: the sum of this rank's parts; its average over ranks is the step's loss.
        skipped: micro-batches left out because a loss was not finite.
        skipped_targets: what they held on this rank.
        grad_norm: the gradient's norm before clipping, where ``max_norm`` was given.
        stepped: the optimizer has stepped. False where every micro-batch was skipped, or the scaler refused.
    """

    micro_batches: Iterable[Item]
    models: list[nn.Module]
    optimizer: torch.optim.Optimizer | None
    denominators: Denominators | None
    mode: Mode
    scaler: Any
    max_norm: float | None
    scheduler: Any
    skip_nonfinite: bool
    every: bool
    group: Any
    loss: Tensor = field(default_factory=lambda: torch.zeros(()))
    skipped: int = 0
    skipped_targets: Denominators | None = None
    grad_norm: Tensor | None = None
    stepped: bool = False
    _weight: float = 1.0
    _waiting: bool = False
    _started: bool = False
    _kept: int = 0

    def __iter__(self) -> Iterator[Item]:
        if self._started:
            raise PadlessError("this accumulation has run; make a new one for the next optimizer step")
        self._started = True
        if self.optimizer is not None:
            self.optimizer.zero_grad()
        for item, last in _mark_last(self.micro_batches):
            self._weight = float(getattr(item, "weight", 1.0))
            self._waiting = True
            with _gradient_sync(self.models, last or self.every):
                yield item
            if self._waiting:
                self._waiting = False
                raise PadlessError("a micro-batch ended without backward(loss); call it once for each")
        self._finish()

    def backward(self, loss: Tensor, *, targets: Denominators | None = None) -> bool:
        """Backpropagate one micro-batch's part of the loss; False where it was skipped.

        Args:
            loss: the scalar of `padless.loss.aggregate`. A zero-weight micro-batch counts as 0 whatever it holds.
            targets: what this micro-batch holds on this rank (`padless.loss.denominators` of its mask): needed with
                ``skip_nonfinite``.

        Raises:
            PadlessError: called twice or outside the loop; a loss that is no scalar, or has no graph.
        """
        if not self._waiting:
            raise PadlessError("backward(loss) belongs inside the loop over micro-batches, once for each")
        if self.skip_nonfinite and targets is None:
            raise PadlessError("skip_nonfinite needs backward(loss, targets=...) to correct the denominator")
        _check_loss(loss)
        self._waiting = False
        if not self._weight:
            loss = torch.nan_to_num(loss, nan=0.0, posinf=0.0, neginf=0.0) * 0.0
        if self.skip_nonfinite:
            assert targets is not None
            if self._any_nonfinite(loss):
                self.skipped += 1
                self.skipped_targets = targets if self.skipped_targets is None else self.skipped_targets + targets
                return False
        self._kept += 1
        self.loss = self.loss.to(loss.device) + loss.detach()
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()
        return True

    def _any_nonfinite(self, loss: Tensor) -> bool:
        flag = (~torch.isfinite(loss.detach())).to(torch.float32).reshape(1)
        if self.group is not None:
            flag, _ = sum_over_ranks(flag, self.group)
        return bool(flag.item())

    def _finish(self) -> None:
        factor = self._correction()
        self.loss = self.loss * factor
        if self.optimizer is None:
            if factor != 1.0:
                _scale_gradients([p for model in self.models for p in model.parameters()], factor)
            return
        if not self._kept:
            return  # nothing to apply: momentum and weight decay must not act on a step without a gradient
        parameters = [p for g in self.optimizer.param_groups for p in g["params"] if p.grad is not None]
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)
        if factor != 1.0:
            _scale_gradients(parameters, factor)
        if self.max_norm is not None:
            self.grad_norm = _clip(self.models, parameters, self.max_norm)
        self._apply()

    def _apply(self) -> None:
        assert self.optimizer is not None
        if self.scaler is None:
            self.optimizer.step()
            self.stepped = True
        else:
            before = self.scaler.get_scale()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.stepped = self.scaler.get_scale() >= before  # it shrinks where gradients overflowed
        if self.scheduler is not None and self.stepped:
            self.scheduler.step()

    def _correction(self) -> float:
        """The step's denominator over the one without skipped micro-batches, over all ranks."""
        if not self.skipped:  # ranks skip together, so all of them stop here or none
            return 1.0
        assert self.denominators is not None
        assert self.skipped_targets is not None
        gone = torch.tensor([self.skipped_targets.of(self.mode)], dtype=torch.float64)
        if self.group is not None:
            gone, _ = sum_over_ranks(gone, self.group)
        total = self.denominators.of(self.mode)
        left = total - float(gone)
        return total / left if left > 0 else 1.0


def _check_loss(loss: Any) -> None:
    """One scalar with a graph behind it."""
    if not isinstance(loss, Tensor):
        raise PadlessError(
            f"backward({shown(loss)}): the loss is a {type(loss).__name__}; expected a scalar tensor, such as"
            " padless.loss.aggregate returns: without .item() or float()"
        )
    if loss.numel() != 1:
        raise PadlessError(
            f"backward(loss): the loss has shape {tuple(loss.shape)}; expected a scalar: sum its values over the step's"
            " targets with padless.loss.aggregate(values, mask, denominators=...)"
        )
    if not loss.requires_grad:
        raise PadlessError(
            "backward(loss): no gradient leads from the loss to a parameter: it was computed under torch.no_grad(), or"
            " detached, or every parameter is frozen"
        )


def _mark_last(items: Iterable[Item]) -> Iterator[tuple[Item, bool]]:
    """Each item and whether it is the last; looks one ahead only where the number is not known."""
    if isinstance(items, Sized):
        count = len(items)
        for i, item in enumerate(items):
            yield item, i == count - 1
        return
    iterator = iter(items)
    try:
        item = next(iterator)
    except StopIteration:
        return
    for following in iterator:
        yield item, False
        item = following
    yield item, True


def _is_distributed(model: nn.Module) -> bool:
    return hasattr(model, "no_sync") or hasattr(model, "set_requires_gradient_sync")


@contextmanager
def _gradient_sync(models: list[nn.Module], on: bool) -> Iterator[None]:
    """Whether the backward inside reduces gradients over ranks: FSDP2 by a flag, DDP and FSDP by ``no_sync``."""
    with ExitStack() as stack:
        for model in models:
            flagged: Any = model
            if hasattr(model, "set_requires_gradient_sync"):
                flagged.set_requires_gradient_sync(on)
                if hasattr(model, "set_is_last_backward"):
                    flagged.set_is_last_backward(on)  # what reduces must also be waited for
                stack.callback(flagged.set_requires_gradient_sync, True)
            elif hasattr(model, "no_sync") and not on:
                stack.enter_context(flagged.no_sync())
        yield


def _clip(models: list[nn.Module], parameters: list[Tensor], max_norm: float) -> Tensor:
    own: Callable[[float], Tensor] | None = getattr(models[0], "clip_grad_norm_", None)  # FSDP shards flat parameters
    if own is not None and len(models) == 1:
        return own(max_norm)
    norm = nn.utils.clip_grad_norm_(parameters, max_norm)
    return norm.full_tensor() if hasattr(norm, "full_tensor") else norm


def _scale_gradients(parameters: Iterable[Tensor], factor: float) -> None:
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad.mul_(factor)


class _CallableModule(ModuleType):
    """``padless.accumulate`` names this module and its main function; importing the module must not hide the latter."""

    def __call__(self, *args: Any, **options: Any) -> Accumulation[Any]:
        return accumulate(*args, **options)


sys.modules[__name__].__class__ = _CallableModule
