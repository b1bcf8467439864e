"""What the mixin keeps: evaluation, adapters, checkpointing, custom losses, left padding; and what it refuses."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Trainer, TrainingArguments

from padless.errors import PadlessError
from padless.integrations._guard import check_seams, check_version
from padless.integrations.transformers import PadlessMixin, PadlessOptions, with_padless
from support.trainers import (
    CountTokens,
    assert_same_run,
    collate,
    collate_left,
    outcome_of,
    plain_trainer,
    run_plain,
    sft_rows,
    tiny_config,
    tiny_model,
)

OURS = PadlessOptions(token_budget=96)
ONCE = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1}


def pair(folder: Path, kind: str = "qwen2", **settings: Any) -> tuple[Any, Any]:
    return run_plain(folder, kind, **settings), run_plain(folder, kind, padless=OURS, **settings)


def test_left_padded_batches_are_rolled(tmp_path: Path) -> None:
    host, ours = pair(tmp_path, collator=collate_left)
    assert_same_run(host, ours)
    assert ours.padded_tokens < host.padded_tokens


def every_token(collator: Any) -> Any:
    """A collator that makes every token but the first a target, as `DataCollatorForLanguageModeling` does."""

    def collate(rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
        batch: dict[str, torch.Tensor] = collator(rows)
        return {**batch, "labels": batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)}

    return collate


@pytest.mark.parametrize("steps", [1, 2], ids=["at-once", "accumulated"])
def test_left_padding_adds_no_target_for_the_first_token(steps: int, tmp_path: Path) -> None:
    """The Trainer alone counts, and trains, one that is predicted where padding is: right padding has none."""
    shared: dict[str, Any] = {"per_device_train_batch_size": 8 // steps, "gradient_accumulation_steps": steps}
    right = run_plain(tmp_path, "qwen2", collator=every_token(collate), **shared)
    left = run_plain(tmp_path, "qwen2", padless=OURS, collator=every_token(collate_left), **shared)
    assert_same_run(right, left)


def test_left_padding_adds_none_to_an_evaluation_either(tmp_path: Path) -> None:
    losses = []
    for collator, padless in ((collate, None), (collate_left, OURS)):
        trainer, _ = plain_trainer(
            tmp_path, "qwen2", padless=padless, per_device_eval_batch_size=6, collator=every_token(collator)
        )
        losses.append(trainer.evaluate()["eval_loss"])
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


def test_gradient_checkpointing_keeps_the_result(tmp_path: Path) -> None:
    assert_same_run(*pair(tmp_path, gradient_checkpointing=True, max_steps=3))


def test_bf16_stays_within_its_rounding(tmp_path: Path) -> None:
    assert_same_run(*pair(tmp_path, bf16=True, max_steps=5), rtol=0.05, atol=0.02)


def test_adapters_are_trained_alike(tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    def adapted() -> Any:
        torch.manual_seed(3)
        return get_peft_model(tiny_model("qwen2"), LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj"]))

    host = run_plain(tmp_path, "qwen2", model=adapted())
    ours = run_plain(tmp_path, "qwen2", model=adapted(), padless=OURS)
    assert_same_run(host, ours)
    assert any("lora" in name for name in ours.parameters)


def test_label_smoothing_and_a_loss_function_of_ones_own_keep_the_result(tmp_path: Path) -> None:
    assert_same_run(*pair(tmp_path, label_smoothing_factor=0.1, max_steps=3))

    def loss_of(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        losses = torch.nn.functional.cross_entropy(
            outputs["logits"][:, :-1].transpose(1, 2), labels[:, 1:], ignore_index=-100, reduction="none"
        )
        return losses.square().sum() / num_items_in_batch

    assert_same_run(*pair(tmp_path, more={"compute_loss_func": loss_of}, max_steps=3))


class MeanLoss(Trainer):
    """A trainer whose loss is a mean over sequences, whatever denominator it is told."""

    loss_is_scaled_for_ga = False

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        labels = inputs["labels"]
        outputs = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"])
        losses = torch.nn.functional.cross_entropy(
            outputs.logits[:, :-1].transpose(1, 2), labels[:, 1:], ignore_index=-100, reduction="none"
        )
        held = labels[:, 1:] != -100
        loss = ((losses * held).sum(1) / held.sum(1).clamp(min=1)).mean()
        return (loss, outputs) if return_outputs else loss


def test_a_mean_over_sequences_is_weighted_by_rows(tmp_path: Path) -> None:
    runs = []
    for padless in (None, OURS):
        model = tiny_model("jamba")
        made: Any = with_padless(MeanLoss) if padless else MeanLoss
        trainer = made(
            model=model,
            args=TrainingArguments(**trainer_arguments(tmp_path)),
            train_dataset=sft_rows(80),
            data_collator=collate_left,
            **({"padless": padless} if padless else {}),
        )
        runs.append(outcome_of(trainer))
    assert_same_run(*runs)


class SquaredMean(MeanLoss):
    """A loss that is no mean of anything: it compares the rows of a micro-batch with one another."""

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        loss = super().compute_loss(*args, **kwargs)
        rows = args[1]["input_ids"].shape[0]
        return loss * rows**2


def test_a_loss_that_depends_on_the_grouping_is_refused(tmp_path: Path) -> None:
    def made(options: PadlessOptions) -> Any:
        trainer_class: Any = with_padless(SquaredMean)
        return trainer_class(
            model=tiny_model("qwen2"),
            args=TrainingArguments(**trainer_arguments(tmp_path, max_steps=1)),
            train_dataset=sft_rows(16),
            data_collator=collate_left,
            padless=options,
        )

    with pytest.raises(PadlessError, match="neither a mean over targets nor one over rows"):
        made(OURS).train()
    with pytest.warns(UserWarning, match="regrouping changes it"):
        made(PadlessOptions(token_budget=96, inexact="warn")).train()


def trainer_arguments(folder: Path, **changes: Any) -> dict[str, Any]:
    from support.trainers import common_arguments

    return common_arguments(folder, **changes)


class Deaf(torch.nn.Module):
    """Takes any keyword and ignores ``num_items_in_batch``: its loss is a mean over its own micro-batch."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = tiny_model("qwen2")
        self.config = self.inner.config

    def forward(self, input_ids: Any = None, attention_mask: Any = None, labels: Any = None, **kwargs: Any) -> Any:
        return self.inner(input_ids=input_ids, attention_mask=attention_mask, labels=labels)


