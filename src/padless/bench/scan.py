"""The selective scan of Mamba-1 models in time linear in the width, for benchmarks.

The PyTorch path of transformers slices one column after another; the backward pass of each slice writes a gradient as
large as the whole tensor, so that its time grows with the square of the width, which no kernel used in training does.
Timing with it would make padding look far worse than it is. `linear_scan` puts an own autograd function in its place
for the time of a benchmark: same inputs, same outputs, same gradients to rounding, states recomputed and not kept.
The short convolution before the scan is replaced, too (`padless.bench.conv`): with the stock one, on a CPU, a sixth of
Jamba's time went into it and into copies around it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F

__all__ = ["SCAN_MODELS", "has_kernels", "linear_scan", "selective_scan"]

SCAN_MODELS = ("falcon_mamba", "jamba", "mamba", "zamba")
"""Model types of transformers whose scan is Mamba-1's."""

_SEGMENT = 1024
"""Columns whose states exist at the same time in the device-independent path."""


@contextmanager
def linear_scan() -> Iterator[None]:
    """Inside, Mamba-1 models of transformers run what is here instead; afterwards what was there before.

    Where the ``mamba_ssm`` kernels are installed for the device, those are linear already and stay.

    >>> with linear_scan():
    ...     pass  # build and train a Jamba model
    """
    replaced: list[tuple[Any, str, Any]] = []
    for name in SCAN_MODELS:
        try:
            module: Any = import_module(f"transformers.models.{name}.modeling_{name}")
        except ImportError:
            continue
        for function, ours in (("mamba_selective_scan", lambda _: selective_scan), ("causal_conv1d_fn", _convolution)):
            stock = getattr(module, function, None)
            if stock is not None and not has_kernels():
                replaced.append((module, function, stock))
                setattr(module, function, ours(stock))
    try:
        yield
    finally:
        for module, function, stock in replaced:
            setattr(module, function, stock)


def _convolution(stock: Any) -> Any:
    from padless.bench.conv import causal_conv  # loads numba

    return causal_conv(stock)


def has_kernels() -> bool:
    """Whether transformers runs Mamba-1 on ``mamba_ssm`` here."""
    from importlib.util import find_spec

    return torch.cuda.is_available() and find_spec("mamba_ssm") is not None


def selective_scan(
    hidden_states: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    delta_bias: torch.Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
    **ignored: Any,
) -> Any:
    """What ``mamba_selective_scan`` of transformers computes, forward and backward in time linear in the width.

    Args:
        hidden_states, dt: (rows, channels, width).
        A: (channels, N), negative.
        B, C: (rows, N, width).
        D: (channels,), the skip connection.
        z: (rows, channels, width), the gate.
        delta_bias: (channels,), added to ``dt``.
        delta_softplus: apply softplus to ``dt``.
        return_last_state: needs a cache, which training has not; refused.

    Returns:
        (rows, channels, width).
    """
    if return_last_state:
        raise NotImplementedError("the benchmark's scan keeps no state: run the model with use_cache=False")
    exact = torch.promote_types(hidden_states.dtype, torch.float32)  # float32 for half precision, float64 stays
    u, dt, A, B, C = (tensor.to(exact) for tensor in (hidden_states, dt, A, B, C))
    D, z, delta_bias = (tensor if tensor is None else tensor.to(exact) for tensor in (D, z, delta_bias))
    if _is_compiled(u):
        from padless.bench.scan_fused import FusedScan

        D, bias = (A.new_zeros(len(A)) if tensor is None else tensor for tensor in (D, delta_bias))
        fused: Any = FusedScan.apply
        return fused(u, dt, A, B, C, D, bias, z, delta_softplus)
    if delta_bias is not None:
        dt = dt + delta_bias[:, None]
    if delta_softplus:
        dt = F.softplus(dt)
    apply: Any = _Scan.apply
    y = apply(u, dt, A, B.transpose(1, 2), C.transpose(1, 2))
    if D is not None:
        y = y + u * D[:, None]
    if z is not None:
        y = y * F.silu(z)
    return y


