"""Rows of JSON lines: cut into blocks where they are read, parsed where they are used, each named by its line."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from padless.data._rows import Columns, as_columns
from padless.errors import PadlessError

__all__ = ["Lines", "Stretch", "columns_of_lines", "read_lines"]

_SPACE = " \t\n\r"  # what JSON calls white space
_scan: Callable[[str, int], tuple[Any, int]] = json.JSONDecoder().scan_once  # type: ignore[attr-defined]


@dataclass(frozen=True, slots=True)
class Lines:
    """Rows as they stand in a file. One block of bytes reaches a worker far more cheaply than a list of lines.

    Attributes:
        name: the file's.
        numbers: (B,) place of each row's line in the file, from 1.
        data: the (B,) lines, with a newline between each two.
    """

    name: str
    numbers: Sequence[int]
    data: bytes

    def __len__(self) -> int:
        """Number of rows."""
        return len(self.numbers)

    def split(self) -> list[bytes]:
        """The lines, (B,), without their newlines."""
        lines = self.data.split(b"\n")  # splitlines would cut at carriage returns, too
        return lines[: len(self.numbers)]  # behind a last newline there is nothing

    def singles(self) -> Iterator[Lines]:
        """Each row apart."""
        for number, line in zip(self.numbers, self.split(), strict=True):
            yield Lines(self.name, (number,), line)


@dataclass(frozen=True, slots=True)
class Stretch:
    """Rows by their place in a file: whoever uses them reads them.

    Attributes:
        path: the file.
        numbers: as of `Lines`.
        start, stop: bytes; blank lines may lie between them.
    """

    path: Path
    numbers: Sequence[int]
    start: int
    stop: int

    def __len__(self) -> int:
        """Number of rows."""
        return len(self.numbers)

    def load(self) -> Lines:
        """Read them.

        Raises:
            PadlessError: the file is no longer what it was when the rows were counted.
        """
        with open(self.path, "rb") as file:
            file.seek(self.start)
            data = file.read(self.stop - self.start)
        whole = len(data) == self.stop - self.start
        if not isinstance(self.numbers, range):
            data = b"\n".join(line for line in data.split(b"\n") if line.strip())
        if not whole or data.count(b"\n") + (not data.endswith(b"\n")) != len(self.numbers):
            raise PadlessError(f"{self.path.name} was changed while it was read: run again when nothing writes to it")
        return Lines(self.path.name, self.numbers, data)


def read_lines(path: Path, size: int, *, in_place: bool = False) -> Iterator[Lines | Stretch]:
    """A file's rows, ``size`` at a time. Blank lines are passed over.

    Args:
        path: JSON lines, gzipped or not; or ``.json``, which may be one array of rows.
        size: rows in each block, except perhaps the last.
        in_place: rows of a plain file are only found, and read by those who use them: a reader that hands out rows
            to many workers is then not what they wait for.
    """
    if path.name.endswith(".json"):
        yield from _read_json(path, size)
        return
    zipped = path.name.endswith(".gz")
    opener: Any = gzip.open if zipped else open
    in_place = in_place and not zipped and path.is_file()  # not a pipe
    with opener(path, "rb") as file:
        number = 1  # of the next line
        start = stop = 0
        while lines := list(islice(file, size)):
            numbers: Sequence[int] = range(number, number + len(lines))
            number += len(lines)
            stop += sum(map(len, lines))
            if not all(map(bytes.strip, lines)):
                full = [(n, line) for n, line in zip(numbers, lines, strict=True) if line.strip()]
                while len(full) < size and (more := file.readline()):
                    if more.strip():
                        full.append((number, more))
                    number += 1
                    stop += len(more)
                if not full:
                    return
                numbers, lines = [n for n, _ in full], [line for _, line in full]
            yield Stretch(path, numbers, start, stop) if in_place else Lines(path.name, numbers, b"".join(lines))
            start = stop


def _read_json(path: Path, size: int) -> Iterator[Lines]:
    """A ``.json`` file is one array of rows, or lines of rows under another name."""
    text = path.read_bytes()
    if not text.lstrip().startswith(b"["):
        lines = [(number, line) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
    else:
        try:
            rows = json.loads(text)
        except ValueError as error:
            raise PadlessError(f"{path.name}: not JSON: {error}") from None
        lines = [(number, json.dumps(row).encode()) for number, row in enumerate(rows, 1)]
    for start in range(0, len(lines), size):
        batch = lines[start : start + size]
        yield Lines(path.name, [number for number, _ in batch], b"\n".join(line for _, line in batch))


def columns_of_lines(payload: Lines | Stretch, first_row: int) -> Columns:
    """Parse a block.

    Raises:
        PadlessError: a line that is not JSON, named by file and line; rows of different kinds.
    """
    if isinstance(payload, Stretch):
        payload = payload.load()
    rows = []
    for i, line in enumerate(payload.split()):
        try:
            rows.append(_row(line.decode()))  # JSON lines are UTF-8: no need to guess
        except ValueError:
            rows.append(_odd_row(payload.name, payload.numbers[i], line))
    return as_columns(rows, first_row)


def _row(text: str) -> Any:
    """``json.loads`` without its detours: in a million rows they are a third of the time that parsing takes."""
    try:
        row, end = _scan(text, 0)
    except StopIteration:  # it begins with white space, or with what is not JSON
        return json.loads(text)
    if end < len(text) and text[end:].strip(_SPACE):
        return json.loads(text)  # which tells what is wrong
    return row


def _odd_row(name: str, number: int, line: bytes) -> Any:
    """A line that is not plain JSON in UTF-8: a byte order mark and lone surrogates are let through."""
    try:
        return json.loads(line)
    except ValueError as error:
        raise PadlessError(f"{name}, line {number}: not JSON: {error}") from None
