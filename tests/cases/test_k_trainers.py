"""Figures in a trainer's log that misled: reports from public trackers."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from padless.integrations._figures import Figures
from padless.integrations.transformers import PadlessOptions
from support.trainers import plain_trainer


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock that a test moves."""
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    return now


def micro(lengths: list[int], width: int) -> Any:
    return SimpleNamespace(lengths=np.array(lengths), weight=1.0, padded_tokens=len(lengths) * width)


def test_k03_each_log_has_the_rate_of_its_own_steps(clock: list[float]) -> None:
    """open-instruct#1032: 100 tokens in each of three seconds is never 300 tokens a second."""
    figures, rates = Figures(), []
    for _ in range(3):
        figures.load(0.0, torch.nn.Linear(1, 1))
        figures.ran(micro([60, 40], 60))
        clock[0] += 1.0
        rates.append(figures.take(1))
    assert [rate["padless/real_tokens_per_second"] for rate in rates] == [100, 100, 100]
    assert [rate["padless/padded_tokens_per_second"] for rate in rates] == [120, 120, 120]


def test_k05_waiting_for_the_loader_is_told_apart(clock: list[float]) -> None:
    """axolotl#2632: 0.2 s of waiting before each 0.1 s of work is two thirds."""
    figures = Figures()
    for _ in range(2):
        clock[0] += 0.2
        figures.load(0.2, torch.nn.Linear(1, 1))
        figures.ran(micro([4], 4))
        clock[0] += 0.1
        figures.close()
    assert figures.take(1)["padless/waiting_share"] == pytest.approx(2 / 3)


def test_k05_a_slow_loader_shows_in_the_log(tmp_path: Path) -> None:
    from support.trainers import collate

    def slow(rows: Any) -> Any:
        time.sleep(0.5)
        return collate(rows)

    shares = {}
    for name, collator in (("slow", slow), ("fast", collate)):
        trainer, _ = plain_trainer(
            tmp_path, "qwen2", padless=PadlessOptions(token_budget=96), max_steps=3, collator=collator
        )
        trainer.train()
        shares[name] = [e["padless/waiting_share"] for e in trainer.state.log_history if "grad_norm" in e]
    assert min(shares["slow"]) > max(shares["fast"])
    assert min(shares["slow"]) > 0.3


def test_k04_padding_is_no_useful_work(tmp_path: Path) -> None:
    """RL#2790, bionemo-recipes#1548: the same rows in wider micro-batches do not raise what counts as useful."""
    useful, computed = [], []
    for multiple in (1, 32):
        options = PadlessOptions(token_budget=320, multiple_of=multiple)
        trainer, _ = plain_trainer(tmp_path, "qwen2", padless=options, max_steps=3, logging_steps=100)
        trainer.train()
        meter = trainer.padless.figures._meter
        assert meter is not None
        useful.append(float(meter.useful_flops))
        computed.append(float(meter.attention_computed))
    assert useful[0] == useful[1] > 0
    assert computed[0] < computed[1]
