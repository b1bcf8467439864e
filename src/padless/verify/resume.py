"""Does a sampler, stream or loader continue exactly where it stopped? Restored at every step, and again after that."""

from __future__ import annotations

import copy
import json
import pickle
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass
from itertools import islice
from typing import Any, Literal, Protocol

import numpy as np

from padless.errors import PadlessError, choose

__all__ = ["ResumeError", "Resumed", "Stateful", "assert_rescalable", "assert_resumable"]

Through = Literal["json", "pickle", "copy"]


class ResumeError(PadlessError, AssertionError):
    """A restored object did not continue as the original did; the message names the step and the items."""


class Stateful(Protocol):
    """What is checked: it can be iterated, and its place saved and restored."""

    def __iter__(self) -> Iterator[Any]: ...
    def state_dict(self) -> Any:
        """The place, to be saved."""

    def load_state_dict(self, state: Any, /) -> Any:
        """Continue from a saved place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed:
    """How much was checked: items of the epoch, and restores made."""

    steps: int
    restores: int


def assert_resumable(
    factory: Callable[[], Stateful],
    *,
    max_steps: int | None = None,
    epochs: int = 1,
    through: Through = "pickle",
) -> Resumed:
    """Check that what ``factory`` builds can be stopped after any item and continued by a fresh object.

    For an epoch of n items, and for every k from 0 to n: a fresh object that loads the state saved after k items
    yields exactly the remaining n - k. Further: loading the same state twice into one object, a chain of fresh objects
    that is saved and restored after every single item, taking a state (it must not move the iteration), and states
    that later iteration must not change behind the caller's back.

    Args:
        factory: builds a fresh, unstarted object, always with the same data, options and seed. It must offer
            ``__iter__``, ``state_dict()`` and ``load_state_dict(state)``; iterating after a load continues.
        max_steps: look at the first so many items only. Needed for an endless stream.
        epochs: iterate this often one after the other and check each; ``set_epoch(e)`` is called where it exists.
        through: how a state travels from one object to the next, as a checkpoint would carry it.
            ``"json"`` is the strictest: plain numbers, strings, lists and dicts only.

    Returns:
        The number of items and restores that were compared.

    Raises:
        ResumeError: a restored object yields something else; it names the step, what came and what was due.
        PadlessError: bad options, an object without state, or an epoch without items.

    >>> class Count:
    ...     def __init__(self): self.place = 0
    ...     def __iter__(self):
    ...         while self.place < 4:
    ...             self.place += 1
    ...             yield self.place
    ...         self.place = 0
    ...     def state_dict(self): return {"place": self.place}
    ...     def load_state_dict(self, state): self.place = state["place"]
    >>> assert_resumable(Count, through="json")
    Resumed(steps=4, restores=17)
    """
    choose("through", through, ("json", "pickle", "copy"))
    if max_steps is not None and max_steps < 1:
        raise PadlessError(f"max_steps={max_steps} checks nothing: it must be at least 1")
    if epochs < 1:
        raise PadlessError(f"epochs={epochs} checks nothing: it must be at least 1")
    steps = restores = 0
    for epoch in range(epochs):
        source = _started(factory, epoch)
        plain, states = _walk(source, max_steps, through)
        if not plain:
            raise PadlessError("the object yields no item, so nothing can be checked: give it data")
        restores += _restore_everywhere(factory, epoch, plain, states)
        if max_steps is None:
            _restore_at_the_end(factory, source, states[-1])
            restores += 1
        restores += _restore_in_a_chain(factory, epoch, plain, states[0], through)
        steps += len(plain)
    return Resumed(steps=steps, restores=restores)


def assert_rescalable(
    factory: Callable[[int, int], Stateful],
    *,
    ranks: Sequence[int] = (1, 2, 3),
    indices: Callable[[Any], Sequence[Any]] = list,
    max_steps: int | None = None,
    through: Through = "pickle",
) -> Resumed:
    """Check that an epoch begun on some ranks continues on another number of ranks with exactly what is not yet seen.

    Every ordered pair from ``ranks`` is tried: all ranks of the first number run k micro-batches, rank 0's state goes
    to every rank of the second number, and what they yield together must be what the first had left, nothing twice.
    k takes every value at which all ranks stand at the end of an optimizer step (``at_step_boundary``, where the object
    has it).

    Args:
        factory: ``factory(ranks, rank)`` builds the fresh object of one rank.
        ranks: the numbers of ranks to move between.
        indices: from one item to the sequences it holds.
        max_steps: try the first so many micro-batches only.
        through: as in :func:`assert_resumable`.

    Raises:
        ResumeError: sequences are lost or repeated; names the numbers of ranks, the step and the sequences.
    """
    choose("through", through, ("json", "pickle", "copy"))
    steps = restores = 0
    for old in ranks:
        rows, states, boundaries = _walk_ranks(factory, old, indices, through)
        steps += len(rows)
        everything = Counter(index for row in rows for index in row)
        for k in boundaries[: max_steps and max_steps + 1]:
            due = everything - Counter(index for row in rows[:k] for index in row)
            for new in ranks:
                found: Counter[Any] = Counter()
                for rank in range(new):
                    other = factory(new, rank)
                    other.load_state_dict(copy.deepcopy(states[k]))
                    found.update(index for item in other for index in indices(item))
                restores += new
                # After the last item an object may have nothing left, or stand at the next epoch.
                if found != due and not (k == len(rows) and found == everything):
                    lost, extra = sorted((due - found).elements())[:8], sorted((found - due).elements())[:8]
                    raise ResumeError(
                        f"moved from {old} to {new} ranks after {k} of {len(rows)} micro-batches:"
                        f" lost {lost}, repeated or new {extra}"
                    )
    return Resumed(steps=steps, restores=restores)


def _walk_ranks(
    factory: Callable[[int, int], Stateful], ranks: int, indices: Callable[[Any], Sequence[Any]], through: Through
) -> tuple[list[list[Any]], list[Any], list[int]]:
    """All ranks side by side: the sequences of each micro-step, rank 0's state after each, and where a step ends."""
    objects = [factory(ranks, rank) for rank in range(ranks)]
    rows: list[list[Any]] = []
    states, boundaries = [_carry(objects[0].state_dict(), through)], [0]
    for items in zip(*objects, strict=True):
        rows.append([index for item in items for index in indices(item)])
        states.append(_carry(objects[0].state_dict(), through))
        if all(getattr(one, "at_step_boundary", True) for one in objects):
            boundaries.append(len(rows))
    if not rows:
        raise PadlessError("the object yields no item, so nothing can be checked: give it data")
    return rows, states, boundaries


