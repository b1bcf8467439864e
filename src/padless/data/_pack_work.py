"""The two kinds of work of a packing run, and the processes that do it. A task done twice leaves the same bytes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from padless.data._processes import run_task, worker_pool
from padless.data._shards import ShardFacts, ShardTask, write_shard
from padless.data._spill import Chunk, Spill
from padless.data._tokens import Encoder, encode_payload
from padless.errors import PadlessError

__all__ = ["Runner", "TokenTask", "Worker", "local_runner"]

Task: TypeAlias = "TokenTask | ShardTask"
Runner: TypeAlias = Callable[[Iterable[Any]], Iterator[Any]]
"""Runs tasks and yields their results in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenTask:
    """Rows to tokenise into one chunk.

    Attributes:
        number: the chunk's place in the corpus.
        file, first_row: the file's place, and the corpus-wide number of its first row.
        what: how messages call the file.
        unpack, payloads: see `padless.data._sources.Source`.
    """

    number: int
    file: int
    first_row: int
    what: str
    unpack: Callable[[Any, int], Any]
    payloads: tuple[tuple[int, Any], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """Does a task. Picklable if its tokenizer is."""

    encoder: Encoder
    spill: Path
    skip_bad: bool

    def __call__(self, task: Task) -> Chunk | ShardFacts:
        """Tokenise rows, or write a shard."""
        if isinstance(task, ShardTask):
            return write_shard(task)
        documents = encode_payload(self.encoder, task.unpack, task.payloads, what=task.what, skip_bad=self.skip_bad)
        return Spill(self.spill).write(task.number, documents, file=task.file, first_row=task.first_row)


@contextmanager
def local_runner(worker: Worker, workers: int) -> Iterator[Runner]:
    """A runner in this process (``workers=0``), or in worker processes that are started at once.

    Forked before the plan exists, they do not hold its memory.
    """
    if workers == 0:
        yield lambda tasks: map(worker, tasks)
        return
    with worker_pool(workers, _start, worker) as pool:

        def run(tasks: Iterable[Task]) -> Iterator[Any]:
            waiting: deque[Future[Any]] = deque()
            try:
                for task in tasks:
                    waiting.append(pool.submit(run_task, _work, task))
                    # The reader stays a little ahead of the workers, and no more: tasks carry their rows.
                    while len(waiting) >= 3 * workers:
                        yield waiting.popleft().result()
                while waiting:
                    yield waiting.popleft().result()
            except BrokenProcessPool:
                raise PadlessError(
                    "a worker process died (out of memory?): run the same command again, it continues where it stopped;"
                    " fewer workers need less memory"
                ) from None

        yield run


_worker: Worker | None = None


def _start(worker: Worker) -> None:
    global _worker
    _worker = worker


def _work(task: Task) -> Any:
    assert _worker is not None
    return _worker(task)
