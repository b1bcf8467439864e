"""Runs of the model under test: which keywords it takes, in which mode, what comes out, gradients of its embeddings."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from padless.errors import PadlessError
from padless.verify.feeds import Feed

__all__ = ["MODES", "Mode", "NoDropout", "Run", "Runner", "first_output", "modes_of", "without_dropout"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mode:
    """One way in which training calls the model."""

    name: str
    training: bool
    grad: bool
    checkpointing: bool | None = None
    """None leaves gradient checkpointing as it is set."""


MODES = (
    Mode(name="train", training=True, grad=True),
    Mode(name="train-no-grad", training=True, grad=False),
    Mode(name="eval-no-grad", training=False, grad=False),
)
"""The pass with gradients, and the log-prob pass without them as trainers run it: in train mode, and in eval mode."""


def modes_of(model: nn.Module) -> tuple[Mode, ...]:
    """:data:`MODES`, and where gradient checkpointing is on also the training pass without it."""
    if any(getattr(module, "gradient_checkpointing", False) is True for module in model.modules()):
        return (*MODES, Mode(name="train-no-checkpointing", training=True, grad=True, checkpointing=False))
    return MODES


@dataclass(slots=True, kw_only=True)
class Run:
    """One forward pass: output (B, T, ...) and, where gradients are on, the embeddings (B, T, H) it was made from."""

    output: Tensor
    leaves: list[Tensor]

    def support(self, cotangent: Tensor) -> Tensor:
        """Largest absolute gradient of ``(output * cotangent).sum()`` at every embedded token (B, T)."""
        grads = _gradients(self.output, cotangent, self.leaves)
        found = torch.zeros(self.leaves[0].shape[:2], dtype=torch.float32, device=self.output.device)
        for leaf, grad in zip(self.leaves, grads, strict=True):
            if grad is not None:
                found = torch.maximum(found, grad.detach().float().abs().reshape(*leaf.shape[:2], -1).amax(-1))
        return found


class Runner:
    """Calls one model the way training does. Use it inside :func:`padless.verify.snapshot.preserved`."""

    def __init__(
        self,
        model: nn.Module,
        *,
        forward: Callable[..., Any] | None = None,
        keywords: Mapping[str, Any] | None = None,
    ) -> None:
        self.model = model
        self.call = forward or model
        own = _accepted(model)
        usual = {"use_cache": False} if own is None or "use_cache" in own else {}
        self.extra = usual if keywords is None else dict(keywords)
        self.accepted = own if forward is None else _accepted(forward)
        self.seed = 0
        self.position_start = 0
        self._dropping: dict[str, bool] = {}

    def takes(self, keyword: str) -> bool:
        """Whether the model's forward takes this keyword (``**kwargs`` takes all)."""
        return self.accepted is None or keyword in self.accepted

    def run(self, feed: Feed, mode: Mode) -> Run:
        """One forward pass of ``feed``; the random generators start from the same seed in each."""
        leaves: list[Tensor] = []
        torch.manual_seed(self.seed)
        with ExitStack() as stack:
            stack.enter_context(torch.set_grad_enabled(mode.grad))
            watch = None
            if mode.training and self._dropping.get(mode.name, True):
                watch = stack.enter_context(NoDropout())
            if mode.grad:
                stack.enter_context(_embeddings_as_leaves(self.model, feed.input_ids, leaves))
            output = self.outputs(feed.keywords)
        if watch is not None:
            self._dropping[mode.name] = watch.used  # following every torch call is slow, so only where it is needed
        if output.dim() < 2 or output.shape[:2] != feed.input_ids.shape:
            raise PadlessError(
                f"the model returns {tuple(output.shape)} for input_ids {tuple(feed.input_ids.shape)}:"
                " one output per token is needed, (B, T, ...); pass forward= to choose it"
            )
        return Run(output=output, leaves=leaves)

    def outputs(self, keywords: Mapping[str, Any]) -> Tensor:
        """Call the model with what it takes of ``keywords`` and of those that are always sent."""
        given = {key: value for key, value in {**self.extra, **keywords}.items() if self.takes(key)}
        return first_output(self.call(**given))

    @contextmanager
    def mode(self, mode: Mode) -> Iterator[None]:
        """The model in the given mode, its dropout rates at zero."""
        was = [(module, module.training) for module in self.model.modules()]
        checkpointed = [m for m in self.model.modules() if getattr(m, "gradient_checkpointing", False) is True]
        with without_dropout(self.model):
            try:
                self.model.train(mode.training)
                if mode.checkpointing is False:
                    for one in checkpointed:
                        setattr(one, "gradient_checkpointing", False)  # noqa: B010 - not a field of nn.Module
                yield
            finally:
                for one, training in was:
                    one.training = training
                for one in checkpointed:
                    setattr(one, "gradient_checkpointing", True)  # noqa: B010


