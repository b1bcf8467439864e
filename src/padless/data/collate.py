"""Collators: rows of a dataset to one padded or packed micro-batch that models take as it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from padless.data._features import BY_ROW, Features, read_features
from padless.data._packs import split_packs
from padless.data._sharing import in_one_block
from padless.errors import PadlessError
from padless.shapes import as_ladder, combine_multiples, round_up, snap
from padless.tensors.fields import Fields
from padless.tensors.flatten import flatten
from padless.tensors.layouts import PACKED_LAYOUTS, packed_layout

__all__ = ["PackedCollator", "PaddedCollator"]


@dataclass(slots=True, kw_only=True)
class PaddedCollator:
    """Right-padded rows [rows, width]: ``input_ids``, ``attention_mask``, ``labels``, every other per-token column.

    Rows are mappings with ``input_ids``, or lists of token ids; rows that come padded, on either side, are cut to what
    their ``attention_mask`` calls real first. Padding is never told from a token id.

    Attributes:
        pad_token_id: what padded ids hold; any valid id, since the mask says what is padding.
        multiple_of: the width is rounded up to it (several combine by their least common multiple).
        ladder: the only widths allowed, for compiled models.
        fields: roles of per-token columns beside the well-known ones: ``{"advantages": Field()}``.
        by_row: multimodal columns; entries of all rows are joined along axis 0.
        keep: row columns (texts, ids, scores) to carry as lists; others are left out, models do not take them.

    Labels are those of the rows, else the ids, masked by ``completion_mask`` or its like; all -100 in rows of weight 0
    (see `TokenBudgetSampler.rows`). Positions of shape (axes, n) become (axes, rows, width).

    >>> batch = PaddedCollator(multiple_of=4)([{"input_ids": [5, 6, 2]}, {"input_ids": [7, 2]}])
    >>> batch["input_ids"].tolist(), batch["labels"].tolist()
    ([[5, 6, 2, 0], [7, 2, 0, 0]], [[5, 6, 2, -100], [7, 2, -100, -100]])
    """

    pad_token_id: int = 0
    multiple_of: int | tuple[int, ...] = 1
    ladder: Sequence[int] | None = None
    fields: Fields | None = None
    by_row: Sequence[str] = BY_ROW
    keep: Sequence[str] = ()
    _multiple: int = field(init=False, repr=False, default=1)
    _ladder: Any = field(init=False, repr=False, default=None)

    def __post_init__(self) -> None:
        self._multiple = combine_multiples(self.multiple_of)
        self._ladder = None if self.ladder is None else as_ladder(self.ladder)

    def __call__(self, rows: Sequence[Any]) -> dict[str, Any]:
        """One micro-batch."""
        features = read_features(rows, fields=self.fields, by_row=self.by_row)
        width = self.width(max(features.lengths))
        batch: dict[str, Any] = {}
        for key, tensors in features.tokens.items():
            batch[key] = _padded(tensors, width, self._pad_of(key, features), count=features.roles[key].pad == "count")
        lengths = torch.tensor(features.lengths)
        batch["attention_mask"] = (torch.arange(width) < lengths[:, None]).long()  # (rows, width)
        if features.positions is not None:
            turned = _padded([p.T for p in features.positions], width, 0, count=True)  # (rows, width, axes)
            batch["position_ids"] = turned.permute(2, 0, 1).contiguous()
        return _finish(batch, features, self.keep)

    def width(self, longest: int) -> int:
        """The width of a batch whose longest row has so many tokens."""
        wide = round_up(max(longest, 1), self._multiple)
        return wide if self._ladder is None else int(snap(np.array([wide]), self._ladder)[0])

    def _pad_of(self, key: str, features: Features) -> float:
        if key == "input_ids":
            return self.pad_token_id
        pad = features.roles[key].pad
        return 0 if pad == "count" else pad


@dataclass(slots=True, kw_only=True)
class PackedCollator:
    """One packed row [1, tokens] without padding, with the boundaries in the form that the model reads.

    The first label of every sequence is -100 (the model's shift must not make it the target of the one before), every
    per-token column is packed alike, positions restart, and there is no two-dimensional mask: an all-ones mask makes
    models forget the boundaries. Whether a model keeps packed sequences apart is for `padless.verify.check_layouts` to
    say; recurrent models mostly do not.

    Attributes:
        layout: how boundaries are told: one of `padless.tensors.PACKED_LAYOUTS`.
        pad_to: tokens of the row; what remains is one tail segment without targets. Without it, none remains.
        multiple_of: without ``pad_to``: tokens are rounded up to it.
        sequence_multiple_of: every sequence is rounded up to it (context parallelism).
        position_start: first position of every sequence.
        dtype: of an additive mask.
        fields, by_row, keep: as in `PaddedCollator`.

    Positions of shape (axes, n) become (axes, 1, tokens). Rows of a packed file (``padless pack``, TRL's
    ``pack_dataset``) come apart at their ``seq_lengths``.

    >>> batch = PackedCollator()([{"input_ids": [11, 12, 13]}, {"input_ids": [21, 22]}])
    >>> batch["labels"].tolist(), batch["position_ids"].tolist()
    ([[-100, 12, 13, -100, 22]], [[0, 1, 2, 0, 1]])
    """

    layout: str = "packed-position-ids"
    pad_to: int | None = None
    multiple_of: int | tuple[int, ...] = 1
    sequence_multiple_of: int | tuple[int, ...] = 1
    position_start: int = 0
    dtype: torch.dtype = torch.float32
    fields: Fields | None = None
    by_row: Sequence[str] = BY_ROW
    keep: Sequence[str] = ()

    def __post_init__(self) -> None:
        self.layout = packed_layout(self.layout)
        assert self.layout in PACKED_LAYOUTS

    def __call__(self, rows: Sequence[Any]) -> dict[str, Any]:
        """One micro-batch."""
        features = read_features(split_packs(rows), fields=self.fields, by_row=self.by_row)
        tokens = sum(features.lengths)
        if self.pad_to is not None and tokens > self.pad_to:
            raise PadlessError(
                f"the rows hold {tokens} tokens, more than pad_to={self.pad_to}: lower the token budget or raise pad_to"
            )
        features.tokens.pop("position_ids", None)  # positions restart with every sequence
        features.roles.pop("position_ids", None)
        packed = flatten(
            [{key: tensors[i] for key, tensors in features.tokens.items()} for i in range(len(features.lengths))],
            fields={**features.roles, **(self.fields or {})},
            layout=self.layout,
            pad_to=self.pad_to,
            multiple_of=self.multiple_of,
            sequence_multiple_of=self.sequence_multiple_of,
            position_start=self.position_start,
            dtype=self.dtype,
        )
        batch = dict(packed.inputs)
        if features.positions is not None:
            batch["position_ids"] = _packed_positions(features.positions, batch["position_ids"], packed.document_ids)
        return _finish(batch, features, self.keep)


def _padded(tensors: list[Tensor], width: int, pad: float, *, count: bool) -> Tensor:
    """Right-padded values (rows, width, ...); with ``count``, padding goes on counting from the last real value."""
    out = tensors[0].new_full((len(tensors), width, *tensors[0].shape[1:]), pad)
    for row, tensor in zip(out, tensors, strict=True):
        row[: len(tensor)] = tensor
        if count and len(tensor) and len(tensor) < width:
            steps = torch.arange(1, width - len(tensor) + 1, dtype=tensor.dtype)
            row[len(tensor) :] = tensor[-1] + steps.reshape(-1, *[1] * (tensor.ndim - 1))
    return out


def _packed_positions(positions: list[Tensor], plain: Tensor, documents: Tensor) -> Tensor:
    """Positions of several axes (axes, 1, T): each row's own; padding counts as in the plain ones (1, T)."""
    out = plain.expand(positions[0].shape[0], 1, -1).clone()
    for row, own in enumerate(positions):
        out[:, documents == row] = own.to(out.dtype)
    return out


def _finish(batch: dict[str, Any], features: Features, keep: Sequence[str]) -> dict[str, Any]:
    batch.update({key: value for key, value in features.by_row.items() if value is not None})
    for key in keep:
        if key not in features.left_out:
            raise PadlessError(
                f"keep names {key!r}; row columns here are {', '.join(map(repr, features.left_out)) or 'none'}"
            )
        batch[key] = features.left_out[key]
    return in_one_block(batch)
