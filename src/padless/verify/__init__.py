"""Proofs on the user's own objects: which layouts a model may be fed, and whether a sampler resumes."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from padless.verify.feeds import LAYOUTS as LAYOUTS
    from padless.verify.layouts import check_layouts as check_layouts
    from padless.verify.report import LayoutReport as LayoutReport
    from padless.verify.report import LayoutResult as LayoutResult
    from padless.verify.resume import Resumed as Resumed
    from padless.verify.resume import ResumeError as ResumeError
    from padless.verify.resume import assert_rescalable as assert_rescalable
    from padless.verify.resume import assert_resumable as assert_resumable
    from padless.verify.small import build_small as build_small
    from padless.verify.small import causal_lm_types as causal_lm_types
    from padless.verify.small import shrink as shrink
    from padless.verify.step import StepReport as StepReport
    from padless.verify.step import check_run as check_run
    from padless.verify.step import check_step as check_step

_LAZY = {
    "LAYOUTS": "feeds",
    "LayoutReport": "report",
    "LayoutResult": "report",
    "ResumeError": "resume",
    "Resumed": "resume",
    "StepReport": "step",
    "assert_rescalable": "resume",
    "assert_resumable": "resume",
    "build_small": "small",
    "causal_lm_types": "small",
    "check_layouts": "layouts",
    "check_run": "step",
    "check_step": "step",
    "shrink": "small",
}

__all__ = [
    "LAYOUTS",
    "LayoutReport",
    "LayoutResult",
    "ResumeError",
    "Resumed",
    "StepReport",
    "assert_rescalable",
    "assert_resumable",
    "build_small",
    "causal_lm_types",
    "check_layouts",
    "check_run",
    "check_step",
    "shrink",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'padless.verify' has no attribute {name!r}")
    value = getattr(import_module(f"padless.verify.{_LAZY[name]}"), name)
    globals()[name] = value
    return value
