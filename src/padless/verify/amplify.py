"""A model made sensitive while it is probed: float32, nothing zero, strong mixing, windows shorter than a sequence.

At default initialisation a leak may hide below the rounding noise of half precision, and an all-zero parameter (LoRA B,
biases, gated branches) hides whatever lies behind it. None of this changes which tokens may influence which, so a
layout that is exact stays exact.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["HALF", "amplified", "extra_bytes", "small_windows"]

HALF = (torch.float16, torch.bfloat16)
_WINDOWS = ("sliding_window", "attention_chunk_size", "attention_window_size", "window_size", "sliding_window_size")
_SMALL = 4


def extra_bytes(model: nn.Module) -> int:
    """Memory that :func:`amplified` takes for a float32 copy of the parameters."""
    return 4 * sum(parameter.numel() for parameter in model.parameters() if parameter.is_floating_point())


@contextmanager
def amplified(model: nn.Module, *, seed: int = 0) -> Iterator[None]:
    """Replace the parameters' data by amplified float32 data, and half precision buffers by float32 ones.

    The parameters stay the same objects, so hooks, patches and tied weights work as they do in training. The old data
    are put back at the end, untouched. Use it inside :func:`padless.verify.snapshot.preserved`.
    """
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    generator = torch.Generator().manual_seed(seed)
    old = [(parameter, parameter.data) for parameter in model.parameters() if parameter.is_floating_point()]
    buffers = [
        (module, name, tensor)
        for module in model.modules()
        for name, tensor in module._buffers.items()
        if tensor is not None and tensor.dtype in HALF
    ]
    try:
        for parameter, data in old:
            parameter.data = _amplify(data, embedding=id(parameter) in embeddings, generator=generator)
        for module, name, tensor in buffers:
            module._buffers[name] = tensor.float()
        yield
    finally:
        for parameter, data in old:
            parameter.data = data
        for module, name, tensor in buffers:
            module._buffers[name] = tensor


def _amplify(data: Tensor, *, embedding: bool, generator: torch.Generator) -> Tensor:
    """Unit gain: a matrix whose outputs are smaller than its inputs is scaled up, an all-zero tensor is filled."""
    data = data.to(torch.float32, copy=True) if data.dtype in HALF else data.clone()
    if not data.numel():
        return data
    fan_in = data.shape[-1] if data.dim() == 2 else data[0].numel() if data.dim() > 2 else 100
    if not bool(data.any()):
        noise: Tensor = torch.randn(data.shape, generator=generator) / fan_in**0.5
        return noise.to(data)
    if data.dim() < 2 or embedding:
        return data
    gain = float(data.float().std(unbiased=False)) * fan_in**0.5
    if gain > 0:
        data *= min(max(1.0, 1.0 / gain), 64.0)
    return data


@contextmanager
def small_windows(model: nn.Module, *, longest: int) -> Iterator[list[str]]:
    """Set attention windows and chunks that no probed sequence reaches to 4 tokens; yields what was set."""
    changed: list[tuple[Any, str, int]] = []
    names: list[str] = []
    targets: list[tuple[str, Any]] = list(model.named_modules())
    targets += [(f"{name}.config" if name else "config", getattr(m, "config", None)) for name, m in targets[:]]
    seen: set[int] = set()
    try:
        for where, target in targets:
            if target is None or id(target) in seen:
                continue
            seen.add(id(target))
            for name in _WINDOWS:
                value = vars(target).get(name)
                if isinstance(value, int) and not isinstance(value, bool) and value >= longest - 1:
                    setattr(target, name, _SMALL)
                    changed.append((target, name, value))
                    names.append(f"{where}.{name}".lstrip("."))
        yield names
    finally:
        for target, name, value in changed:
            setattr(target, name, value)
