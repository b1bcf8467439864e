"""One optimizer step, padded and regrouped: the same loss, gradients and parameters, or it says where they part."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from padless import PadlessError
from padless.verify import build_small, check_layouts, check_run, check_step


def batch_of(lengths=(7, 3, 12, 1, 5), *, left: bool = False, seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    width = max(lengths) + 4
    ids = torch.zeros(len(lengths), width, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, n in enumerate(lengths):
        where = slice(width - n, None) if left else slice(0, n)
        ids[row, where] = torch.randint(5, 100, (n,), generator=generator)
        mask[row, where] = 1
    return {"input_ids": ids, "attention_mask": mask}


@pytest.fixture(scope="module")
def qwen2() -> nn.Module:
    return build_small("qwen2")


@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"method": "greedy"},
        {"layout": "right-padded-no-mask"},
        {"layout": "packed-position-ids"},
        {"layout": "packed-cu-seqlens"},
        {"layout": "packed-block-mask-additive"},
    ],
)
def test_every_exact_layout_makes_the_same_step(qwen2, left, options):
    method = {"method": "best-fit-decreasing"} if options.get("layout", "").startswith("packed") else {}
    report = check_step(qwen2, batch_of(left=left), token_budget=16, **{**method, **options})
    assert report.same, report.explain()
    assert report.micro_batches >= 2
    assert report.padded_tokens[1] < report.padded_tokens[0]
    assert report.check() is report


def test_a_leaking_layout_makes_another_step_and_the_parameter_is_named():
    model = build_small("jamba")
    report = check_step(
        model,
        batch_of((6, 5, 4, 3)),
        token_budget=16,
        layout="packed-position-ids",
        method="best-fit-decreasing",
        unsafe=True,
    )
    assert not report.same
    assert report.worst_parameter in dict(model.named_parameters())
    assert report.gradient_difference > 100 * report.tolerance
    with pytest.raises(PadlessError, match=r"NOT the same step \(furthest away: "):
        report.check()
    assert check_step(model, batch_of((6, 5, 4, 3)), token_budget=16).same


def test_a_verdict_from_the_layout_check_decides_what_regroup_takes(tmp_path):
    model = build_small("jamba")
    verdicts = check_layouts(model, layouts=["right-padded", "packed-position-ids"], seeds=(0,), cache=False)
    assert check_step(model, batch_of(), token_budget=16, layout="auto", report=verdicts).same
    with pytest.raises(PadlessError, match="leaks"):
        check_step(model, batch_of(), token_budget=16, layout="packed-position-ids", report=verdicts)


def test_a_loss_that_averages_inside_the_micro_batch_is_caught(qwen2):
    def averaged(model, inputs):
        logits = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"], use_cache=False).logits
        real = inputs["attention_mask"][:, 1:].bool()
        values = nn.functional.cross_entropy(logits[:, :-1][real], inputs["input_ids"][:, 1:][real], reduction="none")
        return values.mean()

    report = check_step(qwen2, batch_of(), token_budget=16, loss=averaged)
    assert not report.same
    assert report.loss_difference > 0.1


def test_any_loss_whose_parts_add_up_is_the_same(qwen2):
    def squares(model, inputs):
        logits = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"], use_cache=False).logits
        return (logits.square().mean(-1) * inputs["attention_mask"]).sum() / 28

    made = []

    def adam(parameters):
        made.append(torch.optim.AdamW(parameters, lr=1e-3, eps=1e-3))
        return made[-1]

    assert check_step(qwen2, batch_of(), token_budget=16, loss=squares, optimizer=adam).same
    assert len(made) == 3


def test_several_steps_in_a_row_stay_together(qwen2):
    batches = [batch_of(seed=seed, left=bool(seed % 2)) for seed in range(3)]
    report = check_run(qwen2, batches, token_budget=16)
    assert report.same, report.explain()
    assert len(report.losses) == 3
    assert report.losses[0] != report.losses[1]
    with pytest.raises(PadlessError, match="no batch"):
        check_run(qwen2, [], token_budget=16)


def test_the_model_is_handed_back_as_it_came():
    model = build_small("qwen2").train()
    model.model.embed_tokens.weight.requires_grad_(False)
    model.lm_head.weight.grad = kept = torch.ones_like(model.lm_head.weight)
    state, random = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    check_step(model, batch_of(), token_budget=16)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random)
    assert model.lm_head.weight.grad is kept
    assert torch.equal(kept, torch.ones_like(kept))
    assert model.model.layers[0].self_attn.q_proj.weight.grad is None
    assert model.training


def test_labels_decide_the_targets(qwen2):
    batch = batch_of()
    batch["labels"] = torch.where(batch["attention_mask"] > 0, batch["input_ids"], -100)
    batch["labels"][0, :5] = -100
    with_labels = check_step(qwen2, batch, token_budget=16)
    del batch["labels"]
    without = check_step(qwen2, batch, token_budget=16)
    assert with_labels.same
    assert with_labels.losses[0] < without.losses[0]


def test_a_model_without_trainable_parameters_is_refused():
    model = build_small("qwen2").requires_grad_(False)
    with pytest.raises(PadlessError, match="no parameter of the model requires a gradient"):
        check_step(model, batch_of(), token_budget=16)
