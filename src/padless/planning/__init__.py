"""Planners: lengths in, a `Plan` out. Pure functions; no torch, no files."""

from __future__ import annotations

from padless.planning.balance import partition
from padless.planning.microbatch import microbatch
from padless.planning.pack import pack

__all__ = ["microbatch", "pack", "partition"]
