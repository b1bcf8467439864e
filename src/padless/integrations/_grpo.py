"""TRL's GRPO trainer: prompts left padded, completions right padded, rolled into one block."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from padless.errors import PadlessError
from padless.integrations._hosts import StepRows, Unit
from padless.integrations._merge import fill_of, merge
from padless.integrations._options import PadlessOptions
from padless.integrations._trl_hosts import TrlHost
from padless.integrations.transformers import PadlessMixin
from padless.tensors.fields import Field

__all__ = ["GRPOHost", "PadlessGRPOMixin"]

_MASK = "attention_mask"
_SCORED = "padless_scored"
_RATIO = "importance_sampling_ratio"


class GRPOHost(TrlHost):
    """``GRPOTrainer``: prompts left padded, completions right padded.

    Rows are rolled into one block: its first column goes to the host as the prompt, the rest as the completion, with
    the whole row in the attention mask and the completion in the loss mask. Old and reference log-probabilities move
    with their tokens.
    """

    packs = False
    counters = ()
    makes_trials = True
    needs = (
        *("_metrics", "_step", "_current_train_step_time", "_buffered_inputs", "_entropy_bonus_enabled"),
        *("aux_loss_enabled", "importance_sampling_level", "loss_type", "top_entropy_quantile"),
    )
    _TOKENS = ("completion_ids", "old_per_token_logps", "ref_per_token_logps", "sampling_per_token_logps")

    def __init__(self, trainer: Any, options: PadlessOptions) -> None:
        super().__init__(trainer, options)
        self._scale = 1.0
        self._step = 0

    def refuse_inexact(self) -> None:
        trainer = self.trainer
        if trainer.top_entropy_quantile < 1.0:
            self.inexact("top_entropy_quantile, a quantile over the micro-batch,", "set top_entropy_quantile=1.0")
        if trainer._entropy_bonus_enabled:
            self.inexact("the entropy bonus, a mean over the micro-batch's tokens,", "set entropy_coef=0.0")
        self.refuse_router_loss()

    def unit(self, num_items: Any, training: bool) -> Unit:
        kind = self.trainer.loss_type
        if kind in ("cispo", "dapo", "vespo"):
            return "sum"
        return "targets" if kind == "bnpo" else "rows"

    def divides_by_accumulation(self, num_items: Any) -> bool:
        return True

    def metric_weight(self, key: str) -> Unit:
        if "clip" in key or "phi" in key:
            by_token = self.trainer.importance_sampling_level == "token" and "phi" not in key
            return "targets" if by_token else "rows"
        return "targets" if key in ("entropy", "kl") else "rows"

    def evaluates(self, prediction_loss_only: bool) -> bool:
        return True

    def eval_items(self, prepared: Mapping[str, Any]) -> Any:
        return None

    def labels(self, prepared: Mapping[str, Any]) -> Any:
        return None

    # --- rows in, inputs out

    def build(self, batches: Sequence[Mapping[str, Any]]) -> StepRows:
        """All tensors of tokens in the columns of prompt and completion, (N, P + C)."""
        blocks = [self._block(dict(batch)) for batch in batches]
        tokens = [key for key in (*self._TOKENS, "advantages", _RATIO) if _is_tokens(blocks[0].get(key), blocks[0])]
        rows = [key for key in ("advantages", _RATIO) if key in blocks[0] and key not in tokens]
        fields = {
            **(self.options.fields or {}),
            _SCORED: Field(),
            **{key: Field(pad=_fill(key)) for key in tokens},
            **{key: Field(span="row") for key in rows},
        }
        return StepRows(batch=merge(blocks, fields), fields=fields)

    def _block(self, batch: dict[str, Any]) -> dict[str, Any]:
        foreign = [key for key in ("pixel_values", "num_images", "image_grid_thw", "token_type_ids") if key in batch]
        if foreign:
            raise PadlessError(
                f"the GRPO batch holds {', '.join(foreign)}: prompts with images are not regrouped yet; train without"
                " padless, or drop the images"
            )
        prompt_mask, mask = batch.pop("prompt_mask"), batch.pop("completion_mask")  # (N, P), (N, C)
        scored = mask * batch.pop("tool_mask") if "tool_mask" in batch else mask
        out: dict[str, Any] = {
            "input_ids": torch.cat([batch.pop("prompt_ids"), batch.pop("completion_ids")], dim=1),
            _MASK: torch.cat([prompt_mask, mask], dim=1),
            _SCORED: torch.cat([torch.zeros_like(prompt_mask), scored], dim=1),
        }
        lead = prompt_mask.shape[1]
        for key, value in batch.items():
            wide = isinstance(value, Tensor) and value.dim() >= 2 and value.shape == mask.shape
            out[key] = torch.nn.functional.pad(value, (lead, 0), value=_fill(key)) if wide else value
        return out

    def inputs(self, micro: Any) -> dict[str, Any]:
        """The first column is the prompt; the rest goes as completion, of which the tool mask keeps the scored part."""
        held = dict(micro.inputs)
        if held["input_ids"].shape[1] == 1:  # prompts alone: the host wants a column to score
            held = {k: torch.nn.functional.pad(v, (0, 1)) if _is_tokens(v, held) else v for k, v in held.items()}
        ids, mask, scored = held.pop("input_ids"), held.pop(_MASK), held.pop(_SCORED)
        rest = {key: value[:, 1:] if _is_tokens(value, {"input_ids": ids}) else value for key, value in held.items()}
        return {
            **rest,
            "prompt_ids": ids[:, :1],
            "prompt_mask": mask[:, :1],
            "completion_ids": ids[:, 1:],
            "completion_mask": mask[:, 1:],
            "tool_mask": scored[:, 1:],
            "num_items_in_batch": held["num_items_in_batch"] * self._scale,
        }

    def longest(self) -> int | None:
        return None  # prompts are texts, and completions do not exist yet

    def trial(self, rows: StepRows | None, count: int, width: int, packed: dict[str, Any]) -> dict[str, Any]:
        """Completions are scored from the second token on; log-probabilities are those of the first iteration."""
        trainer = self.trainer
        config = trainer.model.config
        vocabulary = int(getattr(config, "get_text_config", lambda: config)().vocab_size)
        shape, device = (count, max(width, 2)), trainer.accelerator.device
        ids = torch.randint(0, vocabulary, shape, device=device)
        ones = torch.ones_like(ids)
        known = torch.zeros((count, shape[1] - 1), device=device)
        made = {
            "prompt_ids": ids[:, :1],
            "prompt_mask": ones[:, :1],
            "completion_ids": ids[:, 1:],
            "completion_mask": ones[:, 1:],
            "tool_mask": ones[:, 1:],
            "old_per_token_logps": known,
            "advantages": torch.ones(count, device=device),
            "num_items_in_batch": torch.tensor(float(known.numel()), device=device),
        }
        return made if trainer.beta == 0 else {**made, "ref_per_token_logps": known}

    def rows(self, inputs: Mapping[str, Any]) -> int:
        return int(inputs["advantages"].shape[0])

    def targets(self, inputs: Mapping[str, Any]) -> int:
        return int(inputs[_SCORED if _SCORED in inputs else "tool_mask"].sum())

    # --- around an optimizer step: the trainer counts its own steps in training_step

    def collected(self, seconds: float) -> None:
        self.trainer._current_train_step_time += seconds

    def skipped(self) -> None:
        self.trainer._step += 1

    def begin(self, accumulated: int, micro_batches: int) -> None:
        # The host multiplies the denominator by the micro-batches of this step over those that it generated for.
        self._scale = accumulated / micro_batches
        self._step, self.trainer._step = self.trainer._step, 0

    def ran(self, weight: float) -> None:
        """Nothing is counted here."""

    def end(self, mode: str, sum_over_ranks: Callable[[list[float]], list[float]]) -> None:
        self._scale = 1.0
        if mode == "train":
            self.trainer._step = self._step + 1


def _fill(key: str) -> float:
    return 1.0 if key == _RATIO else fill_of(key)


def _is_tokens(value: Any, batch: Mapping[str, Any]) -> bool:
    return isinstance(value, Tensor) and value.dim() >= 2 and value.shape[:2] == batch["input_ids"].shape


class PadlessGRPOMixin(PadlessMixin):
    """`PadlessMixin` for ``GRPOTrainer``: old and reference log-probabilities are computed in regrouped rows too."""

    def _get_per_token_logps_and_entropies(
        self,
        model: Any,
        input_ids: Tensor,
        attention_mask: Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Score completions; the prompt's tokens are left out, also where a micro-batch holds rows in one block."""
        score = super()._get_per_token_logps_and_entropies  # type: ignore[misc]
        stepper = self.padless
        if stepper.running:
            held = stepper.micro_inputs
            assert held is not None
            scored = torch.nn.functional.pad(held["tool_mask"], (1, 0))  # (m, W)
            return score(  # type: ignore[no-any-return]
                _only_scored(model, scored), input_ids, attention_mask, logits_to_keep, batch_size, **kwargs
            )
        if batch_size is None or any(kwargs.get(key) is not None for key in ("pixel_values", "num_images")):
            return score(model, input_ids, attention_mask, logits_to_keep, batch_size, **kwargs)  # type: ignore[no-any-return]
        return _score_regrouped(
            stepper,
            score,
            model,
            input_ids,
            attention_mask,
            logits_to_keep,
            {k: v for k, v in kwargs.items() if v is not None},
        )


