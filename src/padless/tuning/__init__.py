"""Find the largest token budget that fits, and what a micro-batch costs; keep both in a file."""

from __future__ import annotations

from padless.tuning.memory import AllocationMeter, OutOfLimit, parse_bytes
from padless.tuning.profile import DEFAULT_PATH, PATH_VARIABLE, Profile, load_profile
from padless.tuning.search import Trial, tune

__all__ = [
    "DEFAULT_PATH",
    "PATH_VARIABLE",
    "AllocationMeter",
    "OutOfLimit",
    "Profile",
    "Trial",
    "load_profile",
    "parse_bytes",
    "tune",
]
