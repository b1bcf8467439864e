"""The micro-batches of a plan, made when asked for, and the way back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from padless.errors import PadlessError, choose
from padless.plan import Plan
from padless.tensors.gather import Cells, padded_cells
from padless.tensors.inputs import Responses, padded_inputs
from padless.tensors.restore import find_alignment, scatter_tokens
from padless.tensors.rows import Rows

__all__ = ["MicroBatch", "Regrouped"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MicroBatch:
    """What one rank runs in one forward and backward.

    Attributes:
        inputs: like the caller's batch, with fewer rows (``"padded"``) or one row of concatenated sequences.
        indices: (k,) rows of the caller's batch.
        lengths: (k,) or (k, F) tokens of each.
        real_tokens: their sum.
        padded_tokens: positions that the device computes.
        weight: 1.0, or 0.0 for a micro-batch that only keeps step with other ranks: multiply the loss by it.
    """

    inputs: Any
    indices: npt.NDArray[np.int64]
    lengths: npt.NDArray[np.int64]
    real_tokens: int
    padded_tokens: int
    weight: float
    _cells: dict[str, Cells]
    _responses: dict[str, Cells]


class Regrouped:
    """The micro-batches of one optimizer step: iterate, index, ask for the ``plan``, restore outputs."""

    def __init__(self, *, rows: Rows, plan: Plan, responses: Responses, unsafe: bool = False) -> None:
        self.plan = plan
        self.unsafe = unsafe
        self._rows = rows
        self._responses: Responses = responses
        self._order = torch.from_numpy(plan.order.copy())
        self._widths = plan.widths.reshape(len(plan), -1)  # (G, F)
        self._tokens = plan.group_tokens

    def __len__(self) -> int:
        return self.plan.steps

    def __iter__(self) -> Iterator[MicroBatch]:
        return (self[step] for step in range(len(self)))

    def __getitem__(self, step: int) -> MicroBatch:
        slots = self.plan.slots(step)
        chosen = self.plan.order[slots]
        lengths = self.plan.slot_lengths[slots]  # (k,) or (k, F)
        cells = self._cells(step)
        made = padded_inputs(self._rows, chosen, cells, self._responses)
        return MicroBatch(
            inputs=made.inputs,
            indices=chosen,
            lengths=lengths,
            real_tokens=int(lengths.sum()),
            padded_tokens=int(self._tokens[step]),
            weight=1.0,
            _cells=cells,
            _responses=made.responses,
        )

    def _cells(self, step: int) -> dict[str, Cells]:
        slots = self.plan.slots(step)
        lengths = self.plan.slot_lengths[slots].reshape(slots.stop - slots.start, -1)  # (k, F)
        cells = {}
        for f, (key, stream) in enumerate(self._rows.streams.items()):
            device = stream.size.device
            width = int(self._widths[step, f])
            first = None
            if self.plan.spans is not None:
                first = torch.from_numpy(self.plan.spans[slots, 0].copy()).to(device)
            size = torch.from_numpy(np.ascontiguousarray(lengths[:, f])).to(device)
            full = bool((lengths[:, f] == width).all())
            cells[key] = padded_cells(self._order[slots].to(device), first, size, width, full=full)
        return cells

    def restore(
        self, outputs: Iterable[Tensor], *, span: str = "sequence", mask: str | None = None, fill: float = 0
    ) -> Tensor:
        """Per-token or per-row outputs of all micro-batches in the caller's order, alignment and width.

        Args:
            outputs: one tensor per micro-batch: (k, w, ...) aligned like its inputs, or (k, ...) for span ``"row"``.
            span: what the outputs are aligned to.
            mask: which mask's columns they follow, where the batch has several.
            fill: what positions without a token receive.
        """
        choose("span", span, ("sequence", "response", "row"))
        given = list(outputs)
        if len(given) != len(self):
            raise PadlessError(f"{len(given)} outputs for {len(self)} micro-batches; give one for each")
        if span == "row":
            values = torch.cat(given)
            blank = values.new_full((self._rows.count, *values.shape[1:]), fill)
            return blank.index_copy(0, self._order.to(values.device), values)
        alignment = find_alignment(self._rows, span, mask)
        parts = []
        for step, output in enumerate(given):
            cells = self._cells(step)[alignment.stream]
            if span == "response" and self._responses == "block":
                from padless.tensors.inputs import response_cells

                cells = response_cells(cells, alignment)
            parts.append((output, cells))
        return scatter_tokens(parts, alignment, self._rows.count, fill)
