"""Best-fit-decreasing where a table of all rooms would be too large: open packs in a sorted list of short blocks."""

# mypy: disable-error-code="no-any-return"
from __future__ import annotations

from typing import Any

import numpy as np

from padless.planning.kernels import jit

__all__ = ["best_fit_sparse"]

Array = Any
_FULL = 256  # ranges of packs in a block, at most


@jit
def _find(rooms: Array, held: Array, sequence: Array, blocks: int, room: int) -> tuple[int, int]:
    """Where the smallest room of at least ``room`` is: (place of its block in ``sequence``, place in the block).

    (blocks, 0) where there is none. ``rooms`` (., _FULL) holds the rooms of each block, ascending, ``held`` how many;
    ``sequence`` are the blocks that are used, in ascending order of their rooms.
    """
    low, high = 0, blocks
    while low < high:
        middle = (low + high) // 2
        block = sequence[middle]
        if rooms[block, held[block] - 1] < room:
            low = middle + 1
        else:
            high = middle
    if low == blocks:
        return low, 0
    return low, int(np.searchsorted(rooms[sequence[low], : held[sequence[low]]], room))


@jit
def _doubled(array: Array) -> Array:
    larger = np.zeros((2 * len(array), *array.shape[1:]), dtype=array.dtype)
    old, new = array.ravel(), larger.ravel()  # views
    for i in range(array.size):  # the assignment of a slice takes seconds to compile, for its error message
        new[i] = old[i]
    return larger


@jit
def best_fit_sparse(sizes: Array, numbers: Array, room: int, opened: Array) -> tuple[Array, int]:
    """Best-fit-decreasing: (records, packs) as of `pack_kernels.best_fit`.

    ``numbers`` (D,) says how often each of ``sizes`` (D,), ascending, occurs; ``opened`` (m,) is the room left in
    packs 0 .. m - 1 that exist already. Its cost grows with the ranges of packs, and hardly with the room.
    """
    rooms, first_of = np.zeros((16, _FULL), dtype=np.int64), np.zeros((16, _FULL), dtype=np.int64)
    packs_of = np.zeros((16, _FULL), dtype=np.int64)
    held, sequence = np.zeros(16, dtype=np.int64), np.zeros((16, 1), dtype=np.int64)[:, 0].copy()
    blocks = used_blocks = used = 0
    records = np.zeros((1024, 4), dtype=np.int64)
    packs, waiting, d = len(opened), len(opened), len(sizes) - 1
    left = numbers[d]
    while True:
        if waiting > 0:  # packs that exist are open before the first sequence
            waiting -= 1
            first, take, rest = waiting, 1, opened[waiting]
        else:
            while left == 0 and d > 0:
                d -= 1
                left = numbers[d]
            if left == 0:
                break
            length = sizes[d]
            b, at = _find(rooms, held, sequence, blocks, length)
            if b == blocks:
                left_room = room
                each = min(room // length, left)
                first, take = packs, left // each
                packs += take
            else:
                block = sequence[b]
                left_room = rooms[block, at]
                each = min(left_room // length, left)
                first, take = first_of[block, at], min(packs_of[block, at], left // each)
                first_of[block, at] += take
                packs_of[block, at] -= take
                if packs_of[block, at] == 0:
                    held[block] -= 1
                    for k in range(at, held[block]):
                        rooms[block, k], first_of[block, k] = rooms[block, k + 1], first_of[block, k + 1]
                        packs_of[block, k] = packs_of[block, k + 1]
                    if held[block] == 0:  # its memory is not used again: there are few such blocks
                        blocks -= 1
                        for k in range(b, blocks):
                            sequence[k] = sequence[k + 1]
            left -= take * each
            if used == len(records):
                records = _doubled(records)
            records[used, 0], records[used, 1], records[used, 2], records[used, 3] = length, first, take, each
            used += 1
            rest = left_room - each * length
        if rest < sizes[0]:  # nothing fits any more
            continue
        b, at = _find(rooms, held, sequence, blocks, rest)
        if b == blocks and blocks > 0:
            b -= 1
            at = held[sequence[b]]
        if blocks == 0 or held[sequence[b]] == _FULL:
            if used_blocks == len(rooms):
                rooms, first_of, packs_of = _doubled(rooms), _doubled(first_of), _doubled(packs_of)
                held, sequence = _doubled(held), _doubled(sequence)
            new = used_blocks
            used_blocks += 1
            if blocks > 0:  # the new one takes the upper half
                old = sequence[b]
                held[new], held[old] = _FULL - _FULL // 2, _FULL // 2
                for k in range(held[new]):
                    rooms[new, k], first_of[new, k] = rooms[old, _FULL // 2 + k], first_of[old, _FULL // 2 + k]
                    packs_of[new, k] = packs_of[old, _FULL // 2 + k]
                for k in range(blocks, b + 1, -1):
                    sequence[k] = sequence[k - 1]
                sequence[b + 1] = new
                if at > _FULL // 2:
                    b, at = b + 1, at - _FULL // 2
            else:
                b, at, sequence[0] = 0, 0, new
            blocks += 1
        block = sequence[b]
        for k in range(held[block], at, -1):
            rooms[block, k], first_of[block, k] = rooms[block, k - 1], first_of[block, k - 1]
            packs_of[block, k] = packs_of[block, k - 1]
        rooms[block, at], first_of[block, at], packs_of[block, at] = rest, first, take
        held[block] += 1
    return records[:used].copy(), packs
