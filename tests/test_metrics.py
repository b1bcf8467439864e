"""Meters: counts that add, rates that follow from matching windows."""

from __future__ import annotations

import math
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from padless import PadlessError
from padless.metrics import Meter, Neighbours

counted = st.lists(
    st.tuples(st.lists(st.integers(1, 50), min_size=1, max_size=6), st.integers(0, 20), st.floats(0.01, 5)),
    min_size=1,
    max_size=8,
)


def filled(batches: list[tuple[list[int], int, float]]) -> Meter:
    meter = Meter(flops_per_token=6.0, flops_per_token_squared=0.5, peak_flops=1e6)
    for lengths, extra, seconds in batches:
        meter.micro_batch(lengths, padded_tokens=sum(lengths) + extra)
        meter.wait(seconds / 4)
        meter.step(seconds=seconds)
    return meter


@given(counted, counted)
def test_the_sum_of_two_meters_has_the_rates_of_all_their_counts(first: list, second: list) -> None:
    together, apart = filled(first + second), filled(first) + filled(second)
    for name in ("real_tokens", "padded_tokens", "sequences", "micro_batches", "steps", "attention"):
        assert getattr(apart, name) == getattr(together, name)
    assert apart.occupancy == together.occupancy
    for name in ("real_tokens_per_second", "mfu", "waiting_share"):
        assert getattr(apart, name) == pytest.approx(getattr(together, name))


@given(counted)
def test_laps_sum_to_the_whole_and_each_uses_its_own_window(batches: list) -> None:
    meter, laps = Meter(), []
    for lengths, extra, seconds in batches:
        meter.micro_batch(lengths, padded_tokens=sum(lengths) + extra)
        meter.step(seconds=seconds)
        laps.append(meter.lap())
        assert laps[-1].real_tokens_per_second == pytest.approx(sum(lengths) / seconds)
    whole, summed = filled(batches), sum(laps)
    assert summed.to_dict()["real_tokens"] == whole.real_tokens
    assert summed.seconds == pytest.approx(whole.seconds)
    a, b = summed.neighbours.correlation, whole.neighbours.correlation
    assert (math.isnan(a) and math.isnan(b)) or a == pytest.approx(b)


@given(st.lists(st.floats(1, 1000), min_size=3, max_size=50))
def test_neighbour_correlation_is_that_of_numpy(means: list[float]) -> None:
    counter = Neighbours()
    for mean in means:
        counter.add(mean)
    x, y = np.array(means[:-1]), np.array(means[1:])
    if x.std() > 1e-2 and y.std() > 1e-2:
        assert counter.correlation == pytest.approx(np.corrcoef(x, y)[0, 1], abs=1e-5)


def test_an_empty_meter_has_no_rates_and_raises_nothing() -> None:
    told = Meter().to_dict()
    assert told["occupancy"] is None
    assert told["mfu"] is None
    assert told["neighbour_correlation"] is None
    assert "0 steps" in repr(Meter())


def test_padding_never_raises_mfu() -> None:
    narrow, wide = Meter(flops_per_token=1, peak_flops=100), Meter(flops_per_token=1, peak_flops=100)
    narrow.micro_batch([3, 3], padded_tokens=6)
    wide.micro_batch([3, 3], padded_tokens=60)
    narrow.step(seconds=1.0)
    wide.step(seconds=1.0)
    assert wide.mfu == narrow.mfu == pytest.approx(0.06)
    assert wide.padded_tokens_per_second > narrow.padded_tokens_per_second


def test_more_real_than_padded_tokens_are_refused() -> None:
    with pytest.raises(PadlessError, match="padded_tokens=5"):
        Meter().micro_batch([3, 3], padded_tokens=5)


def test_meters_of_different_models_do_not_add() -> None:
    with pytest.raises(PadlessError, match="flops_per_token"):
        Meter(flops_per_token=1.0) + Meter(flops_per_token=2.0)


def test_a_step_without_a_beginning_says_how_to_give_one() -> None:
    with pytest.raises(PadlessError, match="start\\(\\)"):
        Meter().step()


def test_watch_times_the_wait_and_not_the_work() -> None:
    def slow() -> object:
        for item in range(3):
            time.sleep(0.03)
            yield item

    meter = Meter()
    for _ in meter.watch(slow()):
        time.sleep(0.01)
        meter.micro_batch([1], padded_tokens=1)
        meter.step()
    # Lower bounds only: a busy machine sleeps longer.
    assert meter.waiting >= 0.09
    assert meter.seconds - meter.waiting >= 0.03 - 1e-3
    assert meter.waiting_share < 1


def test_batches_of_tensors_are_counted_by_mask_or_by_segments() -> None:
    torch = pytest.importorskip("torch")
    meter = Meter()
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]])
    meter.add_batch({"input_ids": torch.zeros(2, 3, dtype=torch.long), "attention_mask": mask})
    assert (meter.real_tokens, meter.padded_tokens, meter.sequences) == (5, 6, 2)
    packed = {"input_ids": torch.zeros(1, 5, dtype=torch.long), "cu_seq_lens_q": torch.tensor([0, 3, 5])}
    meter.add_batch(packed)
    assert (meter.real_tokens, meter.attention) == (10, 2 * (9 + 4))
    with pytest.raises(PadlessError, match="attention_mask"):
        meter.add_batch({"input_ids": torch.zeros(1, 5)})


def test_a_meter_reads_the_arithmetic_of_a_model() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.Qwen2Config(
        vocab_size=100, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, tie_word_embeddings=False,
    )  # fmt: skip
    model = transformers.Qwen2ForCausalLM(config)
    meter = Meter.for_model(model, peak_flops=1e9)
    weights = sum(p.numel() for p in model.parameters()) - 100 * 16
    assert meter.flops_per_token == 6 * weights
    assert meter.flops_per_token_squared == 12 * 2 * 16 / 2


def test_ranks_side_by_side_take_the_slowest_time_and_show_their_imbalance() -> None:
    fast, slow = filled([([4], 0, 1.0)]), filled([([2], 0, 3.0)])
    both = Meter.across([fast, slow])
    assert both.seconds == 3.0
    assert both.real_tokens_per_second == 2.0
    assert both.peak_flops == 2e6
    assert both.imbalance == {"max_over_mean": pytest.approx(4 / 3), "min_over_max": 0.5}
    assert (both + both).imbalance == both.imbalance
    assert Meter().gather().steps == 0
