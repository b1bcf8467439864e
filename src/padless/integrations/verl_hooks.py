"""Replace attributes of verl's modules: now where they are imported, later where they are not; and undo it.

Importing ``verl.workers`` costs seconds and fixes verl's device platform, so padless never imports a module
of verl itself: it waits for verl to do so.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

__all__ = ["Hooks", "log"]

log = logging.getLogger("padless.verl")


@dataclass(slots=True)
class Hooks:
    """What was replaced and what waits for an import; `remove` puts every original object back."""

    waiting: dict[str, list[Callable[[ModuleType], None]]] = field(default_factory=dict)
    replaced: list[tuple[Any, str, Any, Any]] = field(default_factory=list)
    finder: _Finder | None = None

    def when_imported(self, name: str, act: Callable[[ModuleType], None]) -> None:
        """Call ``act(module)`` at once if ``name`` is imported, else right after its import."""
        module = sys.modules.get(name)
        if module is not None and not _is_loading(module):
            act(module)
            return
        self.waiting.setdefault(name, []).append(act)
        if self.finder is None:
            self.finder = _Finder(self)
            sys.meta_path.insert(0, self.finder)

    def replace(self, owner: Any, name: str, new: Any) -> None:
        """Set ``owner.name`` to ``new`` and remember the original (the raw one, not a bound method)."""
        self.replaced.append((owner, name, vars(owner)[name], new))
        setattr(owner, name, new)

    def remove(self) -> None:
        """Put the originals back, latest first, and stop waiting."""
        while self.replaced:
            owner, name, original, new = self.replaced.pop()
            if vars(owner).get(name) is new:
                setattr(owner, name, original)
            else:
                log.warning(
                    "padless: %s.%s was replaced again by someone else and is left as it is",
                    getattr(owner, "__name__", owner),
                    name,
                )
        self.waiting.clear()
        if self.finder is not None and self.finder in sys.meta_path:
            sys.meta_path.remove(self.finder)
        self.finder = None

    def _imported(self, name: str, module: ModuleType) -> None:
        for act in self.waiting.pop(name, []):
            act(module)


def _is_loading(module: ModuleType) -> bool:
    return bool(getattr(getattr(module, "__spec__", None), "_initializing", False))


class _Finder(importlib.abc.MetaPathFinder):
    """Finds nothing itself: asks the other finders and adds a step after the module's own code."""

    def __init__(self, hooks: Hooks) -> None:
        self.hooks = hooks

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in self.hooks.waiting:
            return None
        for finder in sys.meta_path:
            if finder is self:
                continue
            spec = finder.find_spec(fullname, path, target)
            if spec is not None:
                if isinstance(spec.loader, importlib.abc.Loader):
                    spec.loader = _Loader(spec.loader, self.hooks)
                return spec
        return None


class _Loader(importlib.abc.Loader):
    """The module's own loader, then the hooks. Once the module runs, its own loader is back in place."""

    def __init__(self, loader: importlib.abc.Loader, hooks: Hooks) -> None:
        self.loader = loader
        self.hooks = hooks

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = self.loader
        module.__loader__ = self.loader
        self.loader.exec_module(module)
        self.hooks._imported(module.__name__, module)
