"""Kernels that make packs cost alike: sequences dealt to packs, then exchanged between them."""

# mypy: disable-error-code="no-any-return"
from __future__ import annotations

from typing import Any

import numpy as np

from padless.planning.kernels import jit

__all__ = ["deal", "level"]

Array = Any
_SEEN = 48  # members of a pack that an exchange looks at
_PARTNERS = 24  # packs that one pack looks for an exchange in
_ENOUGH = 0.3  # an exchange that takes so much of a pack's surplus away is made at once


@jit
def _sift(heap: Array, key: Array, at: int, size: int) -> None:
    """Let the entry at ``at`` sink in a heap of packs ordered by ``key``, ties by number."""
    while True:
        child = 2 * at + 1
        if child >= size:
            return
        if child + 1 < size:
            a, b = heap[child + 1], heap[child]
            if key[a] < key[b] or (key[a] == key[b] and a < b):
                child += 1
        a, b = heap[child], heap[at]
        if key[a] < key[b] or (key[a] == key[b] and a < b):
            heap[child], heap[at] = b, a
            at = child
        else:
            return


@jit
def _push(heap: Array, key: Array, pack: int, size: int) -> None:
    """Add a pack to a heap of ``size``."""
    at = size
    heap[at] = pack
    while at > 0:
        parent = (at - 1) // 2
        a, b = heap[at], heap[parent]
        if not (key[a] < key[b] or (key[a] == key[b] and a < b)):
            return
        heap[at], heap[parent] = b, a
        at = parent


