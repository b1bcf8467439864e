"""Packs to Parquet: one shard is one file, written whole, with its checksum beside it in the run's folder."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from padless.data._spill import Spill, write_atomically
from padless.errors import PadlessError

__all__ = ["IGNORED", "ShardFacts", "ShardTask", "read_facts", "shard_name", "write_shard"]

Index = npt.NDArray[np.int64]

IGNORED = -100
"""The label of a token that is no target, as PyTorch's cross entropy expects it."""

_GROUP_TOKENS = 1 << 20  # tokens in one Parquet row group: what a streaming reader holds at once


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardTask:
    """All that a worker needs to write one shard. Small: places, not tokens.

    Attributes:
        number: the shard's place.
        out, spill: the output folder and the folder of tokenised chunks.
        chunk, at, length: (P,) where each piece lies: chunk number, first token in it, tokens.
        document, file, row, start: (P,) corpus-wide row, file, row of that file, first token in the document.
        offsets: (packs + 1,) where each pack starts among the pieces.
        columns: per-token columns and the dtype each is written in; without ``labels`` they are the token ids.
        stored: for each chunk, dtype and byte offset of each per-token column.
        split: documents may be in pieces, so the place of each piece in its document is written too.
        position_ids: write positions, too.
        compression: Parquet codec.
    """

    number: int
    out: Path
    spill: Path
    chunk: npt.NDArray[np.int32]
    at: Index
    length: npt.NDArray[np.int32]
    document: Index
    file: npt.NDArray[np.int32]
    row: Index
    start: Index
    offsets: Index
    columns: Mapping[str, str]
    stored: Mapping[int, Mapping[str, tuple[str, int]]]
    split: bool = False
    position_ids: bool = False
    compression: str = "zstd"

    def plan(self) -> str:
        """A hash of what is where: equal for equal packs."""
        digest = hashlib.blake2b(digest_size=16)
        for array in (self.document, self.start, self.length, self.offsets):
            digest.update(np.asarray(array, dtype=np.int64).tobytes())
            digest.update(b"/")
        return digest.hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardFacts:
    """What the manifest says of a shard.

    ``pieces`` are documents or parts of them, ``targets`` the labels that are not -100, and
    ``without_targets`` the pieces that have none.
    """

    name: str
    sha256: str
    bytes: int
    packs: int
    pieces: int
    tokens: int
    targets: int
    without_targets: int


def shard_name(number: int) -> str:
    """File name of a shard.

    >>> shard_name(7)
    'packs-00007.parquet'
    """
    return f"packs-{number:05d}.parquet"


