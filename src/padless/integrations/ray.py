"""Ray Data: packing on a cluster, of files (the stages of ``padless pack``) or inside a pipeline.

``padless pack --engine ray`` runs on the cluster that ``RAY_ADDRESS`` or ``--address`` names, or on a local one. The
data and the output folder must be on storage that every node sees under the same path.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import islice
from typing import Any

import numpy as np

from padless.data._pack_plan import plan_windows
from padless.data._pack_work import Runner, Worker
from padless.data._shards import IGNORED
from padless.data._tokenizer import load_tokenizer
from padless.data._tokens import Encoder, Loss
from padless.errors import PadlessError, choose
from padless.lengths import positive_int
from padless.planning.pack import METHODS, Method
from padless.planning.slots import Overlong

__all__ = ["pack", "ray_runner"]

_WINDOW = 50_000
_OVERLONG = ("error", "truncate", "split", "drop")


def ray_runner(*, address: str | None = None) -> Callable[[Worker, int], AbstractContextManager[Runner]]:
    """A ``runner`` for `padless.data.packing.pack_files` whose tasks run on Ray Data.

    A task that is lost with its worker or node runs again elsewhere; done twice, it leaves the same bytes, so no
    document is lost or doubled. The result is the one of a local run, byte for byte.

    Args:
        address: of the cluster; by default the one that ``RAY_ADDRESS`` names, or a local one that is started.

    >>> from padless.data.packing import pack_files
    >>> pack_files("corpus/", "packs", capacity=8192, runner=ray_runner())  # doctest: +SKIP
    """
    ray = _ray()

    @contextmanager
    def runner(worker: Worker, workers: int) -> Iterator[Runner]:
        started = not ray.is_initialized()
        if started:
            ray.init(address=address or os.environ.get("RAY_ADDRESS"), log_to_driver=False, include_dashboard=False)
        try:
            yield lambda tasks: _run(ray, worker, workers, tasks)
        finally:
            if started:
                ray.shutdown()

    return runner


def _run(ray: Any, worker: Worker, workers: int, tasks: Iterable[Any]) -> Iterator[Any]:
    """Rounds of tasks: all of a round's rows are in the object store at once, not all of the corpus'."""
    context = ray.data.DataContext.get_current()
    shown, context.enable_progress_bars = context.enable_progress_bars, False
    try:
        stream = iter(tasks)
        while batch := list(islice(stream, _round_size(ray, workers))):
            items = [{"place": i, "task": pickle.dumps(task)} for i, task in enumerate(batch)]
            made = ray.data.from_items(items, override_num_blocks=len(items)).map(
                _Task(worker), concurrency=workers or None
            )
            rows = sorted(made.take_all(), key=lambda row: row["place"])
            for row in rows:
                if row["error"]:
                    raise PadlessError(row["error"])
                yield pickle.loads(row["result"])
    finally:
        context.enable_progress_bars = shown


def _round_size(ray: Any, workers: int) -> int:
    processors = workers or int(ray.cluster_resources().get("CPU", 1))
    return max(8, 8 * processors)


class _Task:
    """One row of tasks to one row of results. Messages travel as text: Ray wraps exceptions beyond recognition."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        try:
            result = self.worker(pickle.loads(row["task"]))
        except PadlessError as error:
            return {"place": row["place"], "result": b"", "error": str(error)}
        return {"place": row["place"], "result": pickle.dumps(result), "error": ""}


