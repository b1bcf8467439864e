"""Packs against plain implementations, against brute force and bounds, and under every option."""

from __future__ import annotations

import time
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from laws import check_plan_laws, partitions
from padless import CostModel, PadlessError, Plan, pack
from padless.planning import pack_kernels
from padless.planning.balance import partition
from padless.planning.pack import METHODS
from support.lengths import data_folder, measured_lengths

LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=60)


def plain_decreasing(lengths: list[int], capacity: int, *, best: bool) -> list[list[int]]:
    """Textbook first- and best-fit-decreasing over a list of packs: the lengths in each pack."""
    packs: list[list[int]] = []
    for length in sorted(lengths, reverse=True):
        fitting = [p for p in packs if capacity - sum(p) >= length]
        if not fitting:
            packs.append([length])
        elif best:
            min(fitting, key=lambda p: capacity - sum(p)).append(length)
        else:
            fitting[0].append(length)
    return packs


def held(plan: Plan) -> list[list[int]]:
    return [sorted(plan.lengths[group].tolist(), reverse=True) for group in plan]


@settings(max_examples=200, deadline=None)
@given(LENGTHS, st.integers(40, 130))
def test_decreasing_methods_are_what_their_names_say(lengths: list[int], capacity: int) -> None:
    first = pack(lengths, capacity, method="first-fit-decreasing")
    assert held(first) == plain_decreasing(lengths, capacity, best=False)
    best = pack(lengths, capacity, method="best-fit-decreasing")
    # Packs with equal room left are interchangeable, so what is filled is compared, not with what.
    assert sorted(map(sum, held(best))) == sorted(map(sum, plain_decreasing(lengths, capacity, best=True)))
    # Very large lengths and capacities go another way.
    unit = 10**7
    first = pack([unit * n for n in lengths], unit * capacity + 3, method="first-fit-decreasing")
    assert [[n // unit for n in group] for group in held(first)] == plain_decreasing(lengths, capacity, best=False)
    large = pack([unit * n for n in lengths], unit * capacity + 3)
    assert sorted(map(sum, held(large))) == [unit * total for total in sorted(map(sum, held(best)))]
    assert large.lower_bound == best.lower_bound


@settings(max_examples=100, deadline=None)
@given(LENGTHS, st.integers(40, 130))
def test_next_fit_keeps_the_order(lengths: list[int], capacity: int) -> None:
    plan = pack(lengths, capacity, method="next-fit")
    assert plan.order.tolist() == list(range(len(lengths)))
    check_plan_laws(plan)
    groups = held(plan)
    given_order = [[lengths[i] for i in group] for group in plan]
    assert all(sum(a) + b[0] > capacity for a, b in zip(groups, given_order[1:], strict=False))


def test_random_depends_on_the_seed_alone() -> None:
    lengths = list(range(1, 60))
    assert pack(lengths, 100, method="random", seed=1) == pack(lengths, 100, method="random", seed=1)
    assert pack(lengths, 100, method="random", seed=1) != pack(lengths, 100, method="random", seed=2)


@settings(max_examples=200, deadline=None)
@given(
    LENGTHS,
    st.integers(40, 160),
    st.sampled_from(METHODS),
    st.integers(1, 4),
    st.sampled_from(["none", "ranks", "work"]),
    st.sampled_from([1, 4, (2, 3)]),
    st.sampled_from([1, 8]),
    st.sampled_from(["truncate", "split", "drop", "alone"]),
)
def test_every_option_keeps_every_law(
    lengths: list[int], capacity: int, method: Any, ranks: int, balance: Any, each: Any, whole: int, overlong: Any
) -> None:
    long = [*lengths, 3 * capacity]
    options: dict[str, Any] = {
        "method": method, "ranks": ranks, "balance": balance, "sequence_multiple_of": each, "multiple_of": whole,
        "overlong": overlong,
    }  # fmt: skip
    plan = pack(long, capacity, **options)
    check_plan_laws(plan)
    assert plan == pack(long, capacity, **options)
    assert len(getattr(plan, {"drop": "dropped", "truncate": "truncated"}.get(overlong, overlong))) >= 1
    assert int((plan.rows > 0).sum()) >= plan.lower_bound


@settings(max_examples=100, deadline=None)
@given(LENGTHS, st.integers(60, 160), st.sampled_from(METHODS), st.integers(1, 3), st.randoms(use_true_random=False))
def test_atoms_stay_whole(lengths: list[int], capacity: int, method: Any, ranks: int, random: Any) -> None:
    atoms = [random.randrange(max(1, len(lengths) // 2)) for _ in lengths]
    for overlong in ("truncate", "drop", "alone"):
        check_plan_laws(pack(lengths, capacity, method=method, ranks=ranks, atoms=atoms, overlong=overlong))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 20), min_size=1, max_size=7), st.integers(20, 45))
def test_bounds_hold_and_optimal_comes_within_one_pack_of_brute_force(lengths: list[int], capacity: int) -> None:
    fewest = min(
        len(p) for p in partitions(range(len(lengths))) if all(sum(lengths[i] for i in part) <= capacity for part in p)
    )
    for method in METHODS:
        plan = pack(lengths, capacity, method=method)
        assert plan.lower_bound <= fewest <= len(plan)
    assert len(pack(lengths, capacity, method="optimal")) <= fewest + 1


@pytest.mark.parametrize("mean", [0.22, 0.28, 0.35])
def test_optimal_beats_best_fit_on_narrow_lengths_and_reaches_the_linear_bound(mean: float) -> None:
    draw = np.random.default_rng(0).normal(mean * 512, 0.15 * mean * 512, 20_000)
    lengths = np.clip(draw, 1, 512).astype(np.int64)
    plan = pack(lengths, 512, method="optimal", time_limit=60)
    check_plan_laws(plan)
    assert len(plan) <= plan.lower_bound + 4
    assert len(plan) < 0.985 * len(pack(lengths, 512))


def test_optimal_stops_at_its_time_limit_with_a_plan_no_worse_than_best_fit() -> None:
    lengths = np.random.default_rng(0).normal(300, 45, 20_000).clip(1, 1024).astype(np.int64)
    started = time.perf_counter()
    plan = pack(lengths, 1024, method="optimal", time_limit=0.2)
    assert time.perf_counter() - started < 20
    check_plan_laws(plan)
    assert len(plan) <= len(pack(lengths, 1024))


def test_large_capacities_are_coarsened_upwards_and_stay_within_the_capacity() -> None:
    lengths = np.random.default_rng(0).normal(1229, 184, 5_000).clip(1, 4096).astype(np.int64)
    plan = pack(lengths, 4096, method="optimal", time_limit=60)
    check_plan_laws(plan)
    assert len(plan) < len(pack(lengths, 4096))


@pytest.mark.parametrize(
    ("name", "lengths", "capacity"),
    [
        ("log-normal", np.random.default_rng(0).lognormal(np.log(350), 0.9, 10_000).clip(8, 4096), 4096),
        ("uniform", np.random.default_rng(0).integers(1, 4097, 10_000), 4096),
        ("bimodal", np.where(np.arange(10_000) % 3 == 0, 2060, 1010), 4096),
    ],
)
def test_best_fit_stays_within_a_tenth_of_a_percent_of_the_bound(name: str, lengths: Any, capacity: int) -> None:
    plan = pack(lengths.astype(np.int64), capacity)
    check_plan_laws(plan)
    assert len(plan) <= plan.lower_bound * 1.001 + 3, name


ATTENTION = CostModel(per_microbatch=0, per_token=1, per_token_squared=1 / 24576)


def spread(plan: Plan) -> float:
    work = plan.group_costs()
    return float(work.max() / work.mean() - 1)


def test_work_is_even_in_the_fewest_packs_under_the_hard_budget() -> None:
    pool = measured_lengths("mix_rl_gsm8k_heavy")
    for seed in range(3):
        lengths = np.random.default_rng(seed).choice(pool, 10_000)
        plain, even = pack(lengths, 32_768, cost=ATTENTION), pack(lengths, 32_768, cost=ATTENTION, balance="work")
        check_plan_laws(even)
        assert len(even) == len(plain) == plain.lower_bound
        assert spread(even) < 0.005


def test_work_is_evened_also_where_packs_are_full_to_the_last_tokens() -> None:
    lengths = np.random.default_rng(0).choice(measured_lengths("mix_rl_longcot"), 5_000)
    plain, even = pack(lengths, 32_768, cost=ATTENTION), pack(lengths, 32_768, cost=ATTENTION, balance="work")
    check_plan_laws(even)
    assert len(even) == len(plain)
    assert spread(even) < 0.3 * spread(plain)


@settings(max_examples=80, deadline=None)
@given(st.lists(st.integers(1, 20), min_size=2, max_size=7), st.integers(20, 45), st.sampled_from([0.0, 0.05]))
def test_even_work_comes_close_to_brute_force(lengths: list[int], capacity: int, squared: float) -> None:
    cost = CostModel(per_microbatch=0, per_token=1, per_token_squared=squared)
    plain, even = pack(lengths, capacity, cost=cost), pack(lengths, capacity, cost=cost, balance="work")
    check_plan_laws(even)
    assert len(even) == len(plain)
    least = min(
        max(sum(lengths[i] + squared * lengths[i] ** 2 for i in part) for part in parts)
        for parts in partitions(range(len(lengths)))
        if len(parts) <= len(plain) and all(sum(lengths[i] for i in part) <= capacity for part in parts)
    )
    assert least - 1e-9 <= even.group_costs().max() <= min(1.15 * least, plain.group_costs().max()) + 1e-9


def test_work_is_dealt_over_all_packs_that_the_ranks_run_anyway() -> None:
    lengths = np.random.default_rng(0).lognormal(np.log(350), 0.9, 600).clip(8, 8192).astype(np.int64)
    plan = pack(lengths, 32_768, ranks=8, cost=ATTENTION, balance="work")
    check_plan_laws(plan)
    assert plan.lower_bound == 10  # six packs would have to be halved, or so many ranks stay idle
    assert len(plan) == 16
    assert spread(plan) < 0.01


@settings(max_examples=100, deadline=None)
@given(LENGTHS, st.integers(40, 200), st.integers(1, 8), st.sampled_from([0.0, 0.05]), st.sampled_from([1, 8]))
def test_even_work_is_never_slower_than_packs_side_by_side(
    lengths: list[int], capacity: int, ranks: int, squared: float, multiple: int
) -> None:
    cost = CostModel(per_microbatch=10, per_token=1, per_token_squared=squared)
    options: dict[str, Any] = {"ranks": ranks, "cost": cost, "multiple_of": multiple, "overlong": "alone"}
    beside, even = pack(lengths, capacity, **options), pack(lengths, capacity, balance="work", **options)
    check_plan_laws(even)
    assert len(even) == len(beside)
    if ranks > 1:
        assert even.makespan() <= beside.makespan() * (1 + 1e-9)
    else:
        assert even.group_costs().max() <= beside.group_costs().max() + multiple - 1 + 1e-9


def test_sequences_alone_over_the_capacity_leave_the_work_of_the_others_even() -> None:
    lengths = [*measured_lengths("mix_rl_gsm8k_heavy")[:1000].tolist(), 100_000, 70_000]
    plan = pack(lengths, 32_768, cost=ATTENTION, balance="work", overlong="alone")
    check_plan_laws(plan)
    work = plan.group_costs()[2:]
    assert [group.tolist() for group in plan][:2] == [[1000], [1001]]
    assert work.max() / work.mean() - 1 < 0.01


def test_packs_of_one_micro_step_cost_alike() -> None:
    lengths = measured_lengths("mix_rl_gsm8k_heavy")[:2000]
    cost = CostModel(per_microbatch=0, per_token=1, per_token_squared=1e-3)
    laid = pack(lengths, 32_768, ranks=8, cost=cost)
    plain = pack(lengths, 32_768, ranks=8, cost=cost, balance="none")
    assert len(laid) == len(plain)
    assert (laid.rows > 0).all()
    assert laid.makespan() <= plain.makespan()
    assert laid.makespan() < plain.makespan() or not data_folder()


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 99), min_size=1, max_size=60), st.integers(1, 9), st.booleans())
def test_a_partition_uses_every_part_fairly(work: list[int], parts: int, equal: bool) -> None:
    place = partition(work, parts, equal_counts=equal)
    sums = np.bincount(place, weights=work, minlength=parts)
    counts = np.bincount(place, minlength=parts)
    assert sums.sum() == sum(work)
    if equal:
        assert counts.max() - counts.min() <= 1
    else:
        assert sums.max() <= sum(work) / parts + max(work)


