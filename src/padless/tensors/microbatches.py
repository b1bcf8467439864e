"""The micro-batches of a plan, made when asked for, and the way back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from padless.errors import PadlessError, choose
from padless.exchange import agree, swap
from padless.plan import Plan, snap_within
from padless.shapes import round_up
from padless.tensors.boundaries import Boundaries, boundaries_of
from padless.tensors.distributed import World, ragged, response_alignments
from padless.tensors.gather import Cells, padded_cells
from padless.tensors.inputs import Responses, cells_of, packed_inputs, padded_inputs
from padless.tensors.layouts import is_packed
from padless.tensors.restore import find_alignment, place_tokens
from padless.tensors.rows import Alignment, Rows

__all__ = ["MicroBatch", "Regrouped"]

Index = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MicroBatch:
    """What one rank runs in one forward and backward.

    Attributes:
        inputs: like the caller's batch, with fewer rows (``"padded"``) or one row of concatenated sequences.
        indices: (k,) rows of the caller's batch; of all ranks' batches behind one another with a process group.
        lengths: (k,) or (k, F) tokens of each.
        real_tokens: their sum.
        padded_tokens: positions that the device computes.
        weight: 1.0, or 0.0 for a micro-batch that only keeps step with other ranks. Its targets and response masks
            are padding, its ``document_ids`` all -1; multiply a loss by it that does not follow from those.
        boundaries: of a packed row: cu_seqlens, seq_idx and other forms; None for padded rows.
    """

    inputs: Any
    indices: Index
    lengths: Index
    real_tokens: int
    padded_tokens: int
    weight: float
    boundaries: Boundaries | None
    _cells: dict[str, Cells]
    _responses: dict[str, Cells]

    @property
    def document_ids(self) -> Tensor:
        """(B, W) of the first mask's columns: which of ``indices`` each cell belongs to, -1 on padding."""
        cells = next(iter(self._cells.values()))
        ids = cells.document_ids
        return ids if self.weight else torch.full_like(ids, -1)

    def take_responses(self, tensor: Tensor, *, mask: str | None = None, fill: float = 0) -> Tensor:
        """Values (k, w, ...) of sequences at their responses: (k, longest response, ...), from column 0.

        For regroupings with ``responses="block"``, to line model outputs up with response fields.
        """
        key = next(iter(self._cells)) if mask is None else mask
        cells, block = self._cells[key], self._responses[key]
        column = (block.token - cells.token[:, :1]).clamp(min=0)  # (k, r)
        trailing = (..., *(None,) * (tensor.ndim - 2))
        index = column[trailing].expand(*column.shape, *tensor.shape[2:]).to(tensor.device)
        return tensor.gather(1, index).masked_fill(~block.real[trailing].to(tensor.device), fill)


