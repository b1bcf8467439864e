"""Packs: rows of concatenated sequences within a capacity."""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from padless.errors import PadlessError, choose
from padless.lengths import Lengths, as_ids, as_lengths, positive_int
from padless.plan import Plan
from padless.planning.slots import Overlong, apply_overlong
from padless.shapes import combine_multiples, round_up

__all__ = ["METHODS", "pack"]

Method = Literal["next-fit", "first-fit-decreasing", "best-fit-decreasing"]
METHODS = ("next-fit", "first-fit-decreasing", "best-fit-decreasing")
Index = npt.NDArray[np.int64]


def pack(
    lengths: Lengths,
    capacity: int,
    *,
    method: Method = "best-fit-decreasing",
    ranks: int = 1,
    multiple_of: int | tuple[int, ...] = 1,
    sequence_multiple_of: int | tuple[int, ...] = 1,
    atoms: Any = None,
    overlong: Overlong = "error",
    seed: int = 0,
) -> Plan:
    """Concatenate sequences into packs of at most ``capacity`` tokens.

    >>> plan = pack([7, 5, 4, 1], 10)
    >>> [group.tolist() for group in plan]
    [[0], [1, 2, 3]]
    """
    choose("method", method, METHODS)
    array = as_lengths(lengths)  # (N,)
    if array.ndim != 1:
        raise PadlessError(f"lengths has shape {array.shape}; a pack holds one field: plan each field on its own")
    budget = positive_int(capacity, name="capacity")
    ranks = positive_int(ranks, name="ranks")
    ids = None if atoms is None else as_ids(atoms, len(array), name="atoms")
    each, whole = combine_multiples(sequence_multiple_of), combine_multiples(multiple_of)
    room = budget // whole * whole
    slots = apply_overlong(array, room // each * each, overlong=overlong, what=f"capacity {budget}", atoms=ids)
    held = round_up(slots.held.astype(np.int64), each)  # (S,)
    packs = _fit([[i] for i in range(len(held))] if ids is None else _atoms(ids, slots.sequence), held, room, method)
    steps = max(1, -(-len(packs) // ranks))
    packs += [[] for _ in range(steps * ranks - len(packs))]
    members = np.array([i for group in packs for i in group], dtype=np.int64)
    return Plan(
        layout="packed",
        method=method,
        ranks=ranks,
        steps=steps,
        lengths=array,
        order=members if slots.sequence is None else slots.sequence[members],
        offsets=np.concatenate([[0], np.cumsum([len(group) for group in packs])]).astype(np.int64),
        token_budget=budget,
        spans=None if slots.spans is None else slots.spans[members],
        multiple_of=whole,
        sequence_multiple_of=each,
        atoms=ids,
        dropped=slots.dropped,
        truncated=slots.truncated,
        split=slots.split,
        alone=slots.alone,
        seed=seed,
    )


def _atoms(ids: Index, sequence: Index | None) -> list[list[int]]:
    groups: dict[int, list[int]] = {}
    for slot, name in enumerate((ids if sequence is None else ids[sequence]).tolist()):
        groups.setdefault(name, []).append(slot)
    return list(groups.values())


def _fit(items: list[list[int]], held: Index, room: int, method: str) -> list[list[int]]:
    sizes = [int(held[item].sum()) for item in items]
    order = list(range(len(items)))
    if method != "next-fit":
        order.sort(key=lambda i: -sizes[i])
    packs: list[list[int]] = []
    left: list[int] = []  # room left in each pack
    by_room: list[tuple[int, int]] = []  # (room left, pack), sorted
    for i in order:
        size, chosen = sizes[i], -1
        if method == "best-fit-decreasing":
            at = bisect_left(by_room, (size, -1))
            if at < len(by_room):
                chosen = by_room.pop(at)[1]
        elif method == "first-fit-decreasing":
            chosen = next((g for g, free in enumerate(left) if free >= size), -1)
        elif packs and left[-1] >= size:
            chosen = len(packs) - 1
        if chosen < 0:
            chosen = len(packs)
            packs.append([])
            left.append(room)
        packs[chosen].extend(items[i])
        left[chosen] -= size
        insort(by_room, (left[chosen], chosen))
    return packs
