"""What the page draws, as plain numbers: one optimizer step in rectangles, its ranks over time, and a budget sweep."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from padless.analysis.analyze import Analysis
from padless.analysis.figures import figures_of
from padless.analysis.schedule import STRATEGIES, Schedule, Setup, make_schedule

__all__ = ["budget_sweep", "drawing", "one_step"]

Index = npt.NDArray[np.int64]

_DRAWN = ("fixed", "longest-in-batch", "step-greedy", "step-balanced", "packed")
_SWEPT = ("longest-in-batch", "step-greedy", "step-balanced", "packed")
_ROWS = 400  # sequences drawn at most
_LANES = 4  # ranks drawn at most
_STEPS = 4  # optimizer steps in each point of the sweep
_SWEEP_SEQUENCES = 4096


def one_step(analysis: Analysis, name: str) -> Schedule:
    """The schedule of the epoch's first optimizer step."""
    first = analysis.sample[: analysis.setup.sequences_per_step]
    return make_schedule(name, first, analysis.setup)


def drawing(analysis: Analysis) -> dict[str, Any]:
    """For each strategy of one step: micro-batches to draw, and every rank's busy and waiting time."""
    names = [name for name in STRATEGIES if name in _DRAWN or name == analysis.current]
    return {name: _draw(one_step(analysis, name), analysis.setup) for name in names}


def _draw(schedule: Schedule, setup: Setup) -> dict[str, Any]:
    total = schedule.lengths.sum(axis=1)
    lanes = min(setup.ranks, _LANES)
    boxes: list[dict[str, Any]] = []
    drawn = 0
    for group in range(len(schedule.width)):
        rank, micro = int(schedule.rank[group]), int(schedule.micro_step[group])
        members = schedule.members(group)
        if rank >= lanes or not len(members):
            continue
        if drawn + len(members) > _ROWS and boxes and micro > boxes[-1]["micro"]:
            break  # whole micro-steps, so that the ranks can be compared
        drawn += len(members)
        held = np.sort(total[members])[::-1]
        width = int(schedule.width[group])
        box = {"rank": rank, "micro": micro, "width": width, "lengths": np.minimum(held, width).tolist()}
        boxes.append(box)
    costs = schedule.costs(setup.cost).reshape(-1, setup.ranks)  # (micro-steps, R)
    return {
        "packed": schedule.packed,
        "ranks": setup.ranks,
        "lanes": lanes,
        "microsteps": len(costs),
        "boxes": boxes,
        "drawn_microsteps": boxes[-1]["micro"] + 1 if boxes else 0,
        "timeline": np.round(costs.T, 1).tolist(),  # (R, micro-steps)
        "sync": setup.sync,
    }


def budget_sweep(analysis: Analysis) -> dict[str, Any]:
    """Occupancy, micro-batches per step and time at budgets around the chosen one, on a few steps."""
    setup = analysis.setup
    size = setup.sequences_per_step
    sample = analysis.sample[: max(size, min(_STEPS * size, _SWEEP_SEQUENCES // size * size))]
    steps = -(-len(sample) // size)
    longest = int(sample.sum(axis=1).max()) + setup.multiple_of - 1
    budgets = sorted({setup.token_budget, *(_nice(setup.token_budget * 2 ** (k / 2)) for k in range(-6, 7))})
    budgets = [budget for budget in budgets if budget >= longest]
    points: dict[str, Any] = {name: {"occupancy": [], "microbatches": [], "ratio": []} for name in _SWEPT}
    for budget in budgets:
        tried = replace(setup, token_budget=budget)
        for name in _SWEPT:
            found = figures_of(make_schedule(name, sample, tried), tried)
            points[name]["occupancy"].append(round(found.occupancy, 4))
            points[name]["microbatches"].append(round(found.microbatches / steps, 2))
            points[name]["ratio"].append(round(found.step_time_ratio, 4))
    return {"budgets": budgets, "chosen": budgets.index(setup.token_budget), "steps": steps, "strategies": points}


def _nice(budget: float) -> int:
    """Rounded to a multiple of 256."""
    return max(256, round(budget / 256) * 256)
