"""The layouts that a micro-batch can have, by the names that `padless.verify` gives verdicts for."""

from __future__ import annotations

import warnings
from typing import Any, Literal, Protocol, TypeAlias

from padless.errors import PadlessError, choose, shown

__all__ = [
    "LAYOUTS",
    "PACKED_LAYOUTS",
    "LayoutVerdicts",
    "PackedLayout",
    "check_report",
    "choose_layout",
    "packed_layout",
    "warn_unverified",
]

PackedLayout: TypeAlias = Literal[
    "packed-position-ids",
    "packed-cu-seqlens",
    "packed-seq-idx",
    "packed-fla",
    "packed-block-mask-additive",
    "packed-block-mask-bool",
]
PACKED_LAYOUTS = (
    "packed-position-ids",
    "packed-cu-seqlens",
    "packed-seq-idx",
    "packed-fla",
    "packed-block-mask-additive",
    "packed-block-mask-bool",
)
PADDED_LAYOUTS = ("right-padded", "right-padded-no-mask")
LAYOUTS = (*PADDED_LAYOUTS, *PACKED_LAYOUTS)
_SHORT = {"padded": "right-padded", "packed": "packed-position-ids"}


class LayoutVerdicts(Protocol):
    """What `regroup` asks of a layout report; `padless.verify.check_layouts` returns one."""

    @property
    def best(self) -> str | None:
        """The fastest layout that is exact for the model, or None."""

    def allows(self, layout: str) -> bool:
        """True where the layout is exact."""

    def explain(self, layout: str | None = None) -> str:
        """Which layouts are exact, in words; or what is wrong with one of them."""


def packed_layout(name: str) -> str:
    """The full name of a packed layout."""
    choose("layout", name, ("packed", *PACKED_LAYOUTS))
    return _SHORT.get(name, name)


def check_report(report: Any) -> None:
    """Refuse what cannot give verdicts on layouts.

    >>> check_report("yes")
    Traceback (most recent call last):
    ...
    padless.errors.PadlessError: report='yes'; expected what padless.verify.check_layouts(model) returns, or None
    """
    if report is not None and not all(hasattr(report, name) for name in ("best", "allows", "explain")):
        raise PadlessError(
            f"report={shown(report)}; expected what padless.verify.check_layouts(model) returns, or None"
        )


def choose_layout(name: str, report: LayoutVerdicts | None, *, unsafe: bool) -> tuple[str, bool]:
    """The layout to use, and whether it is used against the report's verdict.

    ``"auto"`` takes the report's best, or right padding where the best is a layout that is not made here. A layout
    that the report does not allow raises, unless ``unsafe``.
    """
    check_report(report)
    if name == "auto":
        if report is None:
            raise PadlessError("layout='auto' needs report=check_layouts(model); or name a layout, such as 'padded'")
        best = report.best
        if best in LAYOUTS or report.allows("right-padded"):
            return (best if best in LAYOUTS else "right-padded"), False
        if unsafe:
            return "right-padded", True
        raise PadlessError(
            f"no layout is known to be exact for this model: {report.explain()} Pass unsafe=True to go on right padded"
        )
    choose("layout", name, ("auto", *_SHORT, *LAYOUTS))
    full = _SHORT.get(name, name)
    if report is None or report.allows(full):
        return full, False
    if not unsafe:
        raise PadlessError(
            f"layout={name!r} is not exact for this model: {report.explain(full)} Use layout='auto',"
            " or unsafe=True to go on regardless"
        )
    return full, True


_warned = False


def warn_unverified(layout: str, report: LayoutVerdicts | None, *, unsafe: bool) -> None:
    """Warn, once per process, where rows are to be packed for a model that nobody has asked about."""
    global _warned
    if _warned or report is not None or unsafe or not is_packed(_SHORT.get(layout, layout)):
        return
    _warned = True
    warnings.warn(
        f"layout={layout!r} without report=: whether this model keeps the sequences of a packed row apart is not known"
        " here, and one that does not trains on other results. Pass report=padless.verify.check_layouts(model), or"
        " unsafe=True if you know that it does",
        UserWarning,
        stacklevel=3,
    )


def is_packed(layout: str) -> bool:
    """True where a micro-batch is one row of concatenated sequences."""
    return layout in PACKED_LAYOUTS


def boundary_inputs(layout: str, boundaries: Any) -> dict[str, Any]:
    """What a layout gives the model beside tokens and positions; masks are made by the caller.

    Kernels of one model differ in the names they read. A Mamba-2 layer and a short convolution read ``seq_idx``; a
    gated delta rule reads ``cu_seq_lens_q`` and its convolution ``seq_idx``, so ``packed-seq-idx`` carries both, as
    transformers' own collator does. ``packed-fla`` carries flash-linear-attention's own name, ``cu_seqlens``, which
    Kimi-Linear and Bailing pass on to it; models that fill that name in themselves raise on it.
    """
    if layout == "packed-cu-seqlens":
        return dict(boundaries.flash_kwargs())
    if layout == "packed-seq-idx":
        return {"seq_idx": boundaries.seq_idx, **boundaries.flash_kwargs()}
    if layout == "packed-fla":
        return {"seq_idx": boundaries.seq_idx, "cu_seqlens": boundaries.cu_seqlens.long()}
    return {}
