"""Figures of regrouped steps: padless' own, and the host's logged means with the weights that regrouping needs."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from padless.errors import PadlessError
from padless.metrics import Meter

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
        self._meter: Meter | None = None
        self._begun: float | None = None
        self._makespan = self._work = 0.0

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

    def load(self, seconds: float, model: Any) -> None:
        """A step begins: ``seconds`` were spent waiting for its batches."""
        if self._meter is None:
            self._meter = meter_for(model)
        self.close()
        self._begun = time.perf_counter() - seconds
        self._meter.wait(seconds)

    def ran(self, micro: Any) -> None:
        """A micro-batch of the step ran."""
        assert self._meter is not None
        held = micro.lengths.reshape(-1) if micro.weight else np.empty(0, dtype=np.int64)  # (m,) or (m x fields,)
        self._meter.micro_batch(held, padded_tokens=micro.padded_tokens)

    def planned(self, plan: Any) -> None:
        """Modelled time of the step, and what of it the ranks work."""
        self._makespan += float(plan.makespan())
        self._work += float(plan.group_costs().sum()) / plan.ranks

    def close(self) -> None:
        """The optimizer step is over: at the log that follows it, or when the next one begins."""
        if self._begun is not None and self._meter is not None:
            self._meter.step(seconds=time.perf_counter() - self._begun)
            self._begun = None

    def take(self, ranks: int) -> dict[str, float]:
        """Figures of all ranks since the last call, ready for the host's log; every rank calls it."""
        self.close()
        if self._meter is None or not self._meter.steps:
            return {}
        lap = self._meter.lap()
        if ranks > 1:
            lap = lap.gather()
        idle = 1.0 - self._work / self._makespan if self._makespan else 0.0
        self._work = self._makespan = 0.0
        figures = {
            "occupancy": lap.occupancy,
            "real_tokens_per_second": lap.real_tokens_per_second,
            "padded_tokens_per_second": lap.padded_tokens_per_second,
            "waiting_share": lap.waiting_share,
            "micro_batches": lap.micro_batches / lap.steps / ranks,
            "planned_idle_share": max(idle, 0.0),
            "length_correlation": lap.neighbours.correlation,
        }
        if lap.peak_memory:
            figures["peak_memory_gib"] = lap.peak_memory / 2**30
        if ranks > 1:
            figures |= {f"imbalance_{name}": value for name, value in lap.imbalance.items()}
        return {f"padless/{name}": value for name, value in figures.items() if math.isfinite(value)}


def meter_for(model: Any) -> Meter:
    """A meter that knows the model's arithmetic where its config tells it."""
    try:
        return Meter.for_model(model)
    except (PadlessError, AttributeError, TypeError, NotImplementedError):
        return Meter()


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