def _is_compiled(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu"


# --- other devices: a scan in two levels, about 2 sqrt(columns) launches for each segment


class _Scan(torch.autograd.Function):
    """u, delta (rows, channels, width), A (channels, N), B, C (rows, width, N) -> y (rows, channels, width)."""

    @staticmethod
    def forward(ctx: Any, *given: torch.Tensor) -> torch.Tensor:
        inputs = [tensor.contiguous() for tensor in given]
        y, kept = _forward(*inputs)
        ctx.save_for_backward(*inputs, kept)
        return y

    @staticmethod
    def backward(ctx: Any, *dy: torch.Tensor) -> Any:
        u, delta, A, B, C, kept = ctx.saved_tensors
        return _backward(u, delta, A, B, C, kept, dy[0].contiguous())


def _forward(
    u: torch.Tensor, delta: torch.Tensor, A: torch.Tensor, B: torch.Tensor, C: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    rows, channels, width = u.shape
    y = torch.empty_like(u)
    kept = u.new_zeros(rows, channels, math.ceil(width / _SEGMENT), A.shape[1])
    state = u.new_zeros(rows, channels, A.shape[1])
    for i, part in enumerate(_segments(width)):
        kept[:, :, i] = state
        decay, inflow = _discrete(u[:, :, part], delta[:, :, part], A, B[:, part])
        h, state = _scan(decay, inflow, state)  # (rows, channels, columns, N)
        y[:, :, part] = torch.einsum("rdtn,rtn->rdt", h, C[:, part])
    return y, kept


def _backward(
    u: torch.Tensor,
    delta: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    kept: torch.Tensor,
    dy: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    du, ddelta, dA = torch.empty_like(u), torch.empty_like(u), torch.zeros_like(A)
    dB, dC = torch.empty_like(B), torch.empty_like(C)
    from_right = torch.zeros_like(kept[:, :, 0])  # gradient of the last state of the segment
    for i, part in reversed(list(enumerate(_segments(u.shape[2])))):
        x, step, right, up = u[:, :, part], delta[:, :, part], B[:, part], dy[:, :, part]
        decay, inflow = _discrete(x, step, A, right)
        h, _ = _scan(decay, inflow, kept[:, :, i])
        before = torch.cat([kept[:, :, i, None], h[:, :, :-1]], dim=2)
        own = up[..., None] * C[:, None, part]  # (rows, channels, columns, N)
        # The gradient runs from right to left with the next column's decay; the last one has been applied already.
        shifted = torch.cat([decay[:, :, 1:], torch.ones_like(decay[:, :, :1])], dim=2)
        g, _ = _scan(shifted.flip(2), own.flip(2), from_right)
        g = g.flip(2)
        through = g * decay * before
        to_inflow = torch.einsum("rdtn,rtn->rdt", g, right)
        du[:, :, part] = to_inflow * step
        ddelta[:, :, part] = to_inflow * x + torch.einsum("rdtn,dn->rdt", through, A)
        dA += torch.einsum("rdtn,rdt->dn", through, step)
        dB[:, part] = torch.einsum("rdtn,rdt->rtn", g, step * x)
        dC[:, part] = torch.einsum("rdtn,rdt->rtn", h, up)
        from_right = decay[:, :, 0] * g[:, :, 0]
    return du, ddelta, dA, dB, dC


def _segments(width: int) -> list[slice]:
    return [slice(start, min(start + _SEGMENT, width)) for start in range(0, width, _SEGMENT)]


def _discrete(
    u: torch.Tensor, delta: torch.Tensor, A: torch.Tensor, B: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Decay and inflow of each state, both (rows, channels, columns, N)."""
    return torch.exp(delta[..., None] * A[:, None, :]), (delta * u)[..., None] * B[:, None]


def _scan(decay: torch.Tensor, inflow: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """h[t] = decay[t] * h[t-1] + inflow[t] along axis 2, from ``state`` (rows, channels, N); all h and the last one.

    Columns are cut into runs; all runs are scanned side by side, then chained, then what flowed in is added.
    """
    rows, channels, width, size = decay.shape
    run = math.ceil(math.sqrt(width))
    extra = math.ceil(width / run) * run - width
    decay = F.pad(decay, (0, 0, 0, extra), value=1.0).view(rows, channels, -1, run, size)
    h = F.pad(inflow, (0, 0, 0, extra)).clone().view(rows, channels, -1, run, size)
    for k in range(1, run):
        h[:, :, :, k] += decay[:, :, :, k] * h[:, :, :, k - 1]
    product = decay.cumprod(dim=3)
    entering = torch.empty_like(h[:, :, :, 0])  # (rows, channels, runs, N)
    for r in range(h.shape[2]):
        entering[:, :, r] = state
        state = product[:, :, r, -1] * state + h[:, :, r, -1]
    h += product * entering[:, :, :, None]
    return h.view(rows, channels, -1, size)[:, :, :width], state
