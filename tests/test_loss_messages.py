"""What `accumulate` and `token_losses` say about a loss, or logits, that cannot be meant."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from padless import PadlessError
from padless.accumulate import accumulate
from padless.logits import token_losses


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (lambda model, rows: 3.0, r"backward\(3\.0\): the loss is a float; expected a scalar tensor"),
        (lambda model, rows: None, r"backward\(None\): the loss is a NoneType"),
        (lambda model, rows: model(rows)[:, 0], r"the loss has shape \(3,\); expected a scalar: .*aggregate"),
        (lambda model, rows: model(rows).sum().detach(), r"no gradient leads from the loss .*no_grad"),
    ],
)
def test_a_loss_that_cannot_be_backpropagated_is_described(made: Any, said: str) -> None:
    model = torch.nn.Linear(2, 1)
    before = [p.clone() for p in model.parameters()]
    step = accumulate([torch.ones(3, 2)], model, torch.optim.SGD(model.parameters(), lr=0.1))

    def run() -> None:
        for rows in step:
            step.backward(made(model, rows))

    with pytest.raises(PadlessError, match=said):
        run()
    assert not step.stepped
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_a_loss_of_one_entry_is_a_scalar() -> None:
    model = torch.nn.Linear(2, 1)
    step = accumulate([torch.ones(1, 2)], model, torch.optim.SGD(model.parameters(), lr=0.1))
    for rows in step:
        assert step.backward(model(rows)[0])
    assert step.stepped


def test_a_models_output_is_not_its_logits() -> None:
    from transformers.modeling_outputs import CausalLMOutput

    labels = torch.tensor([[1, 2, 3]])
    for output in (CausalLMOutput(logits=torch.zeros(1, 3, 4)), {"logits": torch.zeros(1, 3, 4)}):
        with pytest.raises(PadlessError, match=r"logits is a \w+: give its logits: model\(\.\.\.\)\.logits"):
            token_losses(output, labels)  # type: ignore[arg-type]
    with pytest.raises(PadlessError, match=r"logits is a tuple: expected a tensor"):
        token_losses((torch.zeros(1, 3, 4),), labels)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("shape", "said"),
    [
        ((1, 2, 4), r"logits of shape \(1, 2, 4\) do not belong to labels of shape \(1, 3\): .*logits\[:, :-1\]"),
        ((1, 5, 4), r"\(1, 5, 4\) do not belong"),
        ((2, 3, 4), r"\(2, 3, 4\) do not belong"),
        ((3, 4), r"\(3, 4\) do not belong"),
    ],
)
def test_cut_logits_are_shown_with_the_labels_that_they_should_fit(shape: tuple[int, ...], said: str) -> None:
    with pytest.raises(PadlessError, match=said):
        token_losses(torch.zeros(shape), torch.tensor([[1, 2, 3]]))


def test_a_mask_of_another_shape_and_labels_that_are_no_tensor_are_named() -> None:
    logits, labels = torch.zeros(1, 3, 4), torch.tensor([[1, 2, 3]])
    with pytest.raises(PadlessError, match=r"the mask has shape \(1, 2\), the labels \(1, 3\)"):
        token_losses(logits, labels, torch.ones(1, 2))
    with pytest.raises(PadlessError, match=r"labels is \[\[1, 2, 3\]\]; expected a tensor"):
        token_losses(logits, [[1, 2, 3]])  # type: ignore[arg-type]