@jit
def deal(sizes: Array, squares: Array, room: int, packs: int, long_ones: int, place: Array) -> bool:
    """Deal sequences to ``packs`` packs of ``room`` so that tokens and squares come out even.

    ``sizes`` (N,) must fall. The first ``long_ones`` go to the pack with the least ``squares``, the others, whose
    squares are small, to the pack with the fewest tokens, which evens tokens to about the shortest sequence.
    ``place`` (N,) gets the pack of each; False where a sequence found no room.

    A pack that is next but has no room is set aside until sequences are short enough for it.
    """
    held = np.zeros(packs, dtype=np.int64)
    key = np.zeros(packs)
    heap, aside = np.arange(packs), np.empty(packs, dtype=np.int64)
    size, parked = packs, 0
    for i in range(len(sizes)):
        if i == long_ones:
            for pack in range(packs):
                key[pack] = held[pack]
            for at in range(size // 2, -1, -1):
                _sift(heap, key, at, size)
        while parked > 0 and held[aside[0]] <= room - sizes[i]:
            _push(heap, key, aside[0], size)
            size += 1
            parked -= 1
            aside[0] = aside[parked]
            _sift(aside, held, 0, parked)
        while size > 0 and held[heap[0]] > room - sizes[i]:
            _push(aside, held, heap[0], parked)
            parked += 1
            size -= 1
            heap[0] = heap[size]
            _sift(heap, key, 0, size)
        if size == 0:
            return False
        pack = heap[0]
        place[i] = pack
        held[pack] += sizes[i]
        key[pack] += squares[i] if i < long_ones else float(sizes[i])
        _sift(heap, key, 0, size)
    return True


@jit
def _members(head: Array, following: Array, pack: int, turn: int, members: Array) -> int:
    """Some of a pack's members, at most ``len(members)``, others at each ``turn``; how many."""
    count = 0
    i = head[pack]
    while i >= 0:
        count += 1
        i = following[i]
    stride = -(-count // len(members))
    k, seen, i = 0, 0, head[pack]
    while i >= 0:
        if (k + turn) % stride == 0 and seen < len(members):
            members[seen] = i
            seen += 1
        k += 1
        i = following[i]
    return seen


@jit
def _leave(head: Array, following: Array, pack: int, item: int) -> None:
    if head[pack] == item:
        head[pack] = following[item]
        return
    i = head[pack]
    while following[i] != item:
        i = following[i]
    following[i] = following[item]


@jit
def _join(head: Array, following: Array, pack: int, item: int) -> None:
    """Members stay in ascending order, which is that of falling sizes."""
    i = head[pack]
    if i < 0 or i > item:
        following[item] = i
        head[pack] = item
        return
    while following[i] >= 0 and following[i] < item:
        i = following[i]
    following[item] = following[i]
    following[i] = item


@jit
def _one_for_one(
    sizes: Array, work: Array, mine: Array, theirs: Array, state: Array, spare: Array, chosen: Array
) -> int:
    """The best exchange of one of ``mine``, a heavier pack's, for one of ``theirs``, a lighter one's, or for nothing.

    ``state`` (3,) is the work of the two packs, and what the heavier must come below afterwards, which is lowered;
    ``spare`` (2,) is the room they have. The sequences that change sides go to ``chosen``; how many are returned.
    """
    count = 0
    for i in mine:
        for y in range(-1, len(theirs)):
            more, gain = sizes[i], work[i]  # what the lighter pack gets, net
            if y >= 0:
                more, gain = more - sizes[theirs[y]], gain - work[theirs[y]]
            value = max(state[0] - gain, state[1] + gain)
            if value < state[2] and -spare[0] <= more <= spare[1]:
                state[2], chosen[0], count = value, i, 1
                if y >= 0:
                    chosen[1], count = theirs[y], 2
    return count


@jit
def _one_for_two(
    sizes: Array, work: Array, mine: Array, theirs: Array, state: Array, spare: Array, chosen: Array
) -> int:
    """The same with one of ``mine`` for two of ``theirs`` of about its length together.

    Where packs are full to the last token this still moves squares: the one has more of them than the two.
    """
    count = 0
    for i in mine:
        k = len(theirs) - 1
        for j in range(len(theirs)):  # the longer the first, the shorter the second
            while k > j and sizes[theirs[j]] + sizes[theirs[k]] < sizes[i] - spare[1]:
                k -= 1
            for z in range(k, max(j, k - 3), -1):
                more = sizes[i] - sizes[theirs[j]] - sizes[theirs[z]]
                if more < -spare[0]:
                    break
                gain = work[i] - work[theirs[j]] - work[theirs[z]]
                value = max(state[0] - gain, state[1] + gain)
                if value < state[2] and more <= spare[1]:
                    state[2], chosen[0], chosen[1], chosen[2], count = value, i, theirs[j], theirs[z], 3
    return count


@jit
def level(sizes: Array, work: Array, room: int, packs: int, goal: float, evaluations: int, place: Array) -> int:
    """Move and exchange sequences between packs until none has more ``work`` than ``goal``: exchanges made.

    In each round the packs above the goal, heaviest first, look for partners among the lightest (the heaviest
    from the lightest on, the next from the next on, others in each round) such that the heavier of the two becomes
    as light as it can and neither passes ``room``. It ends when the heaviest finds no partner in three rounds, or
    after so many ``evaluations``. ``sizes`` (N,) must fall; ``place`` (N,) is changed.
    """
    held, done = np.zeros(packs, dtype=np.int64), np.zeros(packs)
    head, following = np.full(packs, -1, dtype=np.int64), np.empty(len(sizes), dtype=np.int64)
    for i in range(len(sizes) - 1, -1, -1):
        pack = place[i]
        held[pack] += sizes[i]
        done[pack] += work[i]
        following[i] = head[pack]
        head[pack] = i
    own, others, chosen = np.empty(_SEEN, np.int64), np.empty(_SEEN, np.int64), np.empty(3, np.int64)
    state, spare = np.empty(3), np.empty(2, dtype=np.int64)
    mean, made, turn, stuck = done.mean(), 0, 0, 0
    partners = min(_PARTNERS, packs)
    while packs > 1 and evaluations > 0 and stuck < 3:
        order = np.argsort(done)
        if done[order[packs - 1]] <= goal:
            break
        for rank in range(packs // 2):
            a = order[packs - 1 - rank]
            if done[a] <= goal or evaluations <= 0:
                break
            mine = own[: _members(head, following, a, turn, own)]
            partner, count = -1, 0
            state[0], state[2], spare[0] = done[a], done[a] - 0.01 * (done[a] - mean), room - held[a]
            enough = done[a] - _ENOUGH * (done[a] - mean)
            for step in range(2 * partners):
                b = order[(rank + turn * _PARTNERS + step % partners) % packs]
                if b == a or done[b] >= state[2] or state[2] <= enough:
                    continue
                theirs = others[: _members(head, following, b, turn, others)]
                evaluations -= len(mine) * (len(theirs) + 1)
                state[1], spare[1] = done[b], room - held[b]
                if step < partners:
                    found = _one_for_one(sizes, work, mine, theirs, state, spare, chosen)
                else:
                    found = _one_for_two(sizes, work, mine, theirs, state, spare, chosen)
                if found > 0:
                    partner, count = b, found
            if rank == 0:
                stuck = stuck + 1 if partner < 0 else 0
            for item in chosen[:count]:
                source = place[item]
                target = a + partner - source
                _leave(head, following, source, item)
                _join(head, following, target, item)
                place[item] = target
                held[source] -= sizes[item]
                held[target] += sizes[item]
                done[source] -= work[item]
                done[target] += work[item]
            made += partner >= 0
        turn += 1
    return made
