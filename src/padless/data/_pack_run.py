"""The stages of a packing run: tokenise into chunks, plan on lengths alone, write shards."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from padless.data._inputs import InputFile, open_file, readable
from padless.data._lines import Lines
from padless.data._pack_places import Placed, Places
from padless.data._pack_plan import Fate, plan_windows
from padless.data._pack_work import Runner, TokenTask
from padless.data._shards import ShardFacts, ShardTask, read_facts
from padless.data._sources import Source
from padless.data._spill import Chunk, Spill, write_atomically
from padless.errors import PadlessError
from padless.planning.pack import Method
from padless.planning.slots import Overlong

__all__ = ["Progress", "Settings", "Tokenised", "tokenise", "write_shards"]

Progress = Callable[[str, int, int | None, int], None]
"""Called with the stage, how much of it is done, how much there is (``None`` if unknown), and tokens so far."""

_CHUNKS = 256  # a corpus makes about so many chunks, unless they would be very small or large
_CHUNK_BYTES = (1 << 18, 8 << 20)
_CHUNK_ROWS = 32_768
_BATCH = 128  # rows read at once: a megabyte each is still little


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What decides the bytes of the result, apart from the data and the tokenizer."""

    capacity: int
    method: Method
    overlong: Overlong
    window: int
    seed: int | None
    shard_tokens: int
    position_ids: bool
    compression: str
    bad_rows: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokenised:
    """What the first stage found, kept so that a resumed run need not read the data again.

    Attributes:
        chunks: their number.
        file_rows: rows of each file.
        documents, tokens, empty, bad: totals.
        columns: per-token columns and the dtype that holds all chunks' values.
        left: columns that were not per token.
    """

    chunks: int
    file_rows: list[int]
    documents: int = 0
    tokens: int = 0
    empty: int = 0
    bad: int = 0
    columns: dict[str, str] = field(default_factory=dict)
    left: list[str] = field(default_factory=list)

    @property
    def rows(self) -> int:
        """Rows of all files."""
        return sum(self.file_rows)


