"""TRL's trainers evaluate to the same figures with padless, and refuse what regrouping would change."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from padless.errors import PadlessError
from padless.integrations.trl import PadlessMixin, PadlessOptions, host_for, with_padless
from support.trainers import assert_same_run, outcome_of
from support.trl_runs import BUDGET, dpo_trainer, grpo_trainer, run_dpo, run_grpo, sft_trainer

OPTIONS = PadlessOptions(token_budget=BUDGET)
EVAL = {
    "sft": (sft_trainer, {}, ("eval_loss", "eval_entropy", "eval_mean_token_accuracy")),
    "dpo": (dpo_trainer, {}, ("eval_loss", "eval_rewards/chosen", "eval_logps/rejected", "eval_rewards/accuracies")),
    "grpo": (grpo_trainer, {"loss_type": "grpo"}, ("eval_loss", "eval_kl", "eval_entropy")),
    "grpo-dapo": (grpo_trainer, {}, ("eval_loss", "eval_kl")),
}


@pytest.mark.parametrize("name", EVAL)
def test_an_evaluation_has_the_figures_of_the_host(name: str, tmp_path: Path) -> None:
    build, changes, keys = EVAL[name]
    held = []
    for options in (None, OPTIONS):
        trainer, counter = build(tmp_path, "qwen2", padless=options, per_device_eval_batch_size=8, **changes)
        held.append((trainer.evaluate(), counter.total))
    (host, host_tokens), (ours, our_tokens) = held
    for key in keys:
        assert ours[key] == pytest.approx(host[key], rel=1e-4, abs=1e-6), key
    assert our_tokens < host_tokens


def test_a_trainer_goes_on_training_after_an_evaluation(tmp_path: Path) -> None:
    runs = []
    for options in (None, OPTIONS):
        evaluating = {"max_steps": 4, "eval_strategy": "steps", "eval_steps": 2}
        trainer, counter = grpo_trainer(tmp_path, "qwen2", padless=options, **evaluating)
        runs.append(outcome_of(trainer, counter))
    assert_same_run(*runs)


@pytest.mark.parametrize("loss_type", ["sapo", "luspo", "cispo"])
def test_further_losses_of_grpo_keep_their_result(loss_type: str, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"loss_type": loss_type, "max_steps": 3}
    if loss_type == "luspo":
        settings["importance_sampling_level"] = "sequence"
    assert_same_run(run_grpo(tmp_path, "qwen2", **settings), run_grpo(tmp_path, "qwen2", padless=OPTIONS, **settings))


def test_bnpo_gives_the_mean_over_the_steps_tokens(tmp_path: Path) -> None:
    once = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1, "loss_type": "bnpo", "max_steps": 3}
    assert_same_run(run_grpo(tmp_path, "qwen2", **once), run_grpo(tmp_path, "qwen2", padless=OPTIONS, **once))


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"top_entropy_quantile": 0.5}, "top_entropy_quantile"), ({"entropy_coef": 0.01}, "entropy bonus")],
)
def test_grpo_settings_that_compare_rows_are_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(PadlessError, match=message):
        grpo_trainer(tmp_path, "qwen2", padless=OPTIONS, **changes)
    accepted = PadlessOptions(token_budget=BUDGET, inexact="warn")
    with pytest.warns(UserWarning, match=message):
        grpo_trainer(tmp_path, "qwen2", padless=accepted, **changes)


def test_dpo_losses_that_compare_pairs_are_refused(tmp_path: Path) -> None:
    with pytest.raises(PadlessError, match="loss_type='aot' depends on which rows share"):
        run_dpo(tmp_path, "qwen2", padless=OPTIONS, loss_type="aot")


def test_packing_and_unsupported_trainers_are_refused(tmp_path: Path) -> None:
    with pytest.raises(PadlessError, match="padding_free=True"):
        sft_trainer(tmp_path, "qwen2", padless=OPTIONS, padding_free=True)
    from trl import GRPOTrainer, KTOTrainer

    with pytest.raises(PadlessError, match="KTOTrainer is not supported; TRL trainers that are: SFTTrainer"):
        with_padless(KTOTrainer)

    class Mixed(PadlessMixin, GRPOTrainer):
        pass

    trainer, _ = grpo_trainer(tmp_path, "qwen2")
    trainer.__class__ = Mixed
    with pytest.raises(PadlessError, match="take PadlessGRPOMixin"):
        host_for(trainer, OPTIONS)
