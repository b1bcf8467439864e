"""Items: the units a micro-batch planner moves, sorted from the longest to the shortest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from padless.errors import shown
from padless.lengths import IntArray
from padless.plan import snap_within
from padless.planning.slots import Slots
from padless.shapes import round_up

__all__ = ["Items", "Rounding", "make_items"]

Index = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounding:
    """How a width is rounded up: to a multiple, then to the next width of a ladder if there is one."""

    multiple_of: int = 1
    ladder: IntArray | None = None

    def up(self, widths: npt.NDArray[np.integer[Any]]) -> Index:
        """Widths (...,) the device computes for lengths (...,); those over the ladder stay."""
        wide: Index = round_up(widths.astype(np.int64, copy=False), self.multiple_of)
        return wide if self.ladder is None else snap_within(wide, self.ladder)

    def largest(self, budget: int) -> int:
        """The longest length whose rounded width is within ``budget``; 0 where there is none."""
        if self.ladder is None:
            return budget // self.multiple_of * self.multiple_of
        fitting = [int(w) for w in self.ladder if w <= budget and w % self.multiple_of == 0]
        return max(fitting, default=0)

    def limit_in_words(self, budget: int) -> tuple[str, str]:
        """What sets `largest`, and how to raise it, for messages."""
        if self.ladder is None:
            return f"token_budget {budget}", "raise the limit"
        if int(max(self.ladder)) > budget:
            return f"the widths of ladder={shown(list(map(int, self.ladder)))} within token_budget {budget}", (
                "raise token_budget, or add a width to ladder= that it holds"
            )
        return f"ladder={shown(list(map(int, self.ladder)))}", "add a wider width to ladder="


@dataclass(frozen=True, slots=True, kw_only=True)
class Items:
    """I items, each one sequence or the sequences of one atom, longest first.

    Attributes:
        rows: (I,) sequences in each item.
        widths: (I, F) rounded width of each item.
        members: (S,) slots, item by item.
        starts: (I + 1,) where each item starts in ``members``.
        over: (I,) True for items that run alone, over the budget.
    """

    rows: Index
    widths: Index
    members: Index
    starts: Index
    over: npt.NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.rows)


def make_items(slots: Slots, atoms: Index | None, rounding: Rounding, *, by_length: bool = True) -> Items:
    """Sort the slots (or their atoms) by descending width, ties in the given order.

    Args:
        atoms: (N,) atom ids, or None when every sequence is on its own.
        by_length: False keeps the given order (an atom stands where its first sequence does).
    """
    held = slots.held.reshape(len(slots.held), -1)  # (S, F)
    wide = rounding.up(held)  # (S, F)
    over = np.zeros(len(wide), dtype=bool)
    if len(slots.alone):
        over[slots.alone] = True
    if atoms is None:
        rows = np.ones(len(wide), dtype=np.int64)
        members = np.arange(len(wide), dtype=np.int64)
        starts = np.arange(len(wide) + 1, dtype=np.int64)
    else:
        ids = atoms if slots.sequence is None else atoms[slots.sequence]  # (S,)
        _, first, inverse = np.unique(ids, return_index=True, return_inverse=True)
        rank_of = np.empty(len(first), dtype=np.int64)
        rank_of[np.argsort(first, kind="stable")] = np.arange(len(first))
        place = rank_of[inverse]  # (S,) atoms in order of first appearance
        members = np.argsort(place, kind="stable").astype(np.int64)
        rows = np.bincount(place).astype(np.int64)  # (I,)
        starts = np.concatenate([[0], np.cumsum(rows)])
        wide = np.maximum.reduceat(wide[members], starts[:-1], axis=0)  # (I, F)
        over = over[members[starts[:-1]]]
    items = Items(rows=rows, widths=wide, members=members, starts=starts, over=over)
    return items if not by_length else _sorted(items, held)


def _sorted(items: Items, held: IntArray) -> Items:
    """Descending by rounded width; equal widths by descending length, so that pieces of one width stay tight."""
    key = items.widths.sum(axis=1)
    order = np.argsort(-key, kind="stable")  # (I,)
    if len(items.members) == len(items.rows):  # no atoms
        members = items.members[order]
        starts = items.starts
    else:
        counts = items.rows[order]
        starts = np.concatenate([[0], np.cumsum(counts)])
        offsets = np.repeat(items.starts[order] - starts[:-1], counts)
        members = items.members[np.arange(len(items.members)) + offsets]
    return Items(
        rows=items.rows[order], widths=items.widths[order], members=members, starts=starts, over=items.over[order]
    )
