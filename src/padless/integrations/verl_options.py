"""Options of the verl integration: environment variables, because verl refuses configuration keys it does not know."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from padless.cost import DEFAULT_COST, CostModel
from padless.errors import PadlessError, choose
from padless.lengths import positive_int

__all__ = ["PREFIX", "SWITCH", "VerlOptions", "switched_off", "switched_on"]

SWITCH = "PADLESS_VERL"
PREFIX = "PADLESS_VERL_"
_ON = ("1", "on", "true", "yes")
_OFF = ("0", "off", "false", "no")


@dataclass(frozen=True, slots=True, kw_only=True)
class VerlOptions:
    """How padless plans inside verl. Each is read from the environment variable in brackets.

    Attributes:
        cost: what the plan minimises: the fixed cost of one micro-batch in tokens' worth of time
            (``PADLESS_VERL_OVERHEAD``, default 500; higher: fewer, larger micro-batches), or a whole cost
            model from a JSON file with its coefficients (``PADLESS_VERL_COST``).
        multiple_of: widths are planned as if rounded up to it, on top of what the engine needs
            (``PADLESS_VERL_MULTIPLE_OF``, default 1).
        max_sequences: most rows of one micro-batch (``PADLESS_VERL_MAX_SEQUENCES``, default none).
        overlong: a row over the budget: ``error``, or ``alone`` in a micro-batch of its own, over the
            budget (``PADLESS_VERL_OVERLONG``).
        order: of the micro-batches: ``largest-first``, so that memory fails early; ``small-ends`` for
            pipelines; ``auto`` chooses by the engine (``PADLESS_VERL_ORDER``).
        on_leak: what to do when the model leaks between packed sequences and ``use_remove_padding`` is
            True: ``warn``, ``padded`` (use the padded path), ``error``, or ``ignore`` (no check)
            (``PADLESS_VERL_ON_LEAK``).
        balance: replace verl's assignment of rows to ranks before dispatch (``PADLESS_VERL_BALANCE``).
        metrics: add figures to verl's metrics (``PADLESS_VERL_METRICS``).
        log: print one line per phase and step on rank 0 (``PADLESS_VERL_LOG``).
        truncate: verl 0.5 to 0.7: roll and truncate (``PADLESS_VERL_TRUNCATE``).

    >>> VerlOptions.from_environment({"PADLESS_VERL_OVERHEAD": "900"}).cost.per_microbatch
    900.0
    >>> VerlOptions.from_environment({"PADLESS_VERL_ON_LEAK": "hope"})
    Traceback (most recent call last):
    ...
    padless.errors.PadlessError: PADLESS_VERL_ON_LEAK='hope' is unknown; choose one of 'warn', 'padded', ...
    """

    cost: CostModel = DEFAULT_COST
    multiple_of: int = 1
    max_sequences: int | None = None
    overlong: Literal["error", "alone"] = "error"
    order: Literal["auto", "largest-first", "small-ends"] = "auto"
    on_leak: Literal["warn", "padded", "error", "ignore"] = "warn"
    balance: bool = True
    metrics: bool = True
    log: bool = False
    truncate: bool = True

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> VerlOptions:
        """Read and check every ``PADLESS_VERL_...`` variable.

        Raises:
            PadlessError: an unknown variable of the prefix (the known ones are listed), or a value
                that its option does not take.
        """
        source = os.environ if environment is None else environment
        given = {name[len(PREFIX) :]: value.strip() for name, value in source.items() if name.startswith(PREFIX)}
        unknown = sorted(given.keys() - _READ.keys())
        if unknown:
            known = ", ".join(PREFIX + name for name in _READ)
            raise PadlessError(f"{PREFIX}{unknown[0]} is not an option; known are {known}")
        if "OVERHEAD" in given and "COST" in given:
            raise PadlessError("PADLESS_VERL_OVERHEAD and PADLESS_VERL_COST exclude each other: set one")
        values: dict[str, Any] = {}
        for name, value in given.items():
            field, read = _READ[name]
            values[field] = read(PREFIX + name, value)
        return cls(**values)

    def describe(self) -> str:
        """One line: the options that differ from their defaults, or ``defaults``."""
        changed = []
        for item in fields(self):
            value = getattr(self, item.name)
            if value != item.default:
                shown = f"{value.source} {value.per_microbatch:g}" if isinstance(value, CostModel) else value
                changed.append(f"{item.name}={shown}")
        return ", ".join(changed) or "defaults"


def switched_on(environment: Mapping[str, str] | None = None) -> bool:
    """Whether ``PADLESS_VERL`` asks for padless."""
    return _switch(environment) is True


def switched_off(environment: Mapping[str, str] | None = None) -> bool:
    """Whether ``PADLESS_VERL`` forbids padless."""
    return _switch(environment) is False


def _switch(environment: Mapping[str, str] | None) -> bool | None:
    source = os.environ if environment is None else environment
    return _read_flag(SWITCH, source[SWITCH].strip()) if SWITCH in source else None


def _read_flag(name: str, value: str) -> bool:
    return choose(name, value.lower(), _ON + _OFF) in _ON


def _read_count(name: str, value: str) -> int:
    try:
        number = int(value)
    except ValueError:
        raise PadlessError(f"{name}={value!r}; expected an integer of at least 1") from None
    return positive_int(number, name=name)


def _read_overhead(name: str, value: str) -> CostModel:
    try:
        tokens = float(value)
    except ValueError:
        tokens = -1.0
    if not 0 <= tokens < float("inf"):
        raise PadlessError(f"{name}={value!r}; expected a number of tokens, 0 or more")
    return CostModel(per_microbatch=tokens, source="overhead")


def _read_cost(name: str, value: str) -> CostModel:
    """A JSON file with the coefficients, at the top or under ``"cost"``, as `CostModel.to_dict` gives them."""
    try:
        stored = json.loads(Path(value).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise PadlessError(f"{name}={value!r} cannot be read as a JSON file: {error}") from None
    coefficients = stored.get("cost", stored) if isinstance(stored, dict) else stored
    known = {item.name for item in fields(CostModel)}
    if not isinstance(coefficients, dict) or not coefficients.keys() <= known or "per_token" not in coefficients:
        raise PadlessError(f"{name}={value!r} holds no cost model; expected an object with {', '.join(sorted(known))}")
    return CostModel(**coefficients)


def _read_choice(*known: str) -> Any:
    def read(name: str, value: str) -> str:
        return choose(name, value.lower(), known)

    return read


_READ: dict[str, tuple[str, Any]] = {
    "OVERHEAD": ("cost", _read_overhead),
    "COST": ("cost", _read_cost),
    "MULTIPLE_OF": ("multiple_of", _read_count),
    "MAX_SEQUENCES": ("max_sequences", _read_count),
    "OVERLONG": ("overlong", _read_choice("error", "alone")),
    "ORDER": ("order", _read_choice("auto", "largest-first", "small-ends")),
    "ON_LEAK": ("on_leak", _read_choice("warn", "padded", "error", "ignore")),
    "BALANCE": ("balance", _read_flag),
    "METRICS": ("metrics", _read_flag),
    "LOG": ("log", _read_flag),
    "TRUNCATE": ("truncate", _read_flag),
}
