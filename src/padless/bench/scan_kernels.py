"""The selective scan of Mamba-1 in time linear in the width: kernels for the CPU (numba), no states kept.

For one sequence and channel with state size N::

    delta[t] = softplus(dt[t] + bias)                                 scalar
    h[t] = exp(delta[t] * A) * h[t-1] + delta[t] * u[t] * B[t]        (N,)
    y[t] = sum(C[t] * h[t]) + D * u[t]                                scalar
    out[t] = y[t] * z[t] * sigmoid(z[t])                              scalar

A vector holds the same number of `LANES` channels, a block, so that sums over states need no sums over lanes. Columns
go by chunks: what a chunk needs is transposed once into tiles (columns, lanes), then each state runs through it.

The forward pass keeps the states only at the beginning of each chunk; the backward pass recomputes those inside from
there. Both release the GIL, so that threads can share the blocks.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import numba
import numpy as np

from padless.bench import scan_vectors
from padless.bench.scan_vectors import (
    LANES,
    add,
    decay,
    flush,
    fma,
    fold,
    load,
    mul,
    same,
    silu,
    silu_slope,
    softplus,
    softplus_slope,
    spread,
    store,
    turn,
    widen,
)
from padless.planning.kernels import jit, only_for

__all__ = ["CHUNK", "TILES", "kernels"]

CHUNK = 64
"""Columns between two kept states."""

TILES = 11
"""Tiles (CHUNK, LANES) that a kernel works in."""

_SINCE = 8
"""Columns after which states that have decayed to nothing are set to 0, as where padding follows: numbers so small
that they are subnormal made the scan of padded rows take twice as long."""

_DELTA, _U, _INFLOW, _Y, _GATE, _DY, _DECAY, _STATE, _TO_INFLOW, _TO_STEP, _X = range(TILES)


_compiled = partial(jit, made_of=(scan_vectors.__file__,), nogil=True, error_model="numpy")


@_compiled
def _load_tile(source, b, first, lanes, start, count, tile):  # type: ignore[no-untyped-def]
    """``source`` (rows, channels, width) -> ``tile`` (columns, lanes), 0 in lanes without a channel."""
    whole = count - count % LANES if lanes == LANES else 0
    for i in range(0, whole, LANES):
        turn(source, (b, first, start + i), tile, (i, 0))
    if lanes < LANES:
        tile[:count] = 0
    for lane in range(lanes):
        for i in range(whole, count):
            tile[i, lane] = source[b, first + lane, start + i]


@_compiled
def _store_tile(tile, target, b, first, lanes, start, count):  # type: ignore[no-untyped-def]
    """The other way round."""
    whole = count - count % LANES if lanes == LANES else 0
    for i in range(0, whole, LANES):
        turn(tile, (i, 0), target, (b, first, start + i))
    for lane in range(lanes):
        for i in range(whole, count):
            target[b, first + lane, start + i] = tile[i, lane]


@_compiled
def _load_lines(source, b, first, lanes, start, count, tile):  # type: ignore[no-untyped-def]
    """``source`` (rows, width, channels) -> ``tile`` (columns, lanes), 0 in lanes without a channel."""
    if lanes == LANES:
        for i in range(count):
            store(tile, (i, 0), load(source, (b, start + i, first)))
    else:
        tile[:count] = 0
        for i in range(count):
            for lane in range(lanes):
                tile[i, lane] = source[b, start + i, first + lane]


@_compiled
def _store_lines(tile, target, b, first, lanes, start, count):  # type: ignore[no-untyped-def]
    """The other way round."""
    if lanes == LANES:
        for i in range(count):
            store(target, (b, start + i, first), load(tile, (i, 0)))
    else:
        for i in range(count):
            for lane in range(lanes):
                target[b, start + i, first + lane] = tile[i, lane]


@_compiled
def _load_channels(A, D, bias, unit, first, last, ours):  # type: ignore[no-untyped-def]
    """What the channels of blocks [first, last) have: lines of A times ``unit``, then D, then the bias of dt."""
    channels, N = A.shape
    ours[first:last] = 0
    for channel in range(first * LANES, min(last * LANES, channels)):
        block, lane = channel // LANES, channel % LANES
        for n in range(N):
            ours[block, n, lane] = A[channel, n] * unit
        ours[block, N, lane] = D[channel]
        ours[block, N + 1, lane] = bias[channel]


@_compiled
def _prepare(u, dt, b, first, lanes, start, count, soft, skip, bias, tiles):  # type: ignore[no-untyped-def]
    """Tiles of u, dt with its bias, delta, their product, and y as far as it is D * u."""
    _load_lines(u, b, first, lanes, start, count, tiles[_U])
    _load_tile(dt, b, first, lanes, start, count, tiles[_X])
    for i in range(count):
        delta = add(load(tiles, (_X, i, 0)), bias)
        store(tiles, (_X, i, 0), delta)
        if soft:
            delta = softplus(delta)
        x = load(tiles, (_U, i, 0))
        store(tiles, (_DELTA, i, 0), delta)
        store(tiles, (_INFLOW, i, 0), mul(delta, x))
        store(tiles, (_Y, i, 0), mul(skip, x))


def _forward(u, dt, A, B, C, D, bias, z, out, kept, ours, tiles, first, last, unit, soft, gated):  # type: ignore[no-untyped-def]
    """Fill ``out`` and ``kept`` for the channels of blocks [first, last)."""
    rows, channels, width = dt.shape
    N = A.shape[1]
    _load_channels(A, D, bias, unit, first, last, ours)
    for b in range(rows):
        for block in range(first, last):
            begin = block * LANES
            lanes = min(LANES, channels - begin)
            skip, shift = load(ours, (block, N, 0)), load(ours, (block, N + 1, 0))
            ours[block, N + 2 :] = 0  # the states
            for chunk in range((width + CHUNK - 1) // CHUNK):
                start = chunk * CHUNK
                count = min(CHUNK, width - start)
                _prepare(u, dt, b, begin, lanes, start, count, soft, skip, shift, tiles)
                for n in range(N):
                    rate, h = load(ours, (block, n, 0)), load(ours, (block, N + 2 + n, 0))
                    store(kept, (b, block, chunk, n, 0), h)
                    for i in range(count):
                        inflow = mul(load(tiles, (_INFLOW, i, 0)), spread(B, (b, n, start + i)))
                        h = fma(decay(load(tiles, (_DELTA, i, 0)), rate), h, inflow)
                        store(tiles, (_Y, i, 0), fma(spread(C, (b, n, start + i)), h, load(tiles, (_Y, i, 0))))
                        if i % _SINCE == _SINCE - 1:
                            h = flush(h)
                    store(ours, (block, N + 2 + n, 0), h)
                if gated:
                    _load_lines(z, b, begin, lanes, start, count, tiles[_GATE])
                    for i in range(count):
                        gate = load(tiles, (_GATE, i, 0))
                        store(tiles, (_Y, i, 0), mul(load(tiles, (_Y, i, 0)), silu(gate)))
                _store_lines(tiles[_Y], out, b, begin, lanes, start, count)


@_compiled
def _open_gate(dout, z, b, first, lanes, start, count, gated, tiles):  # type: ignore[no-untyped-def]
    """Tiles of the gradient of y, and of what y is multiplied with to give the gradient of z."""
    _load_lines(dout, b, first, lanes, start, count, tiles[_DY])
    if gated:
        _load_lines(z, b, first, lanes, start, count, tiles[_GATE])
        for i in range(count):
            gate, up = load(tiles, (_GATE, i, 0)), load(tiles, (_DY, i, 0))
            store(tiles, (_DY, i, 0), mul(up, silu(gate)))
            store(tiles, (_GATE, i, 0), mul(up, silu_slope(gate)))


@_compiled
def _one_state(B, C, b, n, block, start, count, kept, ours, tiles, of_B, of_C, total):  # type: ignore[no-untyped-def]
    """Run one state through a chunk, forth and back."""
    N = B.shape[1]
    rate, h = load(ours, (block, n, 0)), load(kept, (b, block, start // CHUNK, n, 0))
    for i in range(count):
        store(tiles, (_STATE, i, 0), h)  # before the column
        share = decay(load(tiles, (_DELTA, i, 0)), rate)
        store(tiles, (_DECAY, i, 0), share)
        inflow = mul(load(tiles, (_INFLOW, i, 0)), spread(B, (b, n, start + i)))
        h = fma(share, h, inflow)
        store(tiles, (_Y, i, 0), fma(spread(C, (b, n, start + i)), h, load(tiles, (_Y, i, 0))))
        if i % _SINCE == _SINCE - 1:
            h = flush(h)
    g = load(ours, (block, N + 2 + n, 0))  # what flows into the state after this chunk from the columns on the right
    share, of_A = same(g, 1.0), same(g, 0.0)
    for back in range(count):
        i = count - 1 - back
        up = load(tiles, (_DY, i, 0))
        g = fma(share, g, mul(up, spread(C, (b, n, start + i))))
        store(of_C, (n, i, 0), fma(up, h, load(of_C, (n, i, 0))))
        store(of_B, (n, i, 0), fma(g, load(tiles, (_INFLOW, i, 0)), load(of_B, (n, i, 0))))
        store(tiles, (_TO_INFLOW, i, 0), fma(g, spread(B, (b, n, start + i)), load(tiles, (_TO_INFLOW, i, 0))))
        share, h = load(tiles, (_DECAY, i, 0)), load(tiles, (_STATE, i, 0))
        through = mul(mul(share, g), h)
        store(tiles, (_TO_STEP, i, 0), fma(through, rate, load(tiles, (_TO_STEP, i, 0))))
        of_A = fma(through, load(tiles, (_DELTA, i, 0)), of_A)
        if i % _SINCE == 0:
            g = flush(g)
    store(ours, (block, N + 2 + n, 0), mul(share, g))
    widen(total, (block, n, 0), of_A)


@_compiled
def _close(block, count, soft, gated, unit, ours, tiles, total):  # type: ignore[no-untyped-def]
    """Gradients of u, dt and z in the places of those tiles; of D and the bias in ``total``."""
    N = total.shape[1] - 2
    skip = load(ours, (block, N, 0))
    one_over_unit, of_D, of_bias = same(skip, 1 / unit), same(skip, 0.0), same(skip, 0.0)
    for i in range(count):
        x, up, to_inflow = load(tiles, (_U, i, 0)), load(tiles, (_DY, i, 0)), load(tiles, (_TO_INFLOW, i, 0))
        step = fma(to_inflow, x, mul(load(tiles, (_TO_STEP, i, 0)), one_over_unit))
        if soft:
            step = mul(step, softplus_slope(load(tiles, (_X, i, 0))))
        of_D, of_bias = fma(up, x, of_D), add(of_bias, step)
        store(tiles, (_X, i, 0), step)
        store(tiles, (_U, i, 0), fma(to_inflow, load(tiles, (_DELTA, i, 0)), mul(skip, up)))
        if gated:
            store(tiles, (_GATE, i, 0), mul(load(tiles, (_GATE, i, 0)), load(tiles, (_Y, i, 0))))
    widen(total, (block, N, 0), of_D)
    widen(total, (block, N + 1, 0), of_bias)


@_compiled
def _store_sums(sums, target, b, start, count):  # type: ignore[no-untyped-def]
    """``sums`` (N, columns, lanes) summed over lanes -> ``target`` (rows, N, width)."""
    for n in range(sums.shape[0]):
        for i in range(0, count, LANES):
            if i + LANES <= count:
                fold(sums, (n, i, 0), target, (b, n, start + i))
            else:
                fold(sums, (n, i, 0), sums, (n, i, 0))
                for rest in range(count - i):
                    target[b, n, start + i + rest] = sums[n, i, rest]


# fmt: off
def _backward(  # type: ignore[no-untyped-def]
    u, dt, A, B, C, D, bias, z, kept, dout, du, ddt, dB, dC, dz, total, ours, tiles, sums, first, last, unit, soft,
    gated,
):
    # fmt: on
    """Fill ``du``, ``ddt``, ``dz`` and ``total`` for blocks [first, last); ``dB`` and ``dC`` are of this thread."""
    rows, channels, width = dt.shape
    N = A.shape[1]
    _load_channels(A, D, bias, unit, first, last, ours)
    total[first:last] = 0
    for b in range(rows):
        ours[first:last, N + 2 :] = 0  # gradients of the states, from the right
        for chunk in range((width + CHUNK - 1) // CHUNK - 1, -1, -1):
            start = chunk * CHUNK
            count = min(CHUNK, width - start)
            sums[:] = 0
            for block in range(first, last):
                begin = block * LANES
                lanes = min(LANES, channels - begin)
                skip, shift = load(ours, (block, N, 0)), load(ours, (block, N + 1, 0))
                _prepare(u, dt, b, begin, lanes, start, count, soft, skip, shift, tiles)
                _open_gate(dout, z, b, begin, lanes, start, count, gated, tiles)
                tiles[_TO_INFLOW] = 0
                tiles[_TO_STEP] = 0
                for n in range(N):
                    _one_state(B, C, b, n, block, start, count, kept, ours, tiles, sums[0], sums[1], total)
                _close(block, count, soft, gated, unit, ours, tiles, total)
                _store_lines(tiles[_U], du, b, begin, lanes, start, count)
                _store_tile(tiles[_X], ddt, b, begin, lanes, start, count)
                if gated:
                    _store_lines(tiles[_GATE], dz, b, begin, lanes, start, count)
            _store_sums(sums[0], dB, b, start, count)
            _store_sums(sums[1], dC, b, start, count)


@cache
def kernels(dtype: np.dtype[Any]) -> tuple[Any, Any]:
    """The two compiled functions for float32 or float64: forward, backward.

    Shapes, all of one type but ``total``; where the last axis is channels, these are neighbours in memory:

    * ``dt``, ``ddt``: (rows, channels, width), contiguous.
    * ``A``: (channels, N); ``D``, ``bias``: (channels,).
    * ``B``, ``C``: (rows, N, width), of any strides; ``dB``, ``dC``: the same, contiguous, one for each thread.
    * ``u``, ``z``, ``out``, and their gradients: (rows, width, channels); without ``gated``, ``z`` and ``dz`` are left
      alone.
    * ``kept``: (rows, blocks, chunks, N, LANES), the states before each chunk.
    * ``total``: (blocks, N + 2, LANES) in float64, the gradients of A (N lines), D and bias.
    * Scratch: ``ours`` (blocks, 2 N + 2, LANES), shared; ``tiles`` (TILES, CHUNK, LANES) and ``sums``
      (2, N, CHUNK, LANES), one for each thread.

    ``first``, ``last``: blocks of `LANES` channels. ``soft``: softplus is applied to ``dt`` + ``bias``.
    """
    number = numba.from_dtype(dtype)
    whole, flag, real = numba.intp, numba.boolean, numba.float64
    solid = {rank: number[(slice(None),) * (rank - 1) + (slice(None, None, 1),)] for rank in (2, 3, 4, 5)}
    line, loose = number[::1], number[:, :, :]
    given = (loose, solid[3], solid[2], loose, loose, line, line, loose)
    common = (whole, whole, real, flag, flag)
    forward = (*given, loose, solid[5], solid[3], solid[3], *common)
    gradients = (loose, *[solid[3]] * 3, loose, real[:, :, ::1])
    backward = (*given, solid[5], loose, *gradients, solid[3], solid[3], solid[4], *common)
    return only_for(forward, _compiled(_forward)), only_for(backward, _compiled(_backward))
