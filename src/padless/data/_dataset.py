"""A dataset as a sampler means it: rows cut to their pieces, zero-weight rows without targets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from padless.data._corpus import Sampled
from padless.data._microbatch import MicroBatch
from padless.errors import PadlessError

__all__ = ["WEIGHT", "SampledRows", "cut_row", "without_targets"]

WEIGHT = "sample_weight"
"""The key that marks a zero-weight row; the collators read and remove it."""

_IGNORED = -100
_MASKS = ("completion_mask", "assistant_masks", "loss_mask")


class SampledRows:
    """A map-style dataset around another one, for a ``DataLoader`` whose ``batch_sampler`` is a `TokenBudgetSampler`.

    Of each row it returns the tokens that the sampler counted (``overlong="truncate"`` and ``"split"`` cut rows), and
    it takes the targets from rows of weight 0.
    """

    def __init__(self, dataset: Any, sampled: Sampled) -> None:
        self.dataset, self._sampled = dataset, sampled

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        return self.dataset[index]

    def __getitems__(self, batch: Sequence[int]) -> list[Any]:
        """Rows of one micro-batch; called by ``DataLoader`` with what the sampler yielded."""
        if not isinstance(batch, MicroBatch):
            raise PadlessError(
                "these rows are fetched by the sampler's micro-batches: pass it as batch_sampler=, unwrapped"
            )
        starts, weights = self._sampled.starts_of(batch.sequences), batch.weights
        held = batch.lengths
        lengths = held if held.ndim == 1 else None
        rows = []
        for i, index in enumerate(batch):
            row = self.dataset[index]
            if lengths is not None:
                row = cut_row(row, int(starts[i]), int(lengths[i]))
            rows.append(row if weights[i] else without_targets(row, index))
        return rows


def cut_row(row: Any, start: int, length: int) -> Any:
    """The tokens ``start`` to ``start + length`` of every per-token column: those as long as ``input_ids``."""
    if not isinstance(row, Mapping) or "input_ids" not in row:
        return row
    tokens = len(row["input_ids"])
    if tokens == length and start == 0:
        return row
    if start + length > tokens:
        raise PadlessError(
            f"a row holds {tokens} tokens where the sampler was told of at least {start + length}:"
            " measure the rows that the dataset returns"
        )
    stop = start + length
    return {key: value[start:stop] if _is_per_token(value, tokens) else value for key, value in row.items()}


def without_targets(row: Any, index: int) -> Any:
    """A row that trains on nothing."""
    if not isinstance(row, Mapping):
        raise PadlessError(f"row {index} is a {type(row).__name__}; rows of weight 0 must be mappings to be marked")
    changed = {**row, WEIGHT: 0.0}
    if "labels" in row:
        changed["labels"] = _filled(row["labels"], _IGNORED)
    for name in _MASKS:
        if name in row:
            changed[name] = _filled(row[name], 0)
    return changed


def _filled(values: Any, value: int) -> Any:
    if isinstance(values, list | tuple):
        return [value] * len(values)
    if isinstance(values, np.ndarray):
        return np.full_like(values, value)
    return values.new_full(values.shape, value)


def _is_per_token(value: Any, tokens: int) -> bool:
    return not isinstance(value, str | bytes | Mapping) and hasattr(value, "__len__") and len(value) == tokens
