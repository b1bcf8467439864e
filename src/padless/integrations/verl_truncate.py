"""verl 0.5 to 0.7: rows are rolled to the right and cut, inside the micro-batches that verl makes.

There ``DataParallelPPOActor`` and ``DataParallelPPOCritic`` run every micro-batch at full width: prompts left
padded to their maximum, responses right padded to theirs. Losses are taken inside a micro-batch, so regrouping
would change them; rolling and cutting changes no real token's output.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

from padless.integrations.verl_hooks import Hooks, log

__all__ = ["hook_fixed_padding"]

_CLASSES = {"DataParallelPPOActor": "actor_module", "DataParallelPPOCritic": "critic_module"}
_ROLLED = ("input_ids", "attention_mask", "position_ids")


def hook_fixed_padding(module: ModuleType, hooks: Hooks) -> None:
    """Hook ``_forward_micro_batch`` of the actor or critic class that ``module`` defines."""
    for name, attribute in _CLASSES.items():
        owner = vars(module).get(name)
        if owner is None:
            continue
        stock = vars(owner).get("_forward_micro_batch")
        if stock is None or list(inspect.signature(stock).parameters)[:2] != ["self", "micro_batch"]:
            log.warning("padless: verl's %s._forward_micro_batch has changed and keeps its padding", name)
            continue
        hooks.replace(owner, "_forward_micro_batch", _truncated(stock, attribute))


def _truncated(stock: Callable[..., Any], attribute: str) -> Callable[..., Any]:
    @functools.wraps(stock)
    def forward_micro_batch(self: Any, micro_batch: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(self, "use_remove_padding", False) or getattr(self, "use_prefix_grouper", False):
            return stock(self, micro_batch, *args, **kwargs)
        rows = _Rolled(micro_batch)
        model = getattr(self, attribute)
        setattr(self, attribute, _AtResponses(model, rows))
        try:
            outputs = stock(self, rows.micro_batch, *args, **kwargs)
        finally:
            setattr(self, attribute, model)
        return _widen(outputs, rows)

    return forward_micro_batch


class _Rolled:
    """A micro-batch without common padding, and where its responses are.

    Attributes:
        micro_batch: verl's dict with rolled, cut rows and cut responses.
        index: (B, r + 1) columns of the rolled row whose outputs belong to the response: the position
            before its first token, and every one of its r columns.
        missing: response columns that were cut.
    """

    def __init__(self, micro_batch: Any) -> None:
        import torch

        from padless.tensors import Field, compact

        mask = micro_batch["attention_mask"]  # (B, P + R)
        columns = micro_batch["responses"].size(-1)
        mrope = micro_batch["position_ids"].dim() == 3  # (B, 4, P + R)
        fields = {"position_ids": Field(axis=2 if mrope else 1, pad="count")}
        rolled = compact({key: micro_batch[key] for key in _ROLLED}, fields=fields).batch
        first = mask.long().argmax(dim=1)  # (B,) first real column
        starts = mask.size(1) - columns - first - 1  # (B,) the rolled column before the response
        after = mask[:, -columns:].long().flip(1)  # (B, R)
        held = torch.where(after.any(dim=1), columns - after.argmax(dim=1), 0)  # (B,) response columns in use
        longest = max(int(held.max()), 1)
        width = rolled["input_ids"].size(1)
        index = starts[:, None] + torch.arange(longest + 1, device=mask.device)  # (B, r + 1)
        self.index = index.clamp(0, width - 1)
        self.missing = columns - longest
        self.micro_batch = {**micro_batch, **rolled, "responses": micro_batch["responses"][:, :longest]}

    def take(self, values: Any) -> Any:
        """(B, width, ...) outputs at the response's columns, (B, r + 1, ...), as verl slices them."""
        index = self.index.reshape(*self.index.shape, *[1] * (values.dim() - 2))
        return values.gather(1, index.expand(-1, -1, *values.shape[2:]))


class _AtResponses:
    """Stands for the model during one micro-batch: the same call, outputs at the responses only."""

    def __init__(self, model: Any, rows: _Rolled) -> None:
        self._model = model
        self._rows = rows

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        output = self._model(*args, **kwargs)
        if isinstance(output, tuple):  # a value head of TRL: logits, loss, values
            return tuple(self._rows.take(v) if i == 2 else v for i, v in enumerate(output))
        for name in ("logits", "log_probs", "entropy"):
            if getattr(output, name, None) is not None:
                setattr(output, name, self._rows.take(getattr(output, name)))
        return output


def _widen(outputs: Any, rows: _Rolled) -> Any:
    """Zeros for the response columns that were cut; verl masks them."""
    import torch
    from torch.nn.functional import pad

    def widen(value: Any) -> Any:
        return pad(value, (0, rows.missing)) if isinstance(value, torch.Tensor) and value.dim() == 2 else value

    if isinstance(outputs, dict):
        return {name: widen(value) for name, value in outputs.items()}
    if isinstance(outputs, tuple):
        return tuple(widen(value) for value in outputs)
    return widen(outputs)
