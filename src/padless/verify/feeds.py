"""The probe's sequences, and the keyword arguments that carry them to the model in each layout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from padless.errors import PadlessError, choose
from padless.tensors.attention import block_mask, flex_block_mask
from padless.tensors.boundaries import boundaries_of
from padless.tensors.layouts import boundary_inputs
from padless.tensors.masks import positions_from_mask

__all__ = ["ALONE", "BLIND", "LAYOUTS", "PACKED", "Feed", "Place", "build_feed", "draw", "redraw"]

LAYOUTS = (
    "left-padded",
    "right-padded",
    "right-padded-no-mask",
    "packed-position-ids",
    "packed-cu-seqlens",
    "packed-seq-idx",
    "packed-fla",
    "packed-block-mask-additive",
    "packed-block-mask-bool",
    "packed-block-mask-flex",
    "naive",
)
"""The layouts that are judged. ``naive`` is concatenation without boundaries: the control that must be caught."""

PACKED = tuple(name for name in LAYOUTS if name.startswith("packed"))
ALONE = "alone"
"""One sequence, one row, nothing else: what every layout is compared with."""
BLIND = "left-padded-no-mask"
"""The control of the padded layouts: padding that the model cannot know of."""

Keywords = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where one sequence lies: ``tensor[row, start:stop]``."""

    row: int
    start: int
    stop: int

    def of(self, tensor: Tensor) -> Tensor:
        """The part (n, ...) of a tensor (B, T, ...) that belongs to this sequence."""
        return tensor[self.row, self.start : self.stop]


@dataclass(frozen=True, slots=True, kw_only=True)
class Feed:
    """Keyword arguments for one forward pass, and the place of every sequence in them."""

    layout: str
    keywords: Keywords
    places: tuple[Place, ...]

    @property
    def input_ids(self) -> Tensor:
        """Token ids (B, T)."""
        ids: Tensor = self.keywords["input_ids"]
        return ids

    def padding(self) -> Tensor:
        """Where no sequence lies (B, T)."""
        free = torch.ones_like(self.input_ids, dtype=torch.bool)
        for place in self.places:
            place.of(free).fill_(False)
        return free

    def with_ids(self, input_ids: Tensor) -> Feed:
        """The same layout over other tokens (B, T)."""
        return replace(self, keywords={**self.keywords, "input_ids": input_ids})


def draw(lengths: Sequence[int], tokens: Tensor, *, seed: int) -> list[Tensor]:
    """Seeded random sequences; every later one opens with the first tokens of the one before (a shared prefix)."""
    generator = torch.Generator().manual_seed(seed)
    drawn: list[Tensor] = []
    for n in lengths:
        ids = tokens[torch.randint(len(tokens), (n,), generator=generator)]
        shared = min(2, n - 1, len(drawn[-1]) - 1) if drawn else 0
        if shared > 0:
            ids[:shared] = drawn[-1][:shared]
        drawn.append(ids)
    return drawn


def redraw(feed: Feed, where: Tensor, tokens: Tensor, *, seed: int) -> Feed:
    """Every token at ``where`` (B, T) is replaced by a different one from ``tokens``."""
    generator = torch.Generator().manual_seed(seed)
    ids = feed.input_ids.clone()
    old = ids[where].cpu()  # (M,)
    place = torch.searchsorted(tokens, old).clamp(max=len(tokens) - 1)
    shift = torch.randint(1, len(tokens), (len(old),), generator=generator)
    ids[where] = tokens[(place + shift) % len(tokens)].to(ids)
    return feed.with_ids(ids)


def build_feed(
    layout: str,
    sequences: Sequence[Tensor],
    *,
    device: torch.device,
    dtype: torch.dtype,
    pad: int = 0,
    spare: int = 3,
    start: int = 0,
    rows: int = 1,
) -> Feed:
    """One layout of some sequences.

    Args:
        layout: one of :data:`LAYOUTS`, :data:`ALONE` or :data:`BLIND`.
        sequences: token ids (n,) each.
        device, dtype: of the tensors; ``dtype`` is the model's and matters to the additive mask.
        pad: the token put into padding. Nothing may depend on it.
        spare: columns of padding beyond the longest sequence, so that it is padded too.
        start: the first position of every sequence.
        rows: packed rows that the sequences are dealt to; shorter rows end in a tail of padding.
    """
    if layout == ALONE:
        if len(sequences) != 1:
            raise PadlessError(f"layout {ALONE!r} holds one sequence, not {len(sequences)}")
        layout = "naive"
    choose("layout", layout, (*LAYOUTS, BLIND))
    if layout == "naive" or layout in PACKED:
        return _packed(layout, sequences, device, dtype, pad, start, rows)
    return _padded(layout, sequences, device, pad, spare, start)


def _padded(layout: str, sequences: Sequence[Tensor], device: torch.device, pad: int, spare: int, start: int) -> Feed:
    lengths = [len(ids) for ids in sequences]
    width = max(lengths) + spare
    ids = torch.full((len(sequences), width), pad, dtype=torch.long)  # (B, T)
    places = []
    for row, one in enumerate(sequences):
        first = width - len(one) if layout.startswith("left") else 0
        places.append(Place(row=row, start=first, stop=first + len(one)))
        places[-1].of(ids).copy_(one)
    feed = Feed(layout=layout, keywords={"input_ids": ids.to(device)}, places=tuple(places))
    if layout in (BLIND, "right-padded-no-mask"):
        return feed
    mask = (~feed.padding()).long()  # (B, T)
    feed.keywords.update(attention_mask=mask, position_ids=positions_from_mask(mask, start=start))
    return feed


def _packed(
    layout: str,
    sequences: Sequence[Tensor],
    device: torch.device,
    dtype: torch.dtype,
    pad: int,
    start: int,
    rows: int,
) -> Feed:
    lengths = np.array([len(ids) for ids in sequences], dtype=np.int64)
    groups = [np.arange(row, len(lengths), rows) for row in range(rows)]
    bounds, members = boundaries_of(lengths, groups, start=start, device=device)
    ids = torch.full((rows, bounds.width), pad, dtype=torch.long)  # (B, T)
    places: dict[int, Place] = {}
    for number, end, held in zip(members.tolist(), bounds.held.cumsum().tolist(), bounds.held.tolist(), strict=True):
        if number >= 0:  # not the tail of a row
            row, first = divmod(end - held, bounds.width)
            places[number] = Place(row=row, start=first, stop=first + held)
            places[number].of(ids).copy_(sequences[number])
    keywords: Keywords = {"input_ids": ids.to(device)}
    if layout != "naive":
        keywords["position_ids"] = bounds.position_ids  # (B, T)
        keywords.update(boundary_inputs(layout, bounds))
        if layout == "packed-block-mask-flex":
            keywords["attention_mask"] = flex_block_mask(bounds.segment_ids)
        elif layout.startswith("packed-block-mask"):
            kind: Any = layout.removeprefix("packed-block-mask-")
            keywords["attention_mask"] = block_mask(bounds.segment_ids, kind=kind, dtype=dtype)
    return Feed(layout=layout, keywords=keywords, places=tuple(places[i] for i in range(len(lengths))))
