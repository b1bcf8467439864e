"""Which files a user means, and what they hold."""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from padless.data._sources import Source, _expand, open_source
from padless.errors import PadlessError

__all__ = ["InputFile", "describe_file", "input_files", "open_file", "readable"]


@dataclass(frozen=True, slots=True, kw_only=True)
class InputFile:
    """A file's name, size, content hash, and rows where counting them is free."""

    name: str
    bytes: int
    blake2b: str
    rows: int | None

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return asdict(self)


def input_files(data: str | Path | Sequence[str | Path]) -> list[Path]:
    """The files of a path, a folder, a dataset that ``datasets`` saved to disk, or several of these, in order.

    Raises:
        PadlessError: a path that does not exist, or holds nothing that can be read.
    """
    paths = [data] if isinstance(data, str | Path) else list(data)
    if not paths:
        raise PadlessError("no data: name at least one file or folder")
    return [file for path in paths for file in _files_of(Path(path))]


def _files_of(path: Path) -> list[Path]:
    if not path.is_dir():
        return _expand(path)
    if (path / "dataset_dict.json").exists():
        splits = json.loads((path / "dataset_dict.json").read_text()).get("splits", [])
        raise PadlessError(f"{path} holds several splits; name one: {', '.join(str(path / split) for split in splits)}")
    state = path / "state.json"
    if not state.exists():
        return _expand(path)
    try:
        saved = json.loads(state.read_text())
        files = [path / entry["filename"] for entry in saved["_data_files"]]
    except (ValueError, KeyError, TypeError):
        raise PadlessError(f"{state} is not what datasets.Dataset.save_to_disk writes") from None
    missing = next((file for file in files if not file.exists()), None)
    if missing is not None:
        raise PadlessError(f"{missing} does not exist, though {state} names it")
    return files


@contextmanager
def readable(path: str | Path) -> Iterator[None]:
    """Turn whatever reading a broken file raises into one `PadlessError` that names it."""
    try:
        yield
    except PadlessError:
        raise
    except (OSError, EOFError, zlib.error, ValueError) as error:  # Arrow's errors are ValueErrors
        raise PadlessError(f"cannot read {path}: {error}") from error


def open_file(path: Path) -> Source:
    """The rows of one file."""
    with readable(path):
        return open_source(path)


def describe_file(path: Path) -> InputFile:
    """Read a file once: its content hash, and the lines of uncompressed JSON lines."""
    digest = hashlib.blake2b(digest_size=16)
    lines = path.name.endswith((".jsonl", ".ndjson"))
    count, last = 0, b"\n"
    with readable(path), open(path, "rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
            if lines:
                count += block.count(b"\n")
                last = block[-1:]
    rows = count + (last != b"\n") if lines else _rows(path)
    return InputFile(name=path.name, bytes=path.stat().st_size, blake2b=digest.hexdigest(), rows=rows)


def _rows(path: Path) -> int | None:
    if path.suffix != ".parquet":
        return None
    try:
        import pyarrow.parquet as pq
    except ImportError:
        raise PadlessError('Parquet files need pyarrow: pip install "padless[data]"') from None
    with readable(path):
        return int(pq.ParquetFile(path).metadata.num_rows)
