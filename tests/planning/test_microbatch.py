"""Micro-batches: the published rule, the baseline, the options, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from laws import check_plan_laws
from padless import CostModel, PadlessError, Plan, microbatch
from padless.planning.sequential import rank_blocks
from support.lengths import measured_lengths

LENGTHS = st.lists(st.integers(1, 60), min_size=1, max_size=40)


def published_rule(lengths: list[int], budget: int) -> list[list[int]]:
    """Sorted ascending; a sequence is admitted while rows x longest stays within the budget."""
    groups: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: lengths[i]):
        if groups and (len(groups[-1]) + 1) * lengths[i] <= budget:
            groups[-1].append(i)
        else:
            groups.append([i])
    return groups


@settings(max_examples=150, deadline=None)
@given(LENGTHS, st.integers(60, 400), st.integers(1, 4))
def test_greedy_is_the_published_rule_on_each_ranks_share(lengths: list[int], budget: int, ranks: int) -> None:
    plan = microbatch(lengths, budget, ranks=ranks, method="greedy")
    check_plan_laws(plan)
    shares = rank_blocks(len(lengths), ranks)
    for rank in range(ranks):
        lo, hi = int(shares[rank]), int(shares[rank + 1])
        expected = [[lo + i for i in group] for group in published_rule(lengths[lo:hi], budget)]
        got = [group.tolist() for group in plan.of_rank(rank)]
        assert got[: len(expected)] == expected
        assert all(group == [] for group in got[len(expected) :])


def test_fixed_keeps_the_given_order_and_row_count() -> None:
    plan = microbatch([5, 9, 2, 7, 4], 1000, method="fixed", max_sequences=2)
    assert [group.tolist() for group in plan] == [[0, 1], [2, 3], [4]]


def test_fixed_ends_a_micro_batch_where_the_budget_does() -> None:
    plan = microbatch([100, 10, 10, 10, 100], 150, method="fixed")
    assert [group.tolist() for group in plan] == [[0], [1, 2, 3], [4]]


OPTIONS = st.fixed_dictionaries(
    {},
    optional={
        "multiple_of": st.sampled_from([1, 4, (2, 3)]),
        "max_sequences": st.integers(2, 8),
        "microbatches_multiple_of": st.integers(1, 3),
        "ranks": st.integers(1, 5),
        "sync": st.sampled_from(["microbatch", "step"]),
        "overlong": st.sampled_from(["truncate", "split", "drop", "alone"]),
        "order": st.sampled_from(["largest-first", "smallest-first", "small-ends", "largest-then-random"]),
        "ladder": st.sampled_from([3, [12, 24, 48]]),
    },
)


@settings(max_examples=200, deadline=None)
@given(LENGTHS, st.integers(48, 300), st.sampled_from(["fixed", "greedy", "balanced"]), OPTIONS)
def test_every_option_keeps_every_law(lengths: list[int], budget: int, method: str, options: dict) -> None:
    options.setdefault("overlong", "drop")
    plan = microbatch(lengths, budget, method=method, **options)
    check_plan_laws(plan)
    again = microbatch(lengths, budget, method=method, **options)
    assert plan == again


@settings(max_examples=100, deadline=None)
@given(
    LENGTHS,
    st.integers(100, 300),
    st.integers(1, 4),
    st.randoms(use_true_random=False),
    st.sampled_from(["truncate", "drop", "alone"]),
    st.sampled_from(["greedy", "balanced"]),
)
def test_atoms_stay_whole_under_every_policy(lengths, budget, ranks, random, overlong, method) -> None:  # type: ignore[no-untyped-def]
    atoms = [random.randrange(max(1, len(lengths) // 3)) for _ in lengths]
    check_plan_laws(microbatch(lengths, budget, ranks=ranks, atoms=atoms, overlong=overlong, method=method))


@settings(max_examples=80, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 40)), min_size=1, max_size=30), st.integers(1, 3))
def test_fields_padded_apart_are_charged_apart(lengths: list[tuple[int, int]], ranks: int) -> None:
    for method in ("fixed", "greedy", "balanced"):
        plan = microbatch(lengths, 160, ranks=ranks, method=method)
        check_plan_laws(plan)


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.integers(1, 60), min_size=8, max_size=40), st.integers(1, 3), st.sampled_from(["microbatch", "step"])
)
def test_a_floor_on_rows_holds_in_every_micro_batch_with_work(lengths: list[int], ranks: int, sync: str) -> None:
    plan = microbatch(lengths, 400, ranks=ranks, min_sequences=3, sync=sync)
    check_plan_laws(plan)


def test_a_multiple_of_rows_gives_way_only_where_fewer_fit_or_sequences_end() -> None:
    rng = np.random.default_rng(0)
    lengths = rng.integers(10, 400, 200)
    for ranks in (1, 4):
        plan = microbatch(lengths, 1600, ranks=ranks, sequences_multiple_of=4)
        check_plan_laws(plan)
        odd = [group for group in plan if len(group) % 4]
        short = [group for group in odd if 1600 // int(lengths[group].max()) >= 4]
        assert len(short) <= 1  # the sequences end once


def test_orders_move_whole_micro_steps_only() -> None:
    lengths = np.random.default_rng(0).integers(10, 900, 120)
    slowest = {}
    for order in ("largest-first", "smallest-first", "small-ends", "largest-then-random"):
        plan = microbatch(lengths, 2000, ranks=2, order=order)
        slowest[order] = plan.group_costs().reshape(plan.steps, 2).max(axis=1)
    down = slowest["largest-first"]
    assert (np.diff(down) <= 0).all()
    assert (np.diff(slowest["smallest-first"]) >= 0).all()
    ends = slowest["small-ends"]
    middle = int(ends.argmax())
    assert (np.diff(ends[: middle + 1]) >= 0).all()
    assert (np.diff(ends[middle:]) <= 0).all()
    assert abs(middle - len(ends) / 2) <= 1
    assert slowest["largest-then-random"][0] == down[0]
    assert not np.array_equal(slowest["largest-then-random"], down)
    for other in slowest.values():
        np.testing.assert_allclose(np.sort(other), np.sort(down))


def test_a_number_as_ladder_bounds_the_distinct_widths() -> None:
    lengths = measured_lengths("mix_rl_gsm8k_heavy")[:500]
    plan = microbatch(lengths, 16384, ranks=4, ladder=6, multiple_of=64, overlong="truncate")
    widths = {int(w) for w in plan.widths if w}
    assert len(widths) <= 6
    assert all(w % 64 == 0 for w in widths)


def test_a_plan_survives_saving(tmp_path) -> None:  # type: ignore[no-untyped-def]
    plan = microbatch([5, 9, 2, 7, 40], 20, ranks=2, overlong="split", seed=3)
    plan.save(tmp_path / "plan.npz")
    assert Plan.load(tmp_path / "plan.npz") == plan


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"token_budget": 512}, "length 513 at index 1 exceeds token_budget 512"),
        ({"token_budget": 0}, "token_budget=0"),
        ({"token_budget": 600.0}, "token_budget=600.0"),
        ({"lengths": []}, "lengths is empty"),
        ({"lengths": [3, -1]}, r"lengths\[1\] is -1"),
        ({"lengths": [3, 0]}, r"lengths\[1\] is 0"),
        ({"lengths": [3, 1.5]}, r"lengths\[1\] is .*1.5"),
        ({"method": "fast"}, "'fixed', 'greedy', 'balanced'"),
        ({"order": "up"}, "'largest-first'"),
        ({"overlong": "ignore", "token_budget": 100}, "'error', 'truncate'"),
        ({"ladder": [100], "multiple_of": 64}, "ladder holds 100"),
        ({"min_sequences": 4, "max_sequences": 2}, "min_sequences=4"),
        ({"min_sequences": 2, "method": "greedy"}, "method='balanced'"),
        ({"min_sequences": 3, "token_budget": 1000}, "min_sequences"),
        ({"atoms": [0, 0, 0], "max_sequences": 2}, "atom 0 holds 3 sequences"),
        ({"atoms": [0, 0]}, "atoms has shape"),
        ({"atoms": [0, 0, 1], "token_budget": 600}, "index 1 exceeds token_budget 600 for the rows of its atom"),
    ],
)
def test_bad_input_is_refused_with_its_place_and_value(options: dict, message: str) -> None:
    options = {"lengths": [10, 513, 20], "token_budget": 4096, **options}
    with pytest.raises(PadlessError, match=message):
        microbatch(options.pop("lengths"), options.pop("token_budget"), **options)


def test_the_budget_is_never_exceeded_in_random_draws_of_real_lengths() -> None:
    pool = measured_lengths("mix_rl_longcot")
    rng = np.random.default_rng(0)
    for _ in range(150):
        ranks, budget = int(rng.integers(1, 17)), int(rng.integers(4_000, 40_000))
        lengths = np.minimum(rng.choice(pool, int(rng.integers(1, 300))), budget // 64 * 64)
        plan = microbatch(lengths, budget, ranks=ranks, multiple_of=int(rng.choice([1, 64])))
        assert plan.group_tokens.max() <= budget
        plan.check()


def test_totals_pass_32_bits() -> None:
    lengths = np.full(70, 2**31 - 1, dtype=np.int32)
    plan = microbatch(lengths, 2**36, ranks=2)
    assert plan.real_tokens == plan.padded_tokens == 70 * (2**31 - 1)
    check_plan_laws(plan)


def test_the_plan_says_with_which_cost_it_was_made() -> None:
    cost = CostModel(per_microbatch=3, per_token=2)
    assert microbatch([3, 4], 10, cost=cost).cost == cost
    assert microbatch([3, 4], 10).to_dict()["cost"]["source"] == "default"
