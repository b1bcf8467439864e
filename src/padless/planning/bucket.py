"""Which sequences share an optimizer step: seeded shuffles, and steps whose lengths come in tight clusters.

Everything here is a function of lengths, sizes and a seed. The random numbers are SplitMix64's (Steele, Lea and Flood,
2014), written out, so that an order does not change with a NumPy release.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from padless.errors import PadlessError
from padless.planning.kernels import jit

__all__ = [
    "arrange",
    "cut_by_padded",
    "cut_by_size",
    "cut_by_tokens",
    "deal",
    "deal_steps",
    "longest_first",
    "mix",
    "repeats",
    "shuffle",
    "shuffled",
]

Index = npt.NDArray[np.int64]
AnyIndex = npt.NDArray[Any]

_U32 = np.uint64(32)
_LOW = np.uint64(0xFFFFFFFF)


def mix(*numbers: int) -> int:
    """One 64-bit seed from several integers; any of them changes it.

    >>> mix(0, 1) != mix(1, 0)
    True
    """
    state = 0x9E3779B97F4A7C15
    for number in numbers:
        state = _finish((state ^ (number & 0xFFFFFFFFFFFFFFFF)) + 0x9E3779B97F4A7C15)
    return state


def _finish(z: int) -> int:
    mask = 0xFFFFFFFFFFFFFFFF
    z &= mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return z ^ (z >> 31)


def shuffled(count: int, seed: int) -> AnyIndex:
    """A uniform random order of ``range(count)``: int32 where that is wide enough, else int64. Shape (count,).

    >>> sorted(shuffled(5, 7).tolist())
    [0, 1, 2, 3, 4]
    """
    order = np.arange(count, dtype=np.int32 if count < 2**31 else np.int64)
    _fisher_yates(order, 0, count, np.uint64(seed))
    return order


def shuffle(values: AnyIndex, seed: int) -> None:
    """Shuffle an integer array in place."""
    _fisher_yates(values, 0, len(values), np.uint64(seed))


def longest_first(sizes: AnyIndex) -> AnyIndex:
    """The order from the longest to the shortest, equal ones in their given order. ``sizes`` (U,) -> (U,).

    >>> longest_first(np.array([3, 9, 9, 4])).tolist()
    [1, 2, 3, 0]
    """
    if len(sizes) == 0:
        return np.empty(0, dtype=np.int32)
    span = int(sizes.max()) - int(sizes.min()) + 1
    kind = np.int32 if len(sizes) < 2**31 else np.int64
    if span <= max(1 << 16, 4 * len(sizes)):
        return np.asarray(_counting_sort(sizes, int(sizes.min()), span, np.empty(len(sizes), dtype=kind)))
    return np.argsort(-sizes.astype(np.int64), kind="stable").astype(kind)


def cut_by_size(sizes: AnyIndex, limit: int) -> Index:
    """Cut units in order into steps of at most ``limit`` sequences. ``sizes`` (E,) -> offsets (steps + 1,).

    Raises:
        PadlessError: one unit alone holds more than the limit.

    >>> cut_by_size(np.array([2, 2, 3, 1]), 4).tolist()
    [0, 2, 4]
    """
    if len(sizes) and int(sizes.max()) > limit:
        raise PadlessError(
            f"a group of {int(sizes.max())} sequences must stay together, but a step holds {limit}:"
            " raise sequences_per_step"
        )
    return np.asarray(_cut(sizes.astype(np.int64, copy=False), limit, True))


def cut_by_tokens(tokens: AnyIndex, target: int) -> Index:
    """Cut units in order into steps that end where they first reach ``target`` tokens; only the last may be short.

    ``tokens`` (E,) -> offsets (steps + 1,).

    >>> cut_by_tokens(np.array([5, 5, 7, 2]), 8).tolist()
    [0, 2, 4]
    """
    return np.asarray(_cut(tokens.astype(np.int64, copy=False), target, False))


def cut_by_padded(sizes: AnyIndex, target: int, *, budget: int, max_rows: int, sort: bool) -> Index:
    """Cut units in order into steps of at most ``target`` padded tokens, as one rank would run them.

    A step takes the most units (found by doubling and bisection) whose micro-batches, cut greedily from ascending
    lengths (from the given order without ``sort``) under ``budget``, compute at most ``target`` positions, or one.

    >>> cut_by_padded(np.array([4, 1, 4, 1]), 8, budget=8, max_rows=9, sort=True).tolist()
    [0, 2, 4]
    """
    return np.asarray(_cut_padded(sizes.astype(np.int64, copy=False), target, budget, max_rows, sort))


def repeats(weights: npt.NDArray[np.float64], seed: int) -> Index:
    """How often each unit appears in an epoch when its average is ``weights`` (U,): systematic sampling.

    Every count is the weight rounded up or down, and their sum is the rounded sum of the weights.
    """
    order = shuffled(len(weights), seed)
    total = round(float(weights.sum()))
    if total == 0:
        return np.zeros(len(weights), dtype=np.int64)
    start = (mix(seed, 1) >> 11) / 2**53  # in [0, 1)
    running = np.cumsum(weights[order])
    running *= total / running[-1]
    running[-1] = total  # exactly: a rounding error must not change how many there are
    ticks = np.floor(running + start).astype(np.int64)
    counts = np.empty(len(weights), dtype=np.int64)
    counts[order] = np.diff(ticks, prepend=0)
    return counts


def arrange(sizes: AnyIndex, steps: int, runs: AnyIndex, *, window: int, seed: int) -> Index:
    """Deal a pool into steps that each hold one tight cluster from every stratum of lengths.

    The pool is sorted, longest first, and cut into strata: stratum j holds ``steps * runs[j]`` units. Within a stratum,
    units are shuffled inside windows of ``window`` clusters and cut into clusters of ``runs[j]``; a random order of the
    clusters says which step gets which. Every step so holds the same number of units and nearly the same mix of
    lengths, and its clusters are nearly free of padding.

    Args:
        sizes: (n,) what is sorted by.
        steps: optimizer steps in the pool, m.
        runs: (c,) units per cluster of each stratum, longest stratum first; their sum is ``n // m``.
        window: clusters that are shuffled into one another; 1 keeps each as tight as it can be.
        seed: of the shuffles.

    Returns:
        (n,) int64 places in the pool, step after step; the first ``n % m`` steps hold one more (of the shortest).

    >>> arrange(np.array([1, 9, 8, 2]), 2, np.array([1, 1]), window=1, seed=0).shape
    (4,)
    """
    order = longest_first(sizes).astype(np.int64)
    out = np.empty(len(sizes), dtype=np.int64)
    _arrange(order, steps, runs.astype(np.int64), window, np.uint64(seed), out)
    return out


def deal(order: Index, offsets: Index, padded: Index, steps: int, ranks: int, seed: int) -> tuple[Index, Index, Index]:
    """Micro-steps in random order, and the ranks' groups of each dealt at random: no rank gets all the long ones.

    ``order`` (S,), ``offsets`` (steps * ranks + 1,), ``padded`` (steps * ranks,), and the same of the groups as dealt.
    """
    out = np.empty_like(order), np.empty_like(offsets), np.empty_like(padded)
    _deal(order, offsets, padded, steps, ranks, np.uint64(seed), *out)
    return out


def deal_steps(
    order: Index, bounds: Index, offsets: Index, padded: Index, steps: Index, ranks: int, seed: int, first: int
) -> tuple[Index, Index, Index]:
    """`deal` for B steps at once, step ``first + b`` with the seed ``mix(mix(seed, 5, first + b), 0)``.

    ``order`` (S,) cut by ``bounds`` (B + 1,); a row of ``offsets`` and ``padded`` for each step; ``steps`` (B,).
    """
    out = np.empty_like(order), np.empty_like(offsets), np.empty_like(padded)
    _deal_steps(order, bounds, offsets, padded, steps, ranks, np.uint64(mix(seed, 5)), first, *out)
    return out


@jit
def _deal(
    order: Index,
    offsets: Index,
    padded: Index,
    steps: int,
    ranks: int,
    seed: np.uint64,
    out_order: Index,
    out_offsets: Index,
    out_padded: Index,
) -> None:
    rows = np.arange(steps)
    _fisher_yates(rows, 0, steps, seed)
    columns = np.empty(ranks, dtype=np.int64)
    at, g = 0, 0
    out_offsets[0] = 0
    for k in range(steps):
        for r in range(ranks):
            columns[r] = r
        _fisher_yates(columns, 0, ranks, seed + np.uint64(k + 1))
        for r in range(ranks):
            source = rows[k] * ranks + columns[r]
            for i in range(offsets[source], offsets[source + 1]):
                out_order[at] = order[i]
                at += 1
            out_padded[g] = padded[source]
            g += 1
            out_offsets[g] = at


@jit
def _deal_steps(
    order: Index,
    bounds: Index,
    offsets: Index,
    padded: Index,
    steps: Index,
    ranks: int,
    mixed: np.uint64,
    first: int,
    out_order: Index,
    out_offsets: Index,
    out_padded: Index,
) -> None:
    golden = np.uint64(0x9E3779B97F4A7C15)
    for b in range(len(steps)):
        start, stop = bounds[b], bounds[b + 1]
        # mix(mix(seed, 5, step), 0), of which mix(seed, 5) is given.
        number = _next((mixed ^ np.uint64(first + b)) + golden)
        seed = _next((_next((golden ^ number) + golden) ^ np.uint64(0)) + golden)
        _deal(
            order[start:stop],
            offsets[b],
            padded[b],
            steps[b],
            ranks,
            seed,
            out_order[start:stop],
            out_offsets[b],
            out_padded[b],
        )


@jit
def _next(state: np.uint64) -> np.uint64:
    """SplitMix64's output for a counter."""
    z = state
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