def pack(
    dataset: Any,
    *,
    capacity: int,
    tokenizer: Any = None,
    fields: str | Sequence[str] | None = None,
    chat_template: str | Callable[[Any], str] | None = None,
    add_special_tokens: bool = True,
    join: str = "",
    loss: Loss = "auto",
    method: Method = "auto",
    overlong: Overlong = "error",
    window: int = _WINDOW,
    seed: int | None = 0,
    leave_out: Sequence[str] = (),
) -> Any:
    """Pack a Ray Dataset, lazily: rows of text, messages or token ids in, rows that are packs out.

    Every window of rows is packed by itself (no document waits for the next window), so the packs of a window are
    those that `padless.pack` makes of its documents. Rows without a token are left out. The first token of each
    document is no target: its label is -100.

    Args:
        dataset: a ``ray.data.Dataset``.
        capacity: tokens that a pack holds at most.
        tokenizer, fields, chat_template, add_special_tokens, join, loss, method, overlong, leave_out: as in
            `padless.data.packing.pack_files`.
        window: rows packed together.
        seed: order of the packs of a window; ``None`` keeps the planner's.

    Returns:
        A ``ray.data.Dataset`` with ``input_ids``, ``labels``, ``seq_lengths`` and every other per-token column.

    Raises:
        PadlessError: options that are unknown; while it runs, a bad row or a document over the capacity.

    >>> import ray  # doctest: +SKIP
    >>> packs = pack(ray.data.read_parquet("corpus/"), capacity=8192, tokenizer="Qwen/Qwen2.5-7B")  # doctest: +SKIP
    """
    _ray()
    if not hasattr(dataset, "map_batches"):
        raise PadlessError(
            f"dataset is a {type(dataset).__name__}; expected a ray.data.Dataset: try ray.data.from_items"
        )
    positive_int(capacity, name="capacity")
    positive_int(window, name="window")
    choose("method", method, METHODS)
    choose("overlong", overlong, _OVERLONG)
    loaded = load_tokenizer(tokenizer)
    end = getattr(loaded, "eos_token_id", None)
    encoder = Encoder(
        tokenizer=loaded,
        fields=(fields,) if isinstance(fields, str) else tuple(fields or ()),
        chat_template=chat_template,
        add_special_tokens=add_special_tokens,
        join=join,
        end=None if end is None else int(end),
        loss=loss,
        leave_out=tuple(leave_out),
    )
    columns = dataset.columns()
    if columns is None:
        raise PadlessError("the dataset has no rows")
    encoded = dataset.map_batches(_Encode(encoder.with_fields(columns)), batch_format="pyarrow", batch_size=1024)
    made = _PackWindow(capacity=capacity, method=method, overlong=overlong, seed=seed)
    return encoded.map_batches(made, batch_format="pyarrow", batch_size=window)


class _Encode:
    """A batch of rows to one row for each document."""

    def __init__(self, encoder: Encoder) -> None:
        self.encoder = encoder

    def __call__(self, table: Any) -> Any:
        import pyarrow as pa

        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        found = self.encoder({name: table.column(name).combine_chunks() for name in table.column_names}, 0)
        ends = np.concatenate([[0], np.cumsum(found.lengths, dtype=np.int64)]).astype(np.int32)
        columns = dict(found.columns)
        labels = columns.pop("labels", columns["input_ids"]).copy()
        labels[ends[:-1]] = IGNORED
        per_token = {"input_ids": columns.pop("input_ids"), "labels": labels, **columns}
        return pa.table({name: pa.ListArray.from_arrays(ends, pa.array(values)) for name, values in per_token.items()})


class _PackWindow:
    """One row for each document to one row for each pack."""

    def __init__(self, *, capacity: int, method: Method, overlong: Overlong, seed: int | None) -> None:
        self.capacity, self.method, self.overlong, self.seed = capacity, method, overlong, seed

    def __call__(self, table: Any) -> Any:
        import pyarrow as pa
        import pyarrow.compute as pc

        table = table.combine_chunks()
        if not table.num_rows:
            return table.append_column("seq_lengths", pa.array([], type=pa.list_(pa.int32())))
        lengths = np.asarray(pc.list_value_length(table.column("input_ids").combine_chunks()), dtype=np.int32)
        [packs] = plan_windows(
            [lengths],
            self.capacity,
            method=self.method,
            overlong=self.overlong,
            window=len(lengths) + 1,
            seed=self.seed,
        )
        pieces = packs.pieces
        firsts = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])[pieces.document] + pieces.start  # (P,)
        sizes = pieces.length.astype(np.int64)
        ends = np.cumsum(sizes)
        places = np.arange(int(ends[-1]) if len(ends) else 0) + np.repeat(firsts - (ends - sizes), sizes)  # (T,)
        offsets = np.concatenate([[0], ends])[packs.offsets].astype(np.int32)  # (packs + 1,)
        starts = np.zeros(len(places), dtype=bool)
        starts[ends - sizes] = True
        made = {}
        for name in table.column_names:
            values = table.column(name).combine_chunks().flatten().take(pa.array(places))
            if name == "labels":  # a piece of a split document begins anew
                values = pc.if_else(pa.array(starts), pa.scalar(IGNORED, values.type), values)
            made[name] = pa.ListArray.from_arrays(pa.array(offsets), values)
        made["seq_lengths"] = pa.ListArray.from_arrays(
            pa.array(packs.offsets.astype(np.int32)), pa.array(pieces.length)
        )
        return pa.table(made)


def _ray() -> Any:
    try:
        import ray
        import ray.data
    except ImportError:
        raise PadlessError('packing on Ray needs it installed: pip install "padless[ray]"') from None
    return ray
