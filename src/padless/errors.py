"""The one exception type that padless raises for bad input."""

from __future__ import annotations

__all__ = ["PadlessError", "choose", "shown"]

SHOWN = 80
"""Characters of a value that a message holds."""


class PadlessError(ValueError):
    """Bad input, a broken law, or a request that cannot be met.

    A message says what was asked, the offending value with its index or key, the limit, and
    the ways out.

    >>> raise PadlessError("length 513 at index 1 exceeds the token budget 512")
    Traceback (most recent call last):
    ...
    padless.errors.PadlessError: length 513 at index 1 exceeds the token budget 512
    """


def choose(name: str, value: object, known: tuple[str, ...]) -> str:
    """Return ``value`` if it is one of ``known``; otherwise raise and list the known ones.

    >>> choose("method", "greedy", ("fixed", "greedy"))
    'greedy'
    """
    if isinstance(value, str) and value in known:
        return value
    listed = ", ".join(repr(item) for item in known)
    raise PadlessError(f"{name}={shown(value)} is unknown; choose one of {listed}")


def shown(value: object, most: int = SHOWN) -> str:
    """``repr(value)`` on one line, cut in the middle where it is long: for messages.

    >>> shown("a" * 200, 11)
    "'aaa...aaa'"
    """
    text = " ".join(repr(value).split())
    if len(text) <= most:
        return text
    tail = (most - 3) // 2
    return f"{text[: most - 3 - tail]}...{text[-tail:]}"
