"""Corpora packed offline: files in, Parquet shards of packs out, resumable at any moment."""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from padless.data._inputs import InputFile, describe_file, input_files, open_file, readable
from padless.data._lines import Lines
from padless.data._pack_plan import WINDOW, Fate
from padless.data._pack_run import Progress, Settings, Tokenised, tokenise, write_shards
from padless.data._pack_work import Runner, Worker, local_runner
from padless.data._shards import ShardFacts
from padless.data._spill import Spill, write_atomically
from padless.data._tokenizer import describe_tokenizer, load_tokenizer
from padless.data._tokens import Encoder, Loss
from padless.errors import PadlessError, choose
from padless.lengths import positive_int
from padless.planning.pack import METHODS, Method
from padless.planning.slots import Overlong

__all__ = ["PackResult", "pack_files"]

MANIFEST = "manifest.json"
_WORK = ".padless"
_OVERLONG = ("error", "truncate", "split", "drop")
_CODECS = ("zstd", "snappy", "gzip", "lz4", "none")


@dataclass(frozen=True, slots=True, kw_only=True)
class PackResult:
    """A packed corpus.

    Attributes:
        out: the folder that holds the shards and ``manifest.json``.
        manifest: its content: files read, options, totals, shards with their hashes.
        seconds: how long this call took.
        resumed: whether an earlier run had done part of the work, or all of it.
    """

    out: Path
    manifest: Mapping[str, Any]
    seconds: float
    resumed: bool

    @property
    def totals(self) -> dict[str, Any]:
        """Rows, documents, tokens, packs, efficiency, and what became of every row that is not in a pack."""
        return dict(self.manifest["totals"])

    @property
    def shards(self) -> list[Path]:
        """The files, in order."""
        return [self.out / shard["name"] for shard in self.manifest["shards"]]

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return {**self.manifest, "out": str(self.out), "seconds": self.seconds, "resumed": self.resumed}


