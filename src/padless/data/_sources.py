"""Where rows come from: files, Hugging Face and Arrow data, lists, anything indexable or iterable."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from padless.data._lines import columns_of_lines, read_lines
from padless.data._rows import Columns, as_columns
from padless.errors import PadlessError

__all__ = ["Source", "open_source"]

_SUFFIXES = (".jsonl", ".jsonl.gz", ".ndjson", ".json", ".parquet", ".arrow")


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Rows in batches. ``payloads`` runs in the reading process and is cheap; ``unpack`` runs in the workers.

    Attributes:
        what: how messages call it.
        payloads: yields (first row, payload) with a given number of rows each, except perhaps the last.
        unpack: turns a payload into columns; picklable.
        total: rows, where known beforehand.
        folder: where a cache can lie beside the data, or ``None``.
        fingerprint: hashes the content, or ``None`` where that would mean reading every row.
    """

    what: str
    payloads: Callable[[int], Iterator[tuple[int, Any]]]
    unpack: Callable[[Any, int], Columns]
    total: int | None = None
    folder: Path | None = None
    fingerprint: Callable[[], str] | None = None
    shared: Any = field(default=None)


def open_source(dataset: Any, *, columns: Sequence[str] | None = None, in_place: bool = False) -> Source:
    """Recognise a dataset; ``columns`` limits what is read from columnar files.

    With ``in_place`` payloads of text files may be places that only this machine can read, see `read_lines`.

    Raises:
        PadlessError: a missing file, a suffix that is not known, or an object that holds no rows.
    """
    if isinstance(dataset, str | Path):
        return _files(_expand(Path(dataset)), columns, in_place)
    if isinstance(dataset, list | tuple) and dataset and all(isinstance(item, Path) for item in dataset):
        return _files([path for item in dataset for path in _expand(item)], columns, in_place)
    if isinstance(dataset, dict | set) or dataset is None:
        raise PadlessError(
            f"dataset is a {type(dataset).__name__}; expected a path, a Hugging Face or Arrow dataset, a list of rows,"
            " or an iterable (of a DatasetDict, pass one split)"
        )
    if hasattr(dataset, "_fingerprint") and hasattr(dataset, "with_format"):
        return _hugging_face(dataset, columns)
    if hasattr(dataset, "to_batches") and hasattr(dataset, "schema"):
        return _arrow_table(dataset, columns)
    if hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__"):
        return _indexable(dataset)
    if isinstance(dataset, Iterable):
        return _iterable(dataset)
    raise PadlessError(
        f"dataset is a {type(dataset).__name__}; expected a path, a Hugging Face or Arrow dataset, a list of rows,"
        " or an iterable"
    )


def _expand(path: Path) -> list[Path]:
    if path.is_dir():
        found = sorted(item for item in path.iterdir() if item.name.endswith(_SUFFIXES))
        if not found:
            raise PadlessError(f"{path} holds no file that ends in {', '.join(_SUFFIXES)}")
        return found
    if not path.exists():
        raise PadlessError(f"{path} does not exist")
    if not path.name.endswith(_SUFFIXES):
        raise PadlessError(f"{path.name}: unknown kind of file; known are {', '.join(_SUFFIXES)}")
    return [path]


def _files(paths: list[Path], columns: Sequence[str] | None, in_place: bool) -> Source:
    tabular = [path.name.endswith((".parquet", ".arrow")) for path in paths]
    if any(tabular) and not all(tabular):
        raise PadlessError(f"{paths[0].parent} mixes text and columnar files: name the files of one kind")

    def payloads(size: int) -> Iterator[tuple[int, Any]]:
        first = 0
        for path in paths:
            found: Iterator[tuple[int, Any]] = (
                _read_columnar(path, size, columns)
                if all(tabular)
                else ((len(lines), lines) for lines in read_lines(path, size, in_place=in_place))
            )
            for rows, payload in found:
                yield first, payload
                first += rows

    def fingerprint() -> str:
        digest = hashlib.blake2b(digest_size=16)
        for path in paths:
            with open(path, "rb") as file:
                while block := file.read(1 << 22):
                    digest.update(block)
            digest.update(path.suffix.encode())
        return digest.hexdigest()

    return Source(
        what=str(paths[0]) if len(paths) == 1 else f"{len(paths)} files in {paths[0].parent}",
        payloads=payloads,
        unpack=_from_batch if all(tabular) else columns_of_lines,
        total=sum(map(_columnar_rows, paths)) if all(tabular) else None,
        folder=paths[0].parent,
        fingerprint=fingerprint,
    )


