"""The arms of the benchmark: how one optimizer step's batch becomes micro-batches, and outputs become rows again.

``fixed`` and ``truncate`` take rows as they come; ``greedy``, ``balanced`` and ``packed`` are `padless.regroup`, called
as its users call it. ``alone`` is the reference that all are compared with: each sequence by itself, cut out of the
batch without any of padless's code.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch

from padless.bench.attention import segments
from padless.bench.batch import Batch
from padless.bench.log_probs import token_log_probs
from padless.cost import CostModel
from padless.errors import PadlessError, choose
from padless.tensors import Compacted, compact, regroup

__all__ = ["ALL_ARMS", "ARMS", "MASKED", "Grouping", "Micro", "Setting", "Shape", "group", "pick_arms"]

ARMS = ("fixed", "truncate", "greedy", "balanced", "packed")
"""What runs by default."""

MASKED = {"truncate-mask": "truncate", "greedy-mask": "greedy", "balanced-mask": "balanced"}
"""The same arms with an attention mask, whether the model needs one or not."""

ALL_ARMS = (*ARMS, *MASKED)
ALONE = "alone"

_RESPONSE_FIELDS = ("response_mask", "advantages", "old_log_probs", "ref_log_probs")


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What the arms are given.

    Attributes:
        rows: rows of a micro-batch in ``fixed`` and ``truncate``.
        token_budget: most padded tokens of a micro-batch in the others.
        cost: what ``balanced`` plans with.
        no_mask: right-padded micro-batches go without an attention mask (set where that is exact for the model).
        segments: ``packed`` attends by segments (`padless.bench.attention`); else transformers reads the position ids.
    """

    rows: int
    token_budget: int
    cost: CostModel
    no_mask: bool = False
    segments: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What a micro-batch looked like: its rectangle, and where the real tokens lie in it."""

    rows: int
    width: int
    lengths: tuple[int, ...]
    starts: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Micro:
    """One forward and backward.

    Attributes:
        inputs: what the model gets.
        fields: ``response_mask`` and its like, lined up with the log-probabilities.
        lengths: real tokens of each sequence in it.
        starts: column where each begins, in its row (packed: in the one row).
        rows, width: the shape that the device computes.
        columns: the last columns that the fields line up with, or ``None`` for all.
        bounds: where each sequence of a packed row begins; empty for padded rows.
    """

    inputs: Batch
    fields: Batch
    lengths: tuple[int, ...]
    starts: tuple[int, ...]
    rows: int
    width: int
    columns: int | None = None
    bounds: tuple[int, ...] = ()

    @property
    def shape(self) -> Shape:
        """Without the tensors."""
        return Shape(rows=self.rows, width=self.width, lengths=self.lengths, starts=self.starts)

    def log_probs(self, model: Any) -> torch.Tensor:
        """Log-probability of every token, in the columns of the fields."""
        with segments(model, self.bounds) if self.bounds else nullcontext():
            logits = model(**self.inputs, use_cache=False).logits
        return token_log_probs(logits, self.inputs["input_ids"], columns=self.columns)

    def with_reference(self, log_probs: torch.Tensor) -> Micro:
        """With the frozen model's log-probabilities, as `log_probs` gave them, as one more field."""
        return replace(self, fields={**self.fields, "ref_log_probs": log_probs})

    @contextmanager
    def backward_context(self, model: Any) -> Iterator[None]:
        """Recomputing activations in the backward pass needs the boundaries, too."""
        with segments(model, self.bounds) if self.bounds else nullcontext():
            yield


class Grouping(Protocol):
    """The micro-batches of one optimizer step."""

    def __len__(self) -> int: ...

    def micro(self, index: int) -> Micro:
        """Make one micro-batch."""

    def restore(self, values: Sequence[torch.Tensor]) -> torch.Tensor:
        """Per-token values of all micro-batches as (N, R), in the order of the batch."""


def pick_arms(names: Sequence[str]) -> tuple[str, ...]:
    """Check the names of arms, keeping their order."""
    for name in names:
        choose("arm", name, ALL_ARMS)
    if not names:
        raise PadlessError(f"no arm was named; choose from {', '.join(ALL_ARMS)}")
    if len(set(names)) != len(names):
        raise PadlessError(f"arms {', '.join(names)} name one more than once")
    return tuple(names)


def group(arm: str, batch: Batch, setting: Setting) -> Grouping:
    """Cut a batch into the micro-batches of an arm."""
    if arm in MASKED:
        return group(MASKED[arm], batch, replace(setting, no_mask=False))
    if arm == ALONE:
        return _Alone(batch)
    if arm == "fixed":
        return _Fixed(batch, setting)
    batch = _unpositioned(batch)
    if arm == "truncate":
        return _Truncated(batch, setting)
    if arm == "packed":
        return _Packed(batch, setting)
    return _Regrouped(batch, setting, method=arm)


