"""The benchmark's scan is what transformers computes, forward and backward, in time linear in the width."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import JambaConfig, JambaForCausalLM
from transformers.models.jamba import modeling_jamba

from padless.bench import scan, scan_fused, scan_kernels, scan_vectors
from padless.bench.scan import linear_scan, selective_scan

STOCK = modeling_jamba.mamba_selective_scan


def arguments(dtype: torch.dtype, rows: int = 2, channels: int = 20, width: int = 70, state: int = 16, seed: int = 0):
    torch.manual_seed(seed)
    given = {
        "hidden_states": torch.randn(rows, channels, width, dtype=dtype),
        "dt": torch.randn(rows, channels, width, dtype=dtype),
        "A": -torch.rand(channels, state, dtype=dtype) * 8 - 0.1,
        "B": torch.randn(rows, state, width, dtype=dtype),
        "C": torch.randn(rows, state, width, dtype=dtype),
        "D": torch.randn(channels, dtype=dtype),
        "z": torch.randn(rows, channels, width, dtype=dtype),
        "delta_bias": torch.randn(channels, dtype=dtype),
    }
    return {name: tensor.requires_grad_() for name, tensor in given.items()}


def outputs(run, given):
    out = run(**given, delta_softplus=True)
    weight = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
    return out.detach(), torch.autograd.grad((out * weight).sum(), list(given.values()))


def plain(hidden_states, dt, A, B, C, D, z, delta_bias, delta_softplus):
    """The recurrence as written in the paper, every step in the inputs' own precision."""
    delta = torch.nn.functional.softplus(dt + delta_bias[:, None])
    state, columns = torch.zeros_like(A).expand(len(dt), *A.shape), []
    for t in range(dt.shape[2]):
        inflow = (delta[:, :, t] * hidden_states[:, :, t])[..., None] * B[:, None, :, t]
        state = torch.exp(delta[:, :, t, None] * A) * state + inflow
        columns.append((state * C[:, None, :, t]).sum(-1))
    return (torch.stack(columns, -1) + hidden_states * D[:, None]) * torch.nn.functional.silu(z)


def difference(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm().clamp(min=1e-30))


@pytest.fixture(params=["compiled", "any device"])
def path(request, monkeypatch):
    """Both implementations; the second normally runs on other devices only."""
    if request.param == "any device":
        monkeypatch.setattr(scan, "_is_compiled", lambda tensor: False)
        monkeypatch.setattr(scan, "_SEGMENT", 32)
    return request.param


@pytest.mark.parametrize(
    ("against", "dtype", "limit"),
    [(plain, torch.float64, 1e-12), (STOCK, torch.float32, 5e-6), (STOCK, torch.float64, 2e-7)],
    ids=["recurrence-float64", "stock-float32", "stock-float64"],
)
@pytest.mark.parametrize("width", [1, 63, 64, 65, 150])
def test_scan_equals_the_stock_path_forward_and_backward(path, against, dtype, limit, width):
    """The stock path rounds B to float32 even in float64, so that the plain recurrence is the sharper check there."""
    given = arguments(dtype, width=width)
    ours, our_grads = outputs(selective_scan, given)
    stock, stock_grads = outputs(against, given)
    assert difference(ours, stock) < limit
    for name, a, b in zip(given, our_grads, stock_grads, strict=True):
        assert a.dtype == b.dtype
        assert difference(a, b) < limit, name


def test_scan_passes_gradcheck(path):
    given = arguments(torch.float64, rows=1, channels=2, width=20)
    tensors = tuple(given[name] for name in ("hidden_states", "dt", "A", "B", "C"))
    assert torch.autograd.gradcheck(lambda *t: selective_scan(*t, delta_softplus=True), tensors)