@pytest.mark.parametrize("work", [[], [1.0, float("inf")], [-1.0], [[1.0]], ["a"]])
def test_work_that_is_not_a_list_of_numbers_is_refused(work: Any) -> None:
    with pytest.raises(PadlessError, match="non-empty list of finite numbers"):
        partition(work, 2)


def test_equal_counts_reach_the_bound_of_the_longest_with_the_shortest() -> None:
    lengths = np.random.default_rng(0).choice(measured_lengths("mix_rl_gsm8k_heavy"), 512)
    place = partition(lengths, 64, equal_counts=True)
    sums = np.bincount(place, weights=lengths)
    down = np.sort(lengths)
    bound = max(sums.mean(), down[-1] + down[:7].sum())
    assert (np.bincount(place) == 8).all()
    assert sums.max() <= bound * 1.02


def test_totals_pass_32_bits_and_capacities_pass_tables() -> None:
    lengths = np.full(5, 2**31 - 1, dtype=np.int32)
    plan = pack(lengths, 2**33)
    check_plan_laws(plan)
    assert len(plan) == 2
    assert plan.real_tokens == 5 * (2**31 - 1)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("capacity", [60_000_000, 10**9, 2**62, 2**70])
def test_a_large_capacity_costs_no_more_memory_and_time_than_its_sequences(method: Any, capacity: int) -> None:
    lengths = np.random.default_rng(0).integers(1, 10**6, 2_000)
    pack(lengths, 10**9, method=method)  # compiles
    tracemalloc.start()
    started = time.process_time()
    plan = pack(lengths, capacity, method=method)
    spent, peak = time.process_time() - started, tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    check_plan_laws(plan)
    assert len(plan) == -(-int(lengths.sum()) // capacity)
    assert peak < 20e6
    assert spent < 1


@pytest.mark.parametrize("unit", [1, 200, 20_000])
def test_memory_stays_below_three_times_the_lengths_and_the_plan_where_lengths_repeat(unit: int) -> None:
    lengths = (np.random.default_rng(0).integers(400, 4_097, 1_000_000) * unit).astype(np.int32)
    longest = 4_096 * unit
    pack(lengths, 4 * longest)  # compiles
    tracemalloc.start()
    plan = pack(lengths, 4 * longest)
    peak = tracemalloc.get_traced_memory()[1] + lengths.nbytes
    tracemalloc.stop()
    assert peak < 3 * (lengths.nbytes + plan.order.nbytes + plan.offsets.nbytes)


def test_lengths_that_64_bits_cannot_count_are_refused_and_the_largest_that_they_can_are_packed() -> None:
    most = 2**62
    with pytest.raises(PadlessError, match=r"sums to 4611686018427387907, over .*lengths\[1\], 4611686018427387904"):
        pack([3, most], most)
    with pytest.raises(PadlessError, match="multiple of 4611686018427387904, may not fit 64 bits"):
        pack([3, 5], most, sequence_multiple_of=most)
    for options in ({}, {"balance": "work"}, {"method": "optimal"}, {"ranks": 2}, {"sequence_multiple_of": 8}):
        plan = pack([most // 2, most // 4, most // 8, most // 8 - 8], 3 * (most // 4), **options)
        check_plan_laws(plan)
        assert plan.lower_bound == 2
        assert len(plan) == 2
        assert plan.real_tokens == most - 8


def test_any_array_of_integers_gives_the_same_plan_and_one_kernel() -> None:
    lengths = np.random.default_rng(0).integers(1, 100, 1000, dtype=np.int32)
    plan = pack(lengths, 256)
    kinds = len(pack_kernels.count_lengths.signatures)
    frozen = lengths.copy()
    frozen.flags.writeable = False
    shifted = np.frombuffer(b"0" + lengths.tobytes(), dtype=np.int32, offset=1)  # not aligned
    for same in (frozen, np.repeat(lengths, 2)[::2], lengths[::-1][::-1], lengths.astype(">i4"), shifted, plan.lengths):
        other = pack(same, 256)
        assert (other.order == plan.order).all()
        assert (other.offsets == plan.offsets).all()
    kinds_of_int64 = 1
    assert len(pack_kernels.count_lengths.signatures) <= kinds + kinds_of_int64


def test_threads_that_plan_at_once_get_the_plans_of_one_alone() -> None:
    draws = [np.random.default_rng(seed).integers(1, 500, 3_000) for seed in range(12)]
    for options in ({}, {"balance": "work", "ranks": 3, "cost": ATTENTION}, {"method": "first-fit-decreasing"}):
        alone = [pack(lengths, 1024, **options) for lengths in draws]
        with ThreadPoolExecutor(4) as pool:
            assert list(pool.map(lambda lengths, o=options: pack(lengths, 1024, **o), draws)) == alone


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"capacity": 10}, "length 12 at index 1 exceeds capacity 10"),
        ({"capacity": 0}, "capacity=0"),
        ({"method": "bfd"}, "'best-fit-decreasing'"),
        ({"balance": "all"}, "'ranks'"),
        ({"lengths": [[1, 2]]}, "one field"),
        ({"lengths": []}, "empty"),
        ({"time_limit": 0}, "time_limit=0"),
        ({"time_limit": "1"}, "time_limit='1'"),
        ({"seed": -1}, "seed=-1"),
        ({"seed": None}, "seed=None"),
        ({"multiple_of": 200}, r"exceeds capacity 100 \(at most 0 tokens fit\)"),
        ({"atoms": [1, 1, 2], "capacity": 14}, "together with its atom"),
        ({"atoms": [1, 1, 2], "capacity": 14, "overlong": "split"}, "tear atom 1 apart"),
    ],
)
def test_bad_input_is_refused_with_its_place_and_value(options: dict, message: str) -> None:
    options = {"lengths": [3, 12, 5], "capacity": 100, **options}
    with pytest.raises(PadlessError, match=message):
        pack(options.pop("lengths"), options.pop("capacity"), **options)
