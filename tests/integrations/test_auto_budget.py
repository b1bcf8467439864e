"""``token_budget="auto"`` without a profile: trainers find the budget on the live model, and leave it as it was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from padless.errors import PadlessError
from padless.integrations._auto import longest_in, trial_batch
from padless.integrations.transformers import PadlessOptions
from padless.tensors.fields import MROPE, Field
from padless.tuning import Profile, load_profile
from support.auto_budget import assert_untouched, watched
from support.ranks import run_ranks
from support.trainers import assert_same_run, outcome_of, plain_trainer, run_plain, sft_rows, tiny_model
from support.trl_runs import dpo_trainer, grpo_trainer, run_dpo, run_grpo, run_sft, sft_trainer


@pytest.mark.parametrize("kind", ["qwen2", "jamba"])
def test_the_trainer_finds_writes_and_uses_a_budget(kind: str, tmp_path: Path) -> None:
    place = tmp_path / "profile.json"
    limit = {"qwen2": 1_500_000, "jamba": 4_000_000}[kind]
    options = PadlessOptions(memory_limit=limit, profile=place)
    trainer, counter = plain_trainer(tmp_path, kind, padless=options, max_steps=4)
    seen = watched(trainer)
    ours = outcome_of(trainer, counter)
    assert_untouched(seen)
    profile = load_profile(place, model=trainer.model)
    longest = max(len(row["input_ids"]) for row in sft_rows(80))
    assert profile.max_length == longest == 40
    assert longest <= profile.token_budget == trainer.padless.budget
    assert profile.peak_memory <= 0.9 * limit
    assert any(not fits for _, _, fits, _ in profile.trials), "the limit was never met"
    assert profile.cost is not None
    assert profile.cost.source == "calibrated"
    assert {entry["padless/token_budget"] for entry in ours.logs} == {profile.token_budget}
    assert_same_run(run_plain(tmp_path, kind, max_steps=4), ours)
    # A second run reads what the first one found.
    again, _ = plain_trainer(tmp_path, kind, padless=PadlessOptions(profile=place), max_steps=1)
    again.train()
    assert again.padless.budget == profile.token_budget


def test_more_memory_gives_a_larger_budget(tmp_path: Path) -> None:
    budgets = []
    for limit in (1_500_000, 3_000_000):
        options = PadlessOptions(memory_limit=limit, profile=tmp_path / f"{limit}.json")
        trainer, _ = plain_trainer(tmp_path, "qwen2", padless=options, max_steps=1)
        trainer.train()
        budgets.append(trainer.padless.budget)
    assert budgets[1] > 1.5 * budgets[0]


TRL: dict[str, tuple[Any, Any, dict[str, Any], int]] = {
    "sft": (sft_trainer, run_sft, {}, 40),
    "dpo": (dpo_trainer, run_dpo, {}, 80),  # a pair is two rows
    "grpo": (grpo_trainer, run_grpo, {"max_length": 60}, 60),
}


@pytest.mark.parametrize("name", TRL)
def test_trl_trainers_find_a_budget_with_their_own_loss(name: str, tmp_path: Path) -> None:
    build, run, more, least = TRL[name]
    options = PadlessOptions(memory_limit="40MB", profile=tmp_path / "profile.json", **more)
    trainer, counter = build(tmp_path, "qwen2", padless=options, max_steps=2)
    seen = watched(trainer)
    ours = outcome_of(trainer, counter)
    assert_untouched(seen)
    assert trainer.padless.budget >= least
    assert any(not fits for _, _, fits, _ in Profile.load(tmp_path / "profile.json").trials)
    assert_same_run(run(tmp_path, "qwen2", max_steps=2), ours)


def test_a_reference_model_takes_its_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[dict[str, Any]] = []

    def tune(model: Any, **given: Any) -> Profile:
        told.append(given)
        return Profile(token_budget=200)

    monkeypatch.setattr("padless.integrations._auto.tune", tune)
    for build in (dpo_trainer, sft_trainer):
        options = PadlessOptions(memory_limit="20MB", profile=tmp_path / f"{build.__name__}.json")
        trainer, _ = build(tmp_path, "qwen2", padless=options, max_steps=1)
        trainer.train()
    held = sum(tensor.numel() * 4 for tensor in tiny_model("qwen2").state_dict().values())
    assert told[0]["also_held"] == pytest.approx(held, rel=0.01)
    assert [given["also_held"] for given in told][1] == 0
    assert [given["rows_together"] for given in told] == [2, 1]


def test_an_evaluation_before_training_finds_it_too(tmp_path: Path) -> None:
    options = PadlessOptions(memory_limit="1500kB", profile=tmp_path / "profile.json")
    trainer, _ = plain_trainer(tmp_path, "qwen2", padless=options, per_device_eval_batch_size=11)
    host, _ = plain_trainer(tmp_path, "qwen2", per_device_eval_batch_size=11)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(host.evaluate()["eval_loss"], rel=1e-5)
    assert trainer.padless.budget == Profile.load(tmp_path / "profile.json").token_budget


def test_without_a_profile_or_a_limit_the_ways_out_are_named(tmp_path: Path) -> None:
    options = PadlessOptions(profile=tmp_path / "none.json")
    trainer, _ = plain_trainer(tmp_path, "qwen2", padless=options)
    with pytest.raises(PadlessError, match=r"memory_limit='8GiB'.*give token_budget a number.*padless tune"):
        trainer.train()
    tight = PadlessOptions(profile=tmp_path / "none.json", memory_limit="300kB")
    trainer, _ = plain_trainer(tmp_path, "qwen2", padless=tight)
    with pytest.raises(PadlessError, match=r"one row of 40 tokens does not fit in 270,000 bytes"):
        trainer.train()
    untold = PadlessOptions(profile=tmp_path / "none.json", memory_limit="3MB")
    with pytest.raises(PadlessError, match=r"longest row: give PadlessOptions\(max_length=\.\.\.\)"):
        grpo_trainer(tmp_path, "qwen2", padless=untold, max_steps=1)[0].train()
    assert not (tmp_path / "none.json").exists()


def test_a_lightning_module_finds_one_and_takes_the_steps_of_the_host(tmp_path: Path) -> None:
    from support.lightning_runs import run

    options = PadlessOptions(memory_limit="1500kB", profile=tmp_path / "profile.json")
    host, ours = run("qwen2", tmp_path, padless=False), run("qwen2", tmp_path, padless=True, options=options)
    assert_same_run(host, ours)
    profile = Profile.load(tmp_path / "profile.json")
    assert profile.token_budget >= 40
    assert any(not fits for _, _, fits, _ in profile.trials)


def test_a_profile_of_another_model_is_refused(tmp_path: Path) -> None:
    place = Profile(token_budget=80, model="Other:5").save(tmp_path / "profile.json")
    trainer, _ = plain_trainer(tmp_path, "qwen2", padless=PadlessOptions(profile=place, memory_limit="3MB"))
    with pytest.raises(PadlessError, match=r"was made for Other:5"):
        trainer.train()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_ranks_find_one_budget_together(tmp_path: Path) -> None:
    limits = ["3MB", "1500kB"]
    heard = run_ranks("support.auto_budget", "two_ranks", 2, folder=str(tmp_path), limits=limits, seconds=540)
    budgets = [rank["budget"] for rank in heard]
    assert budgets[0] == budgets[1] >= 40
    alone, _ = plain_trainer(
        tmp_path, "qwen2", padless=PadlessOptions(memory_limit="1500kB", profile=tmp_path / "one.json"), max_steps=1
    )
    alone.train()
    assert budgets[0] == pytest.approx(alone.padless.budget, rel=0.06), "the tighter rank decides"
    for rank in heard:
        assert_same_run(rank["host"], rank["outcome"])
        assert rank["one without a limit"].startswith("PadlessError")
        assert "memory_limit" in rank["one without a limit"]
    assert heard[0]["written"]
    assert heard[1]["one broken"] == "ValueError: this trial is broken"
    assert heard[0]["one broken"].startswith("PadlessError: a trial failed on another rank")


def test_the_longest_row_is_read_from_lists_and_tables_only() -> None:
    from datasets import Dataset

    rows = [{"a": [1] * n, "b": [2] * (3 * n % 5), "c": [3] * (n % 3)} for n in range(1, 9)]
    expected = max(len(row["a"]) + max(len(row["b"]), len(row["c"])) for row in rows)
    columns = [("a", "b"), ("a", "c")]
    assert longest_in(rows, columns) == expected
    assert longest_in(Dataset.from_list(rows), columns) == expected
    assert longest_in(Dataset.from_list(rows).select([0, 1]), [("a",)]) == 2
    assert longest_in(Dataset.from_list(rows).to_iterable_dataset(), columns) is None
    assert longest_in(rows, [("text",)]) is None
    assert longest_in(None, columns) is None


def test_trial_rows_are_full_and_every_token_is_a_target() -> None:
    batch: dict[str, Any] = {
        "input_ids": torch.tensor([[0, 3, 4], [5, 6, 7]]),
        "attention_mask": torch.tensor([[0, 1, 1], [1, 1, 1]]),
        "labels": torch.tensor([[-100, -100, 4], [-100, 6, 7]]),
        "loss_mask": torch.tensor([[0, 0, 1], [0, 1, 1]]),
        "position_ids": torch.arange(3).expand(3, 2, 3),
        "scores": torch.tensor([0.5, 1.5]),
        "names": ["x", "y"],
        "temperature": torch.tensor(0.7),
    }
    fields = {"scores": Field(span="row"), "loss_mask": Field(), "position_ids": MROPE}
    made = trial_batch(batch, fields, 3, 5)
    assert made["input_ids"].tolist() == [[5, 6, 7, 5, 6]] * 3
    assert bool((made["attention_mask"] == 1).all())
    assert bool((made["loss_mask"] == 1).all())
    assert set(made["labels"].flatten().tolist()) <= {4, 6, 7}
    assert made["position_ids"].tolist() == [[[0, 1, 2, 3, 4]] * 3] * 3
    assert made["scores"].tolist() == [0.5, 1.5, 0.5]
    assert made["names"] == ["x", "y", "x"]
    assert made["temperature"] is batch["temperature"]
    with pytest.raises(PadlessError, match="cannot make trial rows of 'pixels'"):
        trial_batch({**batch, "pixels": torch.zeros(4, 2)}, {**fields, "pixels": Field(span="flat", counts="n")}, 2, 2)