def test_a_model_that_ignores_the_denominator_is_found_out(tmp_path: Path) -> None:
    host = run_plain(tmp_path, "qwen2", model=Deaf(), max_steps=3, **ONCE)
    with pytest.warns(UserWarning, match="Deaf ignores num_items_in_batch"):
        ours = run_plain(tmp_path, "qwen2", model=Deaf(), padless=OURS, max_steps=3, **ONCE)
    assert_same_run(host, ours)


def test_sequence_classification_is_weighted_by_rows(tmp_path: Path) -> None:
    from transformers import AutoModelForSequenceClassification, DataCollatorWithPadding

    from support.trainers import tiny_tokenizer

    rows = [{"input_ids": row["input_ids"], "label": at % 2} for at, row in enumerate(sft_rows(80))]
    runs = []
    for padless in (None, OURS):
        torch.manual_seed(0)
        config = tiny_config("qwen2")
        config.num_labels = 2
        model = AutoModelForSequenceClassification.from_config(config)
        counter = CountTokens(model)
        made: Any = with_padless(Trainer) if padless else Trainer
        trainer = made(
            model=model,
            args=TrainingArguments(**trainer_arguments(tmp_path)),
            train_dataset=rows,
            data_collator=DataCollatorWithPadding(tiny_tokenizer()),
            **({"padless": padless} if padless else {}),
        )
        runs.append(outcome_of(trainer, counter))
    assert_same_run(*runs)
    assert runs[1].padded_tokens < runs[0].padded_tokens


@pytest.mark.parametrize("collator", ["right", "left"])
def test_evaluation_and_prediction_keep_order_width_and_loss(collator: str, tmp_path: Path) -> None:
    held: dict[bool, Any] = {}
    for ours in (False, True):
        more: dict[str, Any] = {"compute_metrics": lambda prediction: {"size": float(len(prediction.predictions))}}
        settings: dict[str, Any] = {"collator": collate_left} if collator == "left" else {}
        trainer, counter = plain_trainer(
            tmp_path, "jamba", padless=OURS if ours else None, per_device_eval_batch_size=6, more=more, **settings
        )
        metrics = trainer.evaluate()
        held[ours] = trainer.predict(sft_rows(11, seed=5)), metrics, counter.total
    (host, host_metrics, host_tokens), (ours_, our_metrics, our_tokens) = held[False], held[True]
    assert our_metrics["eval_loss"] == pytest.approx(host_metrics["eval_loss"], rel=1e-5)
    assert our_metrics["eval_size"] == host_metrics["eval_size"] == 11
    np.testing.assert_array_equal(ours_.label_ids, host.label_ids)
    assert ours_.predictions.shape == host.predictions.shape
    real = host.label_ids != -100
    np.testing.assert_allclose(ours_.predictions[real], host.predictions[real], rtol=1e-4, atol=1e-4)
    assert our_tokens < host_tokens