def pack_files(
    data: str | Path | Sequence[str | Path],
    out: str | Path,
    *,
    capacity: int,
    tokenizer: Any = None,
    fields: str | Sequence[str] | None = None,
    chat_template: str | Callable[[Any], str] | None = None,
    add_special_tokens: bool = True,
    end_token: bool | None = None,
    join: str = "",
    loss: Loss = "auto",
    method: Method = "auto",
    overlong: Overlong = "error",
    bad_rows: Literal["error", "skip"] = "error",
    leave_out: Sequence[str] = (),
    window: int = WINDOW,
    seed: int | None = 0,
    shard_tokens: int = 1 << 23,
    position_ids: bool = False,
    compression: str = "zstd",
    workers: int = 0,
    restart: bool = False,
    progress: Progress | None = None,
    runner: Callable[[Worker, int], AbstractContextManager[Runner]] = local_runner,
) -> PackResult:
    """Tokenise files, put their documents into packs of at most ``capacity`` tokens, and write Parquet shards.

    The bytes written depend on the data, the tokenizer and the options; not on ``workers``, not on the runner, and
    not on how often the run was killed: call it again with the same arguments and it continues.

    A shard's columns, one row for each pack: ``input_ids`` and ``labels`` (and every other per-token column the rows
    have), ``seq_lengths`` (tokens of each document, the column TRL reads boundaries from), ``document_ids`` (row of
    the corpus), ``source_files`` (place in the manifest's list) and ``source_rows``; with ``overlong="split"`` also
    ``source_starts``. The first token of each document is no target: its label is -100. Rows of token ids may carry
    padding: ``attention_mask`` says where, and is not written.

    Args:
        data: files (JSON lines, gzipped or not; JSON; Parquet; Arrow), folders of them, or what
            ``datasets.Dataset.save_to_disk`` wrote.
        out: folder for shards, ``manifest.json`` and, until the run is done, a folder ``.padless``.
        capacity: tokens that a pack holds at most.
        tokenizer, fields, chat_template, add_special_tokens, join: as in `padless.data.measure`.
        end_token: append the tokenizer's end token to plain text; ``None`` does so if it has one.
        loss: which tokens are targets: ``"all"``, ``"completion"``, ``"assistant"`` (the chat template must mark
            them), or ``"auto"``: the completion where rows have a prompt apart, else all. Rows with ``labels``, a
            ``completion_mask``, ``assistant_masks`` or ``loss_mask`` bring their own.
        method: how documents are fitted, see `padless.pack`; ``"auto"`` is best-fit-decreasing, and where that leaves
            over 0.2 % more packs than the bound, a few seconds of linear programming.
        overlong: what happens to a document over the capacity: ``"error"``, ``"truncate"``, ``"split"``, ``"drop"``.
        bad_rows: ``"error"`` names the first row that cannot be read; ``"skip"`` counts them.
        leave_out: columns of lists that are not per token and may be left out.
        window: documents planned at once; more than these are planned window by window.
        seed: order of the packs; ``None`` keeps the planner's, from the longest documents to the shortest.
        shard_tokens: tokens in one shard, roughly.
        position_ids: also write positions, one for each token.
        compression: ``"zstd"``, ``"snappy"``, ``"gzip"``, ``"lz4"`` or ``"none"``.
        workers: processes that tokenise and write; 0 works in this one.
        restart: throw away what an earlier run left in ``out``.
        progress: called with the stage (``"reading"``, ``"tokenizing"``, ``"planning"``, ``"writing"``), how much is
            done, how much there is (``None`` if unknown), and the tokens so far.
        runner: what runs the work; `padless.integrations.ray` has one for a cluster.

    Raises:
        PadlessError: unreadable data or a bad row (file and row are named), a document over the capacity, a full
            disk, or an ``out`` folder that belongs to another run (what differs is named).
    """
    began = time.perf_counter()
    settings = Settings(
        capacity=positive_int(capacity, name="capacity"),
        method=choose("method", method, METHODS),  # type: ignore[arg-type]
        overlong=choose("overlong", overlong, _OVERLONG),  # type: ignore[arg-type]
        window=positive_int(window, name="window", minimum=2),
        seed=None if seed is None else positive_int(seed, name="seed", minimum=0),
        shard_tokens=positive_int(shard_tokens, name="shard_tokens"),
        position_ids=bool(position_ids),
        compression=choose("compression", compression, _CODECS),
        bad_rows=choose("bad_rows", bad_rows, ("error", "skip")),
    )
    positive_int(workers, name="workers", minimum=0)
    report = progress or (lambda stage, done, total, tokens: None)
    paths = input_files(data)
    loaded = load_tokenizer(tokenizer)
    encoder = Encoder(
        tokenizer=loaded,
        fields=(fields,) if isinstance(fields, str) else tuple(fields or ()),
        chat_template=chat_template,
        add_special_tokens=add_special_tokens,
        join=join,
        end=_end_token(loaded, end_token),
        loss=loss,
        leave_out=tuple(leave_out),
    )
    encoder = encoder.with_fields(_first_columns(paths))
    files = _describe(paths, report)
    identity = _identity(files, encoder, settings)
    folder = Path(out)
    with _folder(folder, identity, restart=restart) as (spill, done, resumed):
        if done is not None:
            return PackResult(out=folder, manifest=done, seconds=time.perf_counter() - began, resumed=True)
        worker = Worker(encoder=encoder, spill=spill.folder, skip_bad=bad_rows == "skip")
        with runner(worker, workers) as run:
            found = tokenise(paths, files, spill, settings, run, report)
            if not found.documents:
                raise PadlessError(f"no document in {found.rows} rows: {found.empty} are empty, {found.bad} unreadable")
            shards, fate = write_shards(found, spill, folder, settings, run, report)
        manifest = _manifest(identity, files, found, shards, fate, settings)
        text = json.dumps(manifest, indent=1).encode() + b"\n"
        write_atomically(folder / MANIFEST, lambda file: file.write(text), durable=True, scratch=spill.folder)
        shutil.rmtree(spill.folder, ignore_errors=True)
    return PackResult(out=folder, manifest=manifest, seconds=time.perf_counter() - began, resumed=resumed)