@jit
def _below(random: np.uint64, bound: np.uint64) -> np.int64:
    """The high part of random * bound (bound < 2^32): a number below bound (Lemire, 2019)."""
    low = ((random & _LOW) * bound) >> _U32
    return np.int64(((random >> _U32) * bound + low) >> _U32)


@jit
def _fisher_yates(values: AnyIndex, start: int, stop: int, seed: np.uint64) -> None:
    state = _next(seed ^ np.uint64(0x5851F42D4C957F2D))
    for i in range(stop - start - 1, 0, -1):
        state += np.uint64(0x9E3779B97F4A7C15)
        j = _below(_next(state), np.uint64(i + 1))
        held = values[start + i]
        values[start + i] = values[start + j]
        values[start + j] = held


@jit
def _counting_sort(sizes: AnyIndex, least: int, span: int, out: AnyIndex) -> AnyIndex:
    places = np.zeros(span + 1, dtype=np.int64)
    for size in sizes:
        places[span - 1 - (size - least) + 1] += 1
    for value in range(span):
        places[value + 1] += places[value]
    for i in range(len(sizes)):
        value = span - 1 - (sizes[i] - least)
        out[places[value]] = i
        places[value] += 1
    return out


@jit
def _cut(sizes: Index, limit: int, never_over: bool) -> Index:
    """Offsets of steps; ``never_over`` starts a new one before the limit is passed, otherwise once it is reached."""
    offsets = np.empty(len(sizes) + 1, dtype=np.int64)
    offsets[0] = 0
    count, held = 0, 0
    for i in range(len(sizes)):
        if never_over and held + sizes[i] > limit:
            count += 1
            offsets[count] = i
            held = 0
        held += sizes[i]
        if not never_over and held >= limit:
            count += 1
            offsets[count] = i + 1
            held = 0
    if offsets[count] < len(sizes):
        count += 1
        offsets[count] = len(sizes)
    return offsets[: count + 1].copy()