def test_evaluation_can_be_left_to_the_host(tmp_path: Path) -> None:
    shapes = {}
    for evaluate in (True, False):
        options = PadlessOptions(token_budget=64, evaluate=evaluate)
        trainer, counter = plain_trainer(tmp_path, "qwen2", padless=options, per_device_eval_batch_size=11)
        trainer.evaluate()
        shapes[evaluate] = counter.shapes
    assert len(shapes[False]) == 1
    assert len(shapes[True]) > 1


def test_the_budget_is_a_ceiling_and_the_log_says_what_was_gained(tmp_path: Path) -> None:
    trainer, counter = plain_trainer(tmp_path, "qwen2", padless=OURS, max_steps=4)
    outcome = outcome_of(trainer, counter)
    assert all(rows * width <= 96 for rows, width in counter.shapes)
    for entry in outcome.logs:
        assert 0.5 < entry["padless/occupancy"] <= 1
        assert entry["padless/real_tokens_per_second"] <= entry["padless/padded_tokens_per_second"]
        assert entry["padless/micro_batches"] >= 1
        assert 0 <= entry["padless/waiting_share"] < 1


def test_a_short_last_step_of_the_epoch_is_run(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"max_steps": -1, "num_train_epochs": 2, "more": {"train_dataset": sft_rows(21)}}
    host = run_plain(tmp_path, "qwen2", **settings)
    settings["more"] = {"train_dataset": sft_rows(21)}
    ours = run_plain(tmp_path, "qwen2", padless=OURS, **settings)
    assert len(host.losses) == 6
    assert_same_run(host, ours)


def test_training_resumes_where_it_stopped(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"save_strategy": "steps", "save_steps": 5, "padless": OURS}
    whole = run_plain(tmp_path / "a", "qwen2", **settings)
    trainer, _ = plain_trainer(tmp_path / "b", "qwen2", **settings)
    trainer.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-5"))
    model = trainer.model
    for name, value in model.named_parameters():
        torch.testing.assert_close(value, whole.parameters[name])


def test_dropout_trains_and_gives_finite_gradients(tmp_path: Path) -> None:
    model = tiny_model("qwen2")
    model.config.attention_dropout = 0.2
    outcome = run_plain(tmp_path, "qwen2", model=model, padless=OURS, max_steps=3)
    assert np.isfinite(outcome.grad_norms).all()


def test_widths_are_rounded_so_that_a_compiled_model_sees_few(tmp_path: Path) -> None:
    options = PadlessOptions(token_budget=160, multiple_of=16)
    host = run_plain(tmp_path, "qwen2", max_steps=4)
    trainer, counter = plain_trainer(tmp_path, "qwen2", padless=options, max_steps=4)
    assert_same_run(host, outcome_of(trainer, counter))
    assert {width % 16 for _, width in counter.shapes} == {0}
    assert len({width for _, width in counter.shapes}) <= 3


def test_a_ladder_leaves_only_its_widths(tmp_path: Path) -> None:
    options = PadlessOptions(token_budget=160, ladder=(16, 40))
    host = run_plain(tmp_path, "qwen2", max_steps=3)
    trainer, counter = plain_trainer(tmp_path, "qwen2", padless=options, max_steps=3)
    assert_same_run(host, outcome_of(trainer, counter))
    assert {width for _, width in counter.shapes} == {16, 40}


@pytest.mark.slow
def test_a_compiled_model_gives_the_same_result(tmp_path: Path) -> None:
    compiled = {"torch_compile": True, "torch_compile_backend": "eager", "max_steps": 3}
    options = PadlessOptions(token_budget=160, ladder=(16, 40))
    host = run_plain(tmp_path, "qwen2", max_steps=3)
    torch._dynamo.reset()
    ours = run_plain(tmp_path, "qwen2", padless=options, **compiled)
    assert_same_run(host, ours)


class Packable:
    """Stands in for a leak report that allows packed rows."""

    best = "packed-position-ids"

    def allows(self, layout: str) -> bool:
        return True

    def explain(self, layout: str | None = None) -> str:
        return ""


