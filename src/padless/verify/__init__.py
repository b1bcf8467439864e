"""Proofs on the user's own objects: which layouts a model may be fed, and whether a sampler resumes."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from padless.verify.resume import Resumed as Resumed
    from padless.verify.resume import ResumeError as ResumeError
    from padless.verify.resume import assert_rescalable as assert_rescalable
    from padless.verify.resume import assert_resumable as assert_resumable

__all__ = ["ResumeError", "Resumed", "assert_rescalable", "assert_resumable"]

_LAZY = {
    "ResumeError": "padless.verify.resume",
    "Resumed": "padless.verify.resume",
    "assert_rescalable": "padless.verify.resume",
    "assert_resumable": "padless.verify.resume",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'padless.verify' has no attribute {name!r}")
    value = getattr(import_module(_LAZY[name]), name)
    globals()[name] = value
    return value
