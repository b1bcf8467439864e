"""The figures of each strategy agree with a direct computation on the same lengths."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from padless.analysis import STRATEGIES, Schedule, Setup, analyze_lengths, make_schedule
from padless.analysis.analyze import epoch
from padless.analysis.figures import figures_of, perfect_time
from padless.cost import CostModel
from padless.errors import PadlessError
from padless.planning.microbatch import microbatch
from padless.planning.pack import pack
from support.lengths import measured_lengths

COST = CostModel(per_microbatch=300, per_token=1, per_token_squared=0.001)


def setup_for(lengths: Any, budget: int, *, ranks: int = 1, size: int = 32, **more: Any) -> Setup:
    fields = np.asarray(lengths).reshape(len(lengths), -1)
    return Setup(
        token_budget=budget,
        ranks=ranks,
        sequences_per_step=size,
        widest=int(fields.max(axis=0).sum()),
        cost=more.pop("cost", COST),
        **more,
    )


def columns(lengths: Any) -> np.ndarray:
    return np.asarray(lengths, dtype=np.int64).reshape(len(lengths), -1)


@settings(deadline=None, max_examples=120)
@given(
    lengths=st.lists(st.integers(1, 200), min_size=1, max_size=90),
    name=st.sampled_from(STRATEGIES),
    ranks=st.integers(1, 5),
    size=st.integers(1, 40),
    multiple=st.sampled_from([1, 8]),
)
def test_every_strategy_runs_every_sequence_once_within_the_budget(
    lengths: list[int], name: str, ranks: int, size: int, multiple: int
) -> None:
    setup = setup_for(lengths, 256, ranks=ranks, size=size, multiple_of=multiple)
    schedule = make_schedule(name, columns(lengths), setup)
    assert sorted(schedule.order.tolist()) == list(range(len(lengths)))
    assert schedule.padded.max() <= 256
    assert len(schedule.width) % ranks == 0
    assert (schedule.rank == np.tile(np.arange(ranks), len(schedule.width) // ranks)).all()
    assert (np.diff(schedule.step) >= 0).all()
    assert schedule.real.sum() == sum(lengths)
    if name.startswith("step") or name in ("fixed", "longest-in-batch"):
        for g in range(len(schedule.width)):
            assert (schedule.members(g) // size == schedule.step[g]).all()


@settings(deadline=None, max_examples=80)
@given(
    lengths=st.lists(st.integers(1, 200), min_size=1, max_size=60),
    name=st.sampled_from(STRATEGIES),
    ranks=st.integers(1, 4),
)
def test_no_strategy_beats_the_padding_free_bound(lengths: list[int], name: str, ranks: int) -> None:
    setup = setup_for(lengths, 256, ranks=ranks, size=16)
    assert figures_of(make_schedule(name, columns(lengths), setup), setup).step_time_ratio >= 1 - 1e-9


def brute(schedule: Schedule, setup: Setup) -> dict[str, float]:
    """The same figures, one micro-batch at a time in plain Python."""
    total = schedule.lengths.sum(axis=1)
    padded = real = slowest = mean = count = 0.0
    for start in range(0, len(schedule.width), setup.ranks):
        costs = []
        for g in range(start, start + setup.ranks):
            held = [int(total[i]) for i in schedule.members(g)]
            width = int(schedule.width[g])
            count += bool(held)
            real += sum(held)
            if schedule.packed:
                padded += width
                squares = sum(n * n for n in held)
                costs.append(COST.per_microbatch + width + COST.per_token_squared * squares)
            else:
                padded += len(held) * width
                costs.append(COST.per_microbatch + len(held) * width + COST.per_token_squared * len(held) * width**2)
        slowest += max(costs)
        mean += sum(costs) / len(costs)
    work = float(total.sum() + COST.per_token_squared * (total.astype(float) ** 2).sum())
    bound = (work + COST.per_microbatch * math.ceil(total.sum() / setup.token_budget)) / setup.ranks
    return {
        "occupancy": real / padded,
        "microbatches": count,
        "padded_tokens": padded,
        "step_time_ratio": slowest / bound,
        "rank_imbalance": slowest / mean - 1,
    }


@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("data", ["mix_rl_gsm8k_heavy", "mix_sft_general"])
def test_figures_agree_with_a_direct_computation(name: str, ranks: int, data: str) -> None:
    lengths = measured_lengths(data)[:1500].clip(max=4096)
    setup = setup_for(lengths, 4096, ranks=ranks, size=100)
    schedule = make_schedule(name, columns(lengths), setup)
    found = figures_of(schedule, setup).to_dict()
    for key, value in brute(schedule, setup).items():
        assert found[key] == pytest.approx(value, rel=1e-9, abs=1e-12), key


def test_fixed_and_longest_in_batch_are_what_numpy_says() -> None:
    lengths = measured_lengths("mix_rl_gsm8k_heavy")[:1024].clip(max=2048)
    widest = int(lengths.max())
    setup = setup_for(lengths, 8 * widest, ranks=2, size=128)
    fixed = figures_of(make_schedule("fixed", columns(lengths), setup), setup)
    assert fixed.occupancy == pytest.approx(lengths.sum() / (1024 * widest))
    assert fixed.microbatches == 1024 // 8
    longest = figures_of(make_schedule("longest-in-batch", columns(lengths), setup), setup)
    assert longest.padded_tokens == 8 * int(lengths.reshape(-1, 8).max(axis=1).sum())


def test_prompts_and_responses_padded_apart_add_their_widths() -> None:
    lengths = np.array([[3, 10], [8, 2], [5, 5], [1, 1]])
    setup = setup_for(lengths, 36, size=4)
    assert setup.widest == 18
    fixed = make_schedule("fixed", columns(lengths), setup)
    assert fixed.padded.tolist() == [36, 36]
    longest = make_schedule("longest-in-batch", columns(lengths), setup)
    assert longest.width.tolist() == [8 + 10, 5 + 5]
    assert make_schedule("sorted", columns(lengths), setup).width.tolist() == [10, 13]


@pytest.mark.parametrize(("name", "method"), [("step-greedy", "greedy"), ("step-balanced", "balanced")])
def test_step_strategies_are_the_planners_plans(name: str, method: Any) -> None:
    lengths = measured_lengths("mix_sft_general")[:256].clip(max=4096)
    setup = setup_for(lengths, 8192, ranks=2, size=64)
    schedule = make_schedule(name, columns(lengths), setup)
    plans = [microbatch(lengths[i : i + 64], 8192, ranks=2, method=method, cost=COST) for i in range(0, 256, 64)]
    assert schedule.padded.sum() == sum(plan.padded_tokens for plan in plans)
    assert schedule.costs(COST).reshape(-1, 2).max(axis=1).sum() == pytest.approx(sum(p.makespan() for p in plans))


def test_packed_is_the_packers_plan() -> None:
    lengths = measured_lengths("mix_sft_general")[:500].clip(max=2048)
    setup = setup_for(lengths, 2048, size=50)
    assert figures_of(make_schedule("packed", columns(lengths), setup), setup).microbatches == len(pack(lengths, 2048))


def test_a_sorted_epoch_is_correlated_and_a_shuffled_one_is_not() -> None:
    lengths = np.random.default_rng(0).permutation(np.arange(1, 6401) % 512 + 1)
    setup = setup_for(lengths, 4096, size=100)
    found = {n: figures_of(make_schedule(n, columns(lengths), setup), setup).neighbour_correlation for n in STRATEGIES}
    assert found["sorted"] > 0.95
    for name in ("fixed", "longest-in-batch", "step-greedy", "step-balanced", "pool", "range", "packed"):
        assert abs(found[name]) < 0.45, name


def test_ranks_that_meet_at_the_step_only_wait_less() -> None:
    lengths = measured_lengths("mix_rl_gsm8k_heavy")[:512].clip(max=4096)
    tight = setup_for(lengths, 4096, ranks=4, size=128)
    loose = setup_for(lengths, 4096, ranks=4, size=128, sync="step")
    schedule = make_schedule("longest-in-batch", columns(lengths), tight)
    assert figures_of(schedule, loose).rank_imbalance < figures_of(schedule, tight).rank_imbalance


def test_the_bound_is_real_work_and_full_micro_batches_over_the_ranks() -> None:
    setup = setup_for([100] * 10, 250, ranks=2, cost=CostModel(per_microbatch=50, per_token=2))
    assert perfect_time(columns([100] * 10), setup) == (2000 + 50 * 4) / 2


def test_mixture_weights_set_the_shares_of_the_epoch() -> None:
    source = np.array([0] * 900 + [1] * 100)
    drawn = epoch(1000, source=source, weights=[1, 3], seed=0)
    assert 0.70 < (source[drawn] == 1).mean() < 0.80
    assert sorted(epoch(1000, source=source, weights=None, seed=0).tolist()) == list(range(1000))
    with pytest.raises(PadlessError, match="1 weights for 2 files"):
        epoch(1000, source=source, weights=[1], seed=0)
    with pytest.raises(PadlessError, match="expected numbers of at least 0"):
        epoch(1000, source=source, weights=[1, -1], seed=0)


def test_a_sample_stands_for_the_epoch() -> None:
    lengths = np.random.default_rng(0).integers(10, 1000, size=6_000)
    whole = analyze_lengths(lengths, token_budget=8192, sequences_per_step=100)
    part = analyze_lengths(lengths, token_budget=8192, sequences_per_step=100, sample=2_050)
    assert (whole.simulated, part.simulated) == (6_000, 2_000)
    for name in STRATEGIES:
        assert part.figures[name].occupancy == pytest.approx(whole.figures[name].occupancy, abs=0.03)
        assert part.figures[name].microbatches == pytest.approx(whole.figures[name].microbatches, rel=0.05)