def _end_token(tokenizer: Any, wanted: bool | None) -> int | None:
    if wanted is False or tokenizer is None:
        return None
    end = getattr(tokenizer, "eos_token_id", None)
    if end is None and wanted:
        raise PadlessError(
            f"end_token=True, but {type(tokenizer).__name__} names no end token (eos_token_id): append it to the text,"
            " or pass a Hugging Face tokenizer"
        )
    return None if end is None else int(end)


def _first_columns(paths: Sequence[Path]) -> list[str]:
    """Columns of the first rows that can be read: they decide what a document is, for the whole run."""
    broken: PadlessError | None = None
    for path in paths:
        source = open_file(path)
        with readable(path):
            for first_row, payload in source.payloads(16):
                try:
                    return list(source.unpack(payload, first_row))
                except PadlessError as error:  # a broken row; the policy for bad rows has its turn later
                    if not isinstance(payload, Lines):
                        raise
                    broken = broken or error
                    for line in payload.singles():
                        with suppress(PadlessError):
                            return list(source.unpack(line, first_row))
    if broken is not None:
        raise PadlessError(f"no row can be read: {broken}")
    raise PadlessError(f"no rows in {', '.join(str(path) for path in paths[:5])}{' ...' if len(paths) > 5 else ''}")


def _describe(paths: Sequence[Path], report: Progress) -> list[InputFile]:
    total = sum(path.stat().st_size for path in paths)
    files, done = [], 0
    for path in paths:
        report("reading", done, total, 0)
        files.append(describe_file(path))
        done += files[-1].bytes
    report("reading", done, total, 0)
    return files


def _identity(files: Sequence[InputFile], encoder: Encoder, settings: Settings) -> dict[str, Any]:
    """Everything that decides the bytes of the result."""
    template = encoder.chat_template
    tokenizer = encoder.tokenizer
    return {
        "format": 1,
        "padless": sys.modules["padless"].__version__,
        "pyarrow": metadata.version("pyarrow"),
        "files": [{"name": file.name, "bytes": file.bytes, "blake2b": file.blake2b} for file in files],
        "tokenizer": describe_tokenizer(tokenizer) or f"{type(tokenizer).__name__} {_name(tokenizer)}",
        "options": {
            **asdict(settings),
            "fields": list(encoder.fields),
            "chat_template": _name(template) if callable(template) else template,
            "add_special_tokens": encoder.add_special_tokens,
            "end_token": encoder.end,
            "join": encoder.join,
            "loss": encoder.loss,
            "leave_out": list(encoder.leave_out),
        },
    }


def _name(thing: Any) -> str:
    return f"{getattr(thing, '__module__', '')}.{getattr(thing, '__qualname__', type(thing).__qualname__)}"


@contextmanager
def _folder(
    out: Path, identity: dict[str, Any], *, restart: bool
) -> Iterator[tuple[Spill, dict[str, Any] | None, bool]]:
    """The output folder, locked: its chunks, the manifest if all is done, and whether part of the work is."""
    work = out / _WORK
    try:
        work.mkdir(parents=True, exist_ok=True)
        lock = open(work / "lock", "w")  # noqa: SIM115 (closed below, after the folder may be gone)
    except OSError as error:
        raise PadlessError(f"cannot write in {out}: {error.strerror or error}") from error
    with lock:
        _lock(lock, out)
        if restart:
            _clear(out, work)
        manifest = _load(out / MANIFEST)
        if manifest is not None:
            _refuse_other(out, {key: manifest.get(key) for key in identity}, identity)
            shutil.rmtree(work, ignore_errors=True)
            lost = [shard["name"] for shard in manifest["shards"] if not (out / shard["name"]).exists()]
            if lost:
                raise PadlessError(
                    f"{out / MANIFEST} lists {lost[0]}, which is not there: use restart=True (--restart)"
                )
            yield Spill(work), manifest, True
            return
        begun = _load(work / "run.json")
        if not any(work.glob("*.npz")):  # nothing is done yet that could belong to another run
            begun = None
        if begun is None:
            if any(out.glob("packs-*.parquet")):
                raise PadlessError(
                    f"{out} holds packs of an unknown run: choose another folder, or restart=True (--restart)"
                )
            text = json.dumps(identity).encode()
            write_atomically(work / "run.json", lambda file: file.write(text))
        else:
            _refuse_other(out, begun, identity)
        yield Spill(work), None, begun is not None


