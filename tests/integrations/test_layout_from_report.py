"""The leak report of the model itself decides on the layout: packed where sequences stay apart, padded elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from padless.errors import PadlessError
from padless.integrations.transformers import PadlessOptions
from padless.verify import check_layouts
from support.trainers import assert_same_run, outcome_of, plain_trainer, run_plain, tiny_model
from support.trl_runs import dpo_trainer, run_sft, sft_trainer

LONGEST = 40


def train(folder: Path, kind: str, layout: Any, report: Any) -> tuple[Any, list[tuple[int, ...]], list[bool]]:
    """A run under the layout; shapes of its forward passes, and whether each got a mask."""
    model = tiny_model(kind)
    masks: list[bool] = []
    options = PadlessOptions(token_budget=96, layout=layout, report=report)
    trainer, counter = plain_trainer(folder, kind, model=model, padless=options)
    model.model.register_forward_pre_hook(
        lambda module, args, kwargs: masks.append(kwargs.get("attention_mask") is not None), with_kwargs=True
    )
    return outcome_of(trainer, counter), counter.shapes, masks


def test_qwen2_is_packed_and_jamba_is_not(tmp_path: Path) -> None:
    reports = {}
    for kind in ("qwen2", "jamba"):
        model = tiny_model(kind)
        before = {name: value.clone() for name, value in model.state_dict().items()}
        reports[kind] = check_layouts(model)
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    host = run_plain(tmp_path, "qwen2")
    ours, shapes, masks = train(tmp_path, "qwen2", "packed", reports["qwen2"])
    assert_same_run(host, ours)
    assert all(rows == 1 for rows, _ in shapes[3:]), "the first passes ask what the loss is"
    assert any(width > LONGEST for _, width in shapes)
    assert not any(masks[3:])
    assert all(entry["padless/occupancy"] == pytest.approx(1.0) for entry in ours.logs)
    assert_same_run(
        run_sft(tmp_path, "qwen2"),
        outcome_of(
            sft_trainer(
                tmp_path,
                "qwen2",
                padless=PadlessOptions(token_budget=96, layout="packed", report=reports["qwen2"]),
            )[0]
        ),
    )
    with pytest.raises(PadlessError, match=r"layout='packed' is not exact for this model.*leaks.*mamba"):
        train(tmp_path, "jamba", "packed", reports["jamba"])


@pytest.mark.parametrize("kind", ["qwen2", "jamba"])
def test_auto_takes_the_fastest_exact_layout_of_the_report(kind: str, tmp_path: Path) -> None:
    report = check_layouts(tiny_model(kind))
    assert report.best == "right-padded-no-mask", "under sdpa a packed row pays for a dense mask"
    ours, shapes, masks = train(tmp_path, kind, "auto", report)
    assert_same_run(run_plain(tmp_path, kind), ours)
    assert all(width <= LONGEST for _, width in shapes)
    assert not any(masks[3:])


def test_pairs_are_never_packed(tmp_path: Path) -> None:
    report = check_layouts(tiny_model("qwen2"))
    trainer, _ = dpo_trainer(
        tmp_path, "qwen2", padless=PadlessOptions(token_budget=128, layout="packed", report=report)
    )
    with pytest.raises(PadlessError, match=r"layout='packed': the loss of .*DPOTrainer is one over rows"):
        trainer.train()
    with pytest.raises(PadlessError, match="layout='packed' needs report="):
        PadlessOptions(token_budget=8, layout="packed")