@pytest.mark.parametrize("channels", [1, 16, 37])
@pytest.mark.parametrize("state", [1, 5, 16])
def test_channels_and_states_of_any_number_are_scanned(channels, state):
    given = arguments(torch.float64, channels=channels, state=state, width=80)
    ours, our_grads = outputs(selective_scan, given)
    expected, expected_grads = outputs(plain, given)
    assert difference(ours, expected) < 1e-12
    for name, a, b in zip(given, our_grads, expected_grads, strict=True):
        assert difference(a, b) < 1e-12, name


def test_inputs_of_any_layout_in_memory_give_the_same():
    given = arguments(torch.float32)
    turned = {name: tensor.detach().clone().requires_grad_() for name, tensor in given.items()}
    for name in ("hidden_states", "dt", "B", "C", "z"):
        turned[name] = turned[name].detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()
    one, one_grads = outputs(selective_scan, given)
    other, other_grads = outputs(selective_scan, turned)
    assert torch.equal(one, other)
    assert all(torch.equal(a, b) for a, b in zip(one_grads, other_grads, strict=True))


@pytest.mark.parametrize("without", [{"z"}, {"D"}, {"delta_bias"}, {"z", "D", "delta_bias"}])
@pytest.mark.parametrize("softplus", [False, True])
def test_parts_that_a_model_has_not_are_left_out(monkeypatch, without, softplus):
    given = arguments(torch.float64)
    if not softplus:
        given["dt"] = (given["dt"].detach().abs() + 3).requires_grad_()  # a step is positive
    given = {name: tensor for name, tensor in given.items() if name not in without}

    def run():
        out = selective_scan(**given, delta_softplus=softplus)
        weight = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
        return out.detach(), torch.autograd.grad((out * weight).sum(), list(given.values()))

    ours, our_grads = run()
    monkeypatch.setattr(scan, "_is_compiled", lambda tensor: False)
    expected, expected_grads = run()
    assert difference(ours, expected) < 1e-12
    for name, a, b in zip(given, our_grads, expected_grads, strict=True):
        assert difference(a, b) < 1e-12, name


def test_several_threads_give_the_same_as_one_and_the_same_every_time(monkeypatch):
    monkeypatch.setattr(scan_fused, "_WORTH_SHARING", 0)
    given = arguments(torch.float32, channels=70, width=130)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one, one_grads = outputs(selective_scan, given)
        torch.set_num_threads(3)
        three, three_grads = outputs(selective_scan, given)
        again, again_grads = outputs(selective_scan, given)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(one, three)
    assert torch.equal(three, again)
    for a, b, c in zip(one_grads, three_grads, again_grads, strict=True):
        assert difference(a, b) < 1e-6
        assert torch.equal(b, c)


@pytest.mark.parametrize("where", ["hidden_states", "dt", "B", "C", "z"])
def test_not_a_number_stays_visible(path, where):
    given = arguments(torch.float32, width=90)
    with torch.no_grad():
        given[where][0, 1, 5] = float("nan")
    out = selective_scan(**given, delta_softplus=True)
    alone = {"hidden_states": out[0, 1, 5:], "dt": out[0, 1, 5:], "B": out[0, :, 5:]}
    assert alone.get(where, out[0, 1, 5]).isnan().all()
    assert not out[0, :, :5].isnan().any()
    assert not out[1].isnan().any()
    if where in ("hidden_states", "dt", "z"):
        assert not out[0, 0].isnan().any()
    _, grads = outputs(selective_scan, given)
    assert dict(zip(given, grads, strict=True))["A"].isnan().any()


def test_a_rate_that_is_not_a_number_stays_visible(path):
    given = arguments(torch.float32, width=20)
    with torch.no_grad():
        given["A"][3, 2] = float("nan")
    out = selective_scan(**given, delta_softplus=True)
    assert out[:, 3].isnan().all()
    assert not out[:, 2].isnan().any()


