"""The planner behind verl's ``rearrange_micro_batches``; needs no verl."""

from __future__ import annotations

import doctest
import importlib
import itertools
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from padless import CostModel, PadlessError
from padless.integrations.verl_balance import assign, deal
from padless.integrations.verl_plan import Request, makespan, plan_ranks

BUDGET = 64


@st.composite
def jobs(draw: st.DrawFn) -> tuple[list[list[int]], Request]:
    """Rows of one to four ranks and options under which a plan exists."""
    size = draw(st.sampled_from([1, 2, 3]))
    multiple = draw(st.sampled_from([1, 4]))
    longest = BUDGET // size // multiple * multiple
    groups = draw(st.integers(1, 12))
    ranks = draw(st.integers(1, 4))
    rows = st.lists(st.integers(1, longest), min_size=groups * size, max_size=groups * size)
    every = draw(st.sampled_from([n for n in (1, 2, 3) if groups % n == 0]))
    request = Request(
        token_budget=BUDGET,
        multiple_of=multiple,
        group_size=size,
        count_multiple_of=every,
        at_least=draw(st.integers(1, groups)),
        max_sequences=draw(st.sampled_from([None, 3, 6])),
        order=draw(st.sampled_from(["largest-first", "small-ends"])),
        cost=CostModel(per_microbatch=draw(st.sampled_from([0, 5, 200])), per_token_squared=0.01),
    )
    return [draw(rows) for _ in range(ranks)], request


