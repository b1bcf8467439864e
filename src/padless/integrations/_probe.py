"""What a host's loss is, measured once on its own code: a share of the step, a mean over targets, or one over rows."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from padless.errors import PadlessError
from padless.integrations._hosts import Host, StepRows, Unit
from padless.plan import Plan
from padless.shapes import as_ladder, combine_multiples

__all__ = ["LossProbe"]

_UNKNOWN, _TARGETS, _ROWS, _NEITHER = 0, 1, 2, 3


class LossProbe:
    """Asks the host's ``compute_loss`` in the first step, without gradients and in evaluation mode.

    A model whose ``forward`` takes any keyword is told ``num_items_in_batch``, and may well ignore it: does the loss
    halve when the number doubles? If it does not, it is a mean: two rows with different numbers of targets, apart and
    together, tell over what. Ranks ask the same questions and take one answer.

    Args:
        trainer, host: whose loss.
        agree: the largest of a number over the ranks.
        inside: a context in which the trainer's hooks pass through.
    """

    def __init__(self, trainer: Any, host: Host, agree: Callable[[int], int], inside: Callable[[], Any]) -> None:
        self.trainer, self.host, self.agree, self.inside = trainer, host, agree, inside
        self._ignores: bool | None = None
        self._mean: int = _UNKNOWN

    def unit(self, model: Any, rows: StepRows, num_items: Any, supposed: Unit) -> Unit:
        """How the losses of micro-batches add up; ``supposed`` is what the host's settings say.

        Raises:
            PadlessError: the loss is a mean over something else, so regrouping would change it.
        """
        if supposed == "sum":
            if num_items is None:
                return supposed  # the host says that it scales by itself
            if self._ignores is None:
                self._ignores = self._ignores_items(model, rows, num_items)
            if not self._ignores:
                return supposed
        if self._mean == _UNKNOWN:
            self._mean = self._mean_over(model, rows, num_items)
            self._report(supposed)
        return "rows" if self._mean == _ROWS else "targets" if self._mean == _TARGETS else self._default()

    def _default(self) -> Unit:
        return "targets" if self.host.token_labels else "rows"

    def _report(self, supposed: Unit) -> None:
        name = type(self.trainer.model).__name__
        if self._mean == _NEITHER:
            message = (
                f"the loss of {type(self.trainer).__name__} with {name} is neither a mean over targets nor one over"
                " rows: it depends on which rows share a micro-batch, so regrouping changes it"
            )
            if self.host.options.inexact == "error":
                raise PadlessError(f"{message}. Accept the difference with PadlessOptions(inexact='warn')")
            warnings.warn(message, stacklevel=5)
        elif supposed == "sum" and self._mean != _UNKNOWN:
            over = "targets" if self._mean == _TARGETS else "rows"
            warnings.warn(
                f"{name} ignores num_items_in_batch: its loss is a mean over {over}, and padless weighs it so",
                stacklevel=5,
            )

    def _ignores_items(self, model: Any, rows: StepRows, num_items: Any) -> bool | None:
        """None where no rank has a target to tell by: ask again in the next step."""
        inputs = self._inputs(rows, [np.array([0])])
        once, twice = (self._losses(model, inputs, num_items * scale)[0] for scale in (1, 2))
        told = once == once and once != 0.0
        verdict = self.agree(0 if not told else 2 if abs(once - twice) <= 0.05 * abs(once) else 1)
        return None if verdict == 0 else verdict == 2

    def _mean_over(self, model: Any, rows: StepRows, num_items: Any) -> int:
        host = self.host
        singles = self._inputs(rows, [np.array([row]) for row in range(host.rows(rows.batch))])
        counts = np.array([host.targets(inputs) for inputs in singles])
        held = np.flatnonzero(counts > 0)
        pair = [int(held[counts[held].argmin()]), int(held[counts[held].argmax()])] if len(held) else [0, 0]
        both = self._inputs(rows, [np.array(pair)])
        one, other, together = self._losses(model, [singles[pair[0]], singles[pair[1]], *both], num_items)
        few, many = counts[pair]
        by_rows = (one + other) / 2
        by_targets = (few * one + many * other) / max(few + many, 1)
        apart = abs(by_rows - by_targets)
        if few == many or apart <= 1e-4 * abs(together):
            # One number of targets in every row: both means are the same, if it is one of them.
            verdict = _UNKNOWN if abs(together - by_rows) <= 0.02 * abs(by_rows) + 1e-6 else _NEITHER
        elif min(abs(together - by_rows), abs(together - by_targets)) > 0.1 * apart:
            verdict = _NEITHER
        else:
            verdict = _ROWS if abs(together - by_rows) < abs(together - by_targets) else _TARGETS
        return self.agree(verdict)

    def _inputs(self, rows: StepRows, groups: list[np.ndarray[Any, Any]]) -> list[dict[str, Any]]:
        """Inputs for the host of chosen rows of this rank, a micro-batch for each group."""
        import padless

        alone = padless.regroup(rows.batch, 2**40, fields=rows.fields, method="fixed", overlong="alone")
        options = self.host.options
        order = np.concatenate(groups).astype(np.int64)
        plan = Plan(
            layout="padded",
            method="fixed",
            ranks=1,
            steps=len(groups),
            lengths=alone.plan.lengths,
            order=order,
            offsets=np.concatenate([[0], np.cumsum([len(group) for group in groups])]).astype(np.int64),
            token_budget=2**40,
            multiple_of=combine_multiples(options.multiple_of),
            ladder=as_ladder(options.ladder) if isinstance(options.ladder, tuple) else None,
        )
        return [self.host.inputs(micro) for micro in padless.regroup(rows.batch, fields=rows.fields, plan=plan)]

    def _losses(self, model: Any, inputs: list[dict[str, Any]], num_items: Any) -> list[float]:
        device = self.trainer.args.device
        devices = [device] if device.type == "cuda" else []
        training = model.training
        model.eval()
        try:
            with torch.no_grad(), torch.random.fork_rng(devices=devices), self.inside():
                return [
                    float(self.trainer.compute_loss(model, dict(given), num_items_in_batch=num_items))
                    for given in inputs
                ]
        finally:
            model.train(training)
