"""The selective scan on the CPU as one autograd function around the compiled kernels.

What surrounds the scan is in the kernels, too: softplus of the step, the skip connection and the gate would each be a
pass through memory of their own, which together took longer than the scan.
"""

from __future__ import annotations

from typing import Any

import torch

from padless.bench.conv import channels_last
from padless.bench.scan_kernels import CHUNK, TILES, kernels
from padless.bench.scan_threads import run_shares, shares_of
from padless.bench.scan_vectors import LANES, rate_unit

__all__ = ["FusedScan"]

_WORTH_SHARING = 500_000
"""States (rows x channels x width x N) below which handing a share to another thread takes longer than computing it."""


class FusedScan(torch.autograd.Function):
    """The whole of `padless.bench.scan.selective_scan`; all tensors of one type, float32 or float64.

    Takes u, dt (rows, channels, width), A (channels, N), B, C (rows, N, width), D, bias (channels,), z (rows, channels,
    width) or ``None``, and whether softplus is applied. Gives (rows, channels, width), in memory (rows, width,
    channels): as the projection that comes next wants it.
    """

    @staticmethod
    def forward(ctx: Any, *given: Any) -> Any:
        """See `torch.autograd.Function`."""
        *tensors, z, soft = given
        u, dt, A, B, C, D, bias = tensors  # B and C are read with any strides
        dt, A, D, bias = (tensor.contiguous() for tensor in (dt, A, D, bias))
        rows, channels, width = u.shape
        u = channels_last(u)
        inputs = [u, dt, A, B, C, D, bias, u[:0] if z is None else channels_last(z)]
        state, blocks = A.shape[1], -(-channels // LANES)
        shares = shares_of(blocks, worth_it=u.numel() * state >= _WORTH_SHARING)
        out = u.new_empty(rows, width, channels)
        kept = u.new_empty(rows, blocks, -(-width // CHUNK), state, LANES)
        arrays = _arrays(*inputs, out, kept, u.new_empty(blocks, 2 * state + 2, LANES))
        tiles = u.new_empty(len(shares), TILES, CHUNK, LANES).numpy()
        kernel, _ = kernels(tiles.dtype)
        options = (rate_unit(tiles.dtype), soft, z is not None)
        run_shares(lambda i: kernel(*arrays, tiles[i], *shares[i], *options), len(shares))
        ctx.save_for_backward(*inputs, kept)
        ctx.options = options
        return out.transpose(1, 2)

    @staticmethod
    def backward(ctx: Any, *given: torch.Tensor) -> Any:
        """See `torch.autograd.Function`."""
        *inputs, kept = ctx.saved_tensors
        u, dt, A, B = inputs[:4]
        state, blocks = A.shape[1], kept.shape[1]
        shares = shares_of(blocks, worth_it=u.numel() * state >= _WORTH_SHARING)
        du, ddt, dz = u.new_empty(u.shape), torch.empty_like(dt), u.new_empty(inputs[7].shape)
        dB, dC = u.new_empty(2, len(shares), *B.shape)  # one for each thread: summed over its channels
        total = u.new_empty(blocks, state + 2, LANES, dtype=torch.float64)
        before = _arrays(*inputs, kept, channels_last(given[0]), du, ddt)
        after = _arrays(dz, total, u.new_empty(blocks, 2 * state + 2, LANES))
        of_B, of_C = _arrays(dB, dC)
        tiles = u.new_empty(len(shares), TILES, CHUNK, LANES).numpy()
        sums = u.new_empty(len(shares), 2, state, CHUNK, LANES).numpy()
        _, kernel = kernels(tiles.dtype)

        def run(i: int) -> None:
            kernel(*before, of_B[i], of_C[i], *after, tiles[i], sums[i], *shares[i], *ctx.options)

        run_shares(run, len(shares))
        # (blocks, N + 2, lanes) -> (channels, N + 2)
        of_channels = total.transpose(1, 2).reshape(-1, state + 2)[: u.shape[2]].to(u.dtype)
        dA, dD, dbias = of_channels[:, :state], of_channels[:, state], of_channels[:, state + 1]
        dz = dz.transpose(1, 2) if ctx.options[-1] else None
        return du.transpose(1, 2), ddt, dA, dB.sum(0), dC.sum(0), dD, dbias, dz, None


def _arrays(*tensors: torch.Tensor) -> list[Any]:
    return [tensor.detach().numpy() for tensor in tensors]
