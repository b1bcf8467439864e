"""accumulate in one process, and on DDP and FSDP2 models in 2 and 4 gloo processes against one sequence at a time."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import padless
from padless import PadlessError, accumulate, regroup
from padless.logits import token_losses
from padless.loss import Denominators, aggregate, denominators, target_mask
from padless.windows import windows
from support.batches import random_mask, token_batch
from support.forked import run_forked
from support.trainers import tiny_model

Batch = dict[str, Any]
CONTROL = ("input_ids", "attention_mask", "labels")


def rows(seed: int, count: int, width: int) -> Batch:
    rng = np.random.default_rng(seed)
    batch = token_batch(rng, random_mask(rng, max(count, 1), width, holes=False))
    return {key: batch[key][:count] for key in CONTROL}


def reference(
    kind: str, steps: list[list[Batch]], *, mode: Any = "token-mean", keep: Any = None, max_norm: Any = None
) -> Any:
    """The same optimizer steps in one process: every sequence alone, without padding."""
    model = tiny_model(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses, norms = [], []
    for number, parts in enumerate(steps):
        sequences = [
            {key: part[key][i][part["attention_mask"][i] > 0][None] for key in CONTROL}
            for part in parts
            for i in range(len(part["labels"]))
        ]
        if keep is not None:
            sequences = [sequence for i, sequence in enumerate(sequences) if i in keep[number]]
        whole = denominators([target_mask(s["labels"]) for s in sequences])
        optimizer.zero_grad()
        total = 0.0
        for sequence in sequences:
            logits = model(input_ids=sequence["input_ids"]).logits
            wanted = target_mask(sequence["labels"])
            loss = aggregate(token_losses(logits, sequence["labels"], wanted), wanted, mode, denominators=whole)
            loss.backward()
            total += loss.item()
        if max_norm is not None:
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), max_norm).item())
        optimizer.step()
        losses.append(total)
    return losses, norms, dict(model.named_parameters())


def assert_same_parameters(got: dict[str, Tensor], expected: dict[str, Tensor], kind: str = "qwen2") -> None:
    """Updates, not values: a small learning rate must not hide a difference."""
    start = dict(tiny_model(kind).named_parameters())
    update = torch.cat([(expected[name] - start[name]).detach().flatten() for name in expected])
    difference = torch.cat([(got[name] - expected[name]).detach().flatten() for name in expected])
    assert difference.norm() <= 1e-5 * update.norm()


STEPS = [[rows(100 + 10 * step + rank, (6, 0, 1, 4)[rank], 8 + rank) for rank in range(4)] for step in range(2)]


@pytest.fixture(scope="module", params=[2, 4])
def trained(request: pytest.FixtureRequest) -> tuple[list[list[Batch]], list[dict[str, Any]]]:
    ranks = request.param
    steps = [step[:ranks] for step in STEPS]
    return steps, run_forked("support.rank_loss", "everything", ranks, seconds=280, steps=steps)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen2", "jamba"])
def test_every_model_and_wrapper_trains_as_one_process_with_one_sequence_at_a_time(trained: Any, kind: str) -> None:
    steps, found = trained
    losses, _, parameters = reference(kind, steps)
    runs = [name for name in found[0] if name.startswith(f"{kind} ")]
    assert runs
    for name in runs:
        for result in found:
            assert result[name]["losses"] == pytest.approx(losses, rel=1e-5), name
            assert_same_parameters(result[name]["parameters"], parameters, kind)


@pytest.mark.slow
def test_ranks_without_rows_ran_micro_batches_of_no_weight(trained: Any) -> None:
    _, found = trained
    assert 0.0 in found[1]["qwen2 never"]["weights"]
    assert {len(result["qwen2 never"]["weights"]) for result in found} == {len(found[0]["qwen2 never"]["weights"])}


@pytest.mark.slow
def test_a_micro_step_with_a_non_finite_loss_on_one_rank_is_left_out_on_all(trained: Any) -> None:
    steps, found = trained
    for name in (name for name in found[0] if name.startswith("skip ")):
        assert all(result[name]["skipped"] == len(steps) for result in found)
        keep = [{i for r in found for kept, rows_ in r[name]["kept"][step] if kept for i in rows_} for step in range(2)]
        losses, _, parameters = reference("qwen2", steps, keep=keep)
        for result in found:
            assert result[name]["losses"] == pytest.approx(losses, rel=1e-5)
            assert_same_parameters(result[name]["parameters"], parameters)


@pytest.mark.slow
def test_gradients_are_clipped_once_by_the_norm_over_all_ranks(trained: Any) -> None:
    steps, found = trained
    losses, norms, parameters = reference("qwen2", steps, mode="seq-mean-token-mean", max_norm=0.05)
    for name in (name for name in found[0] if name.startswith("clip ")):
        for result in found:
            assert result[name]["norms"] == pytest.approx(norms, rel=1e-4)
            assert result[name]["losses"] == pytest.approx(losses, rel=1e-5)
            assert_same_parameters(result[name]["parameters"], parameters)


@pytest.mark.slow
def test_windows_over_ranks_that_run_out_at_different_times_raise_on_every_rank(trained: Any) -> None:
    _, found = trained
    assert all("ranks [0" in result["windows"] and "have no micro-batch" in result["windows"] for result in found)


def linear() -> tuple[nn.Linear, torch.optim.SGD]:
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    return model, torch.optim.SGD(model.parameters(), lr=1.0)


def test_one_process_steps_once_and_reports() -> None:
    model = tiny_model("qwen2")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    batch = STEPS[0][0]
    whole = denominators(target_mask(batch["labels"], batch["attention_mask"]))
    run = accumulate(regroup(batch, 16), model, optimizer, max_norm=1e9, scheduler=scheduler)
    for micro in run:
        labels = micro.inputs.pop("labels")
        wanted = target_mask(labels)
        run.backward(aggregate(token_losses(model(**micro.inputs).logits, labels, wanted), wanted, denominators=whole))
    assert run.stepped
    assert run.grad_norm is not None
    losses, _, parameters = reference("qwen2", [STEPS[0][:1]])
    assert float(run.loss) == pytest.approx(losses[0], rel=1e-5)
    assert_same_parameters(dict(model.named_parameters()), parameters)
    assert scheduler.get_last_lr()[0] == pytest.approx(0.005)


def test_a_gradient_scaler_unscales_before_clipping_and_refuses_overflows() -> None:
    model, optimizer = linear()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    run = accumulate([torch.ones(1, 1)] * 2, model, optimizer, scaler=scaler, max_norm=10.0)
    for rows_ in run:
        run.backward(model(rows_).sum() / 2)
    assert run.grad_norm.item() == pytest.approx(1.0)
    assert model.weight.item() == pytest.approx(0.0)
    run = accumulate([torch.full((1, 1), 1e38)], model, optimizer, scaler=scaler)
    for rows_ in run:
        run.backward(model(rows_).sum() * 1e3)
    assert not run.stepped
    assert scaler.get_scale() == 512.0


def test_an_iterator_of_unknown_length_and_an_empty_one() -> None:
    model, optimizer = linear()
    run = accumulate((torch.full((1, 1), float(n)) for n in (1, 2)), model, optimizer)
    for item in run:
        run.backward(model(item).sum())
    assert model.weight.item() == 1.0 - 3.0
    run = accumulate(iter(()), model, optimizer)
    assert list(run) == []
    assert not run.stepped


def test_leaving_the_loop_applies_nothing_and_leaves_the_model_usable() -> None:
    model, optimizer = linear()
    run = accumulate([torch.ones(1, 1)] * 3, model, optimizer)
    for item in run:
        run.backward(model(item).sum())
        break
    assert model.weight.item() == 1.0
    assert not run.stepped
    with pytest.raises(PadlessError, match="make a new one"):
        list(run)


def test_a_step_whose_micro_batches_were_all_skipped_leaves_the_parameters_alone() -> None:
    model, _ = linear()
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.5)
    step = Denominators(targets=1, sequences=1)
    run = accumulate([torch.full((1, 1), float("inf"))], model, optimizer, denominators=step, skip_nonfinite=True)
    for item in run:
        assert not run.backward(model(item).sum(), targets=step)
    assert not run.stepped
    assert model.weight.item() == 1.0


def test_a_micro_batch_of_no_weight_counts_for_nothing_whatever_its_loss() -> None:
    model, optimizer = linear()

    class Filler:
        weight = 0.0

    run = accumulate([Filler()], model, optimizer)
    for _ in run:
        run.backward(model(torch.full((1, 1), float("nan"))).sum() * float("nan"))
    assert run.loss.item() == 0.0


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"skip_nonfinite": True}, "denominators="),
        ({"max_norm": 1.0, "optimizer": None}, "give optimizer="),
        ({"sync": "never"}, "sync='never' is unknown"),
    ],
)
def test_options_that_contradict_each_other_are_refused(options: dict[str, Any], named: str) -> None:
    model, optimizer = linear()
    with pytest.raises(PadlessError, match=named):
        accumulate([], model, **{"optimizer": optimizer, **options})


def test_backward_is_called_once_for_each_micro_batch() -> None:
    model, optimizer = linear()
    run = accumulate([torch.ones(1, 1)] * 2, model, optimizer)
    with pytest.raises(PadlessError, match="without backward"):
        for _ in run:
            pass
    with pytest.raises(PadlessError, match="inside the loop"):
        run.backward(model(torch.ones(1, 1)).sum())
    run = accumulate(
        [torch.ones(1, 1)], model, optimizer, denominators=Denominators(targets=1, sequences=1), skip_nonfinite=True
    )
    for item in run:
        with pytest.raises(PadlessError, match="targets="):
            run.backward(model(item).sum())
        run.backward(model(item).sum(), targets=Denominators(targets=1, sequences=1))


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: windows([1]), "one target"),
        (lambda: windows([1], tokens=1, examples=1), "one target"),
        (lambda: windows([1], tokens=0), "tokens=0"),
        (lambda: windows([1], tokens=1, tail="keep"), "tail='keep' is unknown"),  # type: ignore[arg-type]
        (lambda: list(windows([1], tokens=1)), "a int does not say its tokens"),
    ],
)
def test_windows_that_cannot_be_made_are_refused(call: Any, named: str) -> None:
    with pytest.raises(PadlessError, match=named):
        call()


def test_the_package_names_the_function_even_where_the_module_was_imported_first() -> None:
    import padless.accumulate as module

    model, optimizer = linear()
    for callable_ in (padless.accumulate, module):
        run = callable_([torch.ones(1, 1)], model, optimizer)
        for item in run:
            run.backward(model(item).sum())
        assert run.stepped