def _lock(lock: Any, out: Path) -> None:
    try:
        import fcntl
    except ImportError:  # Windows: two runs into one folder stay the user's business
        return
    try:
        # Of the process, not of the file: workers that outlive a killed parent for a moment do not hold it.
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise PadlessError(f"another run is packing into {out}: wait for it, or choose another folder") from None


def _clear(out: Path, work: Path) -> None:
    for old in (*out.glob("packs-*.parquet"), out / MANIFEST):
        old.unlink(missing_ok=True)
    for old in work.iterdir():
        if old.name != "lock":
            old.unlink()


def _load(path: Path) -> dict[str, Any] | None:
    try:
        return dict(json.loads(path.read_text()))
    except OSError:
        return None
    except (ValueError, TypeError):
        raise PadlessError(f"{path} is damaged: use restart=True (--restart), or choose another folder") from None


def _refuse_other(out: Path, begun: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """A folder belongs to one run: name the first thing that differs."""
    ways = "run it as before to continue, choose another folder, or restart=True (--restart) to begin again"
    if begun.get("tokenizer") != now["tokenizer"]:
        raise PadlessError(f"the tokenizer is not the one that the run in {out} began with: {ways}")
    for was, file in zip(begun.get("files", ()), now["files"], strict=False):
        if any(was.get(key) != value for key, value in file.items()):
            raise PadlessError(
                f"{file['name']} is not as the run in {out} read it ({was['name']}, {was['bytes']} bytes): {ways}"
            )
    if len(begun.get("files", ())) != len(now["files"]):
        raise PadlessError(
            f"the run in {out} began with {len(begun.get('files', ()))} files, not {len(now['files'])}: {ways}"
        )
    options = {**begun.get("options", {})}
    for name, value in now["options"].items():
        if options.get(name) != value:
            raise PadlessError(f"the run in {out} began with {name}={options.get(name)!r}, not {value!r}: {ways}")
    for name in ("format", "padless", "pyarrow"):
        if begun.get(name) != now[name]:
            raise PadlessError(f"the run in {out} began with {name} {begun.get(name)}, not {now[name]}: {ways}")


def _manifest(
    identity: Mapping[str, Any],
    files: Sequence[InputFile],
    found: Tokenised,
    shards: Sequence[ShardFacts],
    fate: Fate,
    settings: Settings,
) -> dict[str, Any]:
    packs = sum(shard.packs for shard in shards)
    tokens = sum(shard.tokens for shard in shards)
    expected = found.tokens - fate.dropped_tokens - fate.truncated_tokens
    if tokens != expected:
        raise PadlessError(
            f"{tokens} tokens were written and {expected} expected: this is a bug in padless, please report it"
        )
    if not shards:
        raise PadlessError(
            f"all {found.documents} documents are over the capacity {settings.capacity} and were dropped"
        )
    first_rows = [sum(found.file_rows[:i]) for i in range(len(files))]
    return {
        **identity,
        "files": [
            {**was, "rows": rows, "first_row": first}
            for was, rows, first in zip(identity["files"], found.file_rows, first_rows, strict=True)
        ],
        "totals": {
            "rows": found.rows,
            "empty": found.empty,
            "bad_rows": found.bad,
            "documents": found.documents - fate.dropped,
            "tokens": tokens,
            "targets": sum(shard.targets for shard in shards),
            "without_targets": sum(shard.without_targets for shard in shards),
            "packs": packs,
            "pieces": sum(shard.pieces for shard in shards),
            "efficiency": tokens / (packs * settings.capacity),
            **asdict(fate),
        },
        "columns": dict(found.columns),
        "columns_left_out": list(found.left),
        "shards": [asdict(shard) for shard in shards],
    }