@contextmanager
def without_dropout(model: nn.Module) -> Iterator[None]:
    """Rates that modules keep (``p`` of dropout modules, ``attention_dropout`` and the like) are zero inside.

    What reads them again in the backward pass, as checkpointing does, then finds no dropout either.
    """
    rates = [
        (module, name, value)
        for module in model.modules()
        for name, value in vars(module).items()
        if isinstance(value, float) and value > 0
        if "drop" in name or (name == "p" and isinstance(module, nn.modules.dropout._DropoutNd))
    ]
    try:
        for module, name, _ in rates:
            setattr(module, name, 0.0)
        yield
    finally:
        for module, name, value in rates:
            setattr(module, name, value)


def first_output(result: Any) -> Tensor:
    """The logits, the hidden states, or the first tensor of whatever a model returns."""
    for name in ("logits", "last_hidden_state"):
        value = getattr(result, name, None)
        if isinstance(value, Tensor):
            return value
    if isinstance(result, Tensor):
        return result
    values = result.values() if isinstance(result, Mapping) else result if isinstance(result, list | tuple) else ()
    for value in values:
        if isinstance(value, Tensor) and value.dim() >= 2:
            return value
    raise PadlessError(f"no output tensor found in {type(result).__name__}: pass forward= to return the logits")


def _accepted(target: Any) -> frozenset[str] | None:
    """Keywords that a model or function takes; None for all."""
    while isinstance(target, nn.Module):
        inner = getattr(target, "get_base_model", None)  # adapters forward everything to the model they wrap
        if inner is None:
            target = target.forward
            break
        target = inner()
    parameters = inspect.signature(target).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return None
    return frozenset(parameter.name for parameter in parameters)


@contextmanager
def _embeddings_as_leaves(model: nn.Module, input_ids: Tensor, leaves: list[Tensor]) -> Iterator[None]:
    """Every embedding that is looked up with exactly ``input_ids`` gives a leaf of the graph, kept in ``leaves``."""

    def hook(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> Any:
        given = next((value for value in inputs if isinstance(value, Tensor)), None)
        if not isinstance(output, Tensor) or given is None or given.shape != input_ids.shape:
            return None
        if output.shape[:-1] != input_ids.shape or not torch.equal(given, input_ids):
            return None
        leaf = output.detach().requires_grad_()
        leaves.append(leaf)
        return leaf.clone()  # some models scale their embeddings in place, which a leaf forbids

    handles = [module.register_forward_hook(hook) for module in _embedding_modules(model)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _embedding_modules(model: nn.Module) -> list[nn.Module]:
    found: list[nn.Module] = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    getter: Any = getattr(model, "get_input_embeddings", None)
    try:
        own = getter() if getter is not None else None
    except NotImplementedError:
        own = None
    if isinstance(own, nn.Module) and own not in found:
        found.append(own)
    return found


def _gradients(output: Tensor, cotangent: Tensor, leaves: list[Tensor]) -> tuple[Tensor | None, ...]:
    try:
        return torch.autograd.grad(output, leaves, cotangent, retain_graph=True, allow_unused=True)
    except RuntimeError as error:
        if "checkpoint" not in str(error).lower():
            raise
    # Reentrant checkpointing works with backward() only; what it adds to the parameters is undone by `preserved`.
    for leaf in leaves:
        leaf.grad = None
    torch.autograd.backward(output, cotangent, retain_graph=True)
    return tuple(leaf.grad for leaf in leaves)


class NoDropout(TorchFunctionMode):
    """Functional dropout becomes the identity: its masks follow the batch's shape, so no two layouts could agree."""

    used = False

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is nn.functional.dropout:
            self.used |= bool(kwargs.get("p", args[1] if len(args) > 1 else 0.5))
            return args[0] if args else kwargs["input"]
        if func is nn.functional.scaled_dot_product_attention and (len(args) > 4 or kwargs.get("dropout_p")):
            self.used = True
            args, kwargs = (*args[:4], *((0.0,) if len(args) > 4 else ()), *args[5:]), {**kwargs}
            kwargs.pop("dropout_p", None)
        return func(*args, **kwargs)