class _Rows:
    """Rows in the order given, ``setting.rows`` to a micro-batch."""

    def __init__(self, batch: Batch, setting: Setting) -> None:
        self.batch, self.setting = batch, setting
        self.count = len(batch["input_ids"])

    def __len__(self) -> int:
        return -(-self.count // self.setting.rows)

    def slice(self, index: int) -> Batch:
        part = slice(index * self.setting.rows, (index + 1) * self.setting.rows)
        return {name: value[part] for name, value in self.batch.items()}


class _Fixed(_Rows):
    def micro(self, index: int) -> Micro:
        part = self.slice(index)
        inputs = {name: part[name] for name in ("input_ids", "attention_mask", "position_ids")}
        rows, width = part["input_ids"].shape
        return Micro(
            inputs=inputs,
            fields=_fields(part),
            lengths=tuple(part["attention_mask"].sum(1).tolist()),
            starts=tuple(part["attention_mask"].argmax(1).tolist()),
            rows=rows,
            width=width,
            columns=part["response_mask"].shape[1],
        )

    def restore(self, values: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.cat(list(values))


class _Truncated(_Rows):
    """Remembers what was compacted last, which is what its outputs are restored with."""

    def __init__(self, batch: Batch, setting: Setting) -> None:
        super().__init__(batch, setting)
        self.made: dict[int, Compacted] = {}

    def micro(self, index: int) -> Micro:
        made = self.made[index] = compact(self.slice(index))
        return _padded(made.batch, made.lengths, self.setting)

    def restore(self, values: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.cat([self.made[i].restore(value, span="response") for i, value in enumerate(values)])


class _Regrouped:
    """`padless.regroup` with padded rows."""

    def __init__(self, batch: Batch, setting: Setting, *, method: str) -> None:
        self.setting = setting
        layout = "right-padded-no-mask" if setting.no_mask else "padded"
        self.step = regroup(batch, setting.token_budget, layout=layout, method=method, cost=setting.cost)

    def __len__(self) -> int:
        return len(self.step)

    def micro(self, index: int) -> Micro:
        made = self.step[index]
        return _padded(made.inputs, made.lengths, self.setting)

    def restore(self, values: Sequence[torch.Tensor]) -> torch.Tensor:
        return self.step.restore(values, span="response")


class _Packed:
    """`padless.regroup` with one packed row to a micro-batch."""

    def __init__(self, batch: Batch, setting: Setting) -> None:
        self.setting = setting
        self.step = regroup(batch, setting.token_budget, layout="packed", cost=setting.cost, unsafe=True)  # marked

    def __len__(self) -> int:
        return len(self.step)

    def micro(self, index: int) -> Micro:
        made = self.step[index]
        bounds = np.concatenate([[0], np.cumsum(made.lengths)])
        return Micro(
            inputs={name: made.inputs[name] for name in ("input_ids", "position_ids")},
            fields=_fields(made.inputs),
            lengths=tuple(made.lengths.tolist()),
            starts=tuple(bounds[:-1].tolist()),
            rows=1,
            width=made.inputs["input_ids"].shape[1],
            bounds=tuple(bounds.tolist()) if self.setting.segments else (),
        )

    def restore(self, values: Sequence[torch.Tensor]) -> torch.Tensor:
        return self.step.restore(values, span="response")


class _Alone:
    """Each sequence by itself: no padding, no mask, and none of padless's code."""

    def __init__(self, batch: Batch) -> None:
        self.batch = batch
        self.real = batch["attention_mask"].bool()
        self.answers = batch["response_mask"].bool()

    def __len__(self) -> int:
        return len(self.real)

    def micro(self, index: int) -> Micro:
        ids = self.batch["input_ids"][index][self.real[index]][None]
        size, answer = ids.shape[1], int(self.answers[index].sum())
        fields = {
            name: torch.nn.functional.pad(self.batch[name][index][self.answers[index]], (size - answer, 0))[None]
            for name in _RESPONSE_FIELDS
            if name in self.batch
        }
        return Micro(inputs={"input_ids": ids}, fields=fields, lengths=(size,), starts=(0,), rows=1, width=size)

    def restore(self, values: Sequence[torch.Tensor]) -> torch.Tensor:
        result = values[0].new_zeros(self.answers.shape)
        for row, value in enumerate(values):
            answer = self.answers[row]
            result[row, answer] = value[0, -int(answer.sum()) :]
        return result


def _padded(inputs: Batch, lengths: np.ndarray[Any, Any], setting: Setting) -> Micro:
    """A right-padded micro-batch; positions count from 0 by themselves."""
    rows, width = inputs["input_ids"].shape
    names = ("input_ids",) if setting.no_mask else ("input_ids", "attention_mask")
    return Micro(
        inputs={name: inputs[name] for name in names},
        fields=_fields(inputs),
        lengths=tuple(lengths.tolist()),
        starts=(0,) * rows,
        rows=rows,
        width=width,
    )


def _unpositioned(batch: Batch) -> Batch:
    """Without position ids: right-padded rows count from 0 by themselves, and `regroup` makes those of packed rows."""
    return {name: value for name, value in batch.items() if name != "position_ids"}


def _fields(inputs: Batch) -> Batch:
    return {name: inputs[name] for name in _RESPONSE_FIELDS if name in inputs}
