"""Rows as a dataset returns them, sorted into what is per token, what is per row, and what the model never sees."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from padless.data._dataset import WEIGHT
from padless.errors import PadlessError
from padless.tensors.fields import Field, Fields, field_for

__all__ = ["BY_ROW", "Features", "read_features"]

IGNORED = -100
BY_ROW = (
    "pixel_values",
    "pixel_values_videos",
    "pixel_attention_mask",
    "image_grid_thw",
    "video_grid_thw",
    "image_sizes",
    "image_position_ids",
    "second_per_grid_ts",
    "input_features",
    "feature_attention_mask",
)
"""Multimodal columns of transformers models: entries of all rows behind one another, along axis 0."""

_MASKS = ("completion_mask", "assistant_masks", "assistant_mask", "loss_mask")


@dataclass(slots=True, kw_only=True)
class Features:
    """B rows without padding.

    Attributes:
        lengths: tokens of each row.
        tokens: key -> one tensor (n, ...) per row. Response-aligned values are filled up at the front.
        roles: the field of each of these keys.
        positions: one tensor (axes, n) per row, where rows bring positions of several axes.
        by_row: multimodal columns, joined over the rows.
        left_out: columns of rows that no model takes: texts, ids, scores.
    """

    lengths: list[int]
    tokens: dict[str, list[Tensor]] = field(default_factory=dict)
    roles: dict[str, Field] = field(default_factory=dict)
    positions: list[Tensor] | None = None
    by_row: dict[str, Any] = field(default_factory=dict)
    left_out: dict[str, list[Any]] = field(default_factory=dict)


def read_features(rows: Sequence[Any], *, fields: Fields | None, by_row: Collection[str]) -> Features:
    """Sort the columns of some rows; add labels where there are none; take targets from rows of weight 0.

    Raises:
        PadlessError: no rows, rows of different columns, a per-token column of another length, or a column whose role
            cannot be told; names the row and the key.
    """
    if not len(rows):
        raise PadlessError("there are no rows to collate")
    named = [row if isinstance(row, Mapping) else {"input_ids": row} for row in rows]
    if "input_ids" not in named[0]:
        raise PadlessError(f"the rows have no input_ids among their keys ({', '.join(map(repr, named[0]))})")
    features = Features(lengths=[len(row["input_ids"]) for row in named])
    keys: dict[str, None] = {}
    for row in named:
        keys.update(dict.fromkeys(row))
    for key in keys:
        if key in by_row:
            features.by_row[key] = _joined(key, [row.get(key) for row in named])
        elif key != WEIGHT:
            _sort(features, key, named, fields)
    if "attention_mask" in features.tokens:
        _strip_padding(features)
    _make_labels(features, [float(row.get(WEIGHT, 1.0)) for row in named])
    return features


def _sort(features: Features, key: str, rows: Sequence[Mapping[str, Any]], fields: Fields | None) -> None:
    role = field_for(key, fields)
    values = [row.get(key) for row in rows]
    if role is None:
        known = next((value for value in values if value is not None), None)
        if _is_plain(known):
            features.left_out[key] = values
            return
        raise PadlessError(
            f"the role of {key!r} is unknown: say what it is aligned to with fields={{{key!r}: Field(span=...)}},"
            f" name it in by_row=, or remove it from the rows"
        )
    if role.span not in ("sequence", "response"):
        features.left_out[key] = values
        return
    tensors = []
    for i, (value, length) in enumerate(zip(values, features.lengths, strict=True)):
        if value is None:
            raise PadlessError(
                f"row {i} has no {key!r}, but another row has: give every row the same per-token columns"
            )
        tensor = torch.as_tensor(np.asarray(value) if not isinstance(value, Tensor) else value)
        if key == "position_ids" and tensor.ndim == 2:
            _add_positions(features, i, tensor)
            continue
        tensors.append(_aligned(tensor, role, length, i, key))
    if tensors:
        features.tokens[key], features.roles[key] = tensors, role


def _aligned(tensor: Tensor, role: Field, length: int, row: int, key: str) -> Tensor:
    if tensor.ndim and len(tensor) == length:
        return tensor
    if role.span == "response" and tensor.ndim and len(tensor) < length:
        # Log-probabilities of n - 1 predicted tokens and the like belong to the last tokens.
        pad = 0 if role.pad == "count" else role.pad
        return torch.cat([tensor.new_full((length - len(tensor), *tensor.shape[1:]), pad), tensor])
    held = len(tensor) if tensor.ndim else "no"
    raise PadlessError(f"row {row}: {key!r} has {held} entries and input_ids {length}: a per-token column has as many")


def _add_positions(features: Features, row: int, tensor: Tensor) -> None:
    if tensor.shape[1] != features.lengths[row]:
        raise PadlessError(
            f"row {row}: position_ids has shape {tuple(tensor.shape)}; expected (axes, {features.lengths[row]})"
        )
    if features.positions is None:
        features.positions = []
    features.positions.append(tensor)


def _strip_padding(features: Features) -> None:
    """Rows that come padded are cut to what their mask calls real, whichever side the padding is on."""
    keep = [mask > 0 for mask in features.tokens.pop("attention_mask")]
    features.roles.pop("attention_mask")
    if all(bool(real.all()) for real in keep):
        return
    for i, real in enumerate(keep):
        places = torch.nonzero(real)[:, 0]
        if len(places) and int(places[-1] - places[0]) + 1 != len(places):
            raise PadlessError(
                f"row {i}: attention_mask has zeros between real tokens; a collator cannot keep the hole"
            )
    for key, tensors in features.tokens.items():
        features.tokens[key] = [tensor[real] for tensor, real in zip(tensors, keep, strict=True)]
    if features.positions is not None:
        features.positions = [t[:, real] for t, real in zip(features.positions, keep, strict=True)]
    features.lengths = [int(real.sum()) for real in keep]


def _make_labels(features: Features, weights: Sequence[float]) -> None:
    """Labels where rows bring none: the tokens themselves, where a completion mask says so."""
    if "labels" not in features.tokens:
        labels = [ids.clone() for ids in features.tokens["input_ids"]]
        for name in _MASKS:
            if name in features.tokens:
                masks = features.tokens[name]
                labels = [torch.where(m > 0, ids, IGNORED) for ids, m in zip(labels, masks, strict=True)]
        features.tokens["labels"] = labels
        features.roles["labels"] = field_for("labels", None) or Field(pad=IGNORED, first=IGNORED)
    for i, weight in enumerate(weights):
        if weight == 0:
            features.tokens["labels"][i] = torch.full_like(features.tokens["labels"][i], IGNORED)


def _joined(key: str, values: Sequence[Any]) -> Any:
    """Entries of all rows that have some, behind one another."""
    given = [torch.as_tensor(value) for value in values if value is not None and len(value)]
    if not given:
        return None
    if any(tensor.shape[1:] != given[0].shape[1:] for tensor in given):
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in given)
        raise PadlessError(f"{key!r} of the rows do not join along their first axis: {shapes}")
    return torch.cat(given)


def _is_plain(value: Any) -> bool:
    """Something that cannot be a column of tokens: a text, a number, a mapping, a list of texts or mappings."""
    if value is None or isinstance(value, str | bytes | bool | int | float | Mapping):
        return True
    if isinstance(value, list | tuple):
        return not value or isinstance(value[0], str | bytes | Mapping)
    return getattr(value, "ndim", None) == 0
