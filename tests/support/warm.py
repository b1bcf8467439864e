"""Imported by the fork server: pays once for what building a model imports."""

from __future__ import annotations

from support.trainers import tiny_model

for _kind in ("qwen2", "jamba"):
    tiny_model(_kind)
