"""Figures of regrouped steps: padless' own, and the host's logged means with the weights that regrouping needs."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

__all__ = ["Figures", "local_collectives"]


@contextlib.contextmanager
def local_collectives(accelerator: Any) -> Iterator[None]:
    """``gather``, ``gather_for_metrics`` and ``reduce`` of an Accelerator stay on this rank.

    Hosts gather a figure in each micro-batch. Ranks hold unequal numbers of rows then (or none), which such a gather
    does not allow; `Figures.lists` combines what was logged once per step instead.
    """

    def here(input_data: Any, *args: Any, **kwargs: Any) -> Any:
        return input_data

    def scaled(tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        return tensor * scale

    replaced = {"gather": here, "gather_for_metrics": here, "reduce": scaled}
    held = {name: vars(accelerator)[name] for name in replaced if name in vars(accelerator)}
    for name, function in replaced.items():
        setattr(accelerator, name, function)
    try:
        yield
    finally:
        for name in replaced:
            if name in held:
                setattr(accelerator, name, held[name])
            else:
                delattr(accelerator, name)


class Figures:
    """Collects figures over micro-batches and steps until the host logs."""

    def __init__(self) -> None:
        self._before: dict[str, list[float]] | None = None
        self._lists: Any = None
        self._held: list[tuple[dict[str, float], dict[str, float]]] = []
        self._train: dict[str, float] = {}

    # --- the host's logged means

    @contextlib.contextmanager
    def lists(self, lists: Any, host: Any, gather: Callable[[Tensor], Tensor]) -> Iterator[None]:
        """Take what the host appends to ``lists`` in each micro-batch; append one combined value in the end."""
        self._lists, self._held = lists, []
        before = {} if lists is None else {key: list(values) for key, values in lists.items()}
        if lists is not None:
            lists.clear()
        try:
            yield
            combined = combine(self._held, host.metric_weight, gather) if lists is not None and self._held else {}
        finally:
            if lists is not None:
                lists.clear()
                for key, values in before.items():
                    lists[key] = values
            self._lists = None
        for key, value in combined.items():
            lists[key] = [*before.get(key, []), value]

    def collect(self, inputs: Mapping[str, Any], weight: float, host: Any) -> None:
        """After one micro-batch: its figures and their weights."""
        if self._lists is None:
            return
        weights = {"rows": weight * host.rows(inputs), "targets": weight * host.targets(inputs), "sum": weight}
        values = {
            key: float(entries[-1]) for key, entries in self._lists.items() if entries and key not in host.counters
        }
        self._held.append((values, weights))
        self._lists.clear()

    # --- padless' own

    @contextlib.contextmanager
    def step(self, grouped: Any, ranks: int, *, training: bool = True) -> Iterator[None]:
        """Account for one regrouped step and the time it takes."""
        begun = time.perf_counter()
        yield
        if not training:
            return
        plan = grouped.plan
        tally = self._train
        for name, value in (
            ("steps", 1.0),
            ("seconds", time.perf_counter() - begun),
            ("real", float(plan.real_tokens)),
            ("padded", float(plan.padded_tokens)),
            ("micro_batches", float(plan.steps)),
            ("makespan", float(plan.makespan())),
            ("work", float(plan.group_costs().sum()) / plan.ranks),
        ):
            tally[name] = tally.get(name, 0.0) + value

    def take(self) -> dict[str, float]:
        """Figures since the last call, ready for the host's log."""
        tally, self._train = self._train, {}
        if not tally:
            return {}
        seconds = max(tally["seconds"], 1e-9)
        return {
            "padless/occupancy": tally["real"] / max(tally["padded"], 1.0),
            "padless/real_tokens_per_second": tally["real"] / seconds,
            "padless/padded_tokens_per_second": tally["padded"] / seconds,
            "padless/micro_batches": tally["micro_batches"] / tally["steps"],
            "padless/idle_share": 1.0 - tally["work"] / max(tally["makespan"], 1e-9),
        }


def combine(
    held: list[tuple[dict[str, float], dict[str, float]]],
    weight_of: Callable[[str], str],
    gather: Callable[[Tensor], Tensor],
) -> dict[str, float]:
    """One value per key over all micro-batches and ranks: smallest, largest, or the weighted mean.

    NaN entries and micro-batches of weight 0 do not count; a key with none left is NaN.
    """
    keys = sorted({key for values, _ in held for key in values})
    table = []
    for key in keys:
        kind = _kind(key)
        pairs = [
            (values[key], weights[weight_of(key)])
            for values, weights in held
            if key in values and weights[weight_of(key)] > 0 and not math.isnan(values[key])
        ]
        table.append(_reduce(kind, pairs))
    parts = gather(torch.tensor(table, dtype=torch.float64).reshape(len(keys), 2))  # (R, K, 2)
    return {
        key: _reduce(_kind(key), [(float(v), float(w)) for v, w in parts[:, at] if float(w) > 0])[0]
        for at, key in enumerate(keys)
    }


def _kind(key: str) -> str:
    parts = key.rpartition("/")[2].split("_")
    return "min" if "min" in parts else "max" if "max" in parts else "mean"


def _reduce(kind: str, pairs: list[tuple[float, float]]) -> tuple[float, float]:
    """(value, weight) of several."""
    if not pairs:
        return math.nan, 0.0
    total = sum(weight for _, weight in pairs)
    if kind == "min":
        return min(value for value, _ in pairs), total
    if kind == "max":
        return max(value for value, _ in pairs), total
    return sum(value * weight for value, weight in pairs) / total, total