@given(jobs())
def test_every_plan_keeps_the_laws(job: tuple[list[list[int]], Request]) -> None:
    lengths, request = job
    plans = plan_ranks(lengths, request)
    assert len({plan.steps for plan in plans}) == 1
    steps = plans[0].steps
    assert steps >= request.at_least
    assert steps % request.count_multiple_of == 0
    for held, plan in zip(lengths, plans, strict=True):
        groups = [group.tolist() for group in plan]
        assert sorted(itertools.chain(*groups)) == list(range(len(held)))
        assert all(groups), "verl cannot run an empty micro-batch"
        for group in groups:
            width = -(-max(held[row] for row in group) // request.multiple_of) * request.multiple_of
            assert len(group) * width <= request.token_budget
            assert request.max_sequences is None or len(group) <= request.max_sequences
            together = {row // request.group_size for row in group}
            assert len(group) == len(together) * request.group_size


@given(jobs())
def test_the_order_is_as_asked(job: tuple[list[list[int]], Request]) -> None:
    lengths, request = job
    for plan in plan_ranks(lengths, request):
        costs = plan.group_costs()
        if request.order == "largest-first":
            assert (np.diff(costs) <= 1e-9).all()
        else:  # rises to one peak and falls
            top = int(costs.argmax())
            assert (np.diff(costs[: top + 1]) >= -1e-9).all()
            assert (np.diff(costs[top:]) <= 1e-9).all()


def contiguous(rows: list[int], parts: int) -> Iterator[list[list[int]]]:
    for cuts in itertools.combinations(range(1, len(rows)), parts - 1):
        yield [rows[a:b] for a, b in itertools.pairwise([0, *cuts, len(rows)])]


def best_by_brute_force(lengths: list[list[int]], request: Request) -> float:
    """The least modelled time over every number of micro-batches and every cut of each rank's sorted rows."""
    best = float("inf")
    for steps in range(1, min(map(len, lengths)) + 1):
        options = []
        for held in lengths:
            costs = set()
            for runs in contiguous(sorted(held, reverse=True), steps):
                if all(len(run) * run[0] <= request.token_budget for run in runs):
                    found = request.cost.padded(np.array([len(r) for r in runs]), np.array([r[0] for r in runs]))
                    costs.add(tuple(sorted(found.tolist(), reverse=True)))
            options.append(costs)
        for chosen in itertools.product(*options):
            best = min(best, float(np.array(chosen).max(axis=0).sum()))
    return best


@given(st.lists(st.lists(st.integers(1, 60), min_size=6, max_size=6), min_size=1, max_size=2))
def test_plans_are_close_to_the_best_of_all_cuts(lengths: list[list[int]]) -> None:
    request = Request(token_budget=BUDGET, cost=CostModel(per_microbatch=20))
    found = makespan(plan_ranks(lengths, request))
    best = best_by_brute_force(lengths, request)
    assert found <= 1.25 * best


def test_plans_are_on_average_within_three_percent_of_the_best_cut() -> None:
    rng = np.random.default_rng(0)
    request = Request(token_budget=BUDGET, cost=CostModel(per_microbatch=20))
    ratios = []
    for _ in range(60):
        lengths = [np.clip(rng.lognormal(2.5, 0.8, 7), 1, BUDGET).astype(int).tolist() for _ in range(2)]
        ratios.append(makespan(plan_ranks(lengths, request)) / best_by_brute_force(lengths, request))
    assert np.mean(ratios) < 1.03


@pytest.mark.parametrize("part", ["plan", "options", "metrics", "balance"])
def test_the_examples_of_the_parts_that_need_no_verl_run(part: str) -> None:
    module = importlib.import_module(f"padless.integrations.verl_{part}")
    result = doctest.testmod(module, optionflags=doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS)
    assert result.attempted > 0
    assert result.failed == 0


def test_equal_inputs_give_equal_plans() -> None:
    lengths = [np.random.default_rng(rank).integers(1, 60, 40) for rank in range(3)]
    assert plan_ranks(lengths, Request(token_budget=256)) == plan_ranks(lengths, Request(token_budget=256))


def test_a_rank_with_short_rows_runs_as_many_micro_batches_as_one_with_long_rows() -> None:
    plans = plan_ranks([[60, 60, 60, 60], [4, 3, 2, 1]], Request(token_budget=64))
    assert [plan.steps for plan in plans] == [4, 4]


@pytest.mark.parametrize(
    ("lengths", "options", "message"),
    [
        ([[9, 65]], {}, "row 1 of rank 0 has 65 tokens: over the token budget 64"),
        ([[9], [63]], {"multiple_of": 10}, "row 0 of rank 1 has 63 tokens, 70 with rounding"),
        ([[9, 40]], {"group_size": 2}, "its group of 2 rows stays together, 80 padded tokens"),
        ([[9, 8, 7]], {"group_size": 2}, "3 rows, not a multiple of force_group_size=2"),
        ([[9], []], {}, "rank 1 has no rows"),
        ([[9, 0]], {}, "row 1 of rank 0 has 0 tokens"),
        ([[60, 60, 60], [5, 4]], {}, "3 micro-batches are needed on every rank"),
        ([[5, 4, 3]], {"count_multiple_of": 4}, "their number must be a multiple of 4"),
        ([[5, 4]], {"at_least": 3}, "at least 3 are asked for"),
        ([[5, 4]], {"group_size": 2, "max_sequences": 1}, "max_sequences=1 is below force_group_size=2"),
    ],
)
def test_what_cannot_be_planned_is_refused_with_the_place_and_the_limit(
    lengths: list[list[int]], options: dict[str, int], message: str
) -> None:
    with pytest.raises(PadlessError, match=message):
        plan_ranks(lengths, Request(token_budget=BUDGET, **options))


def test_a_row_over_the_budget_may_run_alone() -> None:
    plan = plan_ranks([[9, 100, 8]], Request(token_budget=BUDGET, overlong="alone"))[0]
    assert [1] in [group.tolist() for group in plan]
    assert plan.alone.tolist() == [1]


@settings(max_examples=30)
@given(st.lists(st.integers(1, 1200), min_size=1, max_size=12), st.integers(1, 4), st.integers(1, 3))
def test_every_rank_gets_equally_many_rows_of_each_optimizer_step(lengths: list[int], ranks: int, count: int) -> None:
    step = lengths * ranks
    batch = [length + shift for shift in range(count) for length in step]
    request = Request(token_budget=1000, overlong="alone")
    parts = assign(batch, ranks, request, mini_batch=len(step), known=lambda held, ranks: deal(held[::-1], ranks))
    each = len(lengths)
    assert all(len(part) == each * count for part in parts)
    for place in range(count):
        members = sorted(itertools.chain(*(part[place * each : (place + 1) * each] for part in parts)))
        assert members == list(range(place * len(step), (place + 1) * len(step)))


def test_the_assignment_is_never_worse_than_those_it_compares() -> None:
    rng = np.random.default_rng(0)
    request = Request(token_budget=16_384)
    gains = []
    for _ in range(5):
        lengths = np.clip(rng.lognormal(6, 1, 256), 16, 8192).astype(np.int64)
        given_order = [list(range(rank * 32, (rank + 1) * 32)) for rank in range(8)]
        found = assign(lengths, 8, request, known=lambda held, ranks, rows=given_order: rows)
        times = [
            makespan(plan_ranks([lengths[rows] for rows in parts], request))
            for parts in (found, given_order, deal(lengths, 8))
        ]
        assert times[0] <= min(times[1:])
        gains.append(times[0] / times[1])
    assert np.mean(gains) < 0.85, "the order of arrival leaves ranks waiting"
