"""Which versions of a host were tested, and whether the methods that padless hooks still are what they were."""

from __future__ import annotations

import inspect
import warnings
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from padless.errors import PadlessError

__all__ = ["TESTED", "check_seams", "check_version", "require"]

TESTED: dict[str, tuple[str, str]] = {
    "transformers": ("5.19", "5.24"),
    "trl": ("1.16", "1.16"),
    "accelerate": ("1.10", "1.99"),
    "lightning": ("2.5", "2.99"),
}
"""First and last release line (major.minor, both included) that the integrations are tested with."""


def require(package: str, extra: str) -> None:
    """Raise a `PadlessError` that names the extra when ``package`` is not installed."""
    from importlib.util import find_spec

    if find_spec(package) is None:
        raise PadlessError(f'this integration needs {package}: pip install "padless[{extra}]"')


def check_version(package: str, installed: str | None = None) -> None:
    """Warn once where the installed release of ``package`` is outside the tested range.

    A release outside the range may well work: `check_seams` says whether the hooks are still there.
    """
    first, last = TESTED[package]
    try:
        found = installed or version(package)
    except PackageNotFoundError:
        raise PadlessError(f"{package} is not installed") from None
    line = tuple(int(part) for part in found.split(".")[:2])
    low, high = (tuple(int(part) for part in end.split(".")) for end in (first, last))
    if not low <= line <= high:
        warnings.warn(
            f"padless was tested with {package} {first} to {last}; {found} is installed. Its hooks are checked, its"
            " results are not: compare a few steps with and without padless first",
            stacklevel=3,
        )


def check_seams(owner: type, seams: dict[str, tuple[str, ...]], package: str) -> None:
    """Raise where a method that padless hooks is gone or lost a parameter that padless passes.

    Args:
        owner: the host's class.
        seams: method name to the parameters that it must take.
        package: the host's package, for the message.
    """
    for name, needed in seams.items():
        method: Any = getattr(owner, name, None)
        if method is None:
            raise PadlessError(_moved(owner, f"has no method {name!r}", package))
        parameters = inspect.signature(inspect.unwrap(method)).parameters
        if any(item.kind is inspect.Parameter.VAR_POSITIONAL for item in parameters.values()):
            continue  # a pass-through: the class that it passes to is checked on its own
        missing = [item for item in needed if item not in parameters]
        if missing:
            raise PadlessError(_moved(owner, f"{name!r} takes no {', '.join(map(repr, missing))}", package))


def _moved(owner: type, what: str, package: str) -> str:
    first, last = TESTED[package]
    try:
        found = version(package)
    except PackageNotFoundError:
        found = "an unknown version"
    return (
        f"{owner.__name__} {what}: {package} {found} moved a method that padless hooks (tested: {first} to {last})."
        f" Install a tested {package}, or a newer padless"
    )
