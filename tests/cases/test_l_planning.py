"""Reported problems with scale, as planning cases."""

from __future__ import annotations

import time

import numpy as np
import pytest

from padless import PadlessError, microbatch, pack


def test_l01_a_million_rows_are_packed_in_seconds_and_time_grows_with_rows_at_most() -> None:
    """ms-swift#4340, trl#1299."""
    draw = np.random.default_rng(0).integers(1, 2049, 2_000_000)
    pack(draw[:1000], 4096)  # compiled

    def seconds(count: int) -> float:
        times = []
        for _ in range(3):
            started = time.process_time()
            pack(draw[:count], 4096)
            times.append(time.process_time() - started)
        return min(times)

    one, two = seconds(1_000_000), seconds(2_000_000)
    assert one < 10
    assert two < 2.5 * one + 0.05


def test_l02_a_plan_holds_indices_only() -> None:
    """torchtune#1051, torchtune#1109."""
    lengths = np.random.default_rng(0).integers(1, 300, 230_000).astype(np.int32)
    plan = pack(lengths, 4096)
    assert plan.order.nbytes + plan.offsets.nbytes + plan.lengths.nbytes <= 32 * len(lengths)


def test_l05_nothing_to_plan_is_said_and_little_is_planned() -> None:
    """axolotl#3100."""
    for planner in (microbatch, pack):
        with pytest.raises(PadlessError, match="empty"):
            planner([], 100)
        assert len(planner([3, 3, 3], 100, ranks=4).order) == 3
        dropped = planner([300], 100, overlong="drop", ranks=2)
        assert dropped.real_tokens == 0
        assert dropped.occupancy == 1.0
        assert len(dropped) == 2


def test_l06_a_partly_filled_pack_is_valid() -> None:
    """trl#1337."""
    plan = pack([3, 2], 2048)
    assert len(plan) == 1
    assert plan.real_tokens == 5


def test_l07_the_plan_knows_no_workers() -> None:
    """ArcticTraining#155."""
    assert len(pack([5] * 12, 10)) == 6
    assert pack([5] * 12, 10) == pack([5] * 12, 10)


def test_l08_steps_come_from_the_plan() -> None:
    """trl#452, trl#979, ms-swift#4054."""
    assert pack([5] * 8, 20).steps == 2


def test_l09_what_a_policy_touches_is_counted() -> None:
    """trl#1832, LlamaFactory#8487, axolotl#2211."""
    lengths = [4, 9, 5]
    for planner in (microbatch, pack):
        assert planner(lengths, 8, overlong="drop").dropped.tolist() == [1]
        cut = planner(lengths, 8, overlong="truncate")
        assert cut.truncated.tolist() == [1]
        assert sum(lengths) - cut.real_tokens == 1
        split = planner(lengths, 8, overlong="split")
        assert split.split.tolist() == [1]
        assert sorted(split.slot_lengths.tolist()) == [1, 4, 5, 8]
        with pytest.raises(PadlessError, match="index 1"):
            planner(lengths, 8)


def test_l10_first_fit_and_best_fit_are_what_their_names_say() -> None:
    """trl#3645."""
    lengths = np.array([7, 5, 4, 1])
    first = pack(lengths, 10, method="first-fit-decreasing")
    assert [lengths[group].tolist() for group in first] == [[7, 1], [5, 4]]
    best = pack(lengths, 10, method="best-fit-decreasing")
    assert [lengths[group].tolist() for group in best] == [[7], [5, 4, 1]]
