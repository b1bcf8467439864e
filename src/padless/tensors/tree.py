"""Batches as flat dictionaries of dotted keys, and back: dicts, nested dicts, mappings, TensorDict."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from padless.errors import PadlessError

__all__ = ["Rebuild", "flatten_tree", "read_tree"]

Rebuild: TypeAlias = Callable[[dict[str, Any], int | None], Any]
"""Makes a batch like the caller's from dotted keys and its number of rows (None where fields differ in it)."""


def read_tree(batch: Any) -> tuple[dict[str, Any], Rebuild]:
    """Flatten ``batch`` to ``{"outer.inner": value}`` and return how to build one like it."""
    if _is_tensordict(batch):
        return _tensordict_leaves(batch), _rebuild_tensordict
    if not isinstance(batch, Mapping):
        raise PadlessError(
            f"batch is a {type(batch).__name__}; expected a dict of tensors, nested or not, or a TensorDict"
        )
    return flatten_tree(batch), _rebuild_dict


def flatten_tree(batch: Mapping[Any, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as one dict with dotted keys.

    >>> flatten_tree({"a": {"b": 1}, "c": 2})
    {'a.b': 1, 'c': 2}
    """
    leaves: dict[str, Any] = {}
    for key, value in batch.items():
        if not isinstance(key, str) or "." in key:
            raise PadlessError(f"key {key!r} of the batch is not a string without a dot; rename it")
        if _is_tensordict(value):
            leaves |= {f"{prefix}{key}.{inner}": leaf for inner, leaf in _tensordict_leaves(value).items()}
        elif isinstance(value, Mapping):
            leaves |= flatten_tree(value, f"{prefix}{key}.")
        else:
            leaves[prefix + key] = value
    return leaves


def _rebuild_dict(leaves: dict[str, Any], rows: int | None) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in leaves.items():
        *parents, leaf = key.split(".")
        place = result
        for parent in parents:
            place = place.setdefault(parent, {})
        place[leaf] = value
    return result


def _is_tensordict(value: Any) -> bool:
    """True for TensorDict and its tensorclasses, without importing tensordict."""
    return any(kind.__module__.startswith("tensordict") and kind.__name__ == "TensorDictBase" for kind in _mro(value))


def _mro(value: Any) -> tuple[type, ...]:
    return type(value).__mro__


def _tensordict_leaves(batch: Any) -> dict[str, Any]:
    from tensordict import NonTensorData, NonTensorStack

    leaves: dict[str, Any] = {}
    for key in batch.keys():  # noqa: SIM118 - a TensorDict iterates over rows
        value = batch.get(key)
        if isinstance(value, NonTensorStack):
            leaves[key] = value.tolist()
        elif isinstance(value, NonTensorData):  # one object for the whole batch
            leaves[key] = Shared(value.data)
        elif _is_tensordict(value):
            leaves |= {f"{key}.{inner}": leaf for inner, leaf in _tensordict_leaves(value).items()}
        else:
            leaves[key] = value
    return leaves


class Shared:
    """Marks a value that a container itself declares to be the same for all rows."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


def _rebuild_tensordict(leaves: dict[str, Any], rows: int | None) -> Any:
    from tensordict import NonTensorData, NonTensorStack, TensorDict

    batch = TensorDict({}, batch_size=[] if rows is None else [rows])
    for key, value in leaves.items():
        if isinstance(value, list) and rows is not None:
            value = NonTensorStack(*value)
        elif not hasattr(value, "shape") or isinstance(value, list):
            value = NonTensorData(value, batch_size=batch.batch_size)
        batch.set(tuple(key.split(".")), value)
    return batch
