"""padless takes padding out of LLM training before tensors reach the model.

Importing it loads nothing else; NumPy and PyTorch are loaded when what needs them is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from padless.errors import PadlessError

if TYPE_CHECKING:
    from padless.accumulate import accumulate as accumulate
    from padless.cost import CostModel as CostModel
    from padless.plan import Plan as Plan
    from padless.planning.microbatch import microbatch as microbatch
    from padless.planning.pack import pack as pack
    from padless.tensors.compact import compact as compact
    from padless.tensors.flatten import flatten as flatten
    from padless.tensors.flatten import unflatten as unflatten
    from padless.tensors.regroup import regroup as regroup

__version__ = "0.1.0"

__all__ = [
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

_LAZY = {
    "CostModel": "padless.cost",
    "Plan": "padless.plan",
    "accumulate": "padless.accumulate",
    "compact": "padless.tensors.compact",
    "flatten": "padless.tensors.flatten",
    "microbatch": "padless.planning.microbatch",
    "pack": "padless.planning.pack",
    "regroup": "padless.tensors.regroup",
    "unflatten": "padless.tensors.flatten",
}
_MODULES = ("data", "integrations", "logits", "loss", "metrics", "planning", "shapes", "tensors", "verify", "windows")


def __getattr__(name: str) -> Any:
    if name not in _LAZY and name not in _MODULES:
        raise AttributeError(f"module 'padless' has no attribute {name!r}")
    try:
        module = import_module(_LAZY.get(name, f"padless.{name}"))
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise PadlessError(f'padless.{name} needs PyTorch: pip install "padless[torch]"') from error
    value = getattr(module, name) if name in _LAZY else module
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, *_MODULES, "__version__"])
