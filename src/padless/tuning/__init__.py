"""Find the largest token budget that fits, and what a micro-batch costs; keep both in a file."""

from __future__ import annotations

from padless.tuning.memory import AllocationMeter, OutOfLimit, parse_bytes
from padless.tuning.profile import DEFAULT_PATH, PATH_VARIABLE, Profile, load_profile, profile_path
from padless.tuning.search import Trial, memory_limit_of, tune

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
