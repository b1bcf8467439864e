"""Gathered log-probabilities are log_softmax's, forward and backward."""

from __future__ import annotations

import pytest
import torch

from padless.bench import log_probs
from padless.bench.log_probs import gather_log_probs, token_log_probs


@pytest.mark.parametrize("cells", [1 << 24, 170, 40, 1])
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
def test_values_and_gradients_equal_log_softmax(monkeypatch, cells, dtype, limit):
    monkeypatch.setattr(log_probs, "_CELLS", {"cpu": cells})
    torch.manual_seed(0)
    logits = torch.randn(3, 7, 11, dtype=dtype, requires_grad=True)
    targets = torch.randint(0, 11, (3, 7))
    weight = torch.randn(3, 7, dtype=dtype)
    plain = logits.log_softmax(-1).gather(-1, targets[..., None])[..., 0]
    ours = gather_log_probs(logits, targets)
    assert torch.allclose(ours, plain, atol=limit)
    (expected,) = torch.autograd.grad((plain * weight).sum(), logits)
    (found,) = torch.autograd.grad((ours * weight).sum(), logits)
    assert torch.allclose(found, expected, atol=limit)


def test_half_precision_logits_are_summed_in_float32_and_get_gradients_of_their_own_type():
    logits = (torch.randn(2, 5, 300) * 4).bfloat16().requires_grad_()
    targets = torch.randint(0, 300, (2, 5))
    ours = gather_log_probs(logits, targets)
    assert ours.dtype == torch.float32
    plain = logits.float().log_softmax(-1).gather(-1, targets[..., None])[..., 0]
    assert torch.allclose(ours, plain, atol=1e-5)
    ours.sum().backward()
    assert logits.grad.dtype == torch.bfloat16


@pytest.mark.parametrize("cells", [1 << 24, 40])
@pytest.mark.parametrize("columns", [1, 4, 8, 9, 12])
def test_the_last_columns_are_those_of_all_and_the_others_get_no_gradient(monkeypatch, cells, columns):
    monkeypatch.setattr(log_probs, "_CELLS", {"cpu": cells})
    torch.manual_seed(0)
    logits = torch.randn(3, 9, 11, dtype=torch.float64, requires_grad=True)
    ids = torch.randint(0, 11, (3, 9))
    every = torch.nn.functional.pad(token_log_probs(logits, ids), (3, 0))[:, -columns:]
    last = token_log_probs(logits, ids, columns=columns)
    assert torch.equal(last, every)
    weight = torch.randn(3, columns, dtype=torch.float64)
    (expected,) = torch.autograd.grad((every * weight).sum(), logits)
    (found,) = torch.autograd.grad((last * weight).sum(), logits)
    assert torch.equal(found, expected)
    assert not found[:, : max(0, 9 - columns - 1)].any()
    assert not found[:, -1].any()


def test_a_row_of_one_token_has_a_value_and_no_gradient():
    logits = torch.randn(2, 1, 5, requires_grad=True)
    values = token_log_probs(logits, torch.tensor([[1], [4]]))
    assert values.tolist() == [[0], [0]]
    values.sum().backward()
    assert not logits.grad.any()


def test_each_value_sits_at_the_token_it_is_about():
    logits = torch.zeros(1, 3, 5)
    logits[0, 0, 4] = 50.0  # after the first token, 4 is certain
    values = token_log_probs(logits, torch.tensor([[1, 4, 2]]))
    assert values[0, 0] == 0
    assert values[0, 1].abs() < 1e-6
    assert values[0, 2] == pytest.approx(-torch.log(torch.tensor(5.0)).item())
