"""A model is handed back bit for bit as it came: mode, random state, gradients, buffers, caches, parameters."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

__all__ = ["module_state", "preserved", "restore_modules"]

_OF_TORCH = ("_parameters", "_buffers", "_modules", "training")
ModuleState = list[tuple[nn.Module, dict[str, Any]]]


@contextmanager
def preserved(model: nn.Module) -> Iterator[None]:
    """What happens inside to ``model`` and to the random number generators is undone afterwards.

    Parameters are covered as far as they are replaced (``parameter.data = ...``) or their ``grad`` is; whoever writes
    into a parameter's own memory must put it back.
    """
    modes = [(module, module.training) for module in model.modules()]
    parameters = [(p, p.data, p.grad, None if p.grad is None else p.grad.clone()) for p in model.parameters()]
    flags = [(p, p.requires_grad) for p in model.parameters()]
    state = module_state(model)
    generators = _random_state()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
        for parameter, data, grad, copy in parameters:
            if parameter.data is not data:
                parameter.data = data
            parameter.grad = grad
            if grad is not None and copy is not None and not torch.equal(grad, copy):
                grad.copy_(copy)
        for parameter, flag in flags:
            parameter.requires_grad_(flag)
        restore_modules(state)
        _restore_random(generators)


def module_state(model: nn.Module) -> ModuleState:
    """Buffers and plain attributes of every module (caches, positions, counters), copied."""
    state: ModuleState = []
    for module in model.modules():
        own: dict[str, Any] = {key: _copy(value) for key, value in vars(module).items() if key not in _OF_TORCH}
        own["_buffers"] = {key: (tensor, _copy(tensor)[1]) for key, tensor in module._buffers.items()}
        state.append((module, own))
    return state


def restore_modules(state: ModuleState) -> None:
    """Put back what :func:`module_state` saw; tensors keep their identity and get their old contents."""
    for module, own in state:
        buffers = own["_buffers"]
        for key in set(module._buffers) - set(buffers):
            del module._buffers[key]
        for key, pair in buffers.items():
            module._buffers[key] = _back(pair)
        for key in [key for key in vars(module) if key not in own and key not in _OF_TORCH]:
            del vars(module)[key]
        for key, pair in own.items():
            if key != "_buffers":
                vars(module)[key] = _back(pair)


def _copy(value: Any) -> tuple[Any, Any]:
    """(the object itself, a copy of what can change in it)."""
    if isinstance(value, Tensor):
        return value, value.detach().clone()
    if isinstance(value, dict):
        return value, {key: _copy(item) for key, item in value.items()}
    if isinstance(value, list | tuple | deque):
        return value, [_copy(item) for item in value]
    if isinstance(value, set):
        return value, set(value)
    return value, None


def _back(pair: tuple[Any, Any]) -> Any:
    value, copy = pair
    if copy is None:
        return value
    if isinstance(value, Tensor):
        if value.shape != copy.shape or value.dtype != copy.dtype:
            return copy
        if not _identical(value, copy):
            with torch.no_grad():
                value.detach().copy_(copy)
    elif isinstance(value, dict):
        items = {key: _back(item) for key, item in copy.items()}
        if list(value) != list(items) or any(value[key] is not items[key] for key in items):
            value.clear()
            value.update(items)
    elif isinstance(value, list | deque):
        restored = [_back(item) for item in copy]
        if len(value) != len(restored) or any(a is not b for a, b in zip(value, restored, strict=True)):
            value.clear()
            value.extend(restored)
    elif isinstance(value, tuple):
        for item in copy:
            _back(item)
    elif isinstance(value, set) and value != copy:
        value.clear()
        value.update(copy)
    return value


def _identical(one: Tensor, other: Tensor) -> bool:
    """Bit for bit, NaN included."""
    return bool(torch.equal(one, other)) or bool(((one == other) | ((one != one) & (other != other))).all())


def _random_state() -> dict[str, Any]:
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(),  # noqa: NPY002 - the global generator is what must not move
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else None,
    }


def _restore_random(state: dict[str, Any]) -> None:
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])  # noqa: NPY002
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None:
        torch.cuda.set_rng_state_all(state["cuda"])
