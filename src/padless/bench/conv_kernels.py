"""The short causal convolution of Mamba models with its activation: kernels for the CPU (numba).

For each channel, with ``K`` weights::

    y[t] = bias + sum over k of weight[k] * x[t - K + 1 + k]          x is 0 before the first column
    out[t] = y[t] * sigmoid(y[t])

A vector holds `LANES` neighbouring channels; arrays are (rows, width, channels), whose number is a multiple of that.
The backward pass computes ``y`` again.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import numba
import numpy as np

from padless.bench import scan_vectors
from padless.bench.scan_vectors import LANES, add, fma, load, mul, silu, silu_slope, store, widen
from padless.planning.kernels import jit, only_for

__all__ = ["kernels"]

_compiled = partial(jit, made_of=(scan_vectors.__file__,), nogil=True, error_model="numpy")


def _forward(x, weight, bias, out, first, last):  # type: ignore[no-untyped-def]
    """Fill ``out`` for the channels of blocks [first, last)."""
    K = weight.shape[0]
    for b in range(x.shape[0]):
        for c in range(first * LANES, last * LANES, LANES):
            for t in range(x.shape[1]):
                y = load(bias, (c,))
                for k in range(max(0, K - 1 - t), K):
                    y = fma(load(weight, (k, c)), load(x, (b, t - K + 1 + k, c)), y)
                store(out, (b, t, c), silu(y))


def _backward(x, weight, bias, dout, dx, sums, total, first, last):  # type: ignore[no-untyped-def]
    """Fill ``dx``, and ``total`` with the gradients of the weights (K lines) and the bias, for blocks [first, last)."""
    K = weight.shape[0]
    total[:, first * LANES : last * LANES] = 0
    for b in range(x.shape[0]):
        for c in range(first * LANES, last * LANES, LANES):
            sums[:, c : c + LANES] = 0
            for t in range(x.shape[1]):
                y = load(bias, (c,))
                for k in range(max(0, K - 1 - t), K):
                    y = fma(load(weight, (k, c)), load(x, (b, t - K + 1 + k, c)), y)
                dy = mul(load(dout, (b, t, c)), silu_slope(y))
                store(sums, (K, c), add(load(sums, (K, c)), dy))
                for k in range(max(0, K - 1 - t), K):
                    s = t - K + 1 + k
                    store(sums, (k, c), fma(dy, load(x, (b, s, c)), load(sums, (k, c))))
                    share = mul(dy, load(weight, (k, c)))
                    # Column s is met first at t = s, with the last weight.
                    store(dx, (b, s, c), share if k == K - 1 else add(load(dx, (b, s, c)), share))
            for k in range(K + 1):
                widen(total, (k, c), load(sums, (k, c)))


@cache
def kernels(dtype: np.dtype[Any]) -> tuple[Any, Any]:
    """The two compiled functions for float32 or float64: forward, backward.

    Shapes, all of one type but ``total``, and in all of them neighbouring channels are neighbours in memory:

    * ``x``, ``out``, ``dout``, ``dx``: (rows, width, channels).
    * ``weight``: (K, channels); ``bias``: (channels,).
    * ``total``: (K + 1, channels) in float64; ``sums``: the same in their type, scratch.
    """
    number, whole = numba.from_dtype(dtype), numba.intp
    loose, flat, line = number[:, :, :], number[:, ::1], number[::1]
    forward = (loose, flat, line, loose, whole, whole)
    backward = (loose, flat, line, loose, loose, flat, numba.float64[:, ::1], whole, whole)
    return only_for(forward, _compiled(_forward)), only_for(backward, _compiled(_backward))
