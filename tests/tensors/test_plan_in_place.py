"""Plans in which rows stay on their rank: the same laws, and a common number of micro-batches."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from laws import check_plan_laws
from padless.tensors.planning import PlanOptions, plan_in_place

OPTIONS: dict[str, Any] = {
    "token_budget": 40,
    "layout": "right-padded",
    "method": "balanced",
    "cost": None,
    "multiple_of": 1,
    "sequence_multiple_of": 1,
    "max_sequences": None,
    "overlong": "error",
    "microbatches_multiple_of": 1,
    "sync": "microbatch",
    "seed": 0,
}


@given(
    st.integers(0, 1 << 30),
    st.integers(1, 5),
    st.sampled_from(["right-padded", "packed-position-ids"]),
    st.sampled_from(["error", "split", "truncate", "drop"]),
    st.sampled_from([1, 3]),
)
@settings(max_examples=80)
def test_every_row_stays_and_ranks_have_as_many_micro_batches(
    seed: int, ranks: int, layout: str, overlong: str, every: int
) -> None:
    rng = np.random.default_rng(seed)
    counts = rng.integers(0, 9, ranks)
    counts[rng.integers(ranks)] += 1
    base = np.concatenate([[0], np.cumsum(counts)])
    longest = 40 if overlong == "error" else 90
    lengths = rng.integers(1, longest + 1, int(base[-1]))
    given_ = OPTIONS | {"layout": layout, "overlong": overlong, "microbatches_multiple_of": every}
    plan = plan_in_place(lengths, base, PlanOptions(**given_))
    check_plan_laws(plan)
    assert plan.steps % every == 0
    rank_of_slot = np.repeat(np.arange(len(plan)), plan.rows) % ranks
    owner = np.searchsorted(base, plan.order, side="right") - 1
    assert (rank_of_slot == owner).all()


@pytest.mark.parametrize("ladder", [2, [20, 40]])
def test_all_ranks_share_one_ladder(ladder: Any) -> None:
    rng = np.random.default_rng(0)
    base = np.array([0, 9, 15, 30])
    plan = plan_in_place(rng.integers(1, 41, 30), base, PlanOptions(**OPTIONS | {"ladder": ladder}))
    check_plan_laws(plan)
    assert len(set(plan.widths[plan.rows > 0].tolist())) <= 2
