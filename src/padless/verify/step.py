"""The same optimizer step, with padding and without: loss, gradients and updated parameters, for any model and loss."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from padless.errors import PadlessError
from padless.loss import target_mask
from padless.tensors.regroup import regroup
from padless.verify.runs import MODES, NoDropout, Runner
from padless.verify.snapshot import preserved

__all__ = ["StepReport", "check_run", "check_step"]

Batch = Mapping[str, Any]
Loss = Callable[[nn.Module, Any], Tensor]
Optimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """How far the regrouped steps are from the same steps as the batch came.

    Attributes:
        losses: of every step, as the batch came.
        loss_difference: largest relative difference of a step's loss.
        gradient_difference: of the first step, relative to the largest gradient.
        parameter_difference: after the last step, relative to the largest update.
        worst_parameter: the one whose gradient is furthest away.
        noise: the largest of the three differences when the same batches run in another order of rows.
        tolerance: what the differences are held against, from ``noise`` and the dtype.
        micro_batches: of the first step.
        padded_tokens: positions computed in the first step, as the batch came and regrouped.
    """

    losses: tuple[float, ...]
    loss_difference: float
    gradient_difference: float
    parameter_difference: float
    worst_parameter: str
    noise: float
    tolerance: float
    micro_batches: int
    padded_tokens: tuple[int, int]

    @property
    def same(self) -> bool:
        """Whether loss, gradients and parameters agree to rounding."""
        largest = max(self.loss_difference, self.gradient_difference, self.parameter_difference)
        return largest <= self.tolerance  # false for NaN

    def explain(self) -> str:
        """The outcome in a sentence or two."""
        before, after = self.padded_tokens
        verdict = "the same step" if self.same else f"NOT the same step (furthest away: {self.worst_parameter})"
        return (
            f"{verdict}: loss differs by {self.loss_difference:.1e}, gradients by {self.gradient_difference:.1e},"
            f" parameters by {self.parameter_difference:.1e}; tolerance {self.tolerance:.1e}."
            f" {self.micro_batches} micro-batches, {after} instead of {before} padded tokens."
        )

    def check(self) -> StepReport:
        """Return itself, or raise.

        Raises:
            PadlessError: the steps differ; the message is :meth:`explain`.
        """
        if not self.same:
            raise PadlessError(self.explain())
        return self


def check_step(
    model: nn.Module,
    batch: Batch,
    *,
    token_budget: int,
    loss: Loss | None = None,
    optimizer: Optimizer | None = None,
    **options: Any,
) -> StepReport:
    """Run one optimizer step as the batch came, and once more through ``padless.regroup``; compare everything.

    Args:
        model: any module; handed back as it came, parameters, gradients and random state included. Memory: three
            copies of the trainable parameters.
        batch: what ``regroup`` takes: a dict of tensors with ``attention_mask`` (N, W), padded on either side.
        token_budget: of one micro-batch.
        loss: ``loss(model, inputs)`` gives one micro-batch's *part* of the step's loss, a scalar; parts must add up, so
            divide by the whole step's count (``padless.loss.aggregate`` does) or not at all. By default the summed
            cross entropy of next tokens, over ``labels`` where the batch has them.
        optimizer: from the trainable parameters; SGD with a learning rate of 0.1 by default. (Adam turns rounding of
            gradients that are almost zero into steps of full size.)
        options: passed to ``padless.regroup``: ``layout``, ``method``, ``report``, ``fields``, ``unsafe``, ...

    >>> from padless.verify import build_small
    >>> batch = {"input_ids": torch.tensor([[5, 6, 7, 8, 9, 10], [11, 12, 13, 0, 0, 0]]),
    ...          "attention_mask": torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0]])}
    >>> check_step(build_small("jamba"), batch, token_budget=8).check().micro_batches
    2
    """
    return check_run(model, [batch], token_budget=token_budget, loss=loss, optimizer=optimizer, **options)


def check_run(
    model: nn.Module,
    batches: Sequence[Batch],
    *,
    token_budget: int,
    loss: Loss | None = None,
    optimizer: Optimizer | None = None,
    **options: Any,
) -> StepReport:
    """:func:`check_step` over several optimizer steps in a row, one for each of ``batches``."""
    if not batches:
        raise PadlessError("no batch was given, so nothing can be checked")
    part = _next_token_loss if loss is None else loss
    if loss is None:
        batches = [_with_labels(batch) for batch in batches]
    make = optimizer or (lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    if options.get("report") is None:
        options["unsafe"] = True  # this run is what finds out
    regrouped = [regroup(batch, token_budget, **options) for batch in batches]
    with preserved(model):
        fixed = _train(model, [[batch] for batch in batches], part, make)
        again = _train(model, [[_reversed(batch)] for batch in batches], part, make)
        ours = _train(model, [(micro.inputs for micro in step) for step in regrouped], part, make)
    noise, found = _apart(fixed, again), _apart(fixed, ours)
    rough = max(torch.finfo(dtype).eps for dtype in {p.dtype for p in fixed.parameters.values()})
    floor = (200 if rough < 1e-5 else 8) * rough * len(batches)
    loudest = max(noise.loss, noise.gradient, noise.parameter)
    return StepReport(
        losses=tuple(fixed.losses),
        loss_difference=found.loss,
        gradient_difference=found.gradient,
        parameter_difference=found.parameter,
        worst_parameter=found.worst,
        noise=loudest,
        tolerance=max(floor, 20 * min(loudest, floor)),
        micro_batches=len(regrouped[0]),
        padded_tokens=(_cells(batches[0]), sum(micro.padded_tokens for micro in regrouped[0])),
    )


@dataclass(slots=True, kw_only=True)
class _Arm:
    losses: list[float]
    gradients: dict[str, Tensor]
    parameters: dict[str, Tensor]
    start: dict[str, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Apart:
    loss: float
    gradient: float
    parameter: float
    worst: str


def _train(model: nn.Module, steps: Iterable[Iterable[Any]], loss: Loss, make: Optimizer) -> _Arm:
    """Optimizer steps from the model's present parameters, which are put back."""
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not trained:
        raise PadlessError("no parameter of the model requires a gradient, so there is no step to check")
    arm = _Arm(losses=[], gradients={}, parameters={}, start={n: p.detach().clone() for n, p in trained.items()})
    stepper = make(list(trained.values()))
    try:
        with _training(model):
            for micro_batches in steps:
                stepper.zero_grad(set_to_none=True)
                total = 0.0
                for inputs in micro_batches:
                    torch.manual_seed(0)
                    value = loss(model, inputs)
                    value.backward()  # type: ignore[no-untyped-call]
                    total += float(value.detach())
                arm.losses.append(total)
                if not arm.gradients:
                    arm.gradients = {n: p.grad.detach().clone() for n, p in trained.items() if p.grad is not None}
                stepper.step()
        arm.parameters = {name: p.detach().clone() for name, p in trained.items()}
    finally:
        with torch.no_grad():
            for name, parameter in trained.items():
                parameter.copy_(arm.start[name])
                parameter.grad = None
    return arm


