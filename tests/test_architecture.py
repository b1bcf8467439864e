"""The layers of the package: a file imports nothing from a higher layer."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import padless

ROOT = Path(padless.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))

LAYERS = {
    "errors": 0,
    "files": 0,
    "lengths": 0,
    "shapes": 0,
    "cost": 0,
    "cost_config": 0,
    "cost_fit": 0,
    "plan": 0,
    "plan_check": 0,
    "planning": 1,
    "tensors": 2,
    "loss": 2,
    "logits": 2,
    "exchange": 2,
    "accumulate": 2,
    "windows": 2,
    "data": 3,
    "verify": 3,
    "metrics": 3,
    "bench": 4,
    "analysis": 4,
    "tuning": 4,
    "cli": 5,
    "integrations": 5,
    "__main__": 6,
}
NUMPY_ONLY = {name for name, layer in LAYERS.items() if layer == 0}
NO_TORCH = NUMPY_ONLY | {"planning"}
HEAVY = {
    "torch",
    "transformers",
    "trl",
    "verl",
    "ray",
    "lightning",
    "numba",
    "scipy",
    "pyarrow",
    "plotly",
    "tensordict",
}


def part_of(file: Path) -> str:
    """The first name below the package: ``planning`` for planning/pack.py, ``cost`` for cost.py."""
    return file.relative_to(ROOT).parts[0].removesuffix(".py")


def imports_of(file: Path) -> Iterator[tuple[str, bool, int]]:
    """(imported module, at run time and top level, line) of each import of a file."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    typing_only = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        for inner in ast.walk(node)
    }
    top = {id(node) for node in tree.body}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}:{node.lineno}: relative import"
            module = node.module or ""
            names = [f"padless.{alias.name}" for alias in node.names] if module == "padless" else [module]
        else:
            continue
        for name in names:
            yield name, id(node) in top and id(node) not in typing_only, node.lineno


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_a_file_imports_only_from_lower_layers_or_its_own_folder(file: Path) -> None:
    own = part_of(file)
    if own == "__init__":
        return  # the public names, lazily loaded
    assert own in LAYERS, f"{own} has no layer: add it to LAYERS and to docs/architecture.md"
    for name, _, line in imports_of(file):
        parts = name.split(".")
        if parts[0] != "padless" or len(parts) == 1:
            continue
        other = parts[1]
        if other not in LAYERS:  # a public name such as padless.microbatch, or padless.__version__
            assert LAYERS[own] >= 4, f"{file}:{line}: lower layers import from the defining module, not from padless"
            continue
        assert LAYERS[other] <= LAYERS[own], f"{file}:{line}: layer {LAYERS[own]} imports {name}"


def test_parts_of_one_layer_do_not_import_each_other_in_a_circle() -> None:
    edges: dict[str, set[str]] = {part: set() for part in LAYERS}
    for file in FILES:
        for name, at_start, _ in imports_of(file):
            parts = name.split(".")
            if at_start and parts[0] == "padless" and len(parts) > 1 and parts[1] in LAYERS:
                edges.setdefault(part_of(file), set()).add(parts[1])
    while edges:
        leaves = {part for part, used in edges.items() if not (used - {part}) & edges.keys()}
        assert leaves, f"a circle of imports among {sorted(edges)}"
        edges = {part: used for part, used in edges.items() if part not in leaves}


@pytest.mark.parametrize("file", [f for f in FILES if part_of(f) in NO_TORCH], ids=lambda f: str(f.relative_to(ROOT)))
def test_plans_are_values_and_know_no_torch(file: Path) -> None:
    for name, _, line in imports_of(file):
        assert name.split(".")[0] not in HEAVY - {"numba", "scipy"}, f"{file}:{line}: imports {name}"
        if part_of(file) in NUMPY_ONLY:
            assert name.split(".")[0] not in {"numba"}, f"{file}:{line}: imports {name}"


def test_nobody_imports_the_integrations() -> None:
    for file in FILES:
        if part_of(file) == "integrations":
            continue
        for name, at_start, line in imports_of(file):
            assert not (at_start and name.startswith("padless.integrations")), f"{file}:{line}"


def test_files_stay_readable() -> None:
    long = {str(f.relative_to(ROOT)): n for f in FILES if (n := len(f.read_text().splitlines())) > 450}
    assert not long, f"split these: {long}"
