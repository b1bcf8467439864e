"""TRL's SFT, DPO and reward trainers: what their batches mean."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from padless.errors import PadlessError
from padless.integrations._auto import trial_batch
from padless.integrations._guard import TESTED
from padless.integrations._hosts import Host, StepRows, Unit
from padless.integrations._merge import merge
from padless.integrations._options import PadlessOptions
from padless.integrations._pairs import SIDES, TwoWidths, apart_rows, apart_trial, host_inputs
from padless.tensors.fields import Field

__all__ = ["DPOHost", "RewardHost", "SFTHost", "TrlHost"]

_PAIR = "padless_pair"
_SIDE = "padless_side"


class TrlHost(Host):
    """What TRL's trainers share: lists of logged means, and a count of tokens."""

    probes_denominator = False  # their losses are known
    counts_targets: tuple[str, ...] = ()
    counters: tuple[str, ...] = ("num_tokens",)
    needs: tuple[str, ...] = ("_metrics", "_total_train_tokens", "aux_loss_enabled")

    def __init__(self, trainer: Any, options: PadlessOptions) -> None:
        super().__init__(trainer, options)
        missing = [name for name in self.needs if not hasattr(trainer, name)]
        if missing:
            raise PadlessError(
                f"{type(trainer).__name__} has no {', '.join(map(repr, missing))}: TRL moved what padless reads"
                f" (tested: {TESTED['trl'][0]} to {TESTED['trl'][1]}). Install a tested trl, or a newer padless"
            )
        self._tokens = 0
        self.refuse_inexact()

    def refuse_inexact(self) -> None:
        """Settings of this trainer whose result depends on how rows are grouped."""

    def inexact(self, what: str, instead: str) -> None:
        """Refuse, or warn where the user asked for that."""
        message = f"{what} depends on which rows share a micro-batch, so regrouping changes it: {instead}"
        if self.options.inexact == "warn":
            warnings.warn(message, stacklevel=4)
        else:
            raise PadlessError(f"{message}, or accept the difference with PadlessOptions(inexact='warn')")

    def metrics(self, mode: str) -> Any:
        return self.trainer._metrics[mode]

    def metric_weight(self, key: str) -> Unit:
        return "targets" if key in self.counts_targets else "rows"

    # The trainer counts the tokens of each micro-batch on this rank; those of stand-in rows do not count, and the sum
    # over the ranks is taken once per step.

    def begin(self, accumulated: int, micro_batches: int) -> None:
        self._tokens = self._counted = self.trainer._total_train_tokens

    def ran(self, weight: float) -> None:
        if not weight:
            self.trainer._total_train_tokens = self._counted
        self._counted = self.trainer._total_train_tokens

    def end(self, mode: str, sum_over_ranks: Callable[[list[float]], list[float]]) -> None:
        trainer = self.trainer
        (added,) = sum_over_ranks([float(self._counted - self._tokens)])
        trainer._total_train_tokens = self._tokens + int(added)
        trainer._metrics[mode]["num_tokens"] = [trainer._total_train_tokens]

    def refuse_router_loss(self) -> None:
        """A router's auxiliary loss is a product of means over the micro-batch."""
        if getattr(self.trainer, "aux_loss_enabled", False):
            self.inexact("the router's auxiliary loss", "set router_aux_loss_coef=0.0")


class SFTHost(TrlHost):
    """``SFTTrainer``: token means over the step."""

    counts_targets = ("entropy", "mean_token_accuracy")

    def refuse_inexact(self) -> None:
        args = self.trainer.args
        for name in ("packing", "padding_free"):
            if getattr(args, name, False):
                raise PadlessError(
                    f"SFTConfig({name}=True) already joins rows; padless regroups single ones: set {name}=False"
                )
        self.refuse_router_loss()

    def unit(self, num_items: Any, training: bool) -> Unit:
        return "sum" if num_items is not None else "targets"

    def evaluates(self, prediction_loss_only: bool) -> bool:
        return True

    def eval_items(self, prepared: Mapping[str, Any]) -> Any:
        return None  # SFTTrainer takes each evaluation batch's own mean

    def labels(self, prepared: Mapping[str, Any]) -> Any:
        return prepared.get("labels")

    @property
    def shifts_labels(self) -> bool:
        return True


