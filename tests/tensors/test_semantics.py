"""Loss and gradients of a regrouped step equal those of its sequences one at a time, on real models."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from padless import compact, regroup
from padless.logits import cross_entropy, log_probs, token_losses
from padless.loss import MODES, aggregate, denominators, target_mask
from padless.tensors import rlhf
from support.batches import random_mask, rl_batch, token_batch
from support.trainers import tiny_model

QWEN_LAYOUTS = (
    "right-padded",
    "right-padded-no-mask",
    "packed-position-ids",
    "packed-block-mask-additive",
    "packed-block-mask-bool",
)
NORM = 7.0


def gradient(model: torch.nn.Module) -> Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def run(model: torch.nn.Module, parts: Iterable[Tensor]) -> tuple[float, Tensor]:
    model.zero_grad()
    total = 0.0
    for part in parts:
        part.backward()
        total += part.item()
    return total, gradient(model)


def assert_same(got: tuple[float, Tensor], expected: tuple[float, Tensor]) -> None:
    assert got[0] == pytest.approx(expected[0], rel=1e-5)
    assert (got[1] - expected[1]).norm() <= 1e-5 * expected[1].norm()


def one_at_a_time(model: torch.nn.Module, batch: dict[str, Any], mode: Any) -> tuple[float, Tensor]:
    """The step from its definition: every sequence alone, unpadded, the mode written out."""
    per_sequence: list[tuple[Tensor, int]] = []
    for ids, mask, labels in zip(batch["input_ids"], batch["attention_mask"], batch["labels"], strict=True):
        real = mask.nonzero().flatten()
        own = slice(int(real[0]), int(real[-1]) + 1)
        logits = model(input_ids=ids[own][None], attention_mask=mask[own][None]).logits[0]
        wanted = labels[own][1:] != -100
        losses = torch.nn.functional.cross_entropy(logits[:-1][wanted], labels[own][1:][wanted], reduction="sum")
        per_sequence.append((losses, int(wanted.sum())))
    kept = [(total, count) for total, count in per_sequence if count]
    if mode == "token-mean":
        loss = sum(total for total, _ in kept) / sum(count for _, count in kept)
    elif mode == "seq-mean-token-mean":
        loss = sum(total / count for total, count in kept) / len(kept)
    else:
        loss = sum(total for total, _ in kept) / len(kept) / (NORM if mode.endswith("norm") else 1.0)
    return run(model, [loss])


def parts_of(model: torch.nn.Module, batch: dict[str, Any], step: Any, mode: Any) -> Iterable[Tensor]:
    whole = denominators(target_mask(batch["labels"], batch["attention_mask"]))
    for micro in step:
        labels = micro.inputs["labels"]
        call = {key: value for key, value in micro.inputs.items() if key != "labels"}
        wanted = target_mask(labels, document_ids=micro.document_ids)
        values = token_losses(model(**call).logits, labels, wanted)
        yield aggregate(
            values,
            wanted,
            mode,
            denominators=whole,
            document_ids=micro.document_ids,
            norm=NORM if mode.endswith("norm") else None,
        )


def supervised(seed: int, *, holes: bool, rows: int = 7, width: int = 12) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    batch = token_batch(rng, random_mask(rng, rows, width, holes=holes))
    return {key: batch[key] for key in ("input_ids", "attention_mask", "labels")}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("layout", QWEN_LAYOUTS)
def test_a_transformer_step_is_the_same_in_every_layout_and_mode(layout: str, mode: Any) -> None:
    model = tiny_model("qwen2")
    batch = supervised(1, holes=layout in ("right-padded", "packed-block-mask-additive"))
    step = regroup(batch, 24, layout=layout)
    assert len(step) >= 2
    assert_same(run(model, parts_of(model, batch, step, mode)), one_at_a_time(model, batch, mode))


@pytest.mark.parametrize("method", ["fixed", "greedy", "balanced"])
@pytest.mark.parametrize("layout", ["right-padded", "right-padded-no-mask"])
def test_a_hybrid_step_is_the_same_in_every_padded_layout(layout: str, method: str) -> None:
    model = tiny_model("jamba")
    batch = supervised(2, holes=False)
    step = regroup(batch, 30, layout=layout, method=method, multiple_of=2)
    expected = one_at_a_time(model, batch, "token-mean")
    assert_same(run(model, parts_of(model, batch, step, "token-mean")), expected)


def test_packing_a_hybrid_changes_its_loss_so_the_comparison_can_fail() -> None:
    model = tiny_model("jamba")
    batch = supervised(2, holes=False)
    step = regroup(batch, 30, layout="packed")
    got, expected = run(model, parts_of(model, batch, step, "token-mean")), one_at_a_time(model, batch, "token-mean")
    assert (got[1] - expected[1]).norm() > 1e-3 * expected[1].norm()


@pytest.mark.parametrize("seed", range(3))
def test_the_number_of_micro_batches_never_changes_a_step(seed: int) -> None:
    model = tiny_model("qwen2")
    batch = supervised(seed + 10, holes=True)
    expected = one_at_a_time(model, batch, "token-mean")
    for budget in (12, 25, 84):
        assert_same(run(model, parts_of(model, batch, regroup(batch, budget), "token-mean")), expected)


@pytest.mark.parametrize("kind", ["qwen2", "jamba"])
def test_a_compacted_batch_gives_each_sequences_own_outputs(kind: str) -> None:
    model = tiny_model(kind).eval()
    batch = supervised(3, holes=False)
    small = compact(batch)
    with torch.no_grad():
        logits = small.restore(model(**{k: v for k, v in small.batch.items() if k != "labels"}).logits)
        for row, mask in enumerate(batch["attention_mask"]):
            real = mask.nonzero().flatten()
            alone = model(input_ids=batch["input_ids"][row, real][None]).logits[0]
            torch.testing.assert_close(logits[row, real], alone, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.parametrize("responses", ["sequence", "block"])
def test_a_policy_gradient_step_is_the_same_in_every_alignment_of_responses(layout: str, responses: Any) -> None:
    if layout == "packed" and responses == "block":
        return  # packed rows have one alignment
    model = tiny_model("qwen2")
    batch = rl_batch(np.random.default_rng(4), 6, 5, 8)
    prompt = 5

    def alone() -> Iterable[Tensor]:
        count = batch["response_mask"].sum()
        for row, mask in enumerate(batch["attention_mask"]):
            real = mask.nonzero().flatten()
            ids = batch["input_ids"][row, real]
            scores = model(input_ids=ids[None]).logits[0, :-1].log_softmax(-1).gather(-1, ids[1:, None])[:, 0]
            n = int(batch["response_mask"][row].sum())
            assert int(real[-1]) + 1 == prompt + n
            ratio = (scores[-n:] - batch["old_log_probs"][row, :n]).exp()
            yield -(ratio * batch["advantages"][row, :n]).sum() / count

    def regrouped() -> Iterable[Tensor]:
        whole = denominators(batch["response_mask"])
        for micro in regroup(batch, 40, layout=layout, fields=rlhf(), responses=responses):
            inputs = micro.inputs
            call = {k: v for k, v in inputs.items() if k not in rlhf() or rlhf()[k].span != "response"}
            if responses == "block":
                marked = (micro.document_ids >= 0).clone()
                marked[:, 0] = False
                scores = micro.take_responses(log_probs(model, call, marked).values)
            else:
                scores = log_probs(model, call, inputs["response_mask"]).values
            values = -(scores - inputs["old_log_probs"]).exp() * inputs["advantages"]
            yield aggregate(values, inputs["response_mask"], denominators=whole)

    assert_same(run(model, regrouped()), run(model, alone()))


@pytest.mark.parametrize("kind", ["qwen2", "jamba"])
def test_cross_entropy_without_padding_logits_gives_the_same_gradients(kind: str) -> None:
    model = tiny_model(kind)
    batch = supervised(5, holes=False)

    def without() -> Iterable[Tensor]:
        whole = denominators(target_mask(batch["labels"], batch["attention_mask"]))
        for micro in regroup(batch, 30):
            values = cross_entropy(model, micro.inputs, micro.inputs["labels"])
            yield aggregate(values, target_mask(micro.inputs["labels"]), denominators=whole)

    assert_same(run(model, without()), one_at_a_time(model, batch, "token-mean"))
