"""``rearrange_micro_batches`` with padless behind it: verl's contract, kept, on verl's own TensorDicts."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch

from padless import PadlessError
from padless.integrations.verl_engine import rearranger
from padless.integrations.verl_options import VerlOptions
from support.verl_steps import rl_mix

Planner = Callable[..., tuple[list[Any], list[list[int]]]]


@pytest.fixture(scope="module")
def stock() -> Planner:
    from verl.utils.seqlen_balancing import rearrange_micro_batches

    return rearrange_micro_batches


@pytest.fixture(scope="module")
def ours(stock: Planner) -> Planner:
    return rearranger(stock, VerlOptions())


def make(lengths: Any, **settings: Any) -> Any:
    """Jagged rows whose tokens name their row, as an engine hands them to the planner."""
    from verl.utils import tensordict_utils as tu

    rows = [torch.full((int(length),), index) for index, length in enumerate(lengths)]
    fields = {
        "input_ids": torch.nested.as_nested_tensor(rows, layout=torch.jagged),
        "weight": torch.arange(len(rows), dtype=torch.float32),
        "uid": [f"row-{index}" for index in range(len(rows))],
    }
    return tu.get_tensordict(fields, non_tensor_dict={"use_remove_padding": False} | settings)


def padded(groups: list[list[int]], lengths: Any) -> list[int]:
    return [len(group) * max(int(lengths[row]) for row in group) for group in groups]


def real_lengths(rows: int, seed: int) -> np.ndarray:
    prompts, responses = rl_mix(rows, seed)
    return prompts + responses


@pytest.mark.parametrize("seed", range(5))
def test_64_sequences_of_the_rl_mix(
    stock: Planner, ours: Planner, seed: int, capsys: pytest.CaptureFixture[str]
) -> None:
    lengths = real_lengths(64, seed)
    found = {name: plan(make(lengths), 16_384)[1] for name, plan in (("stock", stock), ("padless", ours))}
    occupancy = {name: lengths.sum() / sum(padded(groups, lengths)) for name, groups in found.items()}
    peak = {name: max(padded(groups, lengths)) / 16_384 for name, groups in found.items()}
    with capsys.disabled():
        print("\n" + "; ".join(f"{k}: occupancy {occupancy[k]:.3f}, peak {peak[k]:.2f} x budget" for k in found))
    assert occupancy["padless"] >= 0.85
    assert occupancy["stock"] <= 0.5
    assert peak["padless"] <= 1.0


def test_the_micro_batches_hold_the_rows_they_name_with_all_their_fields(ours: Planner) -> None:
    lengths = real_lengths(40, 9)
    batches, groups = ours(make(lengths, temperature=0.7), 16_384)
    assert sorted(chain(*groups)) == list(range(40))
    for batch, group in zip(batches, groups, strict=True):
        assert [int(row[0]) for row in batch["input_ids"].unbind()] == group
        assert [len(row) for row in batch["input_ids"].unbind()] == [lengths[row] for row in group]
        assert batch["weight"].tolist() == group
        assert list(batch["uid"]) == [f"row-{row}" for row in group]
        assert batch["temperature"] == 0.7


def test_verl_restores_the_order_itself(ours: Planner) -> None:
    from verl.utils.seqlen_balancing import restore_dynamic_batch

    batches, groups = ours(make(real_lengths(33, 2)), 16_384)
    outputs = torch.cat([batch["weight"] for batch in batches])
    assert restore_dynamic_batch(outputs, groups).tolist() == list(range(33))


def test_the_largest_micro_batch_comes_first(ours: Planner) -> None:
    lengths = real_lengths(64, 3)
    sizes = padded(ours(make(lengths), 16_384)[1], lengths)
    assert sizes == sorted(sizes, reverse=True)


@pytest.mark.parametrize(
    ("asked", "holds"),
    [
        ({"num_batches_divided_by": 4}, lambda groups: len(groups) % 4 == 0),
        ({"min_num_micro_batch": 20}, lambda groups: len(groups) >= 20),
        ({"force_group_size": 4}, lambda groups: all(len({r // 4 for r in g}) * 4 == len(g) for g in groups)),
        ({"same_micro_num_in_dp": False, "use_dynamic_bsz_balance": False}, lambda groups: True),
    ],
)
def test_what_verl_asks_for_is_kept(ours: Planner, asked: dict[str, Any], holds: Callable[..., bool]) -> None:
    lengths = np.minimum(real_lengths(64, 4), 4096)
    groups = ours(make(lengths), 16_384, **asked)[1]
    assert holds(groups)
    assert max(padded(groups, lengths)) <= 16_384
    assert sorted(chain(*groups)) == list(range(64))


def test_where_the_engine_removes_padding_verl_plans(stock: Planner, ours: Planner) -> None:
    lengths = real_lengths(64, 5)
    batch = make(lengths, use_remove_padding=True)
    assert ours(batch, 16_384)[1] == stock(batch, 16_384)[1]


def test_padded_rows_are_left_to_verl(stock: Planner, ours: Planner) -> None:
    """Dense rows have one width whatever the grouping, so there is nothing to plan."""
    from verl.utils import tensordict_utils as tu

    mask = (torch.arange(20) < torch.tensor([[5], [20], [7], [9]])).long()
    batch = tu.get_tensordict(
        {"input_ids": mask, "attention_mask": mask}, non_tensor_dict={"use_remove_padding": False}
    )
    assert ours(batch, 40)[1] == stock(batch, 40)[1]


def test_a_row_over_the_budget_is_named(ours: Planner) -> None:
    with pytest.raises(PadlessError, match="row 1 of rank 0 has 50 tokens: over the token budget 40"):
        ours(make([5, 50, 7]), 40)


def test_options_reach_the_planner(stock: Planner) -> None:
    lengths = real_lengths(64, 6)

    def count(**options: Any) -> int:
        return len(rearranger(stock, VerlOptions(**options))(make(lengths), 16_384)[1])

    from padless import CostModel

    assert count(cost=CostModel(per_microbatch=0)) >= count() > count(cost=CostModel(per_microbatch=20_000))
    groups = rearranger(stock, VerlOptions(max_sequences=5))(make(lengths), 16_384)[1]
    assert max(map(len, groups)) <= 5
    alone = rearranger(stock, VerlOptions(overlong="alone"))(make([5, 50, 7]), 40)[1]
    assert [1] in alone


def test_an_older_planner_without_groups_is_called_as_it_wants() -> None:
    def older(
        batch: Any,
        max_token_len: int,
        dp_group: Any = None,
        num_batches_divided_by: Any = None,
        same_micro_num_in_dp: bool = True,
        min_num_micro_batch: Any = None,
        use_dynamic_bsz_balance: bool = True,
    ) -> Any:
        return "batches", [[0]]

    batch = make([5, 6], use_remove_padding=True)
    assert rearranger(older, VerlOptions())(batch, 40) == ("batches", [[0]])


@pytest.fixture(scope="module", autouse=True)
def platform() -> None:
    """The planner needs no device; importing its module fixes one."""
    import verl.workers.engine.utils  # noqa: F401