def _started(factory: Callable[[], Stateful], epoch: int) -> Stateful:
    built = factory()
    for name in ("__iter__", "state_dict", "load_state_dict"):
        if not hasattr(built, name):
            raise PadlessError(f"{type(built).__name__} has no {name}, so it cannot be saved and restored")
    if hasattr(built, "set_epoch"):
        built.set_epoch(epoch)
    else:
        for _ in range(epoch):
            for _ in built:
                pass
    return built


def _walk(source: Stateful, max_steps: int | None, through: Through) -> tuple[list[Any], list[Any]]:
    """The items (n), and the states (n + 1) before, between and after them; twice, with and without saving."""
    items: list[Any] = []
    live = [source.state_dict()]
    states = [_carry(live[0], through)]
    for item in islice(source, max_steps):
        items.append(copy.deepcopy(item))
        live.append(source.state_dict())
        states.append(_carry(live[-1], through))
    for k, (now, then) in enumerate(zip(live, states, strict=True)):
        if not _same(_carry(now, through), then):
            raise ResumeError(f"the state saved after {k} items changed afterwards: state_dict() must return a copy")
    return items, states


def _restore_everywhere(factory: Callable[[], Stateful], epoch: int, items: list[Any], states: list[Any]) -> int:
    unsaved = [copy.deepcopy(item) for item in islice(_started(factory, epoch), len(items))]
    _compare(unsaved, items, "iterated without saving")
    for k, state in enumerate(states[: len(items)]):
        fresh = factory()
        fresh.load_state_dict(copy.deepcopy(state))
        _compare(list(islice(fresh, len(items) - k)), items[k:], f"restored after {k} items")
        other = factory()
        other.load_state_dict(copy.deepcopy(state))
        list(islice(other, 1))  # move it on, then go back: the same state may be loaded again in one epoch
        other.load_state_dict(copy.deepcopy(state))
        _compare(list(islice(other, len(items) - k)), items[k:], f"restored twice after {k} items")
    return 3 * len(items)


def _restore_at_the_end(factory: Callable[[], Stateful], source: Stateful, state: Any) -> None:
    """Nothing is left of this epoch: an empty rest, or for objects that roll over at once, the next epoch."""
    fresh = factory()
    fresh.load_state_dict(copy.deepcopy(state))
    rest = list(fresh)
    if rest:
        _compare(rest, list(source), "restored after the last item")


def _restore_in_a_chain(
    factory: Callable[[], Stateful], epoch: int, items: list[Any], state: Any, through: Through
) -> int:
    """A fresh object for every item: state after state, each taken from an object that was itself restored."""
    for k, item in enumerate(items):
        fresh = factory()
        fresh.load_state_dict(copy.deepcopy(state))
        _compare(list(islice(fresh, 1)), [item], f"restored at every one of {k + 1} items")
        state = _carry(fresh.state_dict(), through)
    return len(items)


def _carry(state: Any, through: Through) -> Any:
    if through == "json":
        try:
            return json.loads(json.dumps(state))
        except TypeError as error:
            raise PadlessError(
                f'the state is not plain JSON ({error}): pass through="pickle", or save integers'
            ) from None
    return pickle.loads(pickle.dumps(state)) if through == "pickle" else copy.deepcopy(state)


def _compare(found: list[Any], due: list[Any], what: str) -> None:
    for k, (one, other) in enumerate(zip(found, due, strict=False)):
        if not _same(one, other):
            raise ResumeError(f"{what}: item {k} of the rest is {one!r:.200}, but {other!r:.200} was due")
    if len(found) != len(due):
        raise ResumeError(f"{what}: {len(found)} items came, but {len(due)} were due")


def _same(one: Any, other: Any) -> bool:
    """Equality that reaches into containers, arrays and tensors; NaN equals NaN."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    if hasattr(one, "shape") and hasattr(other, "shape"):
        left, right = np.asarray(one), np.asarray(other)
        floats = left.dtype.kind in "fc" and right.dtype.kind in "fc"
        return left.dtype == right.dtype and bool(np.array_equal(left, right, equal_nan=floats))
    if type(one) is type(other) and is_dataclass(one):
        return all(_same(getattr(one, item.name), getattr(other, item.name)) for item in fields(one))
    return bool(one == other) or (one != one and other != other)
