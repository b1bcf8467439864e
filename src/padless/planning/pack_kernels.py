"""Kernels for packs. Equal lengths are placed together: the work depends on the histogram, not on the sequences.

A record (length, first, packs, each) says that ``each`` sequences of ``length`` go into every pack from ``first`` to
``first + packs - 1``.
"""

# mypy: disable-error-code="no-any-return"
from __future__ import annotations

from typing import Any

import numpy as np

from padless.planning.kernels import jit

__all__ = ["best_fit", "count_lengths", "first_fit", "next_fit"]

Array = Any


@jit
def count_lengths(lengths: Array, longest: int) -> Array:
    """(longest + 1,) int64: sequences of each length."""
    counts = np.zeros(longest + 1, dtype=np.int64)
    for length in lengths:
        counts[length] += 1
    return counts


@jit
def _grown(records: Array, used: int) -> Array:
    if used < len(records):
        return records
    larger = np.empty((2 * len(records), records.shape[1]), dtype=np.int64)
    for i in range(used):  # the assignment of a slice takes seconds to compile, for its error message
        for k in range(records.shape[1]):
            larger[i, k] = records[i, k]
    return larger


@jit
def _lowest_bit(word: int) -> int:
    """Place of the lowest set bit of a non-zero 32-bit word."""
    place = 0
    if word & 0xFFFF == 0:
        word >>= 16
        place += 16
    if word & 0xFF == 0:
        word >>= 8
        place += 8
    if word & 0xF == 0:
        word >>= 4
        place += 4
    if word & 0x3 == 0:
        word >>= 2
        place += 2
    return place + 1 - (word & 1)


@jit
def _next_set(levels: Array, starts: Array, at: int) -> int:
    """Smallest member of the set that is at least ``at``, or -1. Level l + 1 summarises words of level l."""
    depth = len(starts) - 1
    level = 0
    while level < depth:
        word = at >> 5
        if starts[level] + word >= starts[level + 1]:
            return -1
        rest = levels[starts[level] + word] >> (at & 31)
        if rest != 0:
            at += _lowest_bit(rest)
            while level > 0:
                level -= 1
                at = (at << 5) + _lowest_bit(levels[starts[level] + at])
            return at
        at = word + 1
        level += 1
    return -1


@jit
def _set(levels: Array, starts: Array, at: int, on: bool) -> None:
    for level in range(len(starts) - 1):
        word = starts[level] + (at >> 5)
        before = levels[word]
        if on:
            levels[word] = before | (1 << (at & 31))
            if before != 0:
                return
        else:
            levels[word] = before & ~(1 << (at & 31))
            if levels[word] != 0:
                return
        at >>= 5


@jit
def best_fit(counts: Array, room: int, opened: Array) -> tuple[Array, int]:
    """Best-fit-decreasing: each sequence, longest first, joins the fullest pack that can hold it. (records, packs).

    ``opened`` (m,) is the room left in packs 0 .. m - 1 that exist already.

    Packs with equal room left are interchangeable. The fullest that fits keeps being the fullest while it
    fits, so a pack takes as many of one length as it holds before the next: whole ranges of packs at once.
    """
    sizes = np.zeros(8, dtype=np.int64)
    depth, words = 0, room + 1
    while True:
        words = (words + 31) >> 5
        sizes[depth] = words
        depth += 1
        if words == 1:
            break
    starts = np.zeros(depth + 1, dtype=np.int64)
    for level in range(depth):
        starts[level + 1] = starts[level] + sizes[level]
    levels = np.zeros(starts[depth], dtype=np.int64)  # the set of rooms that some open pack has left
    head = np.full(room + 1, -1, dtype=np.int64)  # first range of packs with so much room left
    ranges = np.empty((1024, 3), dtype=np.int64)  # first pack, packs, next range
    records = np.empty((1024, 4), dtype=np.int64)
    nodes, used, packs = 0, 0, len(opened)
    for pack in range(packs):
        rest = opened[pack]
        if rest > 0:
            ranges = _grown(ranges, nodes)
            ranges[nodes, 0], ranges[nodes, 1], ranges[nodes, 2] = pack, 1, head[rest]
            if head[rest] < 0:
                _set(levels, starts, rest, True)
            head[rest] = nodes
            nodes += 1
    for length in range(len(counts) - 1, 0, -1):
        left = counts[length]
        while left > 0:
            left_room = _next_set(levels, starts, length)
            if left_room < 0:
                left_room = room
                each = min(room // length, left)
                first, take = packs, left // each
                packs += take
            else:
                node = head[left_room]
                each = min(left_room // length, left)
                first, take = ranges[node, 0], min(ranges[node, 1], left // each)
                ranges[node, 0] += take
                ranges[node, 1] -= take
                if ranges[node, 1] == 0:
                    head[left_room] = ranges[node, 2]
                    if head[left_room] < 0:
                        _set(levels, starts, left_room, False)
            left -= take * each
            records = _grown(records, used)
            records[used, 0], records[used, 1], records[used, 2], records[used, 3] = length, first, take, each
            used += 1
            rest = left_room - each * length
            if rest > 0:
                ranges = _grown(ranges, nodes)
                ranges[nodes, 0], ranges[nodes, 1], ranges[nodes, 2] = first, take, head[rest]
                if head[rest] < 0:
                    _set(levels, starts, rest, True)
                head[rest] = nodes
                nodes += 1
    return records[:used].copy(), packs


@jit
def first_fit(sizes: Array, numbers: Array, room: int, most: int) -> tuple[Array, int]:
    """First-fit-decreasing: each sequence, longest first, joins the first pack that can hold it. (records, packs).

    ``numbers`` (D,) says how often each of ``sizes`` (D,), ascending, occurs; ``most`` bounds the packs. A tournament
    tree over packs holds the largest room below each node.
    """
    leaves = 1
    while leaves < most:
        leaves *= 2
    tree = np.zeros(2 * leaves, dtype=np.int64)
    tree[1:] = room
    records = np.empty((1024, 4), dtype=np.int64)
    used = packs = 0
    for d in range(len(sizes) - 1, -1, -1):
        length, left = sizes[d], numbers[d]
        while left > 0:
            node = 1
            while node < leaves:
                node = 2 * node if tree[2 * node] >= length else 2 * node + 1
            each = min(tree[node] // length, left)
            first = node - leaves
            packs = max(packs, first + 1)
            left -= each
            records = _grown(records, used)
            records[used, 0], records[used, 1], records[used, 2], records[used, 3] = length, first, 1, each
            used += 1
            tree[node] -= each * length
            while node > 1:
                node >>= 1
                tree[node] = max(tree[2 * node], tree[2 * node + 1])
    return records[:used].copy(), packs


@jit
def next_fit(sizes: Array, order: Array, room: int, offsets: Array) -> int:
    """Sequences in ``order`` join the open pack or close it: packs, with their bounds in ``offsets``."""
    packs, left = 0, 0
    for k in range(len(order)):
        size = sizes[order[k]]
        if k == 0 or size > left:
            offsets[packs] = k
            packs += 1
            left = room
        left -= size
    offsets[packs] = len(order)
    return packs
