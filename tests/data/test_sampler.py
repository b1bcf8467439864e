"""The laws of TokenBudgetSampler: nothing lost, agreement, budget, determinism, resumption anywhere."""

from __future__ import annotations

import pickle
import warnings
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from padless import CostModel, PadlessError
from padless.data import TokenBudgetSampler, measure
from padless.data.sampler import MicroBatch
from padless.verify.resume import assert_rescalable, assert_resumable

GROUPINGS = ("step", "pool", "range", "sorted", "none")
BUDGET = 64


@st.composite
def options(draw: st.DrawFn) -> dict[str, Any]:
    """Any legal combination: sizes, groupings, step definitions, tails, atoms, fields."""
    count = draw(st.integers(0, 24))
    grouping = draw(st.sampled_from(GROUPINGS))
    lengths: Any = draw(st.lists(st.integers(1, 16), min_size=count, max_size=count))
    chosen: dict[str, Any] = {
        "lengths": lengths,
        "token_budget": BUDGET,
        "grouping": grouping,
        "tail": draw(st.sampled_from(("short", "drop", "repeat"))),
        "seed": draw(st.integers(0, 3)),
        "pool_steps": draw(st.integers(2, 4)),
        "ranges": draw(st.integers(1, 9)),
        "multiple_of": draw(st.sampled_from((1, 4))),
        "method": draw(st.sampled_from(("lean", "balanced"))),
    }
    if draw(st.booleans()):
        chosen["sequences_per_step"] = draw(st.integers(3, 12))
    else:
        chosen["tokens_per_step"] = draw(st.integers(10, 90))
        if grouping not in ("pool", "range") and draw(st.booleans()):
            chosen["counting"] = "padded"
    if count and draw(st.booleans()):
        size = draw(st.integers(1, 3))
        chosen["atoms"] = [i // size for i in range(count)]
    elif count and draw(st.booleans()):
        chosen["lengths"] = np.array([[n, 17 - n] for n in lengths])
    return chosen


def build(chosen: dict[str, Any], ranks: int = 1, rank: int = 0, **more: Any) -> TokenBudgetSampler:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return TokenBudgetSampler(**{**chosen, "ranks": ranks, "rank": rank, **more})


def weighted(batch: MicroBatch) -> list[int]:
    return [index for index, weight in zip(batch, batch.weights, strict=True) if weight]


@settings(max_examples=40)
@given(options(), st.integers(1, 5))
def test_every_epoch_holds_every_sequence_once_on_all_ranks_together(chosen: dict[str, Any], ranks: int) -> None:
    samplers = [build(chosen, ranks, rank) for rank in range(ranks)]
    dropped_before = 0  # with a token target per step, epochs may drop different numbers
    for epoch in range(2):
        assert all(sampler.epoch == epoch for sampler in samplers) or not len(samplers[0])
        lengths = [len(sampler) for sampler in samplers]
        boundaries = samplers[0].step_boundaries.tolist()
        runs = [list(sampler) for sampler in samplers]
        seen = Counter(index for run in runs for batch in run for index in weighted(batch))
        dropped = len(chosen["lengths"]) - sum(seen.values())
        assert max(seen.values(), default=1) == 1
        assert dropped == 0 or chosen["tail"] == "drop"
        assert [len(run) for run in runs] == lengths, "len is exact, and the same on every rank"
        assert [i + 1 for i, batch in enumerate(runs[0]) if batch.ends_step] == boundaries
        for batches in zip(*runs, strict=True):
            assert len({(batch.step, batch.place, batch.places, batch.ends_step) for batch in batches}) == 1
        if runs[0]:
            # What drops is told by each sampler, and told alike.
            assert {sampler.diagnostics.dropped for sampler in samplers} == {dropped_before + dropped}
        dropped_before += dropped


@settings(max_examples=50)
@given(options(), st.integers(1, 4))
def test_no_micro_batch_is_over_the_budget_and_groups_stay_together(chosen: dict[str, Any], ranks: int) -> None:
    count = len(chosen["lengths"])
    lengths = np.asarray(chosen["lengths"]).reshape(count, -1 if count else 1)
    atoms = chosen.get("atoms")
    multiple = chosen["multiple_of"]
    home: dict[int, tuple[int, ...]] = {}
    for rank in range(ranks):
        for number, batch in enumerate(build(chosen, ranks, rank)):
            widths = -(-lengths[list(batch)].max(axis=0) // multiple) * multiple
            assert len(batch) * widths.sum() <= BUDGET
            for index in weighted(batch) if atoms else []:
                assert home.setdefault(atoms[index], (rank, number)) == (rank, number)


@settings(max_examples=12)
@given(options(), st.integers(1, 3), st.integers(0, 2))
def test_a_sampler_restored_at_every_micro_batch_continues_identically(
    chosen: dict[str, Any], ranks: int, rank: int
) -> None:
    def factory() -> TokenBudgetSampler:
        return build(chosen, ranks, rank % ranks)

    if len(factory()):
        assert_resumable(factory, epochs=2, through="json")


@settings(max_examples=12)
@given(options().filter(lambda chosen: chosen["tail"] != "drop"))  # epochs then drop different sequences
def test_at_step_boundaries_any_number_of_ranks_continues_with_what_is_not_yet_seen(chosen: dict[str, Any]) -> None:
    if len(build(chosen)):
        assert_rescalable(
            lambda ranks, rank: build(chosen, ranks, rank), ranks=(1, 2, 3), indices=weighted, through="json"
        )


@settings(max_examples=40)
@given(
    options(), st.lists(st.integers(1, 8), min_size=1, max_size=5), st.lists(st.integers(0, 7), min_size=5, max_size=5)
)
def test_one_epoch_on_changing_numbers_of_ranks_saved_anywhere_loses_and_repeats_nothing(
    chosen: dict[str, Any], worlds: list[int], places: list[int]
) -> None:
    state: dict[str, Any] | None = None
    seen: Counter[int] = Counter()
    members: dict[int, set[int]] = {}
    for ranks, stop_after in zip([*worlds, 2], [*places[: len(worlds)], 10**6], strict=True):
        samplers = [build(chosen, ranks, rank) for rank in range(ranks)]
        for sampler in samplers:
            if state is not None:
                sampler.load_state_dict(state)
        if any(sampler.epoch for sampler in samplers):
            break
        for _, batches in zip(range(stop_after), zip(*samplers, strict=True), strict=False):
            for batch in batches:
                seen.update(weighted(batch))
                members.setdefault(batch.step, set()).update(weighted(batch))
            if samplers[0].epoch:
                break
        states = [sampler.state_dict() for sampler in samplers]
        assert all(told == states[0] for told in states), "every rank saves the same state"
        state = pickle.loads(pickle.dumps(states[0]))
    everything = Counter(range(len(chosen["lengths"])))
    if chosen["tail"] != "drop":
        assert seen == everything
    assert max(seen.values(), default=1) == 1
    if chosen["grouping"] not in ("pool", "range"):
        one = {}
        for batch in build(chosen):
            one.setdefault(batch.step, set()).update(weighted(batch))
        assert members == one, "the members of a step do not depend on the ranks"


@pytest.mark.parametrize("grouping", GROUPINGS)
def test_eight_ranks_then_three_then_five_in_one_epoch_lose_and_repeat_nothing(grouping: str) -> None:
    lengths = np.random.default_rng(0).integers(1, 200, size=997)
    chosen = {"lengths": lengths, "token_budget": 800, "sequences_per_step": 64, "grouping": grouping}
    state, seen = None, Counter()
    for ranks, stop in ((8, 3), (3, 5), (5, None)):
        samplers = [build(chosen, ranks, rank) for rank in range(ranks)]
        for sampler in samplers:
            if state:
                sampler.load_state_dict(state)
        for number, batches in enumerate(zip(*samplers, strict=True)):
            for batch in batches:
                seen.update(weighted(batch))
            if number + 1 == stop:
                break
        state = samplers[0].state_dict()
        assert stop is None or state["position"]["parts"], "the save must fall within a step to mean anything"
    assert seen == Counter(range(997))
    assert state["position"] == {"epoch": 1, "step": 0, "parts": [], "arranged_for": 5}


@pytest.mark.parametrize("grouping", ["step", "pool", "range", "none"])
def test_epochs_have_different_orders_and_the_same_epoch_the_same(grouping: str) -> None:
    chosen = {"lengths": list(range(1, 61)), "token_budget": 64, "sequences_per_step": 6, "grouping": grouping}
    sampler = build(chosen)
    orders = []
    for epoch in (0, 1, 0):
        sampler.set_epoch(epoch)
        orders.append([list(batch) for batch in sampler])
    assert orders[0] != orders[1]
    assert orders[0] == orders[2]
    assert orders[0] != [list(batch) for batch in build(chosen, seed=1)]
    np.random.seed(7)  # noqa: NPY002 - the global state has no influence
    assert orders[0] == [list(batch) for batch in build(chosen)]


def test_step_grouping_has_no_length_bias() -> None:
    lengths, epochs = np.arange(1, 201), 60
    sampler = build({"lengths": lengths, "token_budget": 10**6, "sequences_per_step": 20, "seed": 3})
    early = [[index for batch in sampler if batch.step < 5 for index in batch] for _ in range(epochs)]
    assert all(len(rows) == 100 for rows in early)
    # The mean of 100 drawn without replacement from 1..200 has a standard deviation of 4.09.
    assert abs(np.mean([lengths[rows].mean() for rows in early]) - 100.5) < 4 * 4.09 / np.sqrt(epochs)
    # Each sequence is early in about half of the epochs.
    counts = np.bincount(np.concatenate(early), minlength=200)
    assert counts.min() > epochs / 2 - 4.5 * np.sqrt(epochs / 4)
    assert counts.max() < epochs / 2 + 4.5 * np.sqrt(epochs / 4)


def test_tail_repeat_fills_the_last_step_with_rows_of_weight_zero() -> None:
    sampler = build({"lengths": [4] * 10, "token_budget": 8, "sequences_per_step": 4, "tail": "repeat"})
    batches = list(sampler)
    assert sum(len(batch) for batch in batches) == 12
    assert sum(batch.weights.sum() for batch in batches) == 10
    assert sampler.diagnostics.repeated == 2
    assert {batch.step_sequences for batch in batches} == {4, 2}


def test_a_rank_without_sequences_runs_rows_of_weight_zero() -> None:
    chosen = {"lengths": [3, 9], "token_budget": 9, "sequences_per_step": 2}
    batches = [next(iter(build(chosen, 3, rank))) for rank in range(3)]
    assert sorted(index for batch in batches for index in weighted(batch)) == [0, 1]
    (idle,) = [batch for batch in batches if not batch.weights.any()]
    assert list(idle) == [0], "the shortest sequence of the step"


def test_tokens_per_step_counts_what_it_says() -> None:
    rng = np.random.default_rng(0)
    lengths, targets = rng.integers(1, 100, 500), rng.integers(0, 2, 500)
    common = {"lengths": lengths, "targets": targets, "token_budget": 400}

    def per_step(sampler: TokenBudgetSampler, values: np.ndarray) -> list[int]:
        sums: Counter[int] = Counter()
        for batch in sampler:
            sums[batch.step] += int(values[list(batch)].sum())
        return [sums[step] for step in range(sampler.diagnostics.steps)]

    real = per_step(build({**common, "tokens_per_step": 1000}), lengths)
    assert all(1000 <= held < 1100 for held in real[:-1])
    goal = per_step(build({**common, "tokens_per_step": 10, "counting": "targets"}), targets)
    assert all(held == 10 for held in goal[:-1])
    pooled = per_step(build({**common, "tokens_per_step": 1000, "grouping": "pool", "pool_steps": 8}), lengths)
    assert np.std(pooled[:-1]) / np.mean(pooled[:-1]) < 0.1
    assert abs(np.mean(pooled) - 1000) < 60
    padded = build({**common, "tokens_per_step": 1000, "counting": "padded", "method": "greedy"})
    sums: Counter[int] = Counter()
    for batch in padded:
        sums[batch.step] += len(batch) * int(batch.lengths.max())
    assert max(sums.values()) <= 1000
    assert np.mean(list(sums.values())[:-1]) > 900


def test_batches_know_the_denominators_of_their_whole_step() -> None:
    lengths, targets = np.arange(1, 21), np.arange(20)
    chosen = {"lengths": lengths, "targets": targets, "token_budget": 40, "sequences_per_step": 7}
    steps: dict[int, list[MicroBatch]] = {}
    for rank in range(2):
        for batch in build(chosen, 2, rank):
            steps.setdefault(batch.step, []).append(batch)
    for batches in steps.values():
        rows = [index for batch in batches for index in weighted(batch)]
        assert {batch.step_sequences for batch in batches} == {len(rows)}
        assert {batch.step_tokens for batch in batches} == {lengths[rows].sum()}
        assert {batch.step_targets for batch in batches} == {targets[rows].sum()}


def test_weights_repeat_and_leave_out_in_proportion() -> None:
    weights = np.array([1.0] * 50 + [2.5] * 20 + [0.2] * 30 + [0.0] * 5)
    sampler = build({"lengths": [3] * 105, "weights": weights, "token_budget": 30, "sequences_per_step": 10})
    totals: Counter[int] = Counter()
    epochs = 40
    for _ in range(epochs):
        drawn = Counter(index for batch in sampler for index in weighted(batch))
        assert sum(drawn.values()) == round(weights.sum())
        assert all(int(weights[i]) <= drawn[i] <= np.ceil(weights[i]) for i in range(105))
        totals.update(drawn)
    assert sum(totals[i] for i in range(50, 70)) / epochs == pytest.approx(50, rel=0.02)
    assert sum(totals[i] for i in range(70, 100)) / epochs == pytest.approx(6, rel=0.12)
    assert_resumable(
        lambda: build({"lengths": [3] * 105, "weights": weights, "token_budget": 30, "sequences_per_step": 10}),
        through="json",
    )


def test_pieces_of_a_measured_dataset_are_yielded_as_rows_and_cut_from_them() -> None:
    data = [{"input_ids": list(range(100 * i, 100 * i + n))} for i, n in enumerate((5, 12, 0, 7))]
    measured = measure(data, max_length=6, overlong="split")
    sampler = TokenBudgetSampler(measured, token_budget=6, sequences_per_step=2)
    rows = sampler.rows(data)
    tokens = sorted(token for batch in sampler for row in rows.__getitems__(batch) for token in row["input_ids"])
    assert tokens == sorted(token for row in data for token in row["input_ids"])


@pytest.mark.parametrize(("policy", "rows", "held"), [
    ("drop", [0, 2], [4, 5]), ("truncate", [0, 1, 2], [4, 5, 8]), ("split", [0, 1, 1, 2], [1, 4, 5, 8]),
    ("alone", [0, 1, 2], [4, 5, 9]),
])  # fmt: skip
def test_each_overlong_policy_does_what_its_name_says(policy: str, rows: list[int], held: list[int]) -> None:
    sampler = build({"lengths": [4, 9, 5], "token_budget": 8, "sequences_per_step": 4, "overlong": policy})
    batches = list(sampler)
    assert sorted(index for batch in batches for index in batch) == rows
    assert sorted(int(n) for batch in batches for n in batch.lengths) == held
    assert sampler.diagnostics.dropped == (policy == "drop")


def test_overlong_sequences_are_refused_by_name() -> None:
    with pytest.raises(PadlessError, match=r"length 9 at index 1 exceeds token_budget 8"):
        build({"lengths": [4, 9, 5], "token_budget": 8, "sequences_per_step": 4})


def other(**changed: Any) -> TokenBudgetSampler:
    plain = {"lengths": list(range(1, 41)), "token_budget": 80, "sequences_per_step": 8, "seed": 0}
    return build({**plain, **changed})


@pytest.mark.parametrize(("changed", "named"), [
    ({"lengths": list(range(2, 42))}, "lengths"), ({"lengths": list(range(1, 42))}, "sequences=40"),
    ({"seed": 5}, "seed=0 was saved, here it is 5"), ({"sequences_per_step": 4}, "sequences_per_step"),
    ({"grouping": "pool"}, "grouping='step'"), ({"tail": "drop"}, "tail"), ({"shuffle": False}, "shuffle"),
])  # fmt: skip
def test_a_state_from_elsewhere_is_refused_and_says_what_differs(changed: dict[str, Any], named: str) -> None:
    with pytest.raises(PadlessError, match=named):
        other(**changed).load_state_dict(other().state_dict())


def test_the_budget_may_change_between_steps_but_not_within_one() -> None:
    source = other()
    iterator = iter(source)
    batch = next(iterator)
    while not batch.ends_step:
        batch = next(iterator)
    other(token_budget=160).load_state_dict(source.state_dict())
    while batch.ends_step:
        batch = next(iterator)
    with pytest.raises(PadlessError, match="token_budget=80 was saved"):
        other(token_budget=160).load_state_dict(source.state_dict())


def test_a_state_of_another_format_or_of_something_else_is_refused() -> None:
    with pytest.raises(PadlessError, match="format 99"):
        other().load_state_dict({**other().state_dict(), "format": 99})
    with pytest.raises(PadlessError, match="not a state"):
        other().load_state_dict({"yielded": 3})


def test_int32_and_int64_lengths_have_the_same_state() -> None:
    wide, narrow = np.arange(1, 41, dtype=np.int64), np.arange(1, 41, dtype=np.int32)
    other(lengths=wide).load_state_dict(other(lengths=narrow).state_dict())


def test_leaving_a_loop_early_starts_the_epoch_over_and_finishing_it_goes_on() -> None:
    sampler = other()
    peeked = list(next(iter(sampler)))
    first = [list(batch) for batch in sampler]
    assert first[0] == peeked
    assert sampler.epoch == 1
    assert [list(batch) for batch in sampler] != first
    assert sampler.diagnostics.sequences == 80, "what was peeked at is not counted twice"


def test_diagnostics_add_and_survive_a_restore() -> None:
    lengths = np.random.default_rng(1).integers(1, 60, 300)
    chosen = {"lengths": lengths, "token_budget": 240, "sequences_per_step": 32}
    whole = build(chosen, 2, 0)
    list(whole)
    parts = build(chosen, 2, 0)
    iterator = iter(parts)
    for _ in range(7):
        next(iterator)
    resumed = build(chosen, 2, 0)
    resumed.load_state_dict(parts.state_dict())
    list(resumed)
    assert resumed.diagnostics.to_dict() == whole.diagnostics.to_dict()
    told = whole.diagnostics
    assert (told.sequences, told.real_tokens, told.steps) == (300, lengths.sum(), 10)
    assert 0.5 < told.occupancy <= 1
    assert (told + told).occupancy == told.occupancy
    assert (told + told).sequences == 600
    assert 0 < told.step_size_spread < 1


def test_cost_model_and_ladder_are_passed_to_the_planner() -> None:
    lengths = np.random.default_rng(1).integers(1, 60, 300)
    chosen = {"lengths": lengths, "token_budget": 640, "sequences_per_step": 64}
    few, many = build(chosen, cost=CostModel(per_microbatch=5000)), build(chosen, cost=CostModel(per_microbatch=1))
    assert len(list(few)) < len(list(many))


@pytest.mark.parametrize(("wrong", "said"), [
    ({}, "either sequences_per_step= or tokens_per_step="),
    ({"sequences_per_step": 4, "tokens_per_step": 4}, "either sequences_per_step= or tokens_per_step="),
    ({"sequences_per_step": 4, "counting": "targets"}, "counting='targets'"),
    ({"tokens_per_step": 4, "counting": "targets"}, "needs targets="),
    ({"tokens_per_step": 4, "counting": "padded", "grouping": "pool"}, "counting='padded'"),
    ({"sequences_per_step": 4, "grouping": "buckets"}, "'step', 'pool', 'range', 'sorted', 'none'"),
    ({"sequences_per_step": 4, "ranks": 2}, "both or neither"),
    ({"sequences_per_step": 4, "ranks": 2, "rank": 2}, "rank=2 is not below ranks=2"),
    ({"sequences_per_step": 1, "atoms": [0, 0, 1]}, "must stay together"),
    ({"sequences_per_step": 4, "atoms": [0, 0, 1], "max_sequences": 1}, "max_sequences=1"),
    ({"sequences_per_step": 4, "weights": [1, -1, 1]}, r"weights\[1\]"),
    ({"sequences_per_step": 4, "targets": [1, 1]}, "targets has shape"),
])  # fmt: skip
def test_bad_options_are_refused_and_the_way_out_is_named(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(PadlessError, match=said):
        len(TokenBudgetSampler([3, 4, 5], token_budget=16, **wrong))


def test_a_launcher_without_a_process_group_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(PadlessError, match="init_process_group"):
        TokenBudgetSampler([3], token_budget=16, sequences_per_step=1)


@pytest.mark.parametrize("grouping", GROUPINGS)
@pytest.mark.parametrize("lengths", [[], [5]])
def test_tiny_datasets_work_with_every_grouping(grouping: str, lengths: list[int]) -> None:
    chosen = {"lengths": lengths, "token_budget": 16, "sequences_per_step": 4, "grouping": grouping}
    for rank in range(3):
        sampler = build(chosen, 3, rank)
        assert len(sampler) == len(lengths)
        assert len(list(sampler)) == len(lengths)


def test_a_micro_batch_travels_to_workers_with_its_place() -> None:
    batch = next(iter(other()))
    copied = pickle.loads(pickle.dumps(batch))
    assert copied == batch
    assert copied.places == batch.places
    assert (copied.weights == batch.weights).all()
