"""The plain Trainer with padless takes the same optimizer steps as the Trainer alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from padless.integrations.transformers import PadlessOptions
from support.trainers import MODELS, assert_same_run, run_plain

BUDGET = 96


@pytest.mark.parametrize("rows_and_steps", [(4, 2), (8, 1)], ids=["accumulated", "at-once"])
@pytest.mark.parametrize("kind", MODELS)
def test_ten_steps_are_those_of_the_trainer_alone(kind: str, rows_and_steps: tuple[int, int], tmp_path: Path) -> None:
    size, steps = rows_and_steps
    changes = {"per_device_train_batch_size": size, "gradient_accumulation_steps": steps}
    host = run_plain(tmp_path, kind, **changes)
    ours = run_plain(tmp_path, kind, padless=PadlessOptions(token_budget=BUDGET), **changes)
    assert_same_run(host, ours)
    assert ours.padded_tokens < host.padded_tokens
