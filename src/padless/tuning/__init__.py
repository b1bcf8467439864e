"""Find the largest token budget that fits, and what a micro-batch costs; keep both in a file."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from padless.tuning.memory import AllocationMeter as AllocationMeter
    from padless.tuning.memory import OutOfLimit as OutOfLimit
    from padless.tuning.memory import parse_bytes as parse_bytes
    from padless.tuning.profile import DEFAULT_PATH as DEFAULT_PATH
    from padless.tuning.profile import PATH_VARIABLE as PATH_VARIABLE
    from padless.tuning.profile import Profile as Profile
    from padless.tuning.profile import load_profile as load_profile
    from padless.tuning.profile import profile_path as profile_path
    from padless.tuning.search import Trial as Trial
    from padless.tuning.search import memory_limit_of as memory_limit_of
    from padless.tuning.search import tune as tune

_LAZY = {
    "DEFAULT_PATH": "profile",
    "PATH_VARIABLE": "profile",
    "AllocationMeter": "memory",
    "OutOfLimit": "memory",
    "Profile": "profile",
    "Trial": "search",
    "load_profile": "profile",
    "memory_limit_of": "search",
    "parse_bytes": "memory",
    "profile_path": "profile",
    "tune": "search",
}

__all__ = [
    "DEFAULT_PATH",
    "PATH_VARIABLE",
    "AllocationMeter",
    "OutOfLimit",
    "Profile",
    "Trial",
    "load_profile",
    "memory_limit_of",
    "parse_bytes",
    "profile_path",
    "tune",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'padless.tuning' has no attribute {name!r}")
    value = getattr(import_module(f"padless.tuning.{_LAZY[name]}"), name)
    globals()[name] = value
    return value