def _columnar_rows(path: Path) -> int:
    if path.suffix == ".parquet":
        return int(_arrow("pyarrow.parquet").ParquetFile(path).metadata.num_rows)
    return sum(batch.num_rows for batch in _arrow_batches(path))


def _read_columnar(path: Path, size: int, columns: Sequence[str] | None) -> Iterator[tuple[int, Any]]:
    if path.suffix == ".parquet":
        # Read ahead, a reader keeps every row group it has passed in memory.
        file = _arrow("pyarrow.parquet").ParquetFile(path, pre_buffer=False)
        wanted = None if columns is None else [name for name in file.schema_arrow.names if name in columns]
        yield from _resized(file.iter_batches(batch_size=size, columns=wanted), size)
    else:
        yield from _resized(_arrow_batches(path), size)


def _arrow_batches(path: Path) -> Iterator[Any]:
    """Arrow IPC files come in two formats; Hugging Face writes the streaming one."""
    pa = _arrow("pyarrow")
    with pa.memory_map(str(path)) as mapped:
        try:
            reader = pa.ipc.open_stream(mapped)
            yield from reader
        except pa.ArrowInvalid:
            file = pa.ipc.open_file(mapped)
            for i in range(file.num_record_batches):
                yield file.get_batch(i)


def _resized(batches: Iterable[Any], size: int) -> Iterator[tuple[int, Any]]:
    for batch in batches:
        for start in range(0, batch.num_rows, size):
            part = batch.slice(start, size)
            yield part.num_rows, part


def _from_batch(batch: Any, first_row: int) -> Columns:
    return {name: batch.column(i) for i, name in enumerate(batch.schema.names)}


def _arrow_table(table: Any, columns: Sequence[str] | None) -> Source:
    """A pyarrow Table, or a pyarrow Dataset."""
    if columns is not None and hasattr(table, "select"):
        table = table.select([name for name in table.schema.names if name in columns])

    def payloads(size: int) -> Iterator[tuple[int, Any]]:
        first = 0
        for rows, part in _resized(table.to_batches(), size):
            yield first, part
            first += rows

    total = getattr(table, "num_rows", None)
    return Source(what=type(table).__name__, payloads=payloads, unpack=_from_batch, total=total)


def _hugging_face(dataset: Any, columns: Sequence[str] | None) -> Source:
    if columns is not None:
        dataset = dataset.select_columns([name for name in dataset.column_names if name in columns])
    # A transform makes rows on access (lazy tokenisation): only the items themselves tell their lengths.
    if (dataset.format or {}).get("type") == "custom":
        return _indexable(dataset)
    tabular = dataset.with_format("arrow")

    def payloads(size: int) -> Iterator[tuple[int, Any]]:
        for start in range(0, len(dataset), size):
            yield start, tabular[start : start + size]

    files = dataset.cache_files
    return Source(
        what="the Hugging Face dataset",
        payloads=payloads,
        unpack=_from_table,
        total=len(dataset),
        folder=Path(files[0]["filename"]).parent if files else None,
        fingerprint=lambda: str(dataset._fingerprint),
    )


def _from_table(table: Any, first_row: int) -> Columns:
    return {name: table.column(name).combine_chunks() for name in table.column_names}


def _indexable(dataset: Any) -> Source:
    if isinstance(dataset, np.ndarray) and dataset.ndim == 1:
        dataset = dataset.tolist()

    def payloads(size: int) -> Iterator[tuple[int, Any]]:
        for start in range(0, len(dataset), size):
            yield start, [dataset[i] for i in range(start, min(start + size, len(dataset)))]

    return Source(what=type(dataset).__name__, payloads=payloads, unpack=as_columns, total=len(dataset))


def _iterable(dataset: Iterable[Any]) -> Source:
    def payloads(size: int) -> Iterator[tuple[int, Any]]:
        rows, first = iter(dataset), 0
        while batch := list(islice(rows, size)):
            yield first, batch
            first += len(batch)

    return Source(what=type(dataset).__name__, payloads=payloads, unpack=as_columns)


def _arrow(module: str) -> Any:
    from importlib import import_module

    try:
        return import_module(module)
    except ImportError:
        raise PadlessError('Parquet and Arrow files need pyarrow: pip install "padless[data]"') from None
