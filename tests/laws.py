"""The laws of padless as checks that any test can apply to any plan."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt

from padless import CostModel, Plan
from padless.shapes import round_up, snap

__all__ = ["best_makespan", "check_plan_laws", "partitions"]


def check_plan_laws(plan: Plan) -> None:
    """Nothing lost, budget, equal counts, atoms whole, bound below what is reached; from the plan's arrays alone.

    Written apart from `Plan.check`, group by group in plain Python, so that the two confirm each other.
    """
    plan.check()
    groups = [group.tolist() for group in plan]
    assert len(groups) == plan.steps * plan.ranks
    assert plan.steps % plan.microbatches_multiple_of == 0
    _nothing_lost(plan, [i for group in groups for i in group])
    for g, group in enumerate(groups):
        held = plan.slot_lengths[plan.offsets[g] : plan.offsets[g + 1]]
        tokens = _tokens(plan, held)
        assert tokens == plan.group_tokens[g]
        exempt = set(group) <= set(plan.alone.tolist())
        assert tokens <= plan.token_budget or exempt, (g, tokens)
        assert plan.max_sequences is None or len(group) <= plan.max_sequences
        assert not group or len(group) >= plan.min_sequences
        if tokens > plan.token_budget:
            assert len(group) == 1 or (plan.atoms is not None and len({int(plan.atoms[i]) for i in group}) == 1)
    if plan.atoms is not None:
        home: dict[int, int] = {}
        for g, group in enumerate(groups):
            for i in group:
                assert home.setdefault(int(plan.atoms[i]), g) == g
    if plan.lower_bound > 0 and plan.layout == "padded":
        assert plan.lower_bound <= plan.makespan() * (1 + 1e-9)


def _nothing_lost(plan: Plan, seen: list[int]) -> None:
    whole = set(range(len(plan.lengths))) - set(plan.dropped.tolist())
    assert set(seen) == whole
    repeated = {i for i in whole if seen.count(i) > 1} if len(seen) != len(whole) else set()
    assert repeated <= set(plan.split.tolist())
    if plan.lengths.ndim == 1:
        kept = int(plan.lengths.sum(dtype=np.int64)) - int(plan.lengths[plan.dropped].sum(dtype=np.int64))
        held = int(plan.slot_lengths.sum())
        assert held == kept if not len(plan.truncated) else held < kept


def _tokens(plan: Plan, held: npt.NDArray[np.int64]) -> int:
    if not len(held):
        return 0
    if plan.layout == "packed":
        return int(round_up(int(round_up(held, plan.sequence_multiple_of).sum()), plan.multiple_of))
    widths = round_up(held.reshape(len(held), -1).max(axis=0), plan.multiple_of)
    if plan.ladder is not None:
        widths = np.array([snap(np.array([w]), plan.ladder)[0] if 0 < w <= plan.ladder[-1] else w for w in widths])
    return len(held) * int(widths.sum())


def partitions(items: Sequence[int]) -> Iterator[list[list[int]]]:
    """All partitions of ``items`` into non-empty sets."""
    if not items:
        yield []
        return
    first, rest = items[0], items[1:]
    for smaller in partitions(rest):
        for at in range(len(smaller)):
            yield [*smaller[:at], [first, *smaller[at]], *smaller[at + 1 :]]
        yield [[first], *smaller]


def best_makespan(
    lengths: npt.NDArray[np.int64],
    budget: int,
    *,
    ranks: int,
    cost: CostModel,
    sync: str = "microbatch",
    multiple_of: int = 1,
    max_sequences: int | None = None,
    min_sequences: int = 1,
    microbatches_multiple_of: int = 1,
    atoms: npt.NDArray[np.int64] | None = None,
    ladder: Any = None,
) -> float:
    """The least makespan over all partitions (and, for ``sync="step"``, all assignments): brute force, n <= 9."""
    wide = round_up(lengths.astype(np.int64).reshape(len(lengths), -1), multiple_of)
    if ladder is not None:
        wide = snap(wide.ravel(), np.asarray(ladder)).reshape(wide.shape)
    names = np.arange(len(lengths)) if atoms is None else atoms
    members = [np.flatnonzero(names == name) for name in dict.fromkeys(names.tolist())]
    best = np.inf
    for partition in partitions(range(len(members))):
        costs = []
        for part in partition:
            rows = np.concatenate([members[k] for k in part])
            widths = wide[rows].max(axis=0)
            count = len(rows)
            legal = count * widths.sum() <= budget and min_sequences <= count <= (max_sequences or count)
            if not legal:
                break
            costs.append(float(cost.padded(np.array([count]), widths[None])[0]))
        else:
            steps = round_up(-(-len(costs) // ranks), microbatches_multiple_of)
            best = min(best, _time(sorted(costs, reverse=True), ranks, steps, cost.per_microbatch, sync, best))
    return best


def _time(costs: list[float], ranks: int, steps: int, fixed: float, sync: str, bound: float) -> float:
    if sync == "microbatch":
        return sum(costs[::ranks]) + fixed * (steps - len(costs[::ranks]))
    least = np.inf
    for place in product(range(min(ranks, len(costs))), repeat=len(costs)):
        held = [[costs[g] for g in range(len(costs)) if place[g] == rank] for rank in range(ranks)]
        deepest = max(map(len, held))
        rounds = -(-max(deepest, 1) // steps) * steps if deepest > steps else steps
        least = min(least, max(sum(h) + fixed * (rounds - len(h)) for h in held))
    return least
