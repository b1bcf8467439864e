"""Log-probabilities, cross entropy and entropy without logits for padding, or for tokens that are no target."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from padless.errors import PadlessError, shown
from padless.loss import target_mask

__all__ = ["LogProbs", "cross_entropy", "log_probs", "select_before_head", "token_losses"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LogProbs:
    """Per-token values (B, W), at least float32, at the token that they are about; 0 where there is no target.

    ``entropy`` is that of the distribution the token was drawn from; None unless asked for.
    """

    values: Tensor
    entropy: Tensor | None


def token_losses(logits: Tensor, labels: Tensor, mask: Tensor | None = None, *, ignore_index: int = -100) -> Tensor:
    """Cross entropy (B, W) of each label given the logits (B, W, V) one column before it; 0 where there is no target.

    Args:
        logits: of all columns, as a causal model returns them.
        labels: (B, W), not shifted.
        mask: (B, W) targets, as `padless.loss.target_mask` gives them for rows that are packed or left padded.
        ignore_index: the label of columns without a target.

    Raises:
        PadlessError: shapes that do not belong together, or a model's output in place of its logits.

    >>> token_losses(torch.zeros(1, 3, 4), torch.tensor([[1, 2, -100]])).exp().tolist()
    [[1.0, 4.0, 1.0]]
    """
    _check_shapes(logits, labels, mask)
    wanted = target_mask(labels, ignore_index=ignore_index) if mask is None else mask.bool()
    held = wanted[:, 1:].to(logits.device)
    losses = F.cross_entropy(_wide(logits[:, :-1][held]), labels.to(logits.device)[:, 1:][held], reduction="none")
    return _spread(losses, held, labels.shape)


def _check_shapes(logits: Any, labels: Any, mask: Any) -> None:
    if not isinstance(logits, Tensor):
        held = isinstance(logits, Mapping) and "logits" in logits
        way = "give its logits: model(...).logits" if held or hasattr(logits, "logits") else "expected a tensor"
        raise PadlessError(f"logits is a {type(logits).__name__}: {way}, of shape (B, W, V)")
    for name, value in (("labels", labels), ("mask", mask)):
        if value is None and name == "mask":
            continue
        if not isinstance(value, Tensor):
            raise PadlessError(f"{name} is {shown(value)}; expected a tensor (B, W)")
    if labels.ndim != 2 or logits.ndim != 3 or logits.shape[:2] != labels.shape:
        raise PadlessError(
            f"logits of shape {tuple(logits.shape)} do not belong to labels of shape {tuple(labels.shape)}: expected"
            " (B, W, V) and (B, W), with logits of all columns: nothing is shifted or cut before (no logits[:, :-1], no"
            " logits_to_keep)"
        )
    if mask is not None and mask.shape != labels.shape:
        raise PadlessError(f"the mask has shape {tuple(mask.shape)}, the labels {tuple(labels.shape)}; expected one")


def log_probs(
    model: nn.Module,
    inputs: Mapping[str, Any],
    mask: Tensor,
    *,
    ids: Tensor | None = None,
    temperature: float = 1.0,
    entropy: bool = False,
    head: nn.Module | None = None,
) -> LogProbs:
    """Log-probabilities of the tokens that ``mask`` marks, with logits for these alone.

    The hidden states that predict them are picked just before the output layer, so what a model does to its logits
    afterwards (scaling, capping) still happens. Padding never reaches the output layer.

    Args:
        model: a causal language model, plain or wrapped (DDP, FSDP, PEFT).
        inputs: its inputs, (B, W) padded or packed; ``labels`` among them are not passed on.
        mask: (B, W) tokens wanted: a response mask, or `padless.loss.target_mask`. None may be in column 0 or the first
            of its sequence, since nothing predicts it.
        ids: (B, W) tokens to score; by default ``inputs["input_ids"]``.
        temperature: logits are divided by it.
        entropy: also compute the entropy of each distribution.
        head: the output layer; by default ``model.get_output_embeddings()``.
    """
    wanted = mask.bool()
    tokens = inputs["input_ids"] if ids is None else ids
    if wanted.shape != tokens.shape:
        raise PadlessError(f"the mask has shape {tuple(wanted.shape)}, the tokens {tuple(tokens.shape)}; expected one")
    if bool(wanted[:, 0].any()):
        row = int(wanted[:, 0].int().argmax())
        raise PadlessError(f"row {row}: its first token is marked, and no token before it predicts it: unmark it")
    held = wanted[:, 1:]
    # At least one position, so that every rank's graph reaches every parameter.
    empty = not bool(held.any())
    place = _places(held, wanted.shape[1]) if not empty else torch.zeros(1, dtype=torch.int64, device=held.device)
    call = {key: value for key, value in inputs.items() if key != "labels"}
    with select_before_head(model, place, tuple(wanted.shape), head=head):
        output = model(**call)
    logits = _wide((output["logits"] if isinstance(output, Mapping) else output[0])[0])  # (n, V)
    if temperature != 1.0:
        logits = logits / temperature
    picked = tokens[:, 1:][held] if not empty else tokens[0, :1]
    scores = -F.cross_entropy(logits, picked.to(logits.device), reduction="none")  # (n,)
    spread = None
    if entropy:
        normal = logits - logits.logsumexp(-1, keepdim=True)
        each = -(normal.exp() * normal).sum(-1)
        spread = _spread(each * 0.0 if empty else each, held, tuple(wanted.shape), empty=empty)
    return LogProbs(
        values=_spread(scores * 0.0 if empty else scores, held, tuple(wanted.shape), empty=empty), entropy=spread
    )


def cross_entropy(
    model: nn.Module,
    inputs: Mapping[str, Any],
    labels: Tensor,
    mask: Tensor | None = None,
    *,
    ignore_index: int = -100,
    head: nn.Module | None = None,
) -> Tensor:
    """Cross entropy (B, W) of each label with a target, with logits for these alone; 0 elsewhere.

    ``mask`` marks the targets; by default every label but ``ignore_index`` and column 0. Rows that are packed carry
    that in their labels; for left padded rows use `padless.loss.target_mask`.
    """
    wanted = target_mask(labels, ignore_index=ignore_index) if mask is None else mask
    return -log_probs(model, inputs, wanted, ids=labels.clamp(min=0), head=head).values


@contextmanager
def select_before_head(
    model: nn.Module, place: Tensor, shape: tuple[int, ...], *, head: nn.Module | None = None
) -> Iterator[None]:
    """Inside, the output layer of ``model`` sees only the positions ``place`` (n,) of the flattened (B, W) ``shape``.

    Its logits then have shape (1, n, V).
    """
    layer = head if head is not None else _output_layer(model)
    seen = 0

    def pick(module: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        nonlocal seen
        hidden = arguments[0]
        if tuple(hidden.shape[:2]) != tuple(shape[:2]):
            raise PadlessError(
                f"the output layer gets hidden states of shape {tuple(hidden.shape)}; expected {tuple(shape[:2])} and a"
                " feature axis: name another layer with head="
            )
        seen += 1
        return (hidden.flatten(0, 1).index_select(0, place.to(hidden.device))[None], *arguments[1:])

    handle = layer.register_forward_pre_hook(pick)
    try:
        yield
    finally:
        handle.remove()
    if seen != 1:
        raise PadlessError(f"the output layer ran {seen} times in one forward pass, not once: name another with head=")


def _output_layer(model: nn.Module) -> nn.Module:
    inner: Any = model
    while not hasattr(inner, "get_output_embeddings"):
        if not isinstance(getattr(inner, "module", None), nn.Module):
            raise PadlessError(f"{type(model).__name__} does not name its output layer: give it as head=")
        inner = inner.module
    layer = inner.get_output_embeddings()
    if not isinstance(layer, nn.Module):
        raise PadlessError(f"{type(inner).__name__}.get_output_embeddings() is {layer!r}: give the layer as head=")
    return layer


def _wide(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def _places(held: Tensor, width: int) -> Tensor:
    """Flat positions (n,) that predict the tokens marked in ``held`` (B, W - 1), one column after them."""
    row, column = held.nonzero(as_tuple=True)
    return row * width + column


def _spread(values: Tensor, held: Tensor, shape: tuple[int, ...] | torch.Size, *, empty: bool = False) -> Tensor:
    """``values`` (n,) at the columns that ``held`` (B, W - 1) marks, one column later, in zeros of ``shape``."""
    blank = values.new_zeros(shape[0] * shape[1])
    place = values.new_zeros(1, dtype=torch.int64) if empty else _places(held, shape[1]).to(values.device) + 1
    return blank.index_add(0, place, values).view(shape[0], shape[1])
