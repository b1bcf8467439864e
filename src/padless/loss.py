"""Loss aggregation that no regrouping and no rank count changes.

Per-token values sit at the token they are about (the target), so they line up with labels, response masks, advantages
and stored log-probabilities. Every mode is a weighted sum over the step's tokens; the denominators are the step's, over
all micro-batches and ranks, and known before the first backward.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from padless.errors import PadlessError, choose, shown

__all__ = [
    "MODES",
    "Denominators",
    "Mode",
    "RouterLoad",
    "aggregate",
    "denominators",
    "router_load",
    "router_loss",
    "shift_labels",
    "target_mask",
]

Mode = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
MODES = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")


@dataclass(frozen=True, slots=True, kw_only=True)
class Denominators:
    """What an optimizer step's loss is divided by, over all its micro-batches and ranks.

    Attributes:
        targets: tokens with a target (or the sum of their weights).
        sequences: sequences with at least one target.
        ranks: ranks over which gradients are averaged. DDP and FSDP divide summed gradients by it, so each rank's part
            of the loss is multiplied by it: the average over ranks of those parts is the step's loss.

    >>> Denominators(targets=3, sequences=1) + Denominators(targets=5, sequences=2)
    Denominators(targets=8, sequences=3, ranks=1)
    """

    targets: float
    sequences: int
    ranks: int = 1

    def __add__(self, other: Denominators) -> Denominators:
        if self.ranks != other.ranks:
            raise PadlessError(f"denominators over {self.ranks} and {other.ranks} ranks do not add")
        return Denominators(
            targets=self.targets + other.targets, sequences=self.sequences + other.sequences, ranks=self.ranks
        )

    def __sub__(self, other: Denominators) -> Denominators:
        """Without what was skipped, a micro-batch with a non-finite loss, say."""
        return self + Denominators(targets=-other.targets, sequences=-other.sequences, ranks=self.ranks)

    def of(self, mode: Mode) -> float:
        """The number that a sum over the step is divided by in ``mode``."""
        choose("mode", mode, MODES)
        return float(self.targets if mode == "token-mean" else self.sequences)


def target_mask(
    labels: Tensor,
    attention_mask: Tensor | None = None,
    *,
    document_ids: Tensor | None = None,
    ignore_index: int = -100,
) -> Tensor:
    """Which labels (B, W) are targets once a causal model shifts them: a bool mask of the same shape.

    The first token of a sequence has no token before it, so its label is never a target, wherever the row's padding
    lies.

    Args:
        labels: (B, W), ``ignore_index`` where there is no target.
        attention_mask: (B, W), where rows are left padded, or padding has labels; without it rows begin at column 0
            and every label but ``ignore_index`` counts.
        document_ids: (B, W), the sequence of each cell, where rows are packed.

    >>> target_mask(torch.tensor([[5, 6, -100], [-100, 7, 8]]), torch.tensor([[1, 1, 0], [0, 1, 1]])).int().tolist()
    [[0, 1, 0], [0, 0, 1]]
    """
    wanted = labels != ignore_index
    if document_ids is not None:
        same = document_ids[:, 1:] == document_ids[:, :-1]
        wanted = wanted & (document_ids >= 0)
        return torch.cat([torch.zeros_like(wanted[:, :1]), wanted[:, 1:] & same], dim=1)
    if attention_mask is None:
        return torch.cat([torch.zeros_like(wanted[:, :1]), wanted[:, 1:]], dim=1)
    real = attention_mask > 0
    begun = real.cumsum(1) - real.int() > 0  # a real token lies to the left
    goes_on = real.flip(1).cumsum(1).flip(1) > 0  # here or to the right, too: neither padding nor a first token
    return wanted & begun & goes_on


def shift_labels(labels: Tensor, *, document_ids: Tensor | None = None, ignore_index: int = -100) -> Tensor:
    """Labels (B, W) moved one column to the left, never over the edge of a sequence: what each column predicts.

    Args:
        labels: (B, W), not shifted.
        document_ids: (B, W), the sequence of each cell, where rows are packed.
        ignore_index: what columns without a target hold.

    >>> shift_labels(torch.tensor([[11, 12, 13, 21, 22]]), document_ids=torch.tensor([[0, 0, 0, 1, 1]])).tolist()
    [[12, 13, -100, 22, -100]]
    """
    wanted = target_mask(labels, document_ids=document_ids, ignore_index=ignore_index)
    moved = labels.masked_fill(~wanted, ignore_index)[:, 1:]
    return torch.cat([moved, torch.full_like(labels[:, :1], ignore_index)], dim=1)


def denominators(
    masks: Tensor | Iterable[Tensor], *, document_ids: Any = None, process_group: Any = None
) -> Denominators:
    """Count the targets and the sequences that have one, over all masks given and over the group's ranks.

    Args:
        masks: (B, W) masks (or weights) of targets: the whole batch of this rank, or one per micro-batch.
        document_ids: the same for packed rows: the sequence of each cell, -1 for none.
        process_group: the ranks whose gradients are averaged: one small ``all_reduce``, which every rank must enter.

    >>> denominators(torch.tensor([[0, 1, 1], [0, 0, 0]]))
    Denominators(targets=2, sequences=1, ranks=1)
    """
    parts = [masks] if isinstance(masks, Tensor) else list(masks)
    documents = [None] * len(parts) if document_ids is None else _as_list(document_ids)
    if len(documents) != len(parts):
        raise PadlessError(f"{len(documents)} document_ids for {len(parts)} masks; give one for each")
    total = torch.zeros(2, dtype=torch.float64)
    for mask, ids in zip(parts, documents, strict=True):
        sums = _sequence_sums(mask.to(torch.float64), ids)
        total += torch.stack([sums.sum(), (sums > 0).sum()]).to(total)
    ranks = 1
    if process_group is not None:
        from padless.exchange import sum_over_ranks

        total, ranks = sum_over_ranks(total, process_group)
    targets = float(total[0])
    return Denominators(targets=int(targets) if targets.is_integer() else targets, sequences=int(total[1]), ranks=ranks)


def aggregate(
    values: Tensor,
    mask: Tensor,
    mode: Mode = "token-mean",
    *,
    denominators: Denominators | None = None,
    document_ids: Tensor | None = None,
    targets_per_sequence: Tensor | None = None,
    norm: float | None = None,
) -> Tensor:
    """One micro-batch's part of the step's loss: parts add up to the loss of the whole step.

    ``token-mean`` divides the sum by the step's targets. ``seq-mean-token-sum`` sums each sequence and averages over
    sequences with a target; ``seq-mean-token-mean`` averages in each sequence first; ``seq-mean-token-sum-norm``
    divides ``seq-mean-token-sum`` by the constant ``norm``. Names and meaning as in verl.

    Args:
        values: (B, W) per-token losses; cells without a target may hold anything, NaN included.
        mask: (B, W) targets, as bools, zeros and ones, or weights.
        mode: one of `MODES`.
        denominators: the step's, over all micro-batches and ranks; without them this call is the whole step.
        document_ids: (B, W) for packed rows: the sequence of each cell, -1 for none; else every row is a sequence.
        targets_per_sequence: for ``seq-mean-token-mean`` where a sequence is split: the targets of all its pieces,
            (B,), or (documents,) with ``document_ids``.
        norm: for ``seq-mean-token-sum-norm``: a constant, such as the longest response allowed. A micro-batch's width
            would make the loss depend on the split, so there is no default.

    Returns:
        A scalar to call ``backward`` on; 0 where the step has no target. It is multiplied by
        ``denominators.ranks``, because DDP and FSDP average gradients over ranks.

    >>> values, mask = torch.tensor([[4.0, 0.0, 0.0], [1.0, 1.0, 1.0]]), torch.tensor([[1, 0, 0], [1, 1, 1]])
    >>> aggregate(values, mask).item()
    1.75
    >>> step = Denominators(targets=4, sequences=2)
    >>> [aggregate(values[i : i + 1], mask[i : i + 1], denominators=step).item() for i in range(2)]
    [1.0, 0.75]
    """
    choose("mode", mode, MODES)
    if values.shape != mask.shape:
        raise PadlessError(f"values have shape {tuple(values.shape)}, the mask {tuple(mask.shape)}; expected the same")
    if (mode == "seq-mean-token-sum-norm") != (norm is not None):
        raise PadlessError(
            f"mode={shown(mode)} with norm={shown(norm)}; only 'seq-mean-token-sum-norm' takes a norm, and needs it"
        )
    wide = torch.promote_types(values.dtype, torch.float32)
    weight = mask.to(wide)
    weighted = torch.where(mask != 0, values.to(wide), 0.0) * weight  # NaN times 0 would be NaN
    if mode == "token-mean":
        total, count = weighted.sum(), float(weight.sum()) if denominators is None else denominators.of(mode)
    else:
        targets = _sequence_sums(weight, document_ids)  # (sequences,)
        sums = _sequence_sums(weighted, document_ids)
        if mode == "seq-mean-token-mean":
            divisor = targets if targets_per_sequence is None else targets_per_sequence.to(targets)
            sums = torch.where(targets > 0, sums / divisor.clamp(min=torch.finfo(wide).tiny), 0.0)
        total = sums.sum() / norm if norm is not None else sums.sum()
        count = float((targets > 0).sum()) if denominators is None else denominators.of(mode)
    ranks = 1 if denominators is None else denominators.ranks
    return total * (ranks / count if count else 0.0)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RouterLoad:
    """Choices of each expert, ``counts`` (E,) over all layers, by ``tokens`` times layers; loads add with ``+``."""

    counts: Tensor
    tokens: float
    ranks: int = 1

    def __add__(self, other: RouterLoad) -> RouterLoad:
        return RouterLoad(counts=self.counts + other.counts, tokens=self.tokens + other.tokens, ranks=self.ranks)


def router_load(router_logits: Sequence[Tensor], mask: Tensor, *, top_k: int, process_group: Any = None) -> RouterLoad:
    """Count the experts that the real tokens of a micro-batch, or over all ranks, are routed to; no gradient.

    Args:
        router_logits: one (B * W, E) or (B, W, E) tensor per layer, as mixture-of-experts models return them.
        mask: (B, W), true for real tokens.
        top_k: experts per token.
        process_group: also sum over its ranks.
    """
    real = mask.bool().flatten()
    counts = torch.zeros(router_logits[0].shape[-1], dtype=torch.float64)
    for logits in router_logits:
        chosen = logits.detach().reshape(len(real), -1)[real.to(logits.device)].topk(top_k, dim=-1).indices
        counts += torch.bincount(chosen.flatten(), minlength=len(counts)).cpu()
    total = torch.cat([counts, torch.tensor([float(real.sum()) * len(router_logits)], dtype=torch.float64)])
    ranks = 1
    if process_group is not None:
        from padless.exchange import sum_over_ranks

        total, ranks = sum_over_ranks(total, process_group)
    return RouterLoad(counts=total[:-1], tokens=float(total[-1]), ranks=ranks)


def router_loss(
    router_logits: Sequence[Tensor],
    mask: Tensor,
    *,
    top_k: int,
    load: RouterLoad | None = None,
    tokens: float | None = None,
    ranks: int = 1,
) -> Tensor:
    """One micro-batch's part of the load-balancing loss of Switch Transformers, over real tokens only.

    The loss is the product of two means over the batch, the share of tokens that each expert gets and its mean
    probability, so the sum over micro-batches depends on how they were cut. There are two ways:

    * ``load``: the step's shares, from a pass without gradients over all micro-batches (`router_load`, added up). The
      loss is linear in the probabilities, so parts then add up to the loss of the whole step, exactly.
    * ``tokens``: the step's real tokens over all ranks. Parts are the micro-batches' own losses, weighted by their
      tokens: no pass before, but another loss than the whole step's, and another one for each regrouping.

    Args:
        router_logits: as for `router_load`.
        mask: (B, W), true for real tokens.
        top_k: experts per token.
        load: see above.
        tokens: see above.
        ranks: with ``tokens``: ranks over which gradients are averaged.

    Returns:
        A scalar, to be multiplied by the model's coefficient and added to the part of `aggregate`.
    """
    if (load is None) == (tokens is None):
        raise PadlessError("give load= (exact, from a pass before) or tokens= (the micro-batch's own shares), not both")
    real = mask.bool().flatten()
    probabilities = sum(
        logits.reshape(len(real), -1)[real.to(logits.device)].float().softmax(-1).sum(0) for logits in router_logits
    )
    assert isinstance(probabilities, Tensor)
    if load is None:
        own = router_load(router_logits, mask, top_k=top_k)
        whole = float(tokens or 0) * len(router_logits)
        shares = own.counts / max(own.tokens, 1.0)
    else:
        whole, ranks = load.tokens, load.ranks
        shares = load.counts / max(load.tokens, 1.0)
    part = (probabilities * shares.to(probabilities)).sum() * len(shares)
    return part * (ranks / whole if whole else 0.0)


def _sequence_sums(values: Tensor, document_ids: Tensor | None) -> Tensor:
    """Sums over each sequence: (B,) for rows, (documents,) for packed rows."""
    if document_ids is None:
        return values.sum(-1)
    if document_ids.shape != values.shape:
        raise PadlessError(
            f"document_ids have shape {tuple(document_ids.shape)}, the values {tuple(values.shape)}; expected the same"
        )
    # Slot 0 takes what belongs to no sequence. Rows number their documents on their own: they are set apart.
    ids = document_ids.to(torch.int64)
    most = int(ids.max()) + 1 if ids.numel() else 0
    apart = torch.where(ids >= 0, ids + 1 + torch.arange(len(ids), device=ids.device)[:, None] * most, 0)
    sums = values.new_zeros(1 + most * len(ids)).index_add(0, apart.flatten(), values.flatten())
    return sums[1:]


def _as_list(value: Any) -> list[Any]:
    return [value] if isinstance(value, Tensor) else list(value)