def write_shard(task: ShardTask) -> ShardFacts:
    """Gather the tokens of a shard's packs and write the file; the same task always gives the same bytes."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    columns = {name: _gather(task, name) for name in task.columns}
    labels = columns.pop("labels", None)
    labels = columns["input_ids"].copy() if labels is None else labels
    lengths = task.length.astype(np.int64)  # (P,)
    ends = np.cumsum(lengths)
    # The first token of a document has nothing before it to be predicted from: not the document before.
    labels[ends - lengths] = IGNORED
    token_offsets = np.concatenate([[0], ends])[task.offsets]  # (packs + 1,)
    if task.position_ids:
        columns["position_ids"] = np.arange(int(ends[-1]), dtype=np.int32) - np.repeat(
            (ends - lengths).astype(np.int32), task.length
        )
    per_token = {"input_ids": columns.pop("input_ids"), "labels": labels, **columns}
    per_piece: dict[str, npt.NDArray[Any]] = {
        "seq_lengths": task.length,
        "document_ids": task.document,
        "source_files": task.file,
        "source_rows": task.row,
    }
    if task.split:
        per_piece["source_starts"] = task.start
    arrays = {name: _lists(pa, token_offsets, values) for name, values in per_token.items()}
    arrays |= {name: _lists(pa, task.offsets, values) for name, values in per_piece.items()}
    table = pa.table(arrays)
    group = max(1, _GROUP_TOKENS * table.num_rows // max(1, int(ends[-1])))
    path = task.out / shard_name(task.number)
    digest = hashlib.sha256()
    size = 0

    def write(out: Any) -> None:
        nonlocal size
        counted = _Hashing(out, digest)
        # Ids repeat too little for a dictionary of a whole row group to pay; zstd finds what there is.
        with pa.PythonFile(counted, mode="w") as sink:
            pq.write_table(
                table,
                sink,
                row_group_size=group,
                compression=task.compression,
                use_dictionary=["seq_lengths"],
                write_statistics=False,
            )
        size = counted.size

    write_atomically(path, write, durable=True, scratch=task.spill)
    target = np.concatenate([[0], np.cumsum(labels != IGNORED)])  # (T + 1,)
    trained = target[ends] - target[ends - lengths]  # (P,)
    facts = ShardFacts(
        name=path.name,
        sha256=digest.hexdigest(),
        bytes=size,
        packs=table.num_rows,
        pieces=len(lengths),
        tokens=int(ends[-1]),
        targets=int(target[-1]),
        without_targets=int((trained == 0).sum()),
    )
    told = json.dumps({**asdict(facts), "plan": task.plan()}).encode()
    write_atomically(_facts_path(task.spill, task.number), lambda out: out.write(told))
    return facts


def read_facts(task: ShardTask) -> ShardFacts | None:
    """Facts of a shard that an earlier run finished, or ``None`` where it did not (or the file is not as written).

    A planner with a time limit may plan anew in another way: a shard of other packs is not the one asked for.
    """
    try:
        told = json.loads(_facts_path(task.spill, task.number).read_bytes())
        if told.pop("plan") != task.plan():
            return None
        facts = ShardFacts(**told)
        with open(task.out / facts.name, "rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != facts.sha256:
                return None
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return facts


def _facts_path(spill: Path, number: int) -> Path:
    return spill / f"shard-{number:05d}.json"


def _gather(task: ShardTask, name: str) -> npt.NDArray[Any]:
    """One per-token column of all pieces, end to end, (T,).

    Read with ``preadv``: pages of a memory map would count as memory of this process.
    """
    wanted = np.dtype(task.columns[name])
    total = int(task.length.sum(dtype=np.int64))
    result = np.empty(total, dtype=wanted)
    spill = Spill(task.spill)
    files: dict[int, tuple[int, np.dtype[Any], int]] = {}
    try:
        for chunk in np.unique(task.chunk).tolist():
            dtype, at = task.stored[chunk][name]
            files[chunk] = (os.open(spill.tokens_path(chunk), os.O_RDONLY), np.dtype(dtype), at)
        same = all(dtype == wanted for _, dtype, _ in files.values())
        if same:
            _read_into(result.view(np.uint8).data, task, files, wanted.itemsize)
        else:
            _read_and_convert(result, task, files)
    except OSError as error:
        raise PadlessError(f"cannot read the tokenised chunks in {task.spill}: {error.strerror or error}") from error
    finally:
        for descriptor, _, _ in files.values():
            os.close(descriptor)
    return result


def _read_into(
    room: memoryview, task: ShardTask, files: Mapping[int, tuple[int, np.dtype[Any], int]], size: int
) -> None:
    stops = np.cumsum(task.length, dtype=np.int64) * size
    starts = stops - task.length.astype(np.int64) * size
    preadv = os.preadv
    places = zip(task.chunk.tolist(), (task.at * size).tolist(), starts.tolist(), stops.tolist(), strict=True)
    for chunk, at, start, stop in places:
        descriptor, _, base = files[chunk]
        if preadv(descriptor, (room[start:stop],), base + at) != stop - start:
            raise OSError(f"chunk {chunk} is shorter than its index says")


def _read_and_convert(
    result: npt.NDArray[Any], task: ShardTask, files: Mapping[int, tuple[int, np.dtype[Any], int]]
) -> None:
    """For a column that is of whole numbers in some chunks and of floats in others."""
    done = 0
    for chunk, at, length in zip(task.chunk.tolist(), task.at.tolist(), task.length.tolist(), strict=True):
        descriptor, dtype, base = files[chunk]
        raw = os.pread(descriptor, length * dtype.itemsize, base + at * dtype.itemsize)
        result[done : done + length] = np.frombuffer(raw, dtype=dtype)
        done += length


def _lists(pa: Any, offsets: Index, values: npt.NDArray[Any]) -> Any:
    return pa.ListArray.from_arrays(pa.array(offsets.astype(np.int32)), pa.array(values))


class _Hashing:
    """A file that hashes what goes through it."""

    def __init__(self, out: Any, digest: Any) -> None:
        self.out, self.digest, self.size, self.closed = out, digest, 0, False

    def write(self, data: Any) -> int:
        self.digest.update(data)
        view = memoryview(data)
        self.out.write(view)
        self.size += view.nbytes
        return view.nbytes

    def tell(self) -> int:
        return self.size

    def flush(self) -> None:
        self.out.flush()

    def close(self) -> None:
        self.closed = True
