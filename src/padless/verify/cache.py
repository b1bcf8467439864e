"""Reports on disk, keyed by everything that a verdict depends on."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from padless.errors import PadlessError
from padless.files import write_text
from padless.verify.report import LayoutReport
from padless.verify.runs import modes_of
from padless.verify.subject import Subject

__all__ = ["cache_folder", "cache_key", "load_report", "store_report"]

_VERSION = 2
_NAMES_ONLY = ("_name_or_path", "name_or_path", "transformers_version", "torch_dtype", "dtype", "architectures")


def cache_folder(cache: bool | str | Path = True) -> Path:
    """The folder given, else ``$PADLESS_CACHE``, else ``$XDG_CACHE_HOME/padless`` or ``~/.cache/padless``."""
    if not isinstance(cache, bool):
        return Path(cache).expanduser()
    own = os.environ.get("PADLESS_CACHE")
    if own:
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "padless"


def cache_key(model: nn.Module, subject: Subject, options: Mapping[str, Any]) -> str | None:
    """A hash of configuration, module classes with their code, modes, environment and options.

    None where the model's behaviour cannot be told by these: a forward that was replaced on one module, hooks.
    """
    code: dict[str, str] = {}
    shapes: list[Any] = []
    for name, module in model.named_modules():
        if "forward" in vars(module) or module._forward_hooks or module._forward_pre_hooks:
            return None
        kind = type(module)
        where = f"{kind.__module__}.{kind.__qualname__}"
        shapes.append((name, where, {k: tuple(p.shape) for k, p in module._parameters.items() if p is not None}))
        if where not in code:
            code[where] = _code_of(kind)
    config: dict[str, Any] = getattr(subject.config, "to_dict", dict)()
    for name in _NAMES_ONLY:
        config.pop(name, None)
    facts = {
        "version": _VERSION,
        "config": config,
        "code": code,
        "modules": shapes,
        "checkpointing": [mode.name for mode in modes_of(model)],
        "attention code": _attention_code(subject.attention),
        "environment": subject.environment(),
        "options": options,
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=repr).encode()).hexdigest()[:40]


def load_report(cache: bool | str | Path, key: str) -> LayoutReport | None:
    """A stored report, or None; a damaged file counts as none."""
    try:
        data = json.loads((cache_folder(cache) / "verify" / f"{key}.json").read_text(encoding="utf-8"))
        return replace(LayoutReport.from_dict(data), from_cache=True)
    except (OSError, ValueError, PadlessError):
        return None


def store_report(cache: bool | str | Path, key: str, report: LayoutReport) -> None:
    """Write a report in one move; a folder that cannot be written to is no error."""
    folder = cache_folder(cache) / "verify"
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        write_text(folder / f"{key}.json", report.to_json())


def _code_of(kind: type) -> str:
    """A hash of the bytecode and constants of every function of a class, its bases included."""
    digest = hashlib.sha256()
    for base in kind.__mro__[:-1]:
        if base is nn.Module:
            break
        for name, value in sorted(vars(base).items()):
            code = getattr(getattr(value, "__wrapped__", value), "__code__", None)
            if code is not None:
                digest.update(name.encode() + code.co_code + repr(code.co_names).encode() + _constants(code))
    return digest.hexdigest()[:16]


def _constants(code: Any) -> bytes:
    return repr([value for value in code.co_consts if isinstance(value, int | float | str | bool | None)]).encode()


def _attention_code(attention: str | None) -> str:
    """Which function the attention interface calls: users register their own."""
    if attention is None:
        return ""
    try:
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        function = ALL_ATTENTION_FUNCTIONS.get(attention)
    except (ImportError, AttributeError):
        return ""
    code = getattr(function, "__code__", None)
    return "" if code is None else hashlib.sha256(code.co_code + _constants(code)).hexdigest()[:16]