class _PairHost(TrlHost):
    """Batches that hold the chosen rows first and the rejected ones behind them."""

    packs = False
    rows_together = 2
    _roles: Mapping[str, Field]
    _widths: tuple[int, int]

    def unit(self, num_items: Any, training: bool) -> Unit:
        return "rows"

    def _trial_batch(self, rows: StepRows, count: int, width: int) -> dict[str, Any]:
        """As many tokens in whole pairs."""
        pairs = -(-count // 2)
        if self.options.pairs == "apart":
            return apart_trial(rows.batch, rows.fields, pairs, max(count * width // (2 * pairs), 1))
        made = trial_batch(rows.batch, rows.fields, 2 * pairs, max(count * width // (2 * pairs), 1))
        device = made["input_ids"].device
        made[_PAIR] = torch.arange(pairs, device=device).repeat(2)
        made[_SIDE] = torch.arange(2, device=device).repeat_interleave(pairs)
        return made

    def divides_by_accumulation(self, num_items: Any) -> bool:
        return True

    def evaluates(self, prediction_loss_only: bool) -> bool:
        return prediction_loss_only

    def eval_items(self, prepared: Mapping[str, Any]) -> Any:
        return None

    def build(self, batches: Sequence[Mapping[str, Any]]) -> StepRows:
        """2 x pairs rows; both of a pair carry its number, which is unique over the ranks."""
        sides: list[list[dict[str, Any]]] = [[], []]
        for batch in batches:
            pairs = batch["input_ids"].shape[0] // 2
            for side in (0, 1):
                here = slice(side * pairs, (side + 1) * pairs)
                sides[side].append(
                    {key: value[here] if len(value) == 2 * pairs else value for key, value in batch.items()}
                )
        fields = {
            **(self.options.fields or {}),
            **{key: Field(span="row") for key in ("ref_chosen_logps", "ref_rejected_logps", "margin", _PAIR, _SIDE)},
        }
        if self.options.pairs == "apart":
            pairs_of, self._roles = apart_rows(sides, fields)
            return StepRows(batch=pairs_of, fields=self._roles)
        joined = merge(sides[0] + sides[1], fields)
        device = joined["input_ids"].device
        pairs = joined["input_ids"].shape[0] // 2
        number = torch.arange(pairs, device=device) + (self.rank << 40)
        joined[_PAIR] = number.repeat(2)
        joined[_SIDE] = torch.arange(2, device=device).repeat_interleave(pairs)
        return StepRows(batch=joined, fields=fields, atoms=joined[_PAIR].cpu().numpy())

    def inputs(self, micro: Any) -> dict[str, Any]:
        """Chosen rows first, rejected ones in the same order of pairs; per-pair columns once."""
        inputs = dict(micro.inputs)
        if self.options.pairs == "apart":
            made, self._widths = host_inputs(inputs, self._roles)
            return made
        pair, side = inputs.pop(_PAIR).cpu().numpy(), inputs.pop(_SIDE).cpu().numpy()
        order = np.lexsort((pair, side))
        if not micro.weight and len(order) % 2:  # a stand-in row: let it be both sides of a pair
            order = np.concatenate([order, order])
        index = torch.from_numpy(order).to(inputs["input_ids"].device)
        picked = {key: value[index] for key, value in inputs.items()}
        pairs = len(order) // 2
        for key in ("ref_chosen_logps", "ref_rejected_logps", "margin"):
            if key in picked:
                picked[key] = picked[key][:pairs]
        return picked

    def rows(self, inputs: Mapping[str, Any]) -> int:
        if "input_ids" not in inputs:
            return int(inputs[f"{SIDES[0]}_input_ids"].shape[0])
        return int(inputs["input_ids"].shape[0]) // 2


class DPOHost(_PairHost):
    """``DPOTrainer``: means over pairs."""

    pads_apart = True

    row_columns = (("prompt_ids", "chosen_ids"), ("prompt_ids", "rejected_ids"))
    counts_targets = ("entropy", "mean_token_accuracy", "logits/chosen", "logits/rejected")
    _EXACT = (
        *("sigmoid", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "sppo_hard", "apo_zero", "apo_down"),
        *("discopop", "sigmoid_norm"),
    )

    def refuse_inexact(self) -> None:
        kinds = self.trainer.args.loss_type
        for kind in [kinds] if isinstance(kinds, str) else kinds:
            if kind not in self._EXACT:
                self.inexact(f"loss_type={kind!r}", f"take one of {', '.join(self._EXACT)}")
        self.refuse_router_loss()

    @contextlib.contextmanager
    def calling(self, model: Any) -> Iterator[Any]:
        """The policy and the reference run once per side where these are padded apart."""
        if self.options.pairs == "together":
            yield model
            return
        trainer, reference = self.trainer, self.trainer.ref_model
        if reference is not None:
            trainer.ref_model = TwoWidths(reference, self._widths)
        try:
            yield TwoWidths(model, self._widths)
        finally:
            trainer.ref_model = reference

    def targets(self, inputs: Mapping[str, Any]) -> int:
        return int(inputs["completion_mask"][:, 1:].sum())


class RewardHost(_PairHost):
    """``RewardTrainer``: means over pairs."""

    needs = ("_metrics", "_total_train_tokens")
    row_columns = (("chosen_ids",), ("rejected_ids",))

    def targets(self, inputs: Mapping[str, Any]) -> int:
        return self.rows(inputs)
