"""Collated batches of one optimizer step become one batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from padless.errors import PadlessError
from padless.loss import target_mask
from padless.tensors.fields import Field, field_for

__all__ = ["fill_of", "merge", "rows_of", "without_unpredicted"]

Batch = dict[str, Any]


def rows_of(batch: Mapping[str, Any], key: str = "input_ids") -> int:
    """Rows of a collated batch: those of its ``key``."""
    value = batch.get(key)
    if not isinstance(value, Tensor) or value.dim() < 2:
        raise PadlessError(
            f"the collated batch has no {key!r} of shape (rows, columns) among its keys"
            f" ({', '.join(map(repr, batch))}): padless regroups token batches; train this one without it"
        )
    return int(value.shape[0])


def merge(batches: Sequence[Mapping[str, Any]], fields: Mapping[str, Field] | None = None) -> Batch:
    """Put batches below one another; narrower ones are padded on the right, where the mask says so.

    Args:
        batches: collated batches with the same keys; token tensors of each are as wide as its own mask.
        fields: roles of keys, on top of the well-known ones.

    Returns:
        One batch: tensors (sum of rows, widest, ...), lists one behind another.

    Raises:
        PadlessError: keys differ, or a key has no known role or another shape than its role says.

    >>> a = {"attention_mask": torch.ones(1, 2, dtype=torch.long)}
    >>> b = {"attention_mask": torch.ones(1, 3, dtype=torch.long)}
    >>> merge([a, b])["attention_mask"].tolist()
    [[1, 1, 0], [1, 1, 1]]
    """
    first = batches[0]
    if len(batches) == 1:
        return dict(first)
    for at, other in enumerate(batches):
        if other.keys() != first.keys():
            odd = sorted(set(other) ^ set(first))
            raise PadlessError(f"batch {at} of the optimizer step differs from batch 0 in its keys: {', '.join(odd)}")
    return {key: _join(key, [batch[key] for batch in batches], field_for(key, fields)) for key in first}


def without_unpredicted(batch: Mapping[str, Any]) -> Mapping[str, Any]:
    """The batch without the labels that nothing predicts once padding is gone; they are -100 then.

    A left-padded row has a target that a right-padded one does not have: its first token, predicted where padding is.

    >>> made = without_unpredicted({
    ...     "attention_mask": torch.tensor([[0, 1, 1, 1], [1, 1, 1, 0]]),
    ...     "labels": torch.tensor([[-100, 5, 6, 7], [5, 6, 7, -100]]),
    ... })
    >>> made["labels"].tolist()
    [[-100, -100, 6, 7], [5, 6, 7, -100]]
    """
    mask, labels = batch.get("attention_mask"), batch.get("labels")
    if "shift_labels" in batch:  # these are the targets
        return batch
    if not (isinstance(mask, Tensor) and isinstance(labels, Tensor) and mask.shape == labels.shape and mask.dim() == 2):
        return batch
    kept = target_mask(labels, mask)
    kept[:, 0] = True  # no loss that shifts its labels reads the first column
    return {**batch, "labels": labels.masked_fill(~kept, -100)}


def fill_of(key: str, fields: Mapping[str, Field] | None = None) -> float:
    """What padding of a token field holds; position ids are set again from the mask, so anything does."""
    role = field_for(key, fields)
    return 0 if role is None or role.pad == "count" else role.pad


def _join(key: str, values: list[Any], role: Field | None) -> Any:
    first = values[0]
    if isinstance(first, list | tuple):
        return [item for value in values for item in value]
    if not isinstance(first, Tensor):
        if any(value != first for value in values[1:]):
            raise PadlessError(f"{key!r} is {first!r} in one batch of the optimizer step and something else in another")
        return first
    if first.dim() == 0 or (role is not None and role.span == "batch"):
        if any(not torch.equal(value, first) for value in values[1:]):
            raise PadlessError(f"{key!r} differs between the batches of one optimizer step; it cannot be regrouped")
        return first
    if role is None:
        raise PadlessError(
            f"the role of {key!r} (shape {tuple(first.shape)}) is unknown: name it in"
            f" PadlessOptions(fields={{{key!r}: Field(span=...)}}), or drop the column"
        )
    if role.span in ("sequence", "response"):
        width = max(value.shape[role.axis] for value in values)
        fill = 0 if role.pad == "count" else role.pad
        values = [_widen(value, width, role.axis, fill) for value in values]
    return torch.cat(values, dim=role.batch_axis if role.span != "flat" else 0)


def _widen(value: Tensor, width: int, axis: int, fill: float) -> Tensor:
    missing = width - value.shape[axis]
    if not missing:
        return value
    shape = list(value.shape)
    shape[axis] = missing
    return torch.cat([value, value.new_full(shape, fill)], dim=axis)