def tokenise(
    paths: list[Path],
    files: list[InputFile],
    spill: Spill,
    settings: Settings,
    run: Runner,
    progress: Progress,
) -> Tokenised:
    """Tokenise all files into chunks; those that an earlier run left whole are kept."""
    marker = spill.folder / "tokenised.json"
    if marker.exists():
        return Tokenised(**json.loads(marker.read_text()))
    smallest, largest = _CHUNK_BYTES
    size = min(max(sum(file.bytes for file in files) // _CHUNKS, smallest), largest)
    reader = _Reader(paths=paths, spill=spill, chunk_bytes=size)
    totals = _Totals(paths=paths, settings=settings)
    expected = [file.rows for file in files]
    total = None if None in expected else sum(rows for rows in expected if rows is not None)
    for chunk in run(reader.tasks()):
        # Kept chunks come back in their order between the new ones, as the reader passes them.
        for known in (*reader.passed(before=chunk.number), chunk):
            totals.add(known)
        progress("tokenizing", totals.read, total, totals.tokens)
    for known in reader.passed(before=None):
        totals.add(known)
    progress("tokenizing", totals.read, totals.read, totals.tokens)
    found = totals.result(chunks=reader.count, file_rows=reader.file_rows)
    told = json.dumps(asdict(found)).encode()
    write_atomically(marker, lambda out: out.write(told))
    return found


@dataclass(slots=True)
class _Reader:
    """Cuts files into tasks. The cuts depend on the data only."""

    paths: list[Path]
    spill: Spill
    chunk_bytes: int
    count: int = 0
    file_rows: list[int] = field(default_factory=list)
    kept: list[Chunk] = field(default_factory=list)

    def tasks(self) -> Iterator[TokenTask]:
        for number, path in enumerate(self.paths):
            first_row, rows = sum(self.file_rows), 0
            source = open_file(path)
            for payloads in _batches(source, path, self.chunk_bytes):
                rows += sum(count for count, _, _ in payloads)
                known = self.spill.read(self.count, verify=True)
                task = TokenTask(
                    number=self.count,
                    file=number,
                    first_row=first_row,
                    what=path.name,
                    unpack=source.unpack,
                    payloads=tuple((first, payload) for _, first, payload in payloads),
                )
                self.count += 1
                if known is None:
                    yield task
                else:
                    self.kept.append(known)
            self.file_rows.append(rows)

    def passed(self, *, before: int | None) -> list[Chunk]:
        """Kept chunks up to a number, each once."""
        ready = [chunk for chunk in self.kept if before is None or chunk.number < before]
        self.kept = self.kept[len(ready) :]
        return ready


def _batches(source: Source, path: Path, chunk_bytes: int) -> Iterator[list[tuple[int, int, Any]]]:
    """(rows, first row, payload) of the payloads of each chunk."""
    held: list[tuple[int, int, Any]] = []
    size = rows = 0
    payloads = source.payloads(_BATCH)
    while True:
        with readable(path):
            following = next(payloads, None)
        if following is None:
            break
        count, weight, payload = _weigh(following[1])
        held.append((count, following[0], payload))
        size, rows = size + weight, rows + count
        if size >= chunk_bytes or rows >= _CHUNK_ROWS:
            yield held
            held, size, rows = [], 0, 0
    if held:
        yield held


def _weigh(payload: Any) -> tuple[int, int, Any]:
    """Rows and bytes of a payload, and the payload without the buffers it is only a slice of."""
    if isinstance(payload, Lines):
        return len(payload), len(payload.data), payload
    if payload.nbytes * 2 < payload.get_total_buffer_size():
        payload = payload.take(np.arange(payload.num_rows))
    return payload.num_rows, payload.nbytes, payload


@dataclass(slots=True)
class _Totals:
    paths: list[Path]
    settings: Settings
    read: int = 0
    documents: int = 0
    tokens: int = 0
    empty: int = 0
    bad: int = 0
    columns: dict[str, Any] = field(default_factory=dict)
    left: set[str] = field(default_factory=set)

    def add(self, chunk: Chunk) -> None:
        self._refuse_overlong(chunk)
        self._unite_columns(chunk)
        self.read += chunk.read
        self.documents += len(chunk.lengths)
        self.tokens += chunk.tokens
        self.empty += chunk.empty
        self.bad += chunk.bad
        self.left |= set(chunk.left)

    def _refuse_overlong(self, chunk: Chunk) -> None:
        """Before hours are spent on the rest."""
        capacity = self.settings.capacity
        if self.settings.overlong != "error" or not len(chunk.lengths) or chunk.lengths.max() <= capacity:
            return
        first = int(np.flatnonzero(chunk.lengths > capacity)[0])
        raise PadlessError(
            f"{self.paths[chunk.file].name}, row {chunk.rows[first]}: {chunk.lengths[first]} tokens exceed the capacity"
            f" {capacity}: raise it, or choose overlong='truncate', 'split' or 'drop'"
        )

    def _unite_columns(self, chunk: Chunk) -> None:
        if not len(chunk.lengths):
            return
        names = {name: np.dtype(dtype) for name, (dtype, _) in chunk.columns.items()}
        if self.columns and names.keys() != self.columns.keys():
            odd = ", ".join(sorted(names.keys() ^ self.columns.keys()))
            raise PadlessError(
                f"{self.paths[chunk.file].name}, rows from {chunk.rows[0]}: {odd} is there in some rows and not in"
                " others; a packed column needs every row"
            )
        self.columns = {name: np.result_type(dtype, self.columns.get(name, dtype)) for name, dtype in names.items()}

    def result(self, *, chunks: int, file_rows: list[int]) -> Tokenised:
        return Tokenised(
            chunks=chunks,
            file_rows=file_rows,
            documents=self.documents,
            tokens=self.tokens,
            empty=self.empty,
            bad=self.bad,
            columns={name: dtype.str for name, dtype in self.columns.items()},
            left=sorted(self.left),
        )


def write_shards(
    found: Tokenised, spill: Spill, out: Path, settings: Settings, run: Runner, progress: Progress
) -> tuple[list[ShardFacts], Fate]:
    """Plan the packs and write them; shards that an earlier run finished are kept."""
    progress("planning", 0, None, 0)
    planner = _Planner(found=found, spill=spill, out=out, settings=settings)
    facts: dict[int, ShardFacts] = {}
    numbers: list[int] = []
    tokens = 0

    def missing() -> Iterator[ShardTask]:
        nonlocal tokens
        for task in planner.tasks():
            known = read_facts(task)
            if known is None:
                numbers.append(task.number)
                yield task
            else:
                facts[task.number] = known
                tokens += known.tokens

    for done, written in enumerate(run(missing())):
        facts[numbers[done]] = written
        tokens += written.tokens
        progress("writing", tokens, planner.total_tokens, tokens)
    made = [facts[number] for number in sorted(facts)]
    for old in {path.name for path in out.glob("packs-*.parquet")} - {shard.name for shard in made}:
        (out / old).unlink()  # an interrupted run had planned more shards
    return made, planner.fate


@dataclass(slots=True)
class _Planner:
    """Windows of packs, cut into shards."""

    found: Tokenised
    spill: Spill
    out: Path
    settings: Settings
    fate: Fate = field(default_factory=Fate)
    places: Places = field(default_factory=Places)

    @property
    def total_tokens(self) -> int:
        """Tokens to write, as far as is known."""
        return self.found.tokens - self.fate.dropped_tokens - self.fate.truncated_tokens

    def tasks(self) -> Iterator[ShardTask]:
        settings = self.settings
        per_shard = max(1, settings.shard_tokens // settings.capacity)
        number, rest = 0, Placed.nothing()
        for packs in plan_windows(
            self._lengths(),
            settings.capacity,
            method=settings.method,
            overlong=settings.overlong,
            window=settings.window,
            seed=settings.seed,
        ):
            self.fate += packs.fate
            at = 0
            while len(rest) + len(packs) - at >= per_shard:
                stop = at + per_shard - len(rest)
                yield self._task(number, rest.then(self.places.of(packs, at, stop)))
                number, at, rest = number + 1, stop, Placed.nothing()
            rest = rest.then(self.places.of(packs, at, len(packs)))
            self.places.forget(before=packs.planned, but=packs.waiting)
        if len(rest):
            yield self._task(number, rest)

    def _lengths(self) -> Iterator[npt.NDArray[np.int32]]:
        for number in range(self.found.chunks):
            chunk = self.spill.read(number)
            if chunk is None:
                raise PadlessError(
                    f"{self.spill.tokens_path(number)} is gone or damaged, though the run had written it:"
                    " begin again with restart=True (--restart)"
                )
            self.places.add(chunk)
            yield chunk.lengths

    def _task(self, number: int, placed: Placed) -> ShardTask:
        return ShardTask(
            number=number,
            out=self.out,
            spill=self.spill.folder,
            chunk=placed.chunk,
            at=placed.at,
            length=placed.length,
            document=placed.document,
            file=placed.file,
            row=placed.row,
            start=placed.start,
            offsets=placed.offsets,
            columns=self.found.columns,
            stored={chunk: self.places.columns(chunk) for chunk in np.unique(placed.chunk).tolist()},
            split=self.settings.overlong == "split",
            position_ids=self.settings.position_ids,
            compression=self.settings.compression,
        )
