"""One optimizer step as the planners' kernels take it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from padless.cost import CostModel
from padless.errors import PadlessError
from padless.planning import run_kernels
from padless.planning.items import Items
from padless.shapes import round_up

__all__ = ["Floats", "Index", "Problem", "least_total", "too_few"]

Index = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

_UNBOUNDED = 2**62


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Items and options of one optimizer step, as the kernels take them."""

    items: Items
    ranks: int
    every: int
    lockstep: bool
    fewest_rows: int
    cum: Index
    own: Floats
    cost: Floats
    limits: Index

    @classmethod
    def of(
        cls,
        items: Items,
        *,
        budget: int,
        ranks: int,
        model: CostModel,
        lockstep: bool = True,
        most: int | None = None,
        every: int = 1,
        fewest_rows: int = 1,
        rows_multiple: int = 1,
    ) -> Problem:
        """Bundle arrays; see `run_kernels` for their meaning."""
        wide = items.widths.astype(np.float64)  # (I, F)
        each = items.rows * (model.per_token * wide.sum(axis=1) + model.per_token_squared * np.square(wide).sum(axis=1))
        return cls(
            items=items,
            ranks=ranks,
            every=every,
            lockstep=lockstep,
            fewest_rows=fewest_rows,
            cum=np.concatenate([[0], np.cumsum(items.rows)]),
            own=np.concatenate([[0.0], np.cumsum(each)]),
            cost=np.array(
                [model.per_microbatch, model.per_column, model.per_token, model.per_token_squared], dtype=np.float64
            ),
            limits=np.array([budget, most or _UNBOUNDED, rows_multiple], dtype=np.int64),
        )

    @property
    def single(self) -> bool:
        """Whether every item is one sequence."""
        return bool(len(self.items.members) == len(self.items.rows))

    @property
    def one_field(self) -> bool:
        """Whether runs have one width."""
        return bool(self.items.widths.shape[1] == 1)

    @property
    def arrays(self) -> tuple[Any, ...]:
        """cum, wide, over, cost, limits, single."""
        return self.cum, self.items.widths, self.items.over, self.cost, self.limits, self.single

    def run_costs(self, bounds: Index) -> Floats:
        """Cost (G,) of the runs between ``bounds`` (G + 1,)."""
        wide = np.maximum.reduceat(self.items.widths, bounds[:-1], axis=0).astype(np.float64)  # (G, F)
        rows = np.diff(self.cum[bounds])  # (G,)
        width, square = wide.sum(axis=1), np.square(wide).sum(axis=1)
        return np.asarray(self.cost[0] + self.cost[1] * width + rows * (self.cost[2] * width + self.cost[3] * square))

    def steps_for(self, runs: int) -> int:
        """Micro-steps that hold so many runs."""
        return round_up(max(1, -(-runs // self.ranks)), self.every)

    def lockstep_time(self, costs: Floats, steps: int) -> float:
        """Sum over steps of the slowest rank, runs sorted by cost; empty steps cost their fixed part."""
        slowest = np.sort(costs)[::-1][:: self.ranks]
        return float(slowest.sum()) + (steps - len(slowest)) * float(self.cost[0])


def too_few(problem: Problem) -> PadlessError:
    """The error where ``fewest_rows`` cannot be kept."""
    return PadlessError(
        f"no plan keeps at least {problem.fewest_rows} sequences in every micro-batch within the token budget"
        f" {problem.limits[0]}: raise the budget, or lower min_sequences"
    )


def least_total(problem: Problem, penalty: float | None = None, cap: float = np.inf, every: int | None = None) -> Index:
    """Bounds of the runs with the least total cost (dynamic programming)."""
    starts = np.empty(len(problem.items) + 1, dtype=np.int64)
    total, runs = run_kernels.best_runs(
        float(problem.cost[0]) if penalty is None else penalty,
        cap,
        problem.fewest_rows,
        (problem.every if every is None else every),
        problem.cum,
        problem.items.widths,
        problem.items.over,
        problem.own,
        problem.cost,
        problem.limits,
        starts,
    )
    if not np.isfinite(total):
        if problem.limits[2] > 1:  # gives way, see `balanced`
            relaxed = replace(problem, limits=np.array([*problem.limits[:2], 1], dtype=np.int64))
            return least_total(relaxed, penalty, cap, every)
        raise too_few(problem)
    return starts[: runs + 1].copy()
