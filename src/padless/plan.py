"""A plan: which sequence runs in which micro-step on which rank. A value; everything else applies it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from padless.cost import DEFAULT_COST, CostModel
from padless.errors import PadlessError, choose
from padless.lengths import IntArray
from padless.shapes import round_up, snap

__all__ = ["Layout", "Plan", "Sync"]

Layout = Literal["padded", "packed"]
Sync = Literal["microbatch", "step"]
Index = npt.NDArray[np.int64]

_NONE: Index = np.empty(0, dtype=np.int64)
_FORMAT = 1


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class Plan:
    """Groups of sequences: micro-batches (layout ``"padded"``) or packs (layout ``"packed"``).

    Group ``g`` runs in micro-step ``g // ranks`` on rank ``g % ranks``; it holds
    ``order[offsets[g]:offsets[g + 1]]``. An empty group is a zero-weight micro-batch.

    Attributes:
        layout: ``"padded"`` for [rows, width] rectangles, ``"packed"`` for rows of concatenated sequences.
        method: the planner that made it.
        ranks: data-parallel ranks, R.
        steps: micro-steps, K; every rank runs K micro-batches.
        lengths: (N,) or (N, F) token counts of the sequences as they were given.
        order: (S,) int64, the sequence in each slot; a split sequence fills several slots.
        offsets: (K * R + 1,) int64, where each group starts in ``order``.
        token_budget: ceiling on the padded tokens of one group (for packs, the capacity).
        spans: (S, 2) int64, first and last + 1 token of its sequence that each slot holds; ``None`` where
            every slot holds its whole sequence.
        multiple_of: group widths are rounded up to it.
        sequence_multiple_of: each packed sequence is rounded up to it.
        ladder: the only widths allowed, sorted, or ``None``.
        max_sequences: ceiling on the sequences of one group, or ``None``.
        min_sequences: floor on the sequences of a group that is not empty.
        microbatches_multiple_of: ``steps`` is a multiple of it.
        atoms: (N,) group ids whose sequences must share a group, or ``None``.
        dropped, truncated, split, alone: (.,) int64 sequences that the ``overlong`` policy dropped, cut,
            split, or let run alone over the budget.
        cost: the cost model that the plan was made with.
        sync: ``"microbatch"`` when ranks meet in every micro-batch, ``"step"`` when only at the optimizer step.
        lower_bound: no plan under the same options can be better: modelled makespan for ``"padded"``,
            number of packs for ``"packed"``. 0 where no bound was computed.
        seed: the seed of a randomised method.
    """

    layout: Layout
    method: str
    ranks: int
    steps: int
    lengths: IntArray
    order: Index
    offsets: Index
    token_budget: int
    spans: Index | None = None
    multiple_of: int = 1
    sequence_multiple_of: int = 1
    ladder: IntArray | None = None
    max_sequences: int | None = None
    min_sequences: int = 1
    microbatches_multiple_of: int = 1
    atoms: Index | None = None
    dropped: Index = field(default_factory=lambda: _NONE)
    truncated: Index = field(default_factory=lambda: _NONE)
    split: Index = field(default_factory=lambda: _NONE)
    alone: Index = field(default_factory=lambda: _NONE)
    cost: CostModel = DEFAULT_COST
    sync: Sync = "microbatch"
    lower_bound: float = 0.0
    seed: int | None = None

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if isinstance(value, np.ndarray):
                view = value.view()
                view.flags.writeable = False
                object.__setattr__(self, item.name, view)

    # --- groups

    def __len__(self) -> int:
        """Number of groups, empty ones included: ``steps * ranks``."""
        return self.steps * self.ranks

    def __iter__(self) -> Iterator[Index]:
        """The sequences of each group, in order of micro-step, then rank."""
        for g in range(len(self)):
            yield self.order[self.offsets[g] : self.offsets[g + 1]]

    def slots(self, step: int, rank: int = 0) -> slice:
        """Where the group of micro-step ``step`` on ``rank`` lies in ``order`` and ``spans``."""
        if not (0 <= step < self.steps and 0 <= rank < self.ranks):
            raise PadlessError(
                f"no group (step={step}, rank={rank}): the plan has {self.steps} micro-steps on {self.ranks} ranks"
            )
        g = step * self.ranks + rank
        return slice(int(self.offsets[g]), int(self.offsets[g + 1]))

    def group(self, step: int, rank: int = 0) -> Index:
        """The sequences of micro-step ``step`` on ``rank``, shape (rows,)."""
        return self.order[self.slots(step, rank)]

    def of_rank(self, rank: int) -> list[Index]:
        """The groups of one rank, one per micro-step."""
        return [self.group(step, rank) for step in range(self.steps)]

    # --- sizes

    @property
    def rows(self) -> Index:
        """Sequences (or pieces) in each group, (G,)."""
        return np.diff(self.offsets)

    @property
    def slot_lengths(self) -> npt.NDArray[np.int64]:
        """Tokens in each slot, (S,) or (S, F): after truncation and splitting."""
        if self.spans is not None:
            return np.asarray(self.spans[:, 1] - self.spans[:, 0])
        return self.lengths[self.order].astype(np.int64, copy=False)

    @property
    def widths(self) -> Index:
        """Width of each group, (G,) or (G, F): its longest sequence (or its packed tokens), rounded up; 0 if empty."""
        if self.layout == "packed":
            held = round_up(self.slot_lengths, self.sequence_multiple_of)
            return round_up(_sum_groups(held, self.offsets), self.multiple_of)
        widest = _max_groups(self.slot_lengths, self.offsets)
        if self.ladder is None:
            return round_up(widest, self.multiple_of)
        return np.where(widest > self.ladder[-1], round_up(widest, self.multiple_of), snap_within(widest, self.ladder))

    @property
    def group_tokens(self) -> Index:
        """Padded tokens of each group, (G,): what the device computes and the budget limits."""
        if self.layout == "packed":
            return self.widths
        widths = self.widths
        return self.rows * (widths if widths.ndim == 1 else widths.sum(axis=1))

    @property
    def real_tokens(self) -> int:
        """Tokens of all sequences in the plan."""
        return int(self.slot_lengths.sum(dtype=np.int64))

    @property
    def padded_tokens(self) -> int:
        """Positions that the device computes, rounding included."""
        return int(self.group_tokens.sum())

    @property
    def occupancy(self) -> float:
        """Real over padded tokens; 1.0 for a plan without sequences."""
        padded = self.padded_tokens
        return self.real_tokens / padded if padded else 1.0

    @property
    def padding_ratio(self) -> float:
        """1 - occupancy."""
        return 1.0 - self.occupancy

    @property
    def efficiency(self) -> float:
        """Real tokens over groups times the budget: how full the groups are."""
        room = len(self) * self.token_budget
        return self.real_tokens / room if room else 1.0

    # --- time

    def group_costs(self, cost: CostModel | None = None) -> npt.NDArray[np.float64]:
        """Modelled cost of each group, (G,); an empty one costs its fixed part."""
        model = cost or self.cost
        if self.layout == "padded":
            return model.padded(self.rows, self.widths)
        square = np.square(self.slot_lengths.astype(np.float64))
        return model.packed(self.widths, _sum_groups(square, self.offsets))

    def makespan(self, cost: CostModel | None = None, sync: Sync | None = None) -> float:
        """Modelled time of the optimizer step.

        With ``sync="microbatch"`` each micro-step takes as long as its slowest rank (FSDP, ZeRO-3, pipelines);
        with ``sync="step"`` ranks meet only at the end. Defaults are what the plan was made with.
        """
        how = choose("sync", sync or self.sync, ("microbatch", "step"))
        costs = self.group_costs(cost).reshape(self.steps, self.ranks)  # (K, R)
        if how == "microbatch":
            return float(costs.max(axis=1).sum())
        return float(costs.sum(axis=0).max())

    @property
    def gap(self) -> float:
        """How far the plan is from its lower bound, as a share of the bound; NaN where no bound is known."""
        if self.lower_bound <= 0:
            return float("nan")
        reached = self.makespan() if self.layout == "padded" else int((self.rows > 0).sum())
        return float(reached / self.lower_bound - 1.0)

    # --- laws

    def check(self) -> Plan:
        """Raise `PadlessError` where a law is broken (nothing lost, budget, options kept); return the plan."""
        from padless.plan_check import check_plan

        check_plan(self)
        return self

    # --- in and out

    def to_dict(self, *, arrays: bool = False) -> dict[str, Any]:
        """A JSON-ready summary; with ``arrays`` also lengths, order, offsets and spans as lists."""
        summary: dict[str, Any] = {
            "layout": self.layout,
            "method": self.method,
            "ranks": self.ranks,
            "steps": self.steps,
            "sequences": len(self.lengths),
            "token_budget": self.token_budget,
            "multiple_of": self.multiple_of,
            "sequence_multiple_of": self.sequence_multiple_of,
            "max_sequences": self.max_sequences,
            "min_sequences": self.min_sequences,
            "microbatches_multiple_of": self.microbatches_multiple_of,
            "real_tokens": self.real_tokens,
            "padded_tokens": self.padded_tokens,
            "occupancy": self.occupancy,
            "makespan": self.makespan(),
            "lower_bound": self.lower_bound,
            "sync": self.sync,
            "cost": self.cost.to_dict(),
            "dropped": self.dropped.tolist(),
            "truncated": self.truncated.tolist(),
            "split": self.split.tolist(),
            "alone": self.alone.tolist(),
            "seed": self.seed,
        }
        if arrays:
            for name in ("lengths", "order", "offsets", "spans"):
                value = getattr(self, name)
                summary[name] = None if value is None else value.tolist()
        return summary

    def save(self, path: str | Path) -> None:
        """Write the plan to one ``.npz`` file; `load` reads it back equal."""
        arrays: dict[str, Any] = {}
        plain: dict[str, Any] = {"format": _FORMAT}
        for item in fields(self):
            value = getattr(self, item.name)
            if isinstance(value, np.ndarray):
                arrays[item.name] = value
            else:
                plain[item.name] = value.to_dict() if isinstance(value, CostModel) else value
        with open(path, "wb") as file:
            np.savez_compressed(file, _plain=np.frombuffer(json.dumps(plain).encode(), dtype=np.uint8), **arrays)

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a plan that `save` wrote."""
        try:
            with np.load(path) as stored:
                plain = json.loads(stored["_plain"].tobytes())
                arrays = {name: stored[name] for name in stored.files if name != "_plain"}
        except (KeyError, ValueError) as error:
            raise PadlessError(f"{path} is not a plan written by Plan.save: {error}") from None
        if plain.pop("format", None) != _FORMAT:
            raise PadlessError(f"{path} was written by another version of padless; make the plan again")
        plain["cost"] = CostModel(**plain["cost"])
        return cls(**plain, **arrays)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Plan):
            return NotImplemented
        return all(_equal(getattr(self, item.name), getattr(other, item.name)) for item in fields(self))

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        what = "packs" if self.layout == "packed" else "micro-batches"
        odd = [
            f"{len(getattr(self, name))} {name}"
            for name in ("dropped", "truncated", "split", "alone")
            if len(getattr(self, name))
        ]
        return (
            f"Plan({self.layout}, {self.method}: {len(self.lengths)} sequences in {len(self)} {what}"
            f" = {self.steps} steps x {self.ranks} ranks, {self.real_tokens} real / {self.padded_tokens} padded tokens,"
            f" occupancy {self.occupancy:.3f}" + (", " + ", ".join(odd) if odd else "") + ")"
        )

    def _repr_html_(self) -> str:
        rows = [
            ("layout", self.layout),
            ("method", self.method),
            ("sequences", f"{len(self.lengths):,}"),
            ("micro-steps x ranks", f"{self.steps:,} x {self.ranks:,}"),
            ("real / padded tokens", f"{self.real_tokens:,} / {self.padded_tokens:,}"),
            ("occupancy", f"{self.occupancy:.3f}"),
            ("token budget", f"{self.token_budget:,}"),
            ("over the lower bound", f"{self.gap:.1%}" if self.lower_bound > 0 else "no bound"),
        ]
        body = "".join(f"<tr><th style='text-align:left'>{name}</th><td>{value}</td></tr>" for name, value in rows)
        return f"<table>{body}</table>"


