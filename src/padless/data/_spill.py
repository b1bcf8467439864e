"""Tokenised documents on disk, chunk by chunk, while a corpus is packed: the memory a run does not need."""

from __future__ import annotations

import errno
import json
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from padless.errors import PadlessError
from padless.files import whole_file

__all__ = ["Chunk", "Documents", "Spill", "write_atomically"]

Index = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Documents:
    """The documents of some rows, end to end.

    Attributes:
        lengths: (D,) int32 tokens of each document, at least 1.
        rows: (D,) int64 row of each document, counted from the first row of its file.
        columns: per-token columns, (T,) each; ``input_ids`` is int32.
        read, empty, bad: rows read, without a token, unreadable.
        left: columns of the rows that are not per token and were left out.
    """

    lengths: npt.NDArray[np.int32]
    rows: Index
    columns: Mapping[str, npt.NDArray[Any]]
    read: int
    empty: int = 0
    bad: int = 0
    left: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """What is known of one chunk without its tokens.

    Attributes:
        number: its place in the corpus.
        file: its file, counted from 0.
        first_row: corpus-wide number of the first row of its file.
        lengths, rows: as in `Documents`.
        columns: dtype and byte offset of each per-token column.
    """

    number: int
    file: int
    first_row: int
    lengths: npt.NDArray[np.int32]
    rows: Index
    columns: Mapping[str, tuple[str, int]]
    read: int
    empty: int
    bad: int
    left: tuple[str, ...]

    @property
    def tokens(self) -> int:
        """Tokens of all documents."""
        return int(self.lengths.sum(dtype=np.int64))


@dataclass(frozen=True, slots=True)
class Spill:
    """A folder of chunks. A chunk exists once its ``.npz`` does, which is written last."""

    folder: Path

    def write(self, number: int, documents: Documents, *, file: int, first_row: int) -> Chunk:
        """Write one chunk; a run that is killed leaves it whole or absent."""
        layout: dict[str, tuple[str, int]] = {}
        at = 0
        for name, values in documents.columns.items():
            layout[name] = (values.dtype.str, at)
            at += values.nbytes

        def tokens(out: BinaryIO) -> None:
            for values in documents.columns.values():
                out.write(np.ascontiguousarray(values).data)

        checksum = 0
        for values in documents.columns.values():
            checksum = zlib.crc32(np.ascontiguousarray(values).data, checksum)
        counts = {name: getattr(documents, name) for name in ("read", "empty", "bad")}
        told = {
            **counts,
            "left": list(documents.left),
            "columns": layout,
            "file": file,
            "first_row": first_row,
            "bytes": at,
            "crc32": checksum,
        }
        write_atomically(self.tokens_path(number), tokens)
        plain = np.frombuffer(json.dumps(told).encode(), dtype=np.uint8)
        write_atomically(
            self._index_path(number),
            lambda out: np.savez(out, plain=plain, lengths=documents.lengths, rows=documents.rows),
        )
        return _chunk(number, told, documents.lengths, documents.rows)

    def read(self, number: int, *, verify: bool = False) -> Chunk | None:
        """A chunk's index, or ``None`` where there is no whole chunk of that number."""
        try:
            with np.load(self._index_path(number)) as stored:
                told = json.loads(stored["plain"].tobytes())
                lengths, rows = stored["lengths"], stored["rows"]
        except (OSError, ValueError, KeyError, EOFError, zlib.error):
            return None
        path = self.tokens_path(number)
        if not path.exists() or path.stat().st_size != told["bytes"]:
            return None
        if verify and _crc32(path) != told["crc32"]:
            return None
        return _chunk(number, told, lengths, rows)

    def tokens_path(self, number: int) -> Path:
        """The file that holds a chunk's per-token columns, one after the other."""
        return self.folder / f"{number:07d}.bin"

    def _index_path(self, number: int) -> Path:
        return self.folder / f"{number:07d}.npz"


def _chunk(number: int, told: Mapping[str, Any], lengths: npt.NDArray[np.int32], rows: Index) -> Chunk:
    return Chunk(
        number=number,
        file=told["file"],
        first_row=told["first_row"],
        lengths=lengths,
        rows=rows,
        columns={name: (dtype, at) for name, (dtype, at) in told["columns"].items()},
        read=told["read"],
        empty=told["empty"],
        bad=told["bad"],
        left=tuple(told["left"]),
    )


def _crc32(path: Path) -> int:
    checksum = 0
    with open(path, "rb") as file:
        while block := file.read(1 << 22):
            checksum = zlib.crc32(block, checksum)
    return checksum


def write_atomically(
    path: Path, write: Callable[[BinaryIO], object], *, durable: bool = False, scratch: Path | None = None
) -> None:
    """`padless.files.whole_file` with the packing run's messages.

    Raises:
        PadlessError: the disk is full, or the folder cannot be written.
    """
    try:
        with whole_file(path, durable=durable, scratch=scratch) as out:
            write(out)
    except OSError as error:
        raise _write_failed(path, error) from error


def _write_failed(path: Path, error: OSError) -> PadlessError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return PadlessError(
            f"no space left to write {path.name} in {path.parent} ({error.strerror}): free some and run the same"
            " command again, it continues where it stopped; finished files are whole"
        )
    return PadlessError(f"cannot write {path}: {error.strerror or error}")
