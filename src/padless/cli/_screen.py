"""What `padless analyze` and `padless pack` put on the screen while they work. Standard output stays for results."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, Task, TextColumn, TimeRemainingColumn
from rich.text import Text

from padless.errors import PadlessError

__all__ = ["check_targets", "error_console", "load_object", "number", "progress_bar", "read_text"]


def error_console() -> Console:
    """A console on standard error."""
    return Console(file=sys.stderr)


def number(value: float) -> str:
    """A count for people.

    >>> number(999), number(12_345), number(3_200_000)
    ('999', '12.3k', '3.20M')
    """
    for size, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return (
                f"{value / size:.3g}{unit}"
                if value / size >= 100
                else f"{value / size:.{2 if size > 1e3 else 1}f}{unit}"
            )
    return f"{value:.0f}"


class _Rate(ProgressColumn):
    """Done, of how much, and how fast."""

    def __init__(self) -> None:
        super().__init__()
        self.began: dict[int, tuple[float, float]] = {}

    def render(self, task: Task) -> Text:
        now = time.monotonic()
        start, base = self.began.setdefault(task.id, (now, task.completed))
        unit = task.fields.get("unit", "")
        of = "" if task.total is None else f" / {number(task.total)}"
        passed = now - start
        rate = f", {number((task.completed - base) / passed)} {unit}/s" if passed > 0.5 else ""
        return Text(f"{number(task.completed)}{of} {unit}{rate}")


@contextmanager
def progress_bar(*, quiet: bool) -> Iterator[Callable[[str, int, int | None, str], None]]:
    """A function (stage, done, total, unit) that shows one bar for each stage, with rate and time left.

    Where standard error is no terminal it prints a line every ten seconds instead.
    """
    if quiet:
        yield lambda stage, done, total, unit: None
        return
    console = error_console()
    if not console.is_terminal:
        yield _Lines(console)
        return
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        _Rate(),
        TimeRemainingColumn(elapsed_when_finished=True),
    )
    with Progress(*columns, console=console) as progress:
        tasks: dict[str, Any] = {}

        def show(stage: str, done: int, total: int | None, unit: str) -> None:
            if stage not in tasks:
                tasks[stage] = progress.add_task(stage, total=total, unit=unit)
            progress.update(tasks[stage], completed=done, total=total)

        yield show


class _Lines:
    def __init__(self, console: Console) -> None:
        self.console, self.began, self.shown = console, dict[str, float](), dict[str, float]()

    def __call__(self, stage: str, done: int, total: int | None, unit: str) -> None:
        now = time.monotonic()
        began = self.began.setdefault(stage, now)
        if now - self.shown.setdefault(stage, now) < 10:
            return
        self.shown[stage] = now
        rate = done / (now - began)
        left = f", {(total - done) / rate:.0f} s left" if total and rate > 0 else ""
        of = "" if total is None else f" of {number(total)}"
        self.console.print(f"{stage}: {number(done)}{of} {unit}, {number(rate)} {unit}/s{left}", highlight=False)


def check_targets(paths: list[Path], *, make_folders: bool = False) -> None:
    """Fail before the run, not after it."""
    for path in paths:
        try:
            if make_folders:
                path.parent.mkdir(parents=True, exist_ok=True)
            if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
                raise PadlessError(f"cannot write {path}: name a file in a folder that can be written to")
        except OSError as error:
            raise PadlessError(f"cannot write {path}: {error.strerror}") from None


def load_object(spec: str | None) -> Any:
    """``module:object`` is imported; anything else is left to what loads tokenizers by name."""
    if spec is None or ":" not in spec or Path(spec).exists():
        return spec
    module, _, name = spec.partition(":")
    sys.path.insert(0, "")
    try:
        value: Any = import_module(module)
        for part in name.split("."):
            value = getattr(value, part)
    except (ImportError, AttributeError) as error:
        raise PadlessError(f"{spec!r} cannot be loaded: {error}") from None
    finally:
        sys.path.remove("")
    return value


def read_text(path: str) -> str:
    """A small text file, such as a chat template."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise PadlessError(f"cannot read {path}: {error.strerror or error}") from None