def test_states_that_have_decayed_become_0_before_they_are_subnormal():
    """Subnormal numbers are slow, and every row that ends in padding would run into them."""
    given = arguments(torch.float32, width=600)
    with torch.no_grad():
        given["hidden_states"][:, :, 3:] = 0
        given["A"][:] = -1.0
        given["dt"][:] = 0.0
        given["delta_bias"][:] = 0.0
    ours, our_grads = outputs(selective_scan, given)
    fine = {name: tensor.detach().double().requires_grad_() for name, tensor in given.items()}
    expected, expected_grads = outputs(plain, fine)
    assert (ours[:, :, 150:] == 0).all()
    assert difference(ours.double(), expected) < 1e-6
    for name, a, b in zip(given, our_grads, expected_grads, strict=True):
        assert difference(a.double(), b) < 1e-5, name


def test_large_steps_decay_to_nothing_and_do_not_overflow(path):
    given = arguments(torch.float32, width=40)
    with torch.no_grad():
        given["dt"][:] = 60.0
    ours, _ = outputs(selective_scan, given)
    stock, _ = outputs(STOCK, given)
    assert difference(ours, stock) < 1e-5


def test_kernels_are_kept_on_disk_and_stamped_by_both_of_their_files():
    """What a kernel is made of beside its own file: the operations on vectors."""
    kernel = scan_kernels.kernels(np.dtype(np.float32))[0]
    stamp = kernel._cache._cache_file._source_stamp
    files = {Path(scan_vectors.__file__), *Path(scan_kernels.__file__).parent.glob("*_kernels.py")}
    digest = hashlib.sha256(b"".join(hashlib.sha256(file.read_bytes()).digest() for file in sorted(files)))
    assert stamp[0] == digest.hexdigest()
    assert Path(kernel.stats.cache_path).is_dir()
    assert sum(kernel.stats.cache_hits.values()) + sum(kernel.stats.cache_misses.values()) == 1


def test_half_precision_is_scanned_in_float32():
    given = arguments(torch.bfloat16, width=40)
    fine = {name: tensor.detach().float().requires_grad_() for name, tensor in given.items()}
    ours, grads = outputs(selective_scan, given)
    stock, _ = outputs(STOCK, fine)
    assert difference(ours.float(), stock) < 2e-2
    assert [grad.dtype for grad in grads] == [torch.bfloat16] * len(grads)


def test_a_kept_state_is_refused():
    with pytest.raises(NotImplementedError, match="use_cache=False"):
        selective_scan(**arguments(torch.float32, width=4), return_last_state=True)


def small_jamba(dtype: torch.dtype) -> JambaForCausalLM:
    torch.manual_seed(0)
    config = JambaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=2,
        num_key_value_heads=1, attn_layer_period=4, attn_layer_offset=2, num_experts=4, use_cache=False,
        experts_implementation="eager",
    )  # fmt: skip
    return JambaForCausalLM(config).to(dtype)


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float64, 1e-6), (torch.float32, 2e-5)])
def test_a_whole_jamba_model_gives_the_same_outputs_and_gradients(dtype, limit):
    model = small_jamba(dtype)
    ids = torch.randint(0, 64, (3, 90), generator=torch.Generator().manual_seed(1))
    mask = (torch.arange(90) < torch.tensor([90, 50, 71])[:, None]).long()

    def run():
        model.zero_grad()
        logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
        logits.log_softmax(-1)[..., 0].sum().backward()
        return logits.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}

    stock, stock_grads = run()
    with linear_scan():
        ours, our_grads = run()
    assert difference(ours, stock) < limit
    for name, grad in stock_grads.items():
        assert difference(our_grads[name], grad) < limit, name


def test_the_stock_convolution_is_back_afterwards():
    stock = modeling_jamba.causal_conv1d_fn
    with linear_scan():
        assert modeling_jamba.causal_conv1d_fn is not stock
    assert modeling_jamba.causal_conv1d_fn is stock


def test_the_stock_scan_is_back_afterwards_even_after_an_error():
    def fail():
        with linear_scan():
            assert modeling_jamba.mamba_selective_scan is selective_scan
            raise RuntimeError("inside")

    with pytest.raises(RuntimeError, match="inside"):
        fail()
    assert modeling_jamba.mamba_selective_scan is STOCK