def snap_within(widths: Index, ladder: IntArray) -> Index:
    """`snap`, leaving 0 (an empty group) and widths over the ladder (alone) as they are."""
    inside = (widths > 0) & (widths <= ladder[-1])
    result = widths.astype(np.int64)
    result[inside] = snap(result[inside], ladder)
    return result


def _sum_groups(values: npt.NDArray[Any], offsets: Index) -> npt.NDArray[Any]:
    """Sum of (S,) or (S, F) values in each group: (G,) or (G, F); 0 for an empty group."""
    total = np.zeros((len(values) + 1, *values.shape[1:]), dtype=values.dtype)
    np.cumsum(values, axis=0, out=total[1:])
    return np.asarray(total[offsets[1:]] - total[offsets[:-1]])


def _max_groups(values: npt.NDArray[np.int64], offsets: Index) -> Index:
    """Largest of (S,) or (S, F) values in each group: (G,) or (G, F); 0 for an empty group."""
    groups = len(offsets) - 1
    result = np.zeros((groups, *values.shape[1:]), dtype=np.int64)
    filled = np.flatnonzero(np.diff(offsets) > 0)
    if len(filled):
        # Empty groups share their start with the next one, so the filled ones alone cut the slots.
        result[filled] = np.maximum.reduceat(values, offsets[filled], axis=0)
    return result


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        return a.shape == b.shape and bool((a == b).all())
    return type(a) is type(b) and bool(a == b)
