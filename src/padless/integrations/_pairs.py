"""Preference pairs whose chosen and rejected rows are padded apart: two forward passes stand in for the host's one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from padless.integrations._auto import trial_batch
from padless.integrations._merge import merge
from padless.tensors.fields import Field, field_for

__all__ = ["SIDES", "TwoWidths", "apart_rows", "apart_trial", "host_inputs"]

SIDES = ("chosen", "rejected")


def apart_rows(
    sides: Sequence[Sequence[Mapping[str, Any]]], fields: Mapping[str, Field]
) -> tuple[dict[str, Any], dict[str, Field]]:
    """Batches of either side, (N, ...) each, as one batch of pairs; and the roles of its keys.

    Token columns get the name of their side and the mask of their side; others hold one value per pair.
    """
    batch: dict[str, Any] = {}
    roles = dict(fields)
    for side, batches in zip(SIDES, sides, strict=True):
        for key, value in merge(batches, fields).items():
            role = field_for(key, fields)
            if role is not None and role.span == "row":
                batch[key] = value
                continue
            batch[f"{side}_{key}"] = value
            known = role or Field()
            roles[f"{side}_{key}"] = Field(
                axis=known.axis, pad=known.pad, batch_axis=known.batch_axis, mask=f"{side}_attention_mask"
            )
    return batch, roles


def host_inputs(inputs: Mapping[str, Any], fields: Mapping[str, Field]) -> tuple[dict[str, Any], tuple[int, int]]:
    """The host's block of chosen rows over rejected ones, (2 x pairs, widest); and the width of each side."""
    widths = tuple(int(inputs[f"{side}_attention_mask"].shape[1]) for side in SIDES)
    made: dict[str, Any] = {}
    for key, value in inputs.items():
        side, _, name = key.partition("_")
        if side == SIDES[0] and f"{SIDES[1]}_{name}" in inputs:
            role = fields[key]
            both = [value, inputs[f"{SIDES[1]}_{name}"]]
            fill = 0 if role.pad == "count" else role.pad
            made[name] = torch.cat([_widen(part, max(widths), fill) for part in both])
        elif side not in SIDES or key not in fields or fields[key].span == "row":
            made[key] = value
    return made, (widths[0], widths[1])


def apart_trial(batch: Mapping[str, Any], fields: Mapping[str, Field], pairs: int, width: int) -> dict[str, Any]:
    """A batch of ``pairs`` full pairs of ``width`` tokens on either side."""
    made: dict[str, Any] = {}
    for side in SIDES:
        own = {k.removeprefix(f"{side}_"): v for k, v in batch.items() if k.startswith(f"{side}_") and k in fields}
        made |= {f"{side}_{key}": value for key, value in trial_batch(own, fields, pairs, width).items()}
    index = torch.arange(pairs)
    for key, value in batch.items():
        if key not in made:
            made[key] = value[(index % len(value)).to(value.device)]
    return made


class TwoWidths:
    """Calls a model once per side, each side cut to its own width, and puts the outputs below one another.

    Args:
        model: what the host calls with rows of both sides, (2 x pairs, W).
        widths: columns of the chosen rows and of the rejected ones.
    """

    def __init__(self, model: Any, widths: tuple[int, int]) -> None:
        self.model, self.widths = model, widths

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def __call__(self, **inputs: Any) -> Any:
        rows, whole = inputs["input_ids"].shape
        outputs = []
        for half, width in zip((slice(0, rows // 2), slice(rows // 2, rows)), self.widths, strict=True):
            outputs.append(self.model(**{key: _cut(value, half, rows, whole, width) for key, value in inputs.items()}))
        first, second = outputs
        joined = {
            key: _join([value, second[key]], self.widths, whole)
            for key, value in first.items()
            if isinstance(value, Tensor) and value.dim() >= 2 and value.shape[0] == rows // 2
        }
        return type(first)(**joined)


def _cut(value: Any, half: slice, rows: int, whole: int, width: int) -> Any:
    if isinstance(value, Tensor) and value.dim() >= 2 and value.shape[:2] == (rows, whole):
        return value[half, :width]
    return value


def _join(parts: list[Tensor], widths: tuple[int, int], whole: int) -> Tensor:
    """Token outputs are as wide as the side, or one less (a target each); padding holds 0, as no target does."""
    missing = widths[0] - parts[0].shape[1]
    return torch.cat([_widen(part, whole - missing, 0) for part in parts])


def _widen(value: Tensor, width: int, fill: float) -> Tensor:
    shape = list(value.shape)
    shape[1] = width - shape[1]
    return torch.cat([value, value.new_full(shape, fill)], dim=1) if shape[1] else value
