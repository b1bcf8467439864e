"""Every example in a docstring runs."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
from importlib.util import find_spec

import pytest

import padless

# Modules that cannot be imported without a package that lives in an environment of its own.
OPTIONAL = {"padless.integrations.verl": "verl"}

MODULES = sorted(
    module.name for module in pkgutil.walk_packages(padless.__path__, "padless.") if module.name != "padless.__main__"
)


def needs(name: str) -> str | None:
    return next((package for prefix, package in OPTIONAL.items() if name.startswith(prefix)), None)


@pytest.mark.parametrize(
    "name", [name for name in ["padless", *MODULES] if (package := needs(name)) is None or find_spec(package)]
)
def test_the_examples_in_the_docstrings_run(name: str) -> None:
    module = importlib.import_module(name)
    result = doctest.testmod(module, optionflags=doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS)
    assert result.failed == 0
