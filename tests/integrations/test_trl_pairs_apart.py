"""DPO pairs whose answers are padded apart: the host's steps, with fewer positions where sides differ in length."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset

from padless.errors import PadlessError
from padless.integrations.transformers import PadlessOptions
from padless.tuning import Profile
from support.trainers import MODELS, assert_same_run, ids_of, outcome_of
from support.trl_runs import BUDGET, dpo_trainer, run_dpo, run_reward, sft_trainer

APART = PadlessOptions(token_budget=BUDGET, pairs="apart")


@pytest.mark.parametrize("loss_type", ["sigmoid", "ipo"])
@pytest.mark.parametrize("kind", MODELS)
def test_steps_are_those_of_the_host(kind: str, loss_type: str, tmp_path: Path) -> None:
    host = run_dpo(tmp_path, kind, loss_type=loss_type, max_steps=5)
    trainer, counter = dpo_trainer(tmp_path, kind, padless=APART, loss_type=loss_type, max_steps=5)
    ours = outcome_of(trainer, counter)
    keys = ("num_tokens", "rewards/chosen", "rewards/rejected", "rewards/margins", "logps/chosen")
    assert_same_run(host, ours, keys=keys)
    assert ours.padded_tokens < host.padded_tokens
    # Two passes of one micro-batch: together they stay within the budget.
    shapes = counter.shapes
    assert all(a[0] == b[0] and a[0] * (a[1] + b[1]) <= BUDGET for a, b in zip(shapes[::2], shapes[1::2], strict=True))


def test_long_chosen_rows_do_not_widen_short_rejected_ones(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)

    def text(length: int) -> str:
        return " ".join(f"t{i}" for i in ids_of(length, rng)) + " "

    rows = [{"prompt": text(2), "chosen": text(30), "rejected": text(3)} for _ in range(16)]
    totals = {}
    for pairs in ("together", "apart"):
        options = PadlessOptions(token_budget=256, pairs=pairs)  # type: ignore[arg-type]
        trainer, counter = dpo_trainer(tmp_path, "qwen2", padless=options, max_steps=1)
        data, words = Dataset.from_list(rows), trainer.processing_class
        trainer.train_dataset = trainer._prepare_dataset(data, words, trainer.args, "train")
        totals[pairs] = outcome_of(trainer, counter).padded_tokens
    assert totals["apart"] < 0.65 * totals["together"]


def test_an_evaluation_has_the_figures_of_the_host(tmp_path: Path) -> None:
    held = []
    for options in (None, APART):
        trainer, _ = dpo_trainer(tmp_path, "qwen2", padless=options, per_device_eval_batch_size=8)
        held.append(trainer.evaluate())
    for key in ("eval_loss", "eval_rewards/chosen", "eval_logps/rejected"):
        assert held[1][key] == pytest.approx(held[0][key], rel=1e-4, abs=1e-6), key


def test_the_budget_is_found_for_pairs_apart_too(tmp_path: Path) -> None:
    options = PadlessOptions(memory_limit="40MB", pairs="apart", profile=tmp_path / "profile.json")
    trainer, counter = dpo_trainer(tmp_path, "qwen2", padless=options, max_steps=2)
    assert_same_run(run_dpo(tmp_path, "qwen2", max_steps=2), outcome_of(trainer, counter))
    profile = Profile.load(tmp_path / "profile.json")
    assert profile.token_budget >= 2 * profile.max_length


def test_adapters_take_their_reference_from_the_model_itself(tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model
    from trl import DPOConfig, DPOTrainer

    from padless.integrations.trl import with_padless
    from support.trainers import common_arguments, tiny_model, tiny_tokenizer
    from support.trl_runs import pair_texts

    runs: list[Any] = []
    for options in (None, APART):
        torch.manual_seed(3)
        model = get_peft_model(tiny_model("qwen2"), LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj"]))
        made: Any = with_padless(DPOTrainer) if options else DPOTrainer
        trainer = made(
            model=model,
            args=DPOConfig(**common_arguments(tmp_path, max_length=None, beta=0.5, max_steps=3)),
            train_dataset=Dataset.from_list(pair_texts(80)),
            processing_class=tiny_tokenizer(),
            **({"padless": options} if options else {}),
        )
        runs.append(outcome_of(trainer))
    assert_same_run(*runs)


def test_only_dpo_pads_apart(tmp_path: Path) -> None:
    with pytest.raises(PadlessError, match="pairs='apart' is for DPOTrainer; PadlessSFTTrainer"):
        sft_trainer(tmp_path, "qwen2", padless=APART)
    with pytest.raises(PadlessError, match="pairs='apart' is for DPOTrainer"):
        run_reward(tmp_path, "qwen2", padless=APART)
    with pytest.raises(PadlessError, match=r"pairs='sideways' is unknown; choose one of 'together', 'apart'"):
        PadlessOptions(token_budget=8, pairs="sideways")  # type: ignore[arg-type]
