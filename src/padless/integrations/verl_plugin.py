"""The ``verl.plugins`` entry point: verl loads this module whenever it is imported.

Installing padless must not change anybody's verl runs by itself, so nothing happens unless it is asked for:
``PADLESS_VERL=1``, or padless named in ``VERL_USE_EXTERNAL_PLUGINS``. verl swallows what a plugin
raises; a bad option is therefore raised where it cannot be missed, when verl loads its engines.
"""

from __future__ import annotations

import os

from padless.errors import PadlessError
from padless.integrations.verl_hooks import Hooks
from padless.integrations.verl_options import switched_off, switched_on

__all__ = ["asked_for", "load"]


def asked_for() -> bool:
    """Whether this process' environment asks for padless."""
    named = os.environ.get("VERL_USE_EXTERNAL_PLUGINS", "auto").split(",")
    return switched_on() or ("padless" in (name.strip().lower() for name in named) and not switched_off())


def load() -> None:
    """Install padless in verl where the environment asks for it."""
    try:
        if asked_for():
            import padless.integrations.verl  # noqa: F401 - importing it installs
    except PadlessError as error:
        _raise_later(error)


def _raise_later(error: PadlessError) -> None:
    def refuse(_: object) -> None:
        raise error

    Hooks().when_imported("verl.workers.engine.utils", refuse)


load()
