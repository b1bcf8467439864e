"""Bytes of tensors that are alive at once, counted operation by operation; on any device, the meta device included."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Inside, ``now`` and ``peak`` count the storages that operations made and that are still alive."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._sizes: dict[int, int] = {}
        self._references: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = {id(t.untyped_storage()) for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self._add(tensor.untyped_storage(), known)
        return out

    def _add(self, storage: Any, known: set[int]) -> None:
        key = id(storage)
        if key in self._sizes or key in known:  # a view, or memory that was there before
            return
        self._sizes[key] = storage.nbytes()
        self._references[key] = weakref.ref(storage, lambda _: self._drop(key))
        self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)

    def _drop(self, key: int) -> None:
        self.now -= self._sizes.pop(key, 0)
        self._references.pop(key, None)
