"""How the command ends when it does not come to its own end: signals, and output that nobody takes.

The first interrupt or termination ends a run in order; one more ends it at once. A closed output ends it quietly, as it
ends any filter; a full one is an error. Progress that cannot be shown ends nothing.
"""

from __future__ import annotations

import io
import os
import signal
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from padless.errors import PadlessError

__all__ = ["CLOSED", "INTERRUPTED", "TERMINATED", "guarded", "tell"]

INTERRUPTED, CLOSED, TERMINATED = 130, 141, 143
"""Exit codes, as a shell gives them for SIGINT, SIGPIPE and SIGTERM."""


@contextmanager
def guarded(given: list[str]) -> Iterator[None]:
    """The whole process for one command: its signals and its output. ``given`` are the command's arguments."""
    streams = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = _stream(sys.stdout, _Results), _stream(sys.stderr, _Progress)
    taken = _Signals(given)
    try:
        yield
    finally:
        taken.give_back()
        if sys.stderr is not None:
            sys.stderr.flush()
        sys.stdout, sys.stderr = streams


def tell(given: list[str], what: str) -> None:
    """One line on standard error."""
    print(_line(given, what), file=sys.stderr, flush=True)


def _line(given: list[str], what: str) -> str:
    again = ": run the same command again, it continues where it stopped" if given[:1] == ["pack"] else ""
    return f"padless: {what}{again}"


class _Signals:
    """Handlers of SIGINT and SIGTERM. What the caller ignores, as `nohup` or a shell's background does, stays so."""

    def __init__(self, given: list[str]) -> None:
        self.given, self.process, self.ending = given, os.getpid(), False
        self.numbers = []
        for number, usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGTERM, signal.SIG_DFL)):
            if signal.getsignal(number) is usual:
                signal.signal(number, self._take)
                self.numbers.append(number)

    def give_back(self) -> None:
        """All is said and done: what comes while the interpreter leaves ends it without a word."""
        for number in self.numbers:
            signal.signal(number, signal.SIG_DFL)

    def _take(self, number: int, _: Any) -> None:
        if os.getpid() == self.process:  # else a process that was forked meanwhile
            if self.ending:
                self._leave(number)
            self.ending = True
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        sys.exit(TERMINATED)

    def _leave(self, number: int) -> NoReturn:
        """At once, with the worker processes, whatever is waited for."""
        try:
            running = sys.modules.get("multiprocessing")
            for child in [] if running is None else running.active_children():
                child.kill()
            told = _line(self.given, "interrupted" if number == signal.SIGINT else "terminated")
            shown = "\x1b[?25h\n" if os.isatty(2) else ""  # a progress bar had hidden the cursor
            os.write(2, f"{shown}{told}\n".encode())  # print could be what was interrupted
        finally:
            os._exit(INTERRUPTED if number == signal.SIGINT else TERMINATED)


class _Checked(io.FileIO, ABC):
    """A file whose first failure is dealt with; what is written after it is lost without a word."""

    failed = False

    def write(self, data: Any) -> int:
        if not self.failed:
            try:
                return super().write(data)
            except OSError as error:
                self.failed = True
                self.give_up(error)
        return len(data)

    @abstractmethod
    def give_up(self, error: OSError) -> None:
        """What a failure means for the run."""


class _Results(_Checked):
    def give_up(self, error: OSError) -> None:
        if isinstance(error, BrokenPipeError):
            sys.exit(CLOSED)
        raise PadlessError(f"cannot write the output: {error.strerror or error}") from None


class _Progress(_Checked):
    def give_up(self, error: OSError) -> None:
        """A terminal that is gone ends no run that has hours behind it."""


def _stream(stream: Any, kind: type[_Checked]) -> Any:
    """The same stream through a file of this kind. Streams that are closed, or no files, stay as they are.

    So does a console of Windows, which takes its text through a kind of file of its own.
    """
    if sys.platform == "win32" and stream is not None and stream.isatty():
        return stream
    try:
        stream.flush()
        file = kind(stream.fileno(), "w", closefd=False)
        encoding, errors = stream.encoding, stream.errors
    except (AttributeError, OSError, ValueError):
        return stream
    at_once = stream.line_buffering or stream.write_through  # the latter as PYTHONUNBUFFERED asks
    return io.TextIOWrapper(io.BufferedWriter(file), encoding=encoding, errors=errors, line_buffering=at_once)
