"""Data: measured lengths, samplers, streams and collators that lose nothing and resume anywhere."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

# Not lazy: the function shares its name with the module, and must win.
from padless.data.measure import Estimate, Measured, measure

if TYPE_CHECKING:
    from padless.data.collate import PackedCollator as PackedCollator
    from padless.data.collate import PaddedCollator as PaddedCollator
    from padless.data.sampler import TokenBudgetSampler as TokenBudgetSampler
    from padless.data.stream import PooledStream as PooledStream

_LAZY = {
    "PackedCollator": "collate",
    "PaddedCollator": "collate",
    "PooledStream": "stream",
    "TokenBudgetSampler": "sampler",
}

__all__ = ["Estimate", "Measured", "PackedCollator", "PaddedCollator", "PooledStream", "TokenBudgetSampler", "measure"]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'padless.data' has no attribute {name!r}")
    value = getattr(import_module(f"padless.data.{_LAZY[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
