"""The selective scan of Mamba-1 in time linear in the width: kernels for the CPU (numba), no states kept.

For one sequence and channel with state size N::

    h[t] = exp(delta[t] * A) * h[t-1] + delta[t] * u[t] * B[t]        (N,)
    y[t] = sum(C[t] * h[t])                                           scalar

The forward pass keeps the state only every `CHUNK` columns; the backward pass recomputes the states of one chunk at a
time from there. Both release the GIL, so that threads can share the channels.
"""

from __future__ import annotations

import math
from typing import Any

import numba
import numpy as np

__all__ = ["CHUNK", "backward", "forward"]

CHUNK = 64
"""Columns between two kept states."""

_FAST = {"reassoc", "contract", "nsz", "arcp"}
"""No flag that assumes finite numbers: NaN must stay visible."""


@numba.njit(inline="always", fastmath=_FAST)  # type: ignore[untyped-decorator]
def _exp32(x: Any) -> Any:
    """exp in float32 within 2 ulp for x <= 0, written so that the compiler can vectorise it (libm's is a call)."""
    low = np.float32(-87.0)
    x = x if x > low else low
    k = np.floor(x * np.float32(1.4426950408889634) + np.float32(0.5))
    r = x - k * np.float32(0.693359375)  # ln 2 in two parts: the first is exact in float32
    r = r + k * np.float32(2.12194440e-4)
    p = np.float32(1.9875691500e-4)
    p = p * r + np.float32(1.3981999507e-3)
    p = p * r + np.float32(8.3334519073e-3)
    p = p * r + np.float32(4.1665795894e-2)
    p = p * r + np.float32(1.6666665459e-1)
    p = p * r + np.float32(5.0000001201e-1)
    p = p * r * r + r + np.float32(1.0)
    scale = np.int32((np.int32(k) + np.int32(127)) << np.int32(23))
    return p * scale.view(np.float32)


@numba.njit(inline="always")  # type: ignore[untyped-decorator]
def _exp64(x: Any) -> Any:
    return math.exp(x)


def _make(exp: Any, state: int) -> tuple[Any, Any]:
    """Kernels for one state size: known to the compiler, so that loops over the state become vector instructions."""
    N = state

    @numba.njit(nogil=True, fastmath=_FAST)
    def forward(u, delta, A, B, C, y, kept, first, last):  # type: ignore[no-untyped-def]
        rows, _, width = u.shape
        h = np.empty(N, u.dtype)
        for b in range(rows):
            for d in range(first, last):
                h[:] = 0
                for t in range(width):
                    if t % CHUNK == 0:
                        kept[b, d, t // CHUNK, :] = h
                    step = delta[b, d, t]
                    inflow = step * u[b, d, t]
                    total = u.dtype.type(0)
                    for n in range(N):
                        value = exp(step * A[d, n]) * h[n] + inflow * B[b, t, n]
                        h[n] = value
                        total += value * C[b, t, n]
                    y[b, d, t] = total

    @numba.njit(nogil=True, fastmath=_FAST)
    def backward(u, delta, A, B, C, kept, dy, du, ddelta, dA, dB, dC, first, last):  # type: ignore[no-untyped-def]
        rows, _, width = u.shape
        h = np.empty((CHUNK + 1, N), u.dtype)  # h[i + 1] is the state after column start + i
        decay = np.empty((CHUNK, N), u.dtype)
        g = np.empty(N, u.dtype)  # gradient that flows into the state from the columns on the right
        through = np.empty(N, u.dtype)
        of_A = np.zeros(N, u.dtype)  # of one chunk; chunks are added in float64
        total_dA = np.empty(N, np.float64)
        for b in range(rows):
            for d in range(first, last):
                g[:] = 0
                total_dA[:] = 0
                for chunk in range((width + CHUNK - 1) // CHUNK - 1, -1, -1):
                    start = chunk * CHUNK
                    count = min(CHUNK, width - start)
                    h[0, :] = kept[b, d, chunk]
                    for i in range(count):
                        step = delta[b, d, start + i]
                        inflow = step * u[b, d, start + i]
                        for n in range(N):
                            a = exp(step * A[d, n])
                            decay[i, n] = a
                            h[i + 1, n] = a * h[i, n] + inflow * B[b, start + i, n]
                    for i in range(count - 1, -1, -1):
                        t = start + i
                        step = delta[b, d, t]
                        x = u[b, d, t]
                        up = dy[b, d, t]
                        to_inflow = u.dtype.type(0)
                        to_step = u.dtype.type(0)
                        # One loop per target: with few arrays in each, the compiler can tell that they do not overlap.
                        for n in range(N):
                            gn = g[n] + up * C[b, t, n]
                            to_inflow += gn * B[b, t, n]
                            g[n] = gn
                        for n in range(N):
                            dC[b, t, n] += up * h[i + 1, n]
                        inflow = step * x
                        for n in range(N):
                            dB[b, t, n] += g[n] * inflow
                        for n in range(N):
                            gn = g[n] * decay[i, n]
                            g[n] = gn
                            through[n] = gn * h[i, n]
                        for n in range(N):
                            to_step += through[n] * A[d, n]
                            of_A[n] += through[n] * step
                        du[b, d, t] = to_inflow * step
                        ddelta[b, d, t] = to_inflow * x + to_step
                    for n in range(N):
                        total_dA[n] += of_A[n]
                        of_A[n] = 0
                for n in range(N):
                    dA[d, n] += total_dA[n]

    return forward, backward


_MADE: dict[tuple[str, int], tuple[Any, Any]] = {}


def _kernels(dtype: np.dtype[Any], state: int) -> tuple[Any, Any]:
    key = (dtype.name, state)
    if key not in _MADE:
        _MADE[key] = _make(_exp32 if dtype == np.float32 else _exp64, state)
    return _MADE[key]


def forward(
    u: np.ndarray[Any, Any],
    delta: np.ndarray[Any, Any],
    A: np.ndarray[Any, Any],
    B: np.ndarray[Any, Any],
    C: np.ndarray[Any, Any],
    y: np.ndarray[Any, Any],
    kept: np.ndarray[Any, Any],
    *,
    first: int,
    last: int,
) -> None:
    """Fill ``y`` (rows, channels, width) and ``kept`` (rows, channels, chunks, N) for channels [first, last).

    ``u``, ``delta`` (rows, channels, width), ``A`` (channels, N), ``B``, ``C`` (rows, width, N); all C-contiguous and
    of one type, float32 or float64.
    """
    _kernels(u.dtype, A.shape[1])[0](u, delta, A, B, C, y, kept, first, last)


def backward(
    u: np.ndarray[Any, Any],
    delta: np.ndarray[Any, Any],
    A: np.ndarray[Any, Any],
    B: np.ndarray[Any, Any],
    C: np.ndarray[Any, Any],
    kept: np.ndarray[Any, Any],
    dy: np.ndarray[Any, Any],
    du: np.ndarray[Any, Any],
    ddelta: np.ndarray[Any, Any],
    dA: np.ndarray[Any, Any],
    dB: np.ndarray[Any, Any],
    dC: np.ndarray[Any, Any],
    *,
    first: int,
    last: int,
) -> None:
    """Fill ``du``, ``ddelta`` and add to ``dA``, ``dB``, ``dC`` what channels [first, last) contribute.

    ``dB`` and ``dC`` are summed over channels: give each thread its own.
    """
    _kernels(u.dtype, A.shape[1])[1](u, delta, A, B, C, kept, dy, du, ddelta, dA, dB, dC, first, last)
