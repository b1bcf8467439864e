"""The short causal convolution of Mamba models on the CPU, as one autograd function around compiled kernels.

Training runs it in a kernel of its own (``causal_conv1d``); what transformers does without that (a convolution in
groups of one channel, and transposed copies before and after it) takes a sixth of Jamba's time on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from padless.bench.conv_kernels import kernels
from padless.bench.scan_threads import run_shares, shares_of
from padless.bench.scan_vectors import LANES

__all__ = ["causal_conv", "channels_last"]

_WORTH_SHARING = 200_000
"""Numbers (rows x channels x width) from which on a second thread pays."""


def causal_conv(stock: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """What ``causal_conv1d_fn`` of transformers computes; ``stock`` is that, for what the kernels do not cover.

    They cover float32 and float64 on the CPU, SiLU as activation, and channels in multiples of `LANES`.
    """

    def convolve(
        hidden_states: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        activation: str | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """``hidden_states`` (rows, channels, width), ``weight`` (channels, K), ``bias`` (channels,)."""
        covered = (
            hidden_states.device.type == "cpu"
            and hidden_states.dtype in (torch.float32, torch.float64)
            and weight.dtype == hidden_states.dtype
            and activation == "silu"
            and hidden_states.shape[1] % LANES == 0
        )
        if not covered:
            return stock(hidden_states, weight, bias, activation=activation, **kwargs)
        convolution: Any = _Convolution.apply
        result: torch.Tensor = convolution(hidden_states, weight, bias)
        return result

    return convolve


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *given: Any) -> Any:
        """See `torch.autograd.Function`."""
        x, weight, bias = given
        lines = channels_last(x)
        turned = weight.t().contiguous()  # (K, channels)
        line = weight.new_zeros(len(weight)) if bias is None else bias.contiguous()
        out = x.new_empty(lines.shape)
        arrays = [tensor.detach().numpy() for tensor in (lines, turned, line, out)]
        kernel, _ = kernels(arrays[0].dtype)
        shares = _shares(x)
        run_shares(lambda i: kernel(*arrays, *shares[i]), len(shares))
        ctx.save_for_backward(lines, turned, line)
        ctx.biased = bias is not None
        return out.transpose(1, 2)

    @staticmethod
    def backward(ctx: Any, *given: torch.Tensor) -> Any:
        """See `torch.autograd.Function`."""
        lines, turned, line = ctx.saved_tensors
        dout, dx = channels_last(given[0]), lines.new_empty(lines.shape)
        sums = turned.new_empty(len(turned) + 1, turned.shape[1])
        total = torch.empty_like(sums, dtype=torch.float64)
        arrays = [tensor.detach().numpy() for tensor in (lines, turned, line, dout, dx, sums, total)]
        _, kernel = kernels(arrays[0].dtype)
        shares = _shares(given[0])
        run_shares(lambda i: kernel(*arrays, *shares[i]), len(shares))
        found = total.to(turned.dtype)
        return dx.transpose(1, 2), found[:-1].t(), found[-1] if ctx.biased else None


def channels_last(tensor: torch.Tensor) -> torch.Tensor:
    """(rows, channels, width) -> (rows, width, channels) with neighbouring channels neighbours in memory."""
    turned = tensor.transpose(1, 2)
    return turned if turned.stride(2) == 1 else turned.contiguous()


def _shares(x: torch.Tensor) -> list[tuple[int, int]]:
    return shares_of(x.shape[1] // LANES, worth_it=x.numel() >= _WORTH_SHARING)