class Regrouped:
    """The micro-batches of one optimizer step on this rank: iterate, index, and restore outputs.

    Attributes:
        plan: the plan, over all ranks.
        layout: the layout of the micro-batches, by its full name.
        unsafe: true where the layout is used against a report's verdict.
        rank: this process's rank in the plan.
    """

    def __init__(
        self,
        *,
        home: Rows,
        store: Rows,
        plan: Plan,
        layout: str,
        responses: Responses,
        dtype: torch.dtype,
        unsafe: bool = False,
        rank: int = 0,
        world: World | None = None,
        need: Index | None = None,
        filler: int = 0,
    ) -> None:
        self.plan, self.layout, self.unsafe, self.rank = plan, layout, unsafe, rank
        self._home, self._store, self._world, self._need = home, store, world, need
        self._responses, self._dtype, self._filler = responses, dtype, filler
        group = np.repeat(np.arange(len(plan)), plan.rows)  # (S,) of each slot
        self._slot_rank = group % plan.ranks
        mine = np.flatnonzero(self._slot_rank == rank)
        self._slots = mine  # (n,) slots of this rank, micro-step after micro-step
        counts = plan.rows.reshape(plan.steps, plan.ranks)[:, rank]
        self._cuts = np.concatenate([[0], np.cumsum(counts)])  # (K + 1,)
        self._indices = plan.order[mine]
        self._sizes = plan.slot_lengths[mine].reshape(len(mine), len(home.streams))  # (n, F)
        self._first = None if plan.spans is None else plan.spans[mine, 0]
        own = 0 if world is None or need is not None else world.own().start
        self._rows = self._indices - own if need is None else np.searchsorted(need, self._indices)
        self._widths = plan.widths.reshape(plan.steps, plan.ranks, -1)[:, rank]  # (K, F)

    def __len__(self) -> int:
        return self.plan.steps

    def __iter__(self) -> Iterator[MicroBatch]:
        return (self[step] for step in range(len(self)))

    def __getitem__(self, step: int) -> MicroBatch:
        if not -len(self) <= step < len(self):
            raise IndexError(f"micro-batch {step} of {len(self)}")
        step %= len(self)
        rows, first, sizes, widths, blank = self._group(step)
        if is_packed(self.layout):
            boundaries, cells = self._packed(rows, first, sizes[:, 0], int(widths[0]))
            inputs = packed_inputs(self._store, rows, cells, boundaries, self.layout, dtype=self._dtype, blank=blank)
            key = self._store.only_stream.key
            held, taken, padded = {key: cells}, {key: cells}, boundaries.width
        else:
            boundaries = None
            held = self._padded(rows, first, sizes, widths)
            made = padded_inputs(
                self._store,
                rows,
                held,
                self._responses,
                drop_masks=self.layout == "right-padded-no-mask",
                blank=blank,
            )
            inputs, taken, padded = made.inputs, made.responses, len(rows) * int(widths.sum())
        lengths = sizes[:0] if blank else sizes
        return MicroBatch(
            inputs=inputs,
            indices=self._indices[self._cuts[step] : self._cuts[step + 1]],
            lengths=lengths[:, 0] if lengths.shape[1] == 1 else lengths,
            real_tokens=int(lengths.sum()),
            padded_tokens=padded,
            weight=0.0 if blank else 1.0,
            boundaries=boundaries,
            _cells=held,
            _responses=taken,
        )

    def __repr__(self) -> str:
        return f"Regrouped({self.layout}{', unsafe' if self.unsafe else ''}, rank {self.rank}: {self.plan!r})"

    def _group(self, step: int) -> tuple[Index, Index | None, Index, Index, bool]:
        """Store rows (k,), first tokens, sizes (k, F), widths (F,) of a micro-batch, and whether it is a filler."""
        cut = slice(int(self._cuts[step]), int(self._cuts[step + 1]))
        if cut.start < cut.stop:
            first = None if self._first is None else self._first[cut]
            return self._rows[cut], first, self._sizes[cut], self._widths[step], False
        # Nothing to do: one short row that counts for nothing.
        limit = max(self.plan.token_budget // self.plan.multiple_of * self.plan.multiple_of, 1)
        sizes = np.array([[min(int(s.lengths[self._filler]), limit) for s in self._store.streams.values()]])
        widths = round_up(sizes[0], self.plan.multiple_of)
        if self.plan.ladder is not None:
            widths = snap_within(widths, self.plan.ladder)
        return np.array([self._filler]), None, sizes, widths, True

    def _padded(self, rows: Index, first: Index | None, sizes: Index, widths: Index) -> dict[str, Cells]:
        cells = {}
        for f, (key, stream) in enumerate(self._store.streams.items()):
            width = max(int(widths[f]), 1)
            parts = [rows, sizes[:, f]] + ([] if first is None else [first])
            moved = torch.from_numpy(np.stack(parts)).to(stream.size.device, non_blocking=True)  # one transfer
            full = bool((sizes[:, f] == width).all())
            cells[key] = padded_cells(moved[0], None if first is None else moved[2], moved[1], width, full=full)
        return cells

    def _packed(self, rows: Index, first: Index | None, sizes: Index, width: int) -> tuple[Boundaries, Cells]:
        boundaries, members = boundaries_of(
            sizes,
            [np.arange(len(rows))],
            each=self.plan.sequence_multiple_of,
            width=max(width, int(round_up(sizes, self.plan.sequence_multiple_of).sum())),
            device=self._store.only_stream.size.device,
        )
        begins = None if first is None else np.where(members < 0, 0, first[members])
        return boundaries, cells_of(np.where(members < 0, -1, rows[members]), begins, boundaries)

    def restore(
        self, outputs: Iterable[Tensor], *, span: str = "sequence", mask: str | None = None, fill: float = 0
    ) -> Tensor:
        """Outputs of all micro-batches in the caller's order, alignment and width; differentiable.

        With a process group every rank calls this and gets back the values of its own rows.

        Args:
            outputs: one tensor per micro-batch, in order: (B, W, ...) aligned like its inputs; (k, longest response,
                ...) for span ``"response"`` with ``responses="block"``; (k, ...) for span ``"row"``.
            span: what the outputs are aligned to, and the result shall be.
            mask: which mask's columns they follow, where the batch has several.
            fill: what positions without a token receive.

        Returns:
            (N, W, ...) for ``"sequence"``, (N, R, ...) for ``"response"``, (N, ...) for ``"row"``.
        """
        alignment: Alignment | None = None
        try:
            choose("span", span, ("sequence", "response", "row"))
            given = list(outputs)
            if len(given) != len(self):
                raise PadlessError(f"{len(given)} outputs for {len(self)} micro-batches; give one for each")
            if span == "row" and len(self.plan.split):
                raise PadlessError(f"row {self.plan.split[0]} was split: its pieces have no one value per row")
            alignment = None if span == "row" else find_alignment(self._home, span, mask)
            values = self._picked(given, alignment)
            error = None
        except (PadlessError, RuntimeError) as caught:
            error, values = caught, torch.empty(0)
        if self._need is None or self._world is None:
            if error is not None:
                raise error
            rank_slots = self._slots
        else:
            kind = {"span": span, "mask": mask, "dtype": values.dtype, "shape": tuple(values.shape[1:])}
            agree(self._world.group, what="restore", options=kind if error is None else {}, error=error)
            values, rank_slots = self._send_home(values, alignment)
        start, count = self._extent(rank_slots, alignment)
        own = 0 if self._world is None else self._world.own().start
        rows = self.plan.order[rank_slots] - own
        if alignment is None:
            blank = values.new_full((self._home.count, *values.shape[1:]), fill)
            return blank.index_copy_(0, torch.from_numpy(rows).to(values.device), values)
        base = alignment.place.cpu().numpy()[rows]
        places = torch.from_numpy(ragged(base + start, count))
        return place_tokens(values, places, alignment, self._home.count, fill)

    def _picked(self, outputs: Sequence[Tensor], alignment: Alignment | None) -> Tensor:
        """The values of this rank's tokens, or rows, slot after slot."""
        counts = np.diff(self._cuts)
        if alignment is None:
            for step, (output, rows) in enumerate(zip(outputs, counts.tolist(), strict=True)):
                if rows and len(output) != rows:
                    raise PadlessError(f"output {step} has {len(output)} entries; micro-batch {step} has {rows} rows")
            return torch.cat([output[:rows] for output, rows in zip(outputs, counts.tolist(), strict=True)])
        shapes, entries = self._entries(alignment)
        for step, (output, shape) in enumerate(zip(outputs, shapes, strict=True)):
            if counts[step] and output.shape[:2] != shape:
                raise PadlessError(
                    f"output {step} has shape {tuple(output.shape)}; expected {shape} as its micro-batch, then any"
                    " further axes"
                )
        index = torch.from_numpy(np.concatenate(entries)).to(outputs[0].device)  # one transfer, and no mask to wait for
        parts = torch.split(index, [len(part) for part in entries])
        return torch.cat([o.flatten(0, 1).index_select(0, i.to(o.device)) for o, i in zip(outputs, parts, strict=True)])

    def _entries(self, alignment: Alignment) -> tuple[list[tuple[int, int]], list[Index]]:
        """Of each micro-batch's output: its shape (B, W), and which of its B x W entries are real tokens, in order."""
        start, count = self._extent(self._slots, alignment)
        packed = is_packed(self.layout)
        block = alignment.low is not None and self._responses == "block" and not packed
        inside = start * 0 if block else start if self._first is None else start - self._first  # column of the first
        f = list(self._home.streams).index(alignment.stream)
        shapes, entries = [], []
        for step, (low, high) in enumerate(pairwise(self._cuts.tolist())):
            if packed:
                held = round_up(self._sizes[low:high, f], self.plan.sequence_multiple_of)
                begins, rows, width = np.cumsum(held) - held, 1, max(int(self._widths[step, f]), int(held.sum()))
            else:
                width = int(count[low:high].max(initial=0)) if block else int(self._widths[step, f])
                begins, rows = np.arange(high - low) * max(width, 1), high - low
            shapes.append((rows, max(width, 1)))
            entries.append(ragged(begins + inside[low:high], count[low:high]))
        return shapes, entries

    def _extent(self, slots: Index, alignment: Alignment | None) -> tuple[Index, Index]:
        """The first token of each slot that a span holds, and how many, (n,)."""
        ones = np.ones(len(slots), dtype=np.int64)
        if alignment is None:
            return ones, ones
        f = list(self._home.streams).index(alignment.stream)
        first = ones * 0 if self.plan.spans is None else self.plan.spans[slots, 0]
        size = self.plan.slot_lengths.reshape(len(self.plan.order), len(self._home.streams))[slots, f]
        if alignment.low is None:
            return first, size
        rows = self.plan.order[slots]
        if self._need is None:
            own = 0 if self._world is None else self._world.own().start
            low = alignment.low.cpu().numpy()[rows - own]
        else:
            assert self._world is not None
            a = next(i for i, known in enumerate(response_alignments(self._home)) if known is alignment)
            low = self._world.lows[rows, a]
        start = np.maximum(first, low)
        return start, np.maximum(first + size - start, 0)

    def _send_home(self, values: Tensor, alignment: Alignment | None) -> tuple[Tensor, Index]:
        """Send values (slot after slot) to the owners of their rows; what came, and the slots it belongs to."""
        world = self._world
        assert world is not None
        order, first = self.plan.order, self.plan.spans
        begin = np.zeros(len(order), dtype=np.int64) if first is None else first[:, 0]
        owner = np.searchsorted(world.base, order, side="right") - 1  # (S,)
        _, mine = self._extent(self._slots, alignment)
        by_owner = np.lexsort((begin[self._slots], order[self._slots]))
        begins = np.cumsum(mine) - mine
        index = torch.from_numpy(ragged(begins[by_owner], mine[by_owner]))
        values = values.index_select(0, index.to(values.device))
        sends = np.bincount(owner[self._slots], weights=mine, minlength=world.ranks).astype(np.int64)
        coming = np.flatnonzero(owner == world.rank)
        coming = coming[np.lexsort((begin[coming], order[coming], self._slot_rank[coming]))]
        _, sizes = self._extent(coming, alignment)
        receives = np.bincount(self._slot_rank[coming], weights=sizes, minlength=world.ranks).astype(np.int64)
        return swap(values, sends.tolist(), receives.tolist(), world.group), coming
