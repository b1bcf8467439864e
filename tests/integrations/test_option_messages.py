"""Options of the trainers that cannot be meant as given: each is said with the way to give it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import Trainer, TrainingArguments

import padless
from padless.data import TokenBudgetSampler
from padless.errors import PadlessError
from padless.integrations.transformers import PadlessOptions, with_padless
from support.trainers import collate, sft_rows, tiny_model


def trainer_of(folder: Path, base: type = Trainer, **more: Any) -> Any:
    return with_padless(base)(
        model=tiny_model("qwen2"),
        args=TrainingArguments(output_dir=str(folder), report_to=[]),
        train_dataset=sft_rows(8),
        data_collator=collate,
        **more,
    )


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"padless": {"token_budget": 2048}}, r"padless=PadlessOptions\(token_budget=2048\)"),
        ({"padless": 2048}, r"padless=2048; expected .*padless=PadlessOptions\(token_budget=2048\)"),
        ({"padless": {"layuot": "auto"}}, r"padless=PadlessOptions\(token_budget=16_384\)"),
        (
            {"padless": {"token_budget": 64, "fields": {"a": list(range(999))}}},
            r"fields=\{'a': \[0, .*\.\.\.[^.]*\]\}\)$",
        ),
        (
            {"token_budget": 100, "padless": PadlessOptions(token_budget=2048)},
            r"token_budget=100 and padless=PadlessOptions\(token_budget=2048\) contradict each other",
        ),
        (
            {"token_budget": "auto", "padless": PadlessOptions(token_budget=2048)},
            r"token_budget='auto' and .*token_budget=2048\) contradict",
        ),
        ({"token_budget": 100, "multiple_of": 8}, r"multiple_of=8 .*padless=PadlessOptions\(multiple_of=8\)"),
        ({"token_budget": 100, "layout": "auto"}, r"layout='auto' .*padless=PadlessOptions\(layout='auto'\)"),
    ],
)
def test_a_trainer_says_how_its_options_are_given(given: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(PadlessError, match=said):
        trainer_of(tmp_path, **given)


def test_budgets_in_two_places_that_agree_are_fine_and_one_of_them_may_be_missing(tmp_path: Path) -> None:
    for given in (
        {"token_budget": 96, "padless": PadlessOptions(token_budget=96, multiple_of=8)},
        {"token_budget": 96, "padless": PadlessOptions(multiple_of=8)},
        {"padless": PadlessOptions(token_budget=96, multiple_of=8)},
    ):
        options = trainer_of(tmp_path, **given).padless.options
        assert (options.token_budget, options.multiple_of) == (96, 8)


def test_a_trainers_own_arguments_and_mistakes_stay_its_own(tmp_path: Path) -> None:
    class Own(Trainer):
        def __init__(self, *args: Any, method: str = "plain", **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.method = method

    assert trainer_of(tmp_path, Own, token_budget=96, method="mine").method == "mine"
    with pytest.raises(TypeError, match="unexpected keyword argument 'learning_rate'"):
        trainer_of(tmp_path, token_budget=96, learning_rate=0.1)


def test_trl_and_lightning_say_the_same(tmp_path: Path) -> None:
    from trl import SFTConfig, SFTTrainer

    from padless.integrations.lightning import PadlessModuleMixin
    from support.lightning_runs import HostModule

    config = SFTConfig(output_dir=str(tmp_path), report_to=[], use_cpu=True, bf16=False)
    with pytest.raises(PadlessError, match=r"padless=PadlessOptions\(exchange='never'\)"):
        with_padless(SFTTrainer)(model=tiny_model("qwen2"), args=config, token_budget=64, exchange="never")

    class Module(PadlessModuleMixin, HostModule):
        def __init__(self, **options: Any) -> None:
            super().__init__("qwen2", **options)

    with pytest.raises(PadlessError, match=r"padless=PadlessOptions\(multiple_of=8\)"):
        Module(token_budget=64, multiple_of=8)
    with pytest.raises(PadlessError, match=r"padless=64; expected a PadlessOptions"):
        Module(padless=64)
    with pytest.raises(PadlessError, match="contradict each other"):
        Module(token_budget=64, padless=PadlessOptions(token_budget=65))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"report": "x"}, r"report='x'; expected what padless.verify.check_layouts\(model\) returns"),
        ({"report": True, "layout": "auto"}, "report=True; expected what"),
        ({"cost": "auto"}, r"cost='auto'; expected a CostModel"),
        ({"fields": {"weights": "row"}}, r"fields\['weights'\] is 'row'; expected a Field"),
    ],
)
def test_options_are_checked_when_given_and_regroup_says_the_same(given: dict[str, Any], said: str) -> None:
    with pytest.raises(PadlessError, match=said):
        PadlessOptions(token_budget=64, **given)
    with pytest.raises(PadlessError, match=said):
        padless.regroup([[1, 2], [3]], 8, **given)


def test_planners_and_samplers_take_cost_models_alone() -> None:
    for call in (
        lambda: padless.microbatch([3, 4], 8, cost=500),  # type: ignore[arg-type]
        lambda: padless.pack([3, 4], 8, cost=500),  # type: ignore[arg-type]
        lambda: TokenBudgetSampler([3, 4], token_budget=8, sequences_per_step=2, cost=500),  # type: ignore[arg-type]
    ):
        with pytest.raises(PadlessError, match=r"cost=500; expected a CostModel"):
            call()
