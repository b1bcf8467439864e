"""The benchmark's short convolution is what transformers computes, forward and backward."""

from __future__ import annotations

import pytest
import torch
from transformers.models.jamba import modeling_jamba

from padless.bench import conv
from padless.bench.conv import causal_conv

STOCK = modeling_jamba.causal_conv1d_fn


def refuse(*given, **options):
    raise AssertionError("the stock convolution was called")


def arguments(dtype=torch.float64, rows=2, channels=32, width=21, K=4, bias=True):
    torch.manual_seed(0)
    given = [torch.randn(rows, channels, width, dtype=dtype), torch.randn(channels, K, dtype=dtype)]
    given += [torch.randn(channels, dtype=dtype)] if bias else []
    return [tensor.requires_grad_() for tensor in given]


def outputs(convolve, given):
    out = convolve(*given, activation="silu")
    weight = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)
    return [out.detach(), *torch.autograd.grad((out * weight).sum(), given)]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("K", [1, 2, 4, 7])
@pytest.mark.parametrize("width", [1, 3, 64, 130])
def test_convolution_equals_the_stock_one_forward_and_backward(width: int, K: int, bias: bool) -> None:
    given = arguments(width=width, K=K, bias=bias)
    for ours, theirs in zip(outputs(causal_conv(refuse), given), outputs(STOCK, given), strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-12, atol=1e-12)


def test_float32_is_equal_to_rounding() -> None:
    given = arguments(torch.float32, rows=3, channels=96, width=300)
    for ours, theirs in zip(outputs(causal_conv(refuse), given), outputs(STOCK, given), strict=True):
        assert float((ours - theirs).norm() / theirs.norm()) < 1e-6


def test_convolution_passes_gradcheck() -> None:
    assert torch.autograd.gradcheck(lambda *given: causal_conv(refuse)(*given, activation="silu"), arguments(width=5))


def test_inputs_of_any_layout_in_memory_give_the_same() -> None:
    """A model hands over half of the transposed output of a linear layer."""
    x, weight, bias = arguments(width=40)
    wide = torch.randn(2, 40, 64, dtype=torch.float64)
    wide[..., :32] = x.detach().transpose(1, 2)
    view = wide.transpose(1, 2).chunk(2, dim=1)[0].requires_grad_()
    first = outputs(causal_conv(refuse), [x, weight, bias])
    second = outputs(causal_conv(refuse), [view, weight, bias])
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_several_threads_give_the_same_as_one(monkeypatch) -> None:
    monkeypatch.setattr(conv, "_WORTH_SHARING", 0)
    given, before = arguments(torch.float32, channels=80, width=90), torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = outputs(causal_conv(refuse), given)
        torch.set_num_threads(3)
        three = outputs(causal_conv(refuse), given)
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for a, b in zip(one, three, strict=True))


@pytest.mark.parametrize(
    ("dtype", "channels", "activation"),
    [(torch.bfloat16, 32, "silu"), (torch.float32, 20, "silu"), (torch.float32, 32, "gelu"), (torch.float32, 32, None)],
)
def test_what_the_kernels_do_not_cover_goes_to_the_stock_one(dtype, channels, activation) -> None:
    x, weight, bias = arguments(dtype, channels=channels)
    ours = causal_conv(STOCK)(x, weight, bias, activation=activation)
    assert torch.equal(ours, STOCK(x, weight, bias, activation=activation))


def test_nothing_of_the_future_flows_in() -> None:
    x, weight, bias = (tensor.detach() for tensor in arguments(width=30))
    other = x.clone()
    other[:, :, 12:] += 1
    before, after = (causal_conv(refuse)(given, weight, bias, activation="silu") for given in (x, other))
    assert torch.equal(before[:, :, :12], after[:, :, :12])
    assert not torch.equal(before[:, :, 12], after[:, :, 12])