def test_rows_are_packed_where_the_report_allows_it(tmp_path: Path) -> None:
    options = PadlessOptions(token_budget=96, layout="auto", report=Packable())
    # Every token is a target here, so that a label left at a boundary would show.
    rows = [{"input_ids": row["input_ids"], "labels": row["input_ids"]} for row in sft_rows(80)]
    host = run_plain(tmp_path, "qwen2", more={"train_dataset": rows})
    trainer, counter = plain_trainer(tmp_path, "qwen2", padless=options, more={"train_dataset": rows})
    assert_same_run(host, outcome_of(trainer, counter))
    assert any(shape[0] == 1 and shape[1] > 45 for shape in counter.shapes), "nothing was packed"
    assert counter.total < 0.75 * host.padded_tokens


@pytest.mark.parametrize("run", ["sft", "dpo"])
def test_a_report_packs_sequences_but_never_pairs(run: str, tmp_path: Path) -> None:
    from support.trl_runs import RUNS

    options = PadlessOptions(token_budget=128, layout="auto", report=Packable())
    host = RUNS[run](tmp_path, "qwen2", max_steps=3)
    assert_same_run(host, RUNS[run](tmp_path, "qwen2", max_steps=3, padless=options))


# --- refusals


def test_a_row_over_the_budget_is_named(tmp_path: Path) -> None:
    trainer, _ = plain_trainer(tmp_path, "qwen2", padless=PadlessOptions(token_budget=16))
    with pytest.raises(PadlessError, match="16"):
        trainer.train()
    alone = PadlessOptions(token_budget=16, overlong="alone")
    host = run_plain(tmp_path, "qwen2", max_steps=2)
    assert_same_run(host, run_plain(tmp_path, "qwen2", padless=alone, max_steps=2))


def test_a_column_of_unknown_role_is_named(tmp_path: Path) -> None:
    def collate(rows: Any) -> Any:
        return {**collate_left(rows), "mystery": torch.zeros(len(rows), 7)}

    trainer, _ = plain_trainer(tmp_path, "qwen2", padless=OURS, collator=collate, remove_unused_columns=False)
    with pytest.raises(PadlessError, match="mystery"):
        trainer.train()


def test_auto_reads_budget_and_cost_from_the_profile(tmp_path: Path) -> None:
    from padless.cost import CostModel
    from padless.tuning import Profile

    cost = CostModel(per_microbatch=3.0, per_token=0.5)
    place = Profile(token_budget=80, cost=cost).save(tmp_path / "profile.json")
    trainer, counter = plain_trainer(tmp_path, "qwen2", padless=PadlessOptions(profile=place), max_steps=2)
    trainer.train()
    assert trainer.padless.budget == 80
    assert max(rows * width for rows, width in counter.shapes) <= 80


def test_the_mixin_stands_first_and_before_a_trainer() -> None:
    with pytest.raises(PadlessError, match=r"expected a subclass of transformers\.Trainer"):
        with_padless(dict)

    with pytest.raises(PadlessError, match="put PadlessMixin before Trainer"):

        class Wrong(Trainer, PadlessMixin):
            pass

    class Nothing(PadlessMixin):
        pass

    with pytest.raises(PadlessError, match=r"no transformers\.Trainer"):
        Nothing()
    once = with_padless(Trainer)
    assert with_padless(once) is once


def test_options_are_checked() -> None:
    for wrong in (
        {"token_budget": 0},
        {"token_budget": 64, "method": "best"},
        {"token_budget": 64, "overlong": "truncate"},
        {"token_budget": 64, "layout": "auto"},
        {"token_budget": 64, "multiple_of": 0},
    ):
        with pytest.raises(PadlessError):
            PadlessOptions(**wrong)  # type: ignore[arg-type]


def test_versions_outside_the_tested_range_warn_and_moved_methods_raise() -> None:
    with pytest.warns(UserWarning, match=r"tested with transformers .*; 99\.0 is installed"):
        check_version("transformers", "99.0")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_version("transformers")

    class Moved:
        def training_step(self, model: Any) -> None: ...

    with pytest.raises(PadlessError, match="has no method 'compute_loss'"):
        check_seams(Moved, {"compute_loss": ()}, "transformers")
    with pytest.raises(PadlessError, match="'training_step' takes no 'inputs'"):
        check_seams(Moved, {"training_step": ("model", "inputs")}, "transformers")