def _score_regrouped(
    stepper: Any,
    score: Callable[..., Any],
    model: Any,
    input_ids: Tensor,
    attention_mask: Tensor,
    keep: int,
    kwargs: dict[str, Any],
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Log-probabilities (N, keep) of left-padded prompts and right-padded completions (N, P + keep)."""
    scored = attention_mask.clone()
    scored[:, :-keep] = 0
    batch = {"input_ids": input_ids, _MASK: attention_mask, _SCORED: scored}
    budget = stepper.options.eval_token_budget or stepper.budget_for(stepper.trainer.model)
    grouped = stepper.regroup(StepRows(batch=batch, fields={_SCORED: Field()}), budget, moves=False)
    parts: list[list[Tensor]] = [[], []]
    aux: list[Tensor] = []
    for micro in grouped:
        ids, mask = micro.inputs["input_ids"], micro.inputs[_MASK]
        held = micro.inputs[_SCORED]
        if ids.shape[1] == 1:
            ids, mask, held = (torch.nn.functional.pad(value, (0, 1)) for value in (ids, mask, held))
        width = micro.inputs["input_ids"].shape[1]
        *outputs, extra = score(_only_scored(model, held), ids, mask, ids.shape[1] - 1, None, **kwargs)
        for place, output in zip(parts, outputs, strict=True):
            if output is not None:
                place.append(torch.nn.functional.pad(output, (1, 0))[:, :width])  # (m, W)
        if extra is not None:
            aux.append(extra)
    whole = [grouped.restore(place)[:, -keep:] if place else None for place in parts]
    assert whole[0] is not None
    return whole[0], whole[1], torch.stack(aux).mean() if aux else None


def _only_scored(model: Any, scored: Tensor) -> Callable[..., Any]:
    """``model`` with the labels of all other tokens switched off, so that no head runs on them."""

    def call(*, labels: Tensor, **inputs: Any) -> Any:
        return model(labels=labels.masked_fill(scored == 0, -100), **inputs)

    return call