@contextmanager
def _training(model: nn.Module) -> Iterator[None]:
    with ExitStack() as stack:
        stack.enter_context(Runner(model).mode(MODES[0]))
        stack.enter_context(NoDropout())
        stack.enter_context(torch.enable_grad())
        yield


def _apart(one: _Arm, other: _Arm) -> _Apart:
    loss = max(abs(a - b) / (abs(a) or 1.0) for a, b in zip(one.losses, other.losses, strict=True))
    scale = max((float(g.abs().max()) for g in one.gradients.values() if g.numel()), default=0.0) or 1.0
    gradients = {
        name: _largest(one.gradients.get(name), other.gradients.get(name)) / scale
        for name in {*one.gradients, *other.gradients}
    }
    worst = max(gradients, key=lambda name: _as_infinite(gradients[name]), default="")
    update = max(_largest(one.parameters[n], one.start[n]) for n in one.start) or 1.0
    parameter = max(_as_infinite(_largest(one.parameters[n], other.parameters[n])) for n in one.start) / update
    return _Apart(loss=loss, gradient=_as_infinite(gradients.get(worst, 0.0)), parameter=parameter, worst=worst)


def _largest(one: Tensor | None, other: Tensor | None) -> float:
    if one is None or other is None:
        left = one if one is not None else other
        return 0.0 if left is None or not left.numel() else float(left.float().abs().max())
    return float((one.float() - other.float()).abs().max()) if one.numel() else 0.0


def _as_infinite(value: float) -> float:
    return value if value == value else float("inf")


def _reversed(batch: Batch) -> dict[str, Any]:
    """The same rows in the opposite order: other rounding, nothing else."""
    rows = len(batch["attention_mask"])
    return {
        key: value.flip(0) if isinstance(value, Tensor) and value.dim() and len(value) == rows else value
        for key, value in batch.items()
    }


def _cells(batch: Batch) -> int:
    return int(batch["attention_mask"].numel())


def _with_labels(batch: Batch) -> Batch:
    """Every real token is a target where a batch has no labels; layouts without a mask need to be told."""
    if "labels" in batch:
        return batch
    return {**batch, "labels": batch["input_ids"].masked_fill(batch["attention_mask"] <= 0, -100)}


def _next_token_loss(model: nn.Module, inputs: Any) -> Tensor:
    """Summed cross entropy of the next tokens, over ``labels``."""
    labels = inputs["labels"]
    mask = inputs.get("attention_mask")
    two_dimensional = mask if mask is not None and mask.dim() == 2 else None
    documents = _documents(inputs) if two_dimensional is None else None
    wanted = target_mask(labels, two_dimensional, document_ids=documents)[:, 1:]  # (B, T - 1)
    keywords = {key: value for key, value in inputs.items() if key != "labels"}
    output = Runner(model).outputs(keywords)  # (B, T, V)
    flat = nn.functional.cross_entropy(output[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten(), reduction="none")
    return flat[wanted.flatten()].sum()


def _documents(inputs: Any) -> Tensor | None:
    """The sequence of each cell (B, T), off position_ids that restart; None where there are none."""
    positions = inputs.get("position_ids")
    if positions is None or positions.dim() != 2:
        return None
    begins = torch.ones_like(positions, dtype=torch.bool)
    begins[:, 1:] = positions[:, 1:] <= positions[:, :-1]
    return begins.cumsum(1)
