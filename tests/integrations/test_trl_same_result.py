"""TRL's trainers with padless take the same optimizer steps as alone."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from padless.integrations.transformers import PadlessOptions
from support.trainers import MODELS, assert_same_run
from support.trl_runs import BUDGET, run_dpo, run_grpo, run_reward, run_sft

OPTIONS = PadlessOptions(token_budget=BUDGET)
ONCE = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1}
os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"


@pytest.mark.parametrize("kind", MODELS)
def test_sft_steps_are_those_of_the_host(kind: str, tmp_path: Path) -> None:
    host, ours = run_sft(tmp_path, kind), run_sft(tmp_path, kind, padless=OPTIONS)
    assert_same_run(host, ours, keys=("num_tokens",))
    assert ours.padded_tokens < host.padded_tokens


def test_sft_logs_of_a_step_are_those_of_the_host_in_one_batch(tmp_path: Path) -> None:
    host, ours = run_sft(tmp_path, "qwen2", **ONCE), run_sft(tmp_path, "qwen2", padless=OPTIONS, **ONCE)
    assert_same_run(host, ours, keys=("num_tokens", "entropy", "mean_token_accuracy"))
    assert ours.padded_tokens < 0.8 * host.padded_tokens


@pytest.mark.parametrize("kind", MODELS)
def test_dpo_steps_are_those_of_the_host(kind: str, tmp_path: Path) -> None:
    host, ours = run_dpo(tmp_path, kind), run_dpo(tmp_path, kind, padless=OPTIONS)
    keys = ("num_tokens", "rewards/chosen", "rewards/rejected", "rewards/accuracies", "rewards/margins", "logps/chosen")
    assert_same_run(host, ours, keys=keys)
    assert ours.padded_tokens < host.padded_tokens


@pytest.mark.parametrize("kind", MODELS)
def test_reward_steps_are_those_of_the_host(kind: str, tmp_path: Path) -> None:
    host, ours = run_reward(tmp_path, kind, **ONCE), run_reward(tmp_path, kind, padless=OPTIONS, **ONCE)
    keys = ("num_tokens", "min_reward", "max_reward", "accuracy", "margin")
    assert_same_run(host, ours, keys=keys)
    assert ours.padded_tokens < host.padded_tokens


GRPO_KEYS = ("entropy", "kl", "clip_ratio/low_mean", "clip_ratio/high_max", "clip_ratio/region_mean")


@pytest.mark.parametrize("loss_type", ["dapo", "grpo", "dr_grpo"])
@pytest.mark.parametrize("kind", MODELS)
def test_grpo_steps_are_those_of_the_host(kind: str, loss_type: str, tmp_path: Path) -> None:
    host = run_grpo(tmp_path, kind, loss_type=loss_type)
    ours = run_grpo(tmp_path, kind, padless=OPTIONS, loss_type=loss_type)
    assert_same_run(host, ours)
    assert ours.padded_tokens < 0.7 * host.padded_tokens


def test_grpo_logs_of_a_step_are_those_of_the_host_in_one_batch(tmp_path: Path) -> None:
    host, ours = run_grpo(tmp_path, "qwen2", **ONCE), run_grpo(tmp_path, "qwen2", padless=OPTIONS, **ONCE)
    assert_same_run(host, ours, keys=GRPO_KEYS)
