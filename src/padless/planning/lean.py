"""Micro-batches of one step in microseconds: a cap for each micro-step, the least padding under it."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from padless.cost import CostModel
from padless.planning.kernels import jit

__all__ = ["lean_groups"]

Index = npt.NDArray[np.int64]
Array = Any

_ROUNDS = 3


def lean_groups(
    lengths: npt.NDArray[Any],
    budget: int,
    *,
    ranks: int,
    multiple_of: int,
    max_sequences: int | None,
    every: int,
    cost: CostModel,
) -> tuple[int, Index, Index, Index]:
    """Group a step for some ranks: micro-steps K, order (S,), offsets (K * R + 1,), padded tokens (K * R,).

    One rank: the dynamic programme over runs of the sorted lengths, whose sum of costs is the least. Several ranks:
    every micro-step has a cap; each rank in turn takes from the sorted lengths what the cap allows. For each number of
    micro-steps the caps start equal (the smallest that suffices, by bisection) and are then moved one at a time while
    their sum falls; the number with the least sum and overhead is taken. Last, each micro-step's runs are replaced by
    those with the least padding under its cap (the price of a run found by bisection).

    For one field, without atoms or a ladder; `padless.microbatch` takes everything and looks longer.

    >>> steps, order, offsets, padded = lean_groups(
    ...     np.array([900, 100, 120, 880, 110, 90]), 2000, ranks=1, multiple_of=1, max_sequences=None, every=1,
    ...     cost=CostModel())
    >>> order.tolist(), offsets.tolist(), padded.tolist()
    ([0, 3, 2, 4, 1, 5], [0, 2, 6], [1800, 480])
    """
    count = len(lengths)
    limit = count if max_sequences is None else max_sequences
    weights = (cost.per_microbatch, cost.per_column, cost.per_token, cost.per_token_squared)
    room = _room(count, ranks, every)
    order, offsets, padded = np.empty(count, np.int64), np.empty(room + 1, np.int64), np.empty(room, np.int64)
    steps: int = _plan(lengths, budget, ranks, multiple_of, limit, every, *weights, order, offsets, padded)
    return steps, order, offsets[: steps * ranks + 1], padded[: steps * ranks]


def _room(count: int, ranks: int, every: int) -> int:
    """Groups there can be at most: one for each sequence, completed to whole micro-steps."""
    steps = -(-count // ranks)
    return -(-steps // every) * every * ranks


@jit
def _value(rows: int, width: int, column: float, token: float, square: float) -> float:
    """Cost of a micro-batch without its fixed part."""
    return column * width + token * rows * width + square * rows * float(width) * width


@jit
def _reach(
    start: int, wide: Array, cap: float, budget: int, limit: int, column: float, token: float, square: float
) -> int:
    """End of the run that begins at ``start`` (its longest) when it costs at most ``cap``, fixed part aside.

    ``start`` itself where one row alone costs more; one row may be over the budget.
    """
    width = wide[start]
    rows = max(min(budget // width, limit), 1)
    per_row = token * width + square * float(width) * width
    if per_row > 0.0 and cap < np.inf:
        rows = min(rows, int((cap - column * width) / per_row * (1.0 + 1e-12)))
    stop: int = min(start + max(rows, 0), len(wide))
    return stop


@jit
def _runs(
    wide: Array, cap: float, most: int, budget: int, limit: int, column: float, token: float, square: float
) -> int:
    """Runs that a greedy cut under ``cap`` needs; ``most + 1`` as soon as there are more."""
    start, count = 0, 0
    while start < len(wide) and count <= most:
        stop = _reach(start, wide, cap, budget, limit, column, token, square)
        if stop == start:
            return most + 1
        start, count = stop, count + 1
    return count


@jit
def _cheapest(
    wide: Array, rate: Array, price: float, cap: float, budget: int, limit: int, column: float, best: Array, back: Array
) -> int:
    """Runs of the least total cost when each costs ``price`` more; their bounds lie in ``back``. Returns their number.

    best[j] = min over i of best[i] + price + column * wide[i] + (j - i) * rate[i], with ``rate`` (n,) the cost of a row
    as wide as item i. Rates fall as i grows, so the best i never moves back as j grows, and neither does the first i
    that the cap allows: only those in between are tried.
    """
    n = len(wide)
    best[0] = 0.0
    first = 0
    for j in range(1, n + 1):
        while first < j - 1:
            rows = j - first
            if rows <= limit and rows * wide[first] <= budget and column * wide[first] + rows * rate[first] <= cap:
                break
            first += 1
        lowest, at = np.inf, first
        for i in range(first, j):
            total = best[i] + column * wide[i] + (j - i) * rate[i]
            if total < lowest:
                lowest, at = total, i
        best[j] = lowest + price
        back[j] = first = at
    count, j = 0, n
    while j > 0:
        j = back[j]
        count += 1
    return count


@jit
def _cap(
    wide: Array,
    groups: int,
    real: float,
    top: float,
    budget: int,
    limit: int,
    column: float,
    token: float,
    square: float,
) -> float:
    """The smallest cost that no run exceeds when a greedy cut needs at most ``groups``, to 0.2 %."""
    low, high = real / groups * 0.999, top
    while high - low > 0.002 * high:
        middle = 0.5 * (low + high)
        if _runs(wide, middle, groups, budget, limit, column, token, square) <= groups:
            high = middle
        else:
            low = middle
    return high


@jit
def _advance(
    start: int, wide: Array, cap: float, ranks: int, budget: int, limit: int, column: float, token: float, square: float
) -> int:
    """Where a micro-step that begins at ``start`` ends when each of its ranks takes all that ``cap`` allows."""
    for _ in range(ranks):
        if start < len(wide):
            start = _reach(start, wide, cap, budget, limit, column, token, square)
    return start


@jit
def _last_cap(
    caps: Array,
    wide: Array,
    ranks: int,
    top: float,
    budget: int,
    limit: int,
    column: float,
    token: float,
    square: float,
) -> float:
    """The smallest cap of the last micro-step, the others given; ``inf`` where none is enough."""
    start = 0
    for step in range(len(caps) - 1):
        start = _advance(start, wide, caps[step], ranks, budget, limit, column, token, square)
    if start >= len(wide):
        return 0.0
    low, high = 0.0, top
    if _advance(start, wide, high, ranks, budget, limit, column, token, square) < len(wide):
        return np.inf
    while high - low > 0.003 * top:
        middle = 0.5 * (low + high)
        if _advance(start, wide, middle, ranks, budget, limit, column, token, square) < len(wide):
            low = middle
        else:
            high = middle
    return high


@jit
def _tune(
    caps: Array,
    wide: Array,
    ranks: int,
    top: float,
    budget: int,
    limit: int,
    column: float,
    token: float,
    square: float,
) -> float:
    """Give each micro-step a cap of its own, by coordinate descent from equal ones; returns their sum."""
    last = len(caps) - 1
    lowest: float = caps.sum()
    for scale in (0.25, 0.08, 0.02):
        for step in range(last):
            for sign in (-1.0, 1.0):
                while True:
                    held, held_last = caps[step], caps[last]
                    caps[step] = min(held * (1.0 + sign * scale), top)
                    caps[last] = _last_cap(caps, wide, ranks, top, budget, limit, column, token, square)
                    total = caps.sum()
                    if total < lowest * 0.9995:
                        lowest = total
                    else:
                        caps[step], caps[last] = held, held_last
                        break
    return lowest


@jit
def _tighten(
    start: int,
    stop: int,
    wide: Array,
    rate: Array,
    cap: float,
    fixed: float,
    ranks: int,
    budget: int,
    limit: int,
    column: float,
    token: float,
    square: float,
    best: Array,
    back: Array,
    kept: Array,
) -> None:
    """Runs of one micro-step with the least padding under its cap, at most one for each rank; bounds in ``kept``."""
    at = start
    while at < stop:  # the greedy cut is one way; keep it where no price does better
        behind = min(_reach(at, wide, cap, budget, limit, column, token, square), stop)
        kept[behind] = at
        at = behind
    n = stop - start
    low, high, price = 0.0, -1.0, fixed
    for _ in range(_ROUNDS):
        count = _cheapest(wide[start:stop], rate[start:stop], price, cap, budget, limit, column, best, back)
        if count <= ranks:
            j = n
            while j > 0:
                kept[start + j] = start + back[j]
                j = back[j]
            high = price
            if count == ranks or n <= ranks:
                return
            price = 0.5 * (low + high)
        else:
            low = price
            price = 4.0 * price + 1.0 if high < 0.0 else 0.5 * (low + high)


@jit
def _plan(
    lengths: Array,
    budget: int,
    ranks: int,
    multiple: int,
    limit: int,
    every: int,
    fixed: float,
    column: float,
    token: float,
    square: float,
    order: Array,
    offsets: Array,
    padded: Array,
) -> int:
    n = len(lengths)
    keys = np.empty(n, dtype=np.int64)
    for i in range(n):
        keys[i] = (np.int64(lengths[i]) << 32) | (n - 1 - i)  # longest first, equal ones in their order
    keys.sort()
    ranked = np.empty(n, dtype=np.int64)
    wide = np.empty(n, dtype=np.int64)
    for i in range(n):
        key = keys[n - 1 - i]
        ranked[i] = n - 1 - (key & 0xFFFFFFFF)
        wide[i] = -(-(key >> 32) // multiple) * multiple
    rate = np.empty(n)
    real = 0.0
    for i in range(n):
        rate[i] = token * wide[i] + square * float(wide[i]) * wide[i]
        real += rate[i]
    top = column * wide[0] + rate[0] * max(min(budget // wide[0], limit), 1)
    top = max(top, real + column * wide[0])
    fewest = _runs(wide, np.inf, n, budget, limit, column, token, square)
    first = -(-fewest // ranks)
    first = -(-first // every) * every

    best, back, kept = np.empty(n + 1), np.zeros(n + 1, np.int64), np.zeros(n + 1, np.int64)
    if ranks == 1:
        # The sum of costs is all that counts.
        count = _cheapest(wide, rate, fixed, top, budget, limit, column, best, kept)
        chosen = -(-count // every) * every
    else:
        chosen, best_time, misses, steps = first, np.inf, 0, first
        caps, trial = np.empty(0), np.empty(0)
        while steps <= first + 16 * every and misses < 2:
            trial = np.full(steps, _cap(wide, steps * ranks, real, top, budget, limit, column, token, square))
            time = trial.sum() + fixed * steps
            if time * 0.92 < best_time:  # own caps gain less than that
                time = _tune(trial, wide, ranks, top, budget, limit, column, token, square) + fixed * steps
            if time < best_time:
                chosen, best_time, misses, caps = steps, time, 0, trial
            else:
                misses += 1
            if steps * ranks >= n:
                break
            steps += every
        start = 0
        for step in range(chosen):
            stop = _advance(start, wide, caps[step], ranks, budget, limit, column, token, square)
            _tighten(
                start,
                stop,
                wide,
                rate,
                caps[step],
                fixed,
                ranks,
                budget,
                limit,
                column,
                token,
                square,
                best,
                back,
                kept,
            )
            start = stop

    groups = chosen * ranks
    bounds = np.empty(groups + 1, dtype=np.int64)
    count, j = 0, n
    bounds[0] = n
    while j > 0:
        j = kept[j]
        count += 1
        bounds[count] = j
    value = np.zeros(groups)
    for g in range(count):
        value[g] = -_value(bounds[g] - bounds[g + 1], wide[bounds[g + 1]], column, token, square)
    by_cost = np.argsort(value, kind="mergesort")
    offsets[0] = 0
    at = 0
    for g in range(groups):
        run = by_cost[g]
        padded[g] = 0
        if run < count:
            start, stop = bounds[run + 1], bounds[run]
            for i in range(start, stop):
                order[at] = ranked[i]
                at += 1
            padded[g] = (stop - start) * wide[start]
        offsets[g + 1] = at
    return int(chosen)
