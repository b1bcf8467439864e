"""Metrics that misled: reports from public trackers, each with its input and what was expected."""

from __future__ import annotations

import numpy as np
import pytest

from padless.metrics import Meter


def test_k01_real_tokens_per_second_occupancy_and_padded_tokens_per_second_are_told_apart() -> None:
    """allenai/OLMo-core#870: a batch of 2 x 8 positions, 10 of them real, in half a second."""
    meter = Meter()
    meter.micro_batch([6, 4], padded_tokens=2 * 8)
    meter.step(seconds=0.5)
    assert meter.padded_tokens_per_second == 32.0
    assert meter.real_tokens_per_second == 20.0
    assert meter.occupancy == 0.625


def test_k03_rates_of_each_step_use_the_tokens_of_that_step() -> None:
    """allenai/open-instruct#1032: 100 tokens in each of three seconds is never 300 tokens a second."""
    meter, laps = Meter(), []
    for _ in range(3):
        meter.micro_batch([100], padded_tokens=100)
        meter.step(seconds=1.0)
        laps.append(meter.lap())
    assert [lap.real_tokens_per_second for lap in laps] == [100, 100, 100]
    assert sum(laps).real_tokens_per_second == 100


def test_k04_attention_is_counted_by_segment_and_padding_is_not_useful() -> None:
    """NVIDIA-NeMo/RL#2790: two segments of 2 in a pack of 4 need 8 units, not 16."""
    packed = Meter(flops_per_token_squared=1.0)
    packed.micro_batch([2, 2], padded_tokens=4, computed_lengths=[2, 2])
    assert packed.attention == 8
    assert packed.useful_flops == 8
    padded = Meter()
    padded.micro_batch([2], padded_tokens=4)
    assert padded.attention == 4
    assert padded.attention_computed == 16


def test_k05_time_blocked_on_the_loader_is_measured_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """axolotl-ai-cloud/axolotl#2632: 0.2 s of waiting before each 0.1 s of work is two thirds."""
    clock = [0.0]
    monkeypatch.setattr("padless.metrics.time.perf_counter", lambda: clock[0])

    def loader() -> object:
        for item in range(2):
            clock[0] += 0.2
            yield item

    meter = Meter()
    for _ in meter.watch(loader()):
        clock[0] += 0.1
        meter.step()
    assert meter.waiting_share == pytest.approx(2 / 3)
    later = Meter()
    for _ in later.watch(loader(), skip_first=True):
        clock[0] += 0.1
        later.step()
    assert later.waiting == pytest.approx(0.2)
    assert later.waiting_share == pytest.approx(0.5)


def test_k06_the_spread_over_ranks_is_reported() -> None:
    """snowflakedb/ArcticTraining#155: one of eight ranks gets a much smaller pack."""
    tokens = [449280, 334080, 448768, 448512, 449792, 448256, 449536, 449792]
    meters = []
    for held in tokens:
        meter = Meter()
        meter.micro_batch([held], padded_tokens=held)
        meters.append(meter)
    spread = Meter.across(meters).imbalance
    # The report rounds; the mean of the eight is 434752.
    assert spread["max_over_mean"] == pytest.approx(449792 / np.mean(tokens))
    assert spread["max_over_mean"] == pytest.approx(1.0346, abs=1e-4)
    assert spread["min_over_max"] == pytest.approx(0.7427, abs=1e-4)