@jit
def _padded(sizes: Index, budget: int, max_rows: int, sort: bool) -> int:
    """Positions that greedily cut micro-batches compute."""
    ordered = np.sort(sizes) if sort else sizes
    total, rows, width = 0, 0, 0
    for size in ordered:
        wider = max(width, size)
        if rows > 0 and ((rows + 1) * wider > budget or rows >= max_rows):
            total += rows * width
            rows, wider = 0, size
        rows, width = rows + 1, wider
    return total + rows * width


@jit
def _cut_padded(sizes: Index, target: int, budget: int, max_rows: int, sort: bool) -> Index:
    offsets = np.empty(len(sizes) + 1, dtype=np.int64)
    offsets[0] = 0
    count, start, guess = 0, 0, 16
    while start < len(sizes):
        left = len(sizes) - start
        low, high = 1, min(guess, left)
        while high < left and _padded(sizes[start : start + high], budget, max_rows, sort) <= target:
            low, high = high, min(2 * high, left)
        while low < high:
            middle = (low + high + 1) // 2
            if _padded(sizes[start : start + middle], budget, max_rows, sort) <= target:
                low = middle
            else:
                high = middle - 1
        start, guess = start + low, max(2, low)
        count += 1
        offsets[count] = start
    return offsets[: count + 1].copy()


@jit
def _arrange(order: Index, steps: int, runs: Index, window: int, seed: np.uint64, out: Index) -> None:
    n = len(order)
    size = n // steps
    extra = n - size * steps
    filled = np.zeros(steps, dtype=np.int64)
    starts = np.empty(steps, dtype=np.int64)
    for step in range(steps):
        starts[step] = step * size + min(step, extra)
    deal = np.arange(steps)
    start = 0
    for j in range(len(runs)):
        run = runs[j]
        stop = start + steps * run
        at = start
        while window > 1 and at < stop:
            end = min(at + window * run, stop)
            _fisher_yates(order, at, end, seed + np.uint64(at + 1))
            at = end
        _fisher_yates(deal, 0, steps, seed ^ np.uint64(0xD1B54A32D192ED03 + j))
        for cluster in range(steps):
            step = deal[cluster]
            for i in range(run):
                out[starts[step] + filled[step] + i] = order[start + cluster * run + i]
            filled[step] += run
        start = stop
    for i in range(extra):
        out[starts[i] + filled[i]] = order[start + i]
