"""How far two runs of the same optimizer steps are apart, and which layouts are exact for a model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from padless.bench.arms import ALONE, Grouping, Setting, group
from padless.bench.batch import Batch

__all__ = ["LIMITS", "Evidence", "Limits", "Probe", "alone_log_probs", "distance", "probe_layouts"]

Tensors = Sequence[torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What counts as equal in float32: rounding, and nothing more.

    Attributes:
        logprob: largest absolute difference of a real token's log-probability.
        loss: relative.
        gradient: norm of the difference over the norm.
        update: the same, of all parameter changes since the start, so that a small learning rate hides nothing.
    """

    logprob: float = 1e-4
    loss: float = 1e-5
    gradient: float = 1e-5
    update: float = 1e-3


LIMITS = Limits()


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What an arm computed: on the first step, and after the last one that is compared.

    Attributes:
        reference, train: (N, R) log-probabilities of the two passes of the first step.
        loss: of the first step.
        gradient: of the first step, one tensor per parameter.
        update: what the parameters changed by, one tensor per parameter.
    """

    reference: torch.Tensor
    train: torch.Tensor
    loss: float
    gradient: Tensors
    update: Tensors = ()

    def differences(self, others: Iterable[Evidence], mask: torch.Tensor) -> dict[str, float | None]:
        """The largest difference from any of the others, on tokens that ``mask`` (N, R) marks."""
        found: dict[str, float | None] = dict.fromkeys(
            ("max_logprob_difference", "loss_difference", "gradient_difference", "update_difference")
        )
        real = mask.bool()
        for other in others:
            logprob = max(
                float((a - b)[real].abs().max())
                for a, b in ((self.reference, other.reference), (self.train, other.train))
            )
            measured: dict[str, float | None] = {
                "max_logprob_difference": logprob,
                # Token losses are of the order of 1: a mean below 0.01 is what is left of terms that cancel.
                "loss_difference": abs(self.loss - other.loss) / max(abs(other.loss), 0.01),
                "gradient_difference": distance(self.gradient, other.gradient),
                "update_difference": distance(self.update, other.update) if self.update and other.update else None,
            }
            for name, value in measured.items():
                if value is not None:
                    found[name] = max(found[name] or 0.0, value)
        return found


def distance(ours: Tensors, theirs: Tensors) -> float:
    """Norm of the difference of all tensors together, over the norm of ``theirs``; summed in float64.

    >>> distance([torch.tensor([3.0, 4.0])], [torch.tensor([0.0, 4.0])])
    0.75
    """
    apart, size = 0.0, 0.0
    for a, b in zip(ours, theirs, strict=True):
        there = b.detach().to(a.device)
        apart += float((a.detach().double() - there.double()).square().sum())
        size += float(there.double().square().sum())
    return float((apart / size) ** 0.5) if size else float(apart > 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """What a layout did to a model on this batch, without gradients.

    Attributes:
        max_logprob_difference: from each sequence alone.
        foreign_influence: how much log-probabilities moved when the tokens of every other sequence (and the padding)
            were exchanged; the larger of both halves.
        exact: no difference beyond rounding, and nothing foreign flows in.
    """

    max_logprob_difference: float
    foreign_influence: float
    exact: bool

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return {
            "max_logprob_difference": self.max_logprob_difference,
            "foreign_influence": self.foreign_influence,
            "exact": self.exact,
        }


def alone_log_probs(model: Any, batch: Batch, setting: Setting) -> torch.Tensor:
    """Log-probabilities (N, R) of the responses, each sequence run by itself."""
    return _log_probs(model, group(ALONE, batch, setting))


def probe_layouts(
    model: Any, batch: Batch, setting: Setting, alone: torch.Tensor, *, arms: Sequence[str]
) -> dict[str, Probe]:
    """Which layouts that the arms need are exact: ``right-padded-no-mask``, ``right-padded``, ``packed``.

    ``packed`` is tried with attention by segments and, where that is not exact, as transformers reads position ids.
    ``model`` is in float32: in half precision rounding hides small leaks.
    """
    mask = batch["response_mask"].bool()
    found = {}
    if any(arm not in ("fixed", "packed") for arm in arms):
        for name, bare in (("right-padded-no-mask", True), ("right-padded", False)):
            found[name] = _probe(model, "greedy", batch, replace(setting, no_mask=bare), alone, mask)
    if "packed" in arms:
        found["packed"] = _probe(model, "packed", batch, replace(setting, segments=True), alone, mask)
        if not found["packed"].exact:
            found["packed-position-ids"] = _probe(model, "packed", batch, replace(setting, segments=False), alone, mask)
    return found


def _probe(model: Any, arm: str, batch: Batch, setting: Setting, alone: torch.Tensor, mask: torch.Tensor) -> Probe:
    before = _log_probs(model, group(arm, batch, setting))
    difference = float((before - alone)[mask].abs().max())
    influence = 0.0
    for half in (0, 1):  # each sequence is once among the kept, with some of the others' tokens exchanged around it
        kept = torch.arange(len(mask), device=mask.device) % 2 == half
        after = _log_probs(model, group(arm, _with_other_tokens(batch, kept, model), setting))
        moved = (after - before)[kept[:, None] & mask].abs()
        influence = max(influence, float(moved.max()) if moved.numel() else 0.0)
    # A mixture of experts sums in another order when other tokens come along: rounding, well below the limit.
    exact = influence <= LIMITS.logprob / 10 and difference <= LIMITS.logprob
    return Probe(max_logprob_difference=difference, foreign_influence=influence, exact=exact)


def _log_probs(model: Any, groups: Grouping) -> torch.Tensor:
    with torch.no_grad():
        return groups.restore([groups.micro(i).log_probs(model) for i in range(len(groups))])


def _with_other_tokens(batch: Batch, kept: torch.Tensor, model: Any) -> Batch:
    """Other ids in the rows that are not kept, and on all padding."""
    ids = batch["input_ids"]
    vocabulary = int(model.get_input_embeddings().weight.shape[0])
    other = (ids + 1 + torch.arange(ids.shape[1], device=ids.device) % 7) % vocabulary
    own = kept[:, None] & batch["attention_mask"].bool()
    return {**batch, "input_ids": torch.where(own, ids, other)}
