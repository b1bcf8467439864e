"""The public surface is pinned, and importing it is light."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

import padless

PINNED = [
    "CostModel",
    "PadlessError",
    "Plan",
    "accumulate",
    "compact",
    "flatten",
    "microbatch",
    "pack",
    "regroup",
    "unflatten",
]


def run(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_public_names_are_these_and_no_others() -> None:
    assert padless.__all__ == PINNED
    assert len(PINNED) <= 15


@pytest.mark.parametrize("name", PINNED)
def test_every_public_name_loads_and_is_documented(name: str) -> None:
    assert getattr(padless, name).__doc__


@pytest.mark.parametrize(
    "name", ["data", "integrations", "logits", "loss", "metrics", "planning", "shapes", "tensors", "verify", "windows"]
)
def test_every_public_module_loads_as_an_attribute(name: str) -> None:
    assert getattr(padless, name).__name__ == f"padless.{name}"
    assert name in dir(padless)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'unpad'"):
        _ = padless.unpad


def test_importing_padless_loads_numpy_and_nothing_heavy() -> None:
    heavy = run("""
        import sys, padless
        heavy = {"torch", "numba", "scipy", "pandas", "pyarrow", "transformers", "typer", "rich", "plotly", "ray"}
        print(sorted(heavy & set(sys.modules)))
    """)
    assert heavy == "[]"


def test_plans_work_where_torch_is_blocked() -> None:
    out = run("""
        import sys
        sys.modules["torch"] = None  # any import of torch now raises ImportError
        import padless
        plan = padless.microbatch([5, 3, 9, 2], 12)
        packs = padless.pack([5, 3, 9, 2], 10)
        print(plan.check().real_tokens, packs.check().real_tokens)
        for name in ("regroup", "loss", "verify"):
            try:
                getattr(padless, name)
                print("without torch:", name)
            except padless.PadlessError as error:
                print(error)
    """)
    plans, *told = out.splitlines()
    assert plans == "19 19"
    assert told[0] == 'padless.regroup needs PyTorch: pip install "padless[torch]"'
    assert all("needs PyTorch" in line or line == "without torch: verify" for line in told)


def test_the_version_is_the_installed_one() -> None:
    from importlib.metadata import version

    assert version("padless") == padless.__version__
