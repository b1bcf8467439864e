"""What a host's collated batch means: rows to regroup, and inputs for the host again.

`Host` is the plain Hugging Face ``Trainer``; TRL's trainers have their own in ``trl.py``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from padless.errors import PadlessError
from padless.integrations._auto import longest_in, trial_batch
from padless.integrations._merge import merge, rows_of, without_unpredicted
from padless.integrations._options import PadlessOptions
from padless.tensors.fields import Field

__all__ = ["Host", "StepRows", "Unit"]

Unit = Literal["sum", "rows", "targets"]
"""What a micro-batch's loss is: its share of the step's sum (the host gave it the step's denominator), or a mean over
its rows or over its targets."""

_MASK = "attention_mask"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRows:
    """The rows of one optimizer step on this rank.

    Attributes:
        batch: tensors (N, ...) and lists, as ``padless.regroup`` takes them.
        fields: roles of their keys.
        atoms: (N,) ids of rows that stay in one micro-batch, unique over ranks; or ``None``.
        shared: arguments that every micro-batch gets as they are.
    """

    batch: dict[str, Any]
    fields: dict[str, Field]
    atoms: npt.NDArray[np.int64] | None = None
    shared: dict[str, Any] = field(default_factory=dict)


class Host:
    """The plain ``Trainer``: ``input_ids``, ``attention_mask``, ``labels`` and further columns of tokens or rows."""

    probes_denominator = True
    """Whether the first step checks that the model divides by ``num_items_in_batch``."""

    packs = True
    """Whether a packed row means the same to the host's loss as its sequences apart."""

    pads_apart = False
    """Whether ``pairs="apart"`` means something."""

    def __init__(self, trainer: Any, options: PadlessOptions) -> None:
        self.trainer = trainer
        self.options = options
        self.rank = int(trainer.args.process_index)
        if options.pairs == "apart" and not self.pads_apart:
            raise PadlessError(f"pairs='apart' is for DPOTrainer; {type(trainer).__name__} has no pairs to pad apart")
        self._made_mask = False

    # --- what the loss is

    def unit(self, num_items: Any, training: bool) -> Unit:
        """How the losses of micro-batches add up; follows ``Trainer.training_step``."""
        if self._scaled(num_items):
            return "sum"
        return "targets" if self.token_labels else "rows"

    def divides_by_accumulation(self, num_items: Any) -> bool:
        """Whether somebody divides the loss by the number of accumulated micro-batches: the Trainer, or the host."""
        return not self._scaled(num_items)

    def _scaled(self, num_items: Any) -> bool:
        trainer = self.trainer
        stated = getattr(trainer, "loss_is_scaled_for_ga", None)
        if stated is not None:
            return bool(stated)
        return bool(
            (trainer.model_accepts_loss_kwargs and num_items is not None) or trainer.compute_loss_func is not None
        )

    token_labels = False

    # --- rows in, inputs out

    def build(self, batches: Sequence[Mapping[str, Any]]) -> StepRows:
        """One batch of rows from the collated batches of an optimizer step."""
        rows_of(batches[0])
        fields = dict(self.options.fields or {})
        labels = batches[0].get("labels")
        if isinstance(labels, Tensor) and labels.dim() < 2 and "labels" not in fields:
            fields["labels"] = Field(span="row")
        self.token_labels = isinstance(labels, Tensor) and labels.dim() >= 2
        self._made_mask = _MASK not in batches[0]
        if self._made_mask:  # a collator that makes no mask pads nothing: blocks of one width
            batches = [{**batch, _MASK: torch.ones_like(batch["input_ids"])} for batch in batches]
            if len({batch["input_ids"].shape[1] for batch in batches}) > 1:
                raise PadlessError(
                    "the collated batches have no attention_mask but different widths: padding is read from the mask;"
                    " let the collator return it"
                )
        return StepRows(batch=merge(self.counted(batches), fields), fields=fields)

    @property
    def shifts_labels(self) -> bool:
        """Whether the host's loss takes the labels of the column behind each output, and counts them so."""
        return bool(getattr(self.trainer, "_loss_shifts_labels", False))

    def counted(self, batches: Sequence[Any]) -> list[Any]:
        """Batches whose labels are the targets of rows that are rolled and cut. GRPO's are lists, without labels."""
        if not self.shifts_labels:
            return list(batches)
        return [without_unpredicted(batch) if isinstance(batch, Mapping) else batch for batch in batches]

    def inputs(self, micro: Any) -> dict[str, Any]:
        """What the host's ``compute_loss`` takes, from one micro-batch."""
        inputs = dict(micro.inputs)
        if self._made_mask and _MASK in inputs and bool((inputs[_MASK] > 0).all()):
            inputs.pop(_MASK)
        return inputs

    @contextlib.contextmanager
    def calling(self, model: Any) -> Iterator[Any]:
        """Around the host's ``compute_loss`` on a micro-batch; yields what it calls as its model."""
        yield model

    def rows(self, inputs: Mapping[str, Any]) -> int:
        """Rows (or pairs) in inputs for the host."""
        return rows_of(inputs)

    def targets(self, inputs: Mapping[str, Any]) -> int:
        """Targets in inputs for the host, after the label shift where the loss shifts."""
        labels = inputs.get("labels")
        if not isinstance(labels, Tensor):
            return 0
        if labels.dim() >= 2 and self.shifts_labels:
            labels = labels[..., 1:]
        return int((labels != -100).sum())

    # --- a search for the token budget

    rows_together = 1
    """Rows that always share a micro-batch."""

    row_columns: tuple[tuple[str, ...], ...] = (("input_ids",),)
    """Columns of the training data that make a row, behind one another; several where the longest counts."""

    makes_trials = False
    """Whether `trial` needs no real rows."""

    def longest(self) -> int | None:
        """The longest row that training may meet, or ``None`` where the data does not tell."""
        found = longest_in(self.trainer.train_dataset, self.row_columns)
        cut = getattr(self.trainer.args, "max_length", None)
        return found if cut is None or found is None else min(found, cut)

    def trial(self, rows: StepRows | None, count: int, width: int, packed: dict[str, Any]) -> dict[str, Any]:
        """Inputs for ``compute_loss`` of ``count`` full rows of ``width`` tokens, like the rows given.

        ``packed`` are arguments of ``padless.regroup`` for rows that are packed.
        """
        import padless

        assert rows is not None
        made = self._trial_batch(rows, count, width)
        method = "balanced" if packed else "fixed"
        grouped = padless.regroup(made, 2**40, fields=rows.fields, method=method, **packed)
        return self.inputs(grouped[0])

    def _trial_batch(self, rows: StepRows, count: int, width: int) -> dict[str, Any]:
        return trial_batch(rows.batch, rows.fields, count, width)

    # --- evaluation

    def eval_items(self, prepared: Mapping[str, Any]) -> Any:
        """The denominator of an evaluation batch, or ``None`` where the host takes a mean."""
        trainer = self.trainer
        if not trainer.label_names or any(prepared.get(name) is None for name in trainer.label_names):
            return None
        return trainer._get_num_items_in_batch(self.counted([prepared]), trainer.args.device)

    def evaluates(self, prediction_loss_only: bool) -> bool:
        """Whether evaluation batches can be regrouped, outputs included."""
        return not getattr(self.trainer.args, "predict_with_generate", False)

    def labels(self, prepared: Mapping[str, Any]) -> Any:
        """The labels that ``prediction_step`` returns, in the host's own shape."""
        names = self.trainer.label_names
        if not names or any(prepared.get(name) is None for name in names):
            return None
        values = tuple(prepared[name].detach() for name in names)
        return values[0] if len(values) == 1 else values

    # --- around an optimizer step

    def metrics(self, mode: str) -> dict[str, list[float]] | None:
        """The lists that the host averages into its log, or ``None``."""
        return None

    def metric_weight(self, key: str) -> Unit:
        """What a logged mean is a mean over."""
        return "rows"

    counters: tuple[str, ...] = ()
    """Keys of `metrics` that are counts kept by the trainer, not means."""

    def collected(self, seconds: float) -> None:
        """A host batch was prepared."""

    def skipped(self) -> None:
        """It was only collected; its rows run with the last one of the step."""

    def begin(self, accumulated: int, micro_batches: int) -> None:
        """Before the micro-batches that stand for ``accumulated`` host batches."""

    def ran(self, weight: float) -> None:
        """After a micro-batch."""

    def end(self, mode: str, sum_over_ranks: Callable[[list[float]], list[float]]) -> None:
        """After all of them."""
