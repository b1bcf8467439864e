"""Options that every trainer integration takes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from padless.cost import CostModel, check_cost
from padless.errors import PadlessError, choose, shown
from padless.lengths import positive_int
from padless.planning.microbatch import choose_method
from padless.shapes import as_ladder, combine_multiples

if TYPE_CHECKING:
    from padless.tensors.fields import Field

__all__ = ["PadlessOptions", "naming_options", "options_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PadlessOptions:
    """How a trainer's optimizer steps are regrouped.

    Attributes:
        token_budget: ceiling on the padded tokens of one micro-batch on one rank; ``"auto"`` reads it (and the cost
            model) from the profile that ``padless tune`` wrote. Where there is none, it is searched for on the live
            model before its first step, by all ranks together, and the profile is written.
        eval_token_budget: the same for evaluation and prediction, which keep no gradients; ``None`` takes
            ``token_budget``.
        method: the planner, ``"balanced"`` (default), ``"greedy"`` or ``"fixed"``.
        cost: what a micro-batch costs; ``None`` takes the profile's, or the default.
        multiple_of: widths are rounded up to it (several: to their least common multiple).
        ladder: the only widths allowed, for compiled models: widths, or how many of them; ``None`` allows all.
        layout: ``"padded"``; ``"auto"``, the layout that ``report`` calls fastest among the exact ones (under sdpa and
            eager attention that is right padding without a mask, with variable-length kernels packed rows); or
            ``"packed"``, refused where the report does not allow it. It is for training micro-batches whose loss is
            one over tokens; others are padded.
        report: what ``padless.verify.check_layouts`` found for this model.
        pairs: of ``DPOTrainer``: ``"together"`` pads both answers to one width and runs them in one forward pass, as
            the host does; ``"apart"`` pads chosen and rejected rows each to their own longest and runs two.
        exchange: ``"auto"`` moves rows between ranks where the host's loss allows it, ``"always"`` insists,
            ``"never"`` keeps each row on its rank.
        overlong: ``"error"`` (default), or ``"alone"``: a sequence over the budget runs in a micro-batch of its own.
        fields: roles of keys that padless does not know.
        evaluate: regroup evaluation and prediction too.
        log: add padless' figures to the host's log.
        inexact: what to do with a host option whose result depends on how rows are grouped (a loss that compares
            all rows of a micro-batch, say): ``"error"`` (default) or ``"warn"``.
        memory_limit: what the search of ``"auto"`` may use, in bytes or as ``"80GiB"``; ``None`` takes what is free on
            a GPU. On a CPU it must be stated.
        max_length: longest row that the search tries; ``None`` takes the longest of the training data.
        profile: path of the profile; ``None`` looks at ``$PADLESS_PROFILE``, then ``padless-profile.json``.

    >>> PadlessOptions(token_budget=16_384).method
    'balanced'
    """

    token_budget: int | Literal["auto"] = "auto"
    eval_token_budget: int | None = None
    method: Literal["balanced", "greedy", "fixed"] = "balanced"
    cost: CostModel | None = None
    multiple_of: int | tuple[int, ...] = 1
    ladder: tuple[int, ...] | int | None = None
    layout: Literal["padded", "auto", "packed"] = "padded"
    report: Any = None
    pairs: Literal["together", "apart"] = "together"
    exchange: Literal["auto", "always", "never"] = "auto"
    overlong: Literal["error", "alone"] = "error"
    fields: Mapping[str, Field] | None = None
    evaluate: bool = True
    log: bool = True
    inexact: Literal["error", "warn"] = "error"
    memory_limit: int | str | None = None
    max_length: int | None = None
    profile: str | Path | None = None

    def __post_init__(self) -> None:
        if self.token_budget != "auto":
            positive_int(self.token_budget, name="token_budget")
        if self.eval_token_budget is not None:
            positive_int(self.eval_token_budget, name="eval_token_budget")
        if self.max_length is not None:
            positive_int(self.max_length, name="max_length")
        choose_method(self.method)
        choose("layout", self.layout, ("padded", "auto", "packed"))
        choose("pairs", self.pairs, ("together", "apart"))
        choose("exchange", self.exchange, ("auto", "always", "never"))
        choose("overlong", self.overlong, ("error", "alone"))
        choose("inexact", self.inexact, ("error", "warn"))
        check_cost(self.cost)
        if self.report is not None:
            from padless.tensors.layouts import check_report

            check_report(self.report)
        if self.fields is not None:
            from padless.tensors.fields import check_fields

            check_fields(self.fields)
        combine_multiples(self.multiple_of)
        if isinstance(self.ladder, int):
            positive_int(self.ladder, name="ladder")
        elif self.ladder is not None:
            as_ladder(self.ladder)
        if self.layout != "padded" and self.report is None:
            raise PadlessError(
                f"layout={self.layout!r} needs report=: run padless.verify.check_layouts on the model, or use"
                " layout='padded'"
            )


def options_of(padless: Any, token_budget: Any) -> PadlessOptions:
    """One set of options from a host's two arguments, which may not contradict each other.

    >>> options_of(None, 2048).token_budget
    2048
    >>> options_of({"token_budget": 2048}, None)
    Traceback (most recent call last):
    ...
    padless.errors.PadlessError: padless={'token_budget': 2048}; expected a PadlessOptions: \
padless=PadlessOptions(token_budget=2048)
    """
    if padless is None:
        return PadlessOptions() if token_budget is None else PadlessOptions(token_budget=token_budget)
    if not isinstance(padless, PadlessOptions):
        raise PadlessError(
            f"padless={shown(padless)}; expected a PadlessOptions: padless=PadlessOptions({_meant_by(padless)})"
        )
    if token_budget is None or padless.token_budget == token_budget:
        return padless
    if padless.token_budget != "auto":
        raise PadlessError(
            f"token_budget={shown(token_budget)} and padless=PadlessOptions(token_budget={padless.token_budget})"
            " contradict each other: give it in one place"
        )
    return replace(padless, token_budget=token_budget)


def _meant_by(padless: Any) -> str:
    if isinstance(padless, int) and not isinstance(padless, bool):
        return f"token_budget={padless}"
    known = {field.name for field in fields(PadlessOptions)}
    if isinstance(padless, Mapping) and padless and set(padless) <= known:
        return ", ".join(f"{name}={shown(value, 40)}" for name, value in padless.items())
    return "token_budget=16_384"


@contextmanager
def naming_options(arguments: Mapping[str, Any]) -> Iterator[None]:
    """While a host is constructed: an option of padless that it refuses as its own is told where it belongs."""
    known = {field.name for field in fields(PadlessOptions)}
    try:
        yield
    except TypeError as error:
        found = re.search(r"unexpected keyword argument '(\w+)'", str(error))
        name = found[1] if found else ""
        if name not in known or name not in arguments:
            raise
        raise PadlessError(
            f"{name}={shown(arguments[name])} is an option of padless: give it as"
            f" padless=PadlessOptions({name}={shown(arguments[name], 40)})"
        ) from error
