"""Where does a foreign influence enter? The first module whose inputs are still right and whose output is not."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from padless.verify.feeds import Feed, Place
from padless.verify.runs import Mode, Runner

__all__ = ["Culprit", "Reach", "find_culprit", "find_reach"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    """Which foreign positions a module reads directly, for one sequence in the middle of the row."""

    foreign: int
    """Of the positions tried (its own row, and the row after), so many are read."""
    adjacent: bool
    """They stand next to the sequence, before it, with no gap."""
    all_read: bool
    """Every token of the sequence reads them; a convolution's later tokens do not."""
    later: bool
    """Positions that come after the sequence are read."""
    rows: bool
    """Other rows of the batch are read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Culprit:
    """A module, by its name in the model and its class."""

    name: str
    kind: str
    reach: Reach | None = None

    def __str__(self) -> str:
        return f"{self.name or 'the model itself'} ({self.kind})"


Event = tuple[str, bool, list[Tensor]]


def find_culprit(
    runner: Runner,
    mode: Mode,
    one: Feed,
    other: Feed,
    pairs: Sequence[tuple[Place, Place]],
    *,
    tolerance: float,
    reseed: bool = False,
) -> Culprit | None:
    """Compare two runs at the places that should agree; the innermost module in which they part.

    ``pairs`` gives for each sequence its place in ``one`` and in ``other``. Modules are followed in the order of
    execution, entries and exits, by every tensor that has a sequence axis. ``reseed`` gives the second run other
    random numbers.
    """
    first = _record(runner, mode, one, [pair[0] for pair in pairs])
    runner.seed += reseed
    try:
        second = _record(runner, mode, other, [pair[1] for pair in pairs])
    finally:
        runner.seed -= reseed
    open_modules: list[str] = [""]
    modules = dict(runner.model.named_modules())
    for (name, leaving, mine), (name2, leaving2, theirs) in zip(first, second, strict=False):
        if (name, leaving) != (name2, leaving2):
            break  # the two runs took different paths: what encloses them decides
        if not leaving and name in modules:
            inside = open_modules[-1]
            open_modules.append(name)
        else:
            inside = name
        if _differ(mine, theirs, tolerance):
            return Culprit(name=inside, kind=type(modules[inside]).__name__)
        if leaving:
            open_modules.pop()
    inside = open_modules[-1]
    return Culprit(name=inside, kind=type(modules[inside]).__name__)


def find_reach(probe_run: Callable[[], object], model: nn.Module, feed: Feed, culprit: Culprit) -> Reach | None:
    """The direct reads of one module over the edges of a sequence: its input is changed at one position at a time.

    The module's arguments are taken from one pass of the whole model (``probe_run``); then it is called by itself.
    None where it cannot be, or takes and returns nothing that runs over the tokens.
    """
    module = dict(model.named_modules())[culprit.name]
    taken: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not taken:
            taken.append((args, dict(kwargs)))

    handle = module.register_forward_pre_hook(before, with_kwargs=True)
    try:
        probe_run()
    finally:
        handle.remove()
    place = feed.places[len(feed.places) // 2]
    try:
        with torch.no_grad():
            return _reach(module, *taken[0], feed, place) if taken else None
    except Exception:  # some modules only work inside their model; then the reach stays unknown
        return None


def _reach(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], feed: Feed, place: Place) -> Reach | None:
    arguments: dict[int | str, Any] = dict(enumerate(args))
    arguments.update(kwargs.items())
    key = next((key for key, value in arguments.items() if _carries_tokens(value, feed)), None)
    if key is None:
        return None
    source: Tensor = arguments[key].detach()
    axis = _sequence_axis(source, feed) or 1

    def call(value: Tensor) -> Tensor | None:
        now = {**arguments, key: value}
        output = module(*(now[i] for i in range(len(args))), **{name: now[name] for name in kwargs})
        found = next((item for item in _tensors(output) if _carries_tokens(item, feed)), None)
        return None if found is None else place.of(found.movedim(_sequence_axis(found, feed) or 1, 1))

    own = call(source)
    if own is None:
        return None
    width = feed.input_ids.shape[1]
    rows = [place.row] if feed.input_ids.shape[0] == 1 else [place.row, (place.row + 1) % feed.input_ids.shape[0]]
    read: list[tuple[int, int]] = []
    readers = torch.zeros(place.stop - place.start, dtype=torch.bool, device=own.device)
    for row in rows:
        for column in range(width):
            if row == place.row and place.start <= column < place.stop:
                continue
            changed = source.clone()
            changed.movedim(axis, 1)[row, column].add_(1.0).mul_(-1.7)
            moved = call(changed)
            differs = (moved != own).flatten(1).any(1) if moved is not None else readers  # (n,)
            if bool(differs.any()):
                read.append((row, column))
                readers = readers | differs
    if not read:
        return None
    columns = sorted(column for row, column in read if row == place.row)
    wanted = list(range(place.start - len(columns), place.start))
    return Reach(
        foreign=len(read),
        adjacent=bool(columns) and columns == wanted and len(columns) == len(read),
        all_read=bool(readers.all()),
        later=any(column >= place.stop for column in columns),
        rows=len(columns) < len(read),
    )


def _record(runner: Runner, mode: Mode, feed: Feed, places: Sequence[Place]) -> list[Event]:
    events: list[Event] = []
    with _watching(runner.model, feed, places, events), torch.no_grad():
        runner.run(feed, Mode(name=mode.name, training=mode.training, grad=False, checkpointing=mode.checkpointing))
    return events


@contextmanager
def _watching(model: nn.Module, feed: Feed, places: Sequence[Place], events: list[Event]) -> Iterator[None]:
    def cut(values: Any) -> list[Tensor]:
        kept = []
        for value in _tensors(values):
            axis = _sequence_axis(value, feed)
            if axis is not None and value.is_floating_point():
                moved = value.detach().movedim(axis, 1)
                kept += [place.of(moved).clone() for place in places]
        return kept

    def entering(name: str) -> Any:
        return lambda module, args, kwargs: events.append((name, False, cut((args, kwargs))))

    def leaving(name: str) -> Any:
        return lambda module, args, output: events.append((name, True, cut(output)))

    handles = []
    for name, module in model.named_modules():
        handles.append(module.register_forward_pre_hook(entering(name), with_kwargs=True))
        handles.append(module.register_forward_hook(leaving(name)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _tensors(values: Any) -> Iterator[Tensor]:
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, dict):
        for value in values.values():
            yield from _tensors(value)
    elif isinstance(values, list | tuple):
        for value in values:
            yield from _tensors(value)


def _sequence_axis(value: Any, feed: Feed) -> int | None:
    """The axis that runs over tokens: (B, T, ...) as in most modules, or (B, C, ..., T) as in convolutions."""
    if not isinstance(value, Tensor) or value.dim() < 2:
        return None
    batch, width = feed.input_ids.shape
    if value.shape[0] != batch or value.shape[-1] == value.shape[-2] == width:
        return None  # a mask (T, T) compares tokens, it does not carry them
    return 1 if value.shape[1] == width else value.dim() - 1 if value.shape[-1] == width and value.dim() > 2 else None


def _carries_tokens(value: Any, feed: Feed) -> bool:
    return _sequence_axis(value, feed) is not None and bool(value.is_floating_point())


def _differ(mine: list[Tensor], theirs: list[Tensor], tolerance: float) -> bool:
    for one, other in zip(mine, theirs, strict=False):
        if one.shape != other.shape:
            continue
        scale = float(other.abs().max()) if other.numel() else 0.0
        moved = float((one - other).abs().max()) if one.numel() else 0.0
        if moved != moved or moved > tolerance * (scale or 1.0):
            return True
    return False
