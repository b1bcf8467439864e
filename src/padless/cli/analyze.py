"""``padless analyze``: how much of the compute is padding, what to set, and what it will bring."""

from __future__ import annotations

import json
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from padless.analysis import Analysis, DataFacts, analyze_lengths, read_model
from padless.analysis.settings import FRAMEWORKS
from padless.cli._screen import check_targets, load_object, progress_bar, read_text
from padless.data._inputs import input_files, readable
from padless.data.measure import Measured, measure
from padless.errors import PadlessError, choose

__all__ = ["analyze"]

_LONG_ENOUGH = 3.0
"""Seconds of measuring after which the planners are loaded beside it: small inputs are done by then."""


def analyze(
    data: Annotated[
        list[str], typer.Argument(help="JSONL(.gz), JSON, Parquet, Arrow, .npy of lengths, or folders of them.")
    ],
    tokenizer: Annotated[
        str | None, typer.Option(help="Folder, tokenizer.json, qwen, deepseek, OWNER/NAME, or module:object.")
    ] = None,
    fields: Annotated[
        str | None,
        typer.Option(help="Columns of a sequence: a,b are joined; a,b;c,d are two fields padded apart."),
    ] = None,
    padded_apart: Annotated[
        bool, typer.Option("--padded-apart", help="Today each column of --fields is padded on its own, as in RL.")
    ] = False,
    chat_template: Annotated[str | None, typer.Option(help="A file with a Jinja chat template.")] = None,
    add_tokens: Annotated[int, typer.Option(help="Tokens that training appends to each sequence.")] = 0,
    max_length: Annotated[int | None, typer.Option(help="Limit on one sequence, in tokens.")] = None,
    overlong: Annotated[
        str, typer.Option(help="What happens to longer ones: truncate, drop, split or error.")
    ] = "truncate",
    weights: Annotated[
        str | None, typer.Option(help="Mixture: one number for each DATA, its share of the epoch, e.g. 0.7,0.3.")
    ] = None,
    token_budget: Annotated[int | None, typer.Option(help="Padded tokens of one micro-batch.")] = None,
    ranks: Annotated[int, typer.Option(help="Data-parallel ranks.")] = 1,
    sequences_per_step: Annotated[
        int | None, typer.Option(help="Sequences of one optimizer step, over all ranks.")
    ] = None,
    rows: Annotated[int | None, typer.Option(help="Sequences of one micro-batch today.")] = None,
    current: Annotated[str | None, typer.Option(help="What is done today: longest-in-batch, fixed, ...")] = None,
    model: Annotated[str | None, typer.Option(help="config.json or checkpoint folder: cost model, memory.")] = None,
    multiple_of: Annotated[int, typer.Option(help="Widths are rounded up to it.")] = 1,
    sync: Annotated[
        str, typer.Option(help="Where ranks meet: microbatch (FSDP, ZeRO-3) or step (DDP).")
    ] = "microbatch",
    sample: Annotated[int, typer.Option(help="Sequences to simulate at most.")] = 16_384,
    workers: Annotated[int, typer.Option(help="Processes that tokenize.")] = 0,
    seed: Annotated[int, typer.Option(help="Order of the epoch.", min=0)] = 0,
    cache: Annotated[bool, typer.Option(help="Keep measured lengths beside the data.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    html: Annotated[Path | None, typer.Option(help="Write a self-contained page.")] = None,
) -> None:
    """Say how much of the compute is padding, what each strategy would bring, and what to set."""
    choose("sync", sync, ("microbatch", "step"))
    choose("overlong", overlong, ("truncate", "drop", "split", "error"))
    check_targets([] if html is None else [html])
    columns = _fields(fields, padded_apart)
    template = None if chat_template is None else read_text(chat_template)
    options: dict[str, Any] = {
        "tokenizer": load_object(tokenizer),
        "fields": columns,
        "chat_template": template,
        "add_tokens": add_tokens,
        "max_length": max_length,
        "overlong": overlong,
        "workers": workers,
        "cache": cache,
    }
    found = [_read(name, options, quiet=as_json) for name in data]
    shapes = {part.lengths.shape[1:] for part in found}
    if len(shapes) > 1:
        raise PadlessError("the data sets have sequences of different numbers of fields: analyze them apart")
    lengths = np.concatenate([part.lengths for part in found])
    if not len(lengths):
        seen = sum(part.rows for part in found)
        why = f"all {seen:,} rows are empty or dropped" if seen else "there are no rows"
        raise PadlessError(f"no sequence in {', '.join(data)}: {why}")
    facts = DataFacts(
        files=tuple(str(file) for name in data for file in _named(name)),
        rows=sum(part.rows for part in found),
        empty=sum(len(part.empty) for part in found),
        dropped=sum(len(part.dropped) for part in found),
        truncated=sum(len(part.truncated) for part in found),
    )
    total = lengths if lengths.ndim == 1 else lengths.sum(axis=1)
    analysis = analyze_lengths(
        lengths,
        token_budget=token_budget,
        ranks=ranks,
        sequences_per_step=sequences_per_step,
        sync=sync,  # type: ignore[arg-type]
        multiple_of=multiple_of,
        model=None if model is None else read_model(model, width=int(total.max())),
        current=current,
        data=facts,
        max_length=max_length,
        sources=np.repeat(np.arange(len(found)), [len(part) for part in found]),
        names=[Path(name).name for name in data],
        weights=None if weights is None else _weights(weights, len(data)),
        sample=sample,
        seed=seed,
        rows=rows,
    )
    if html is not None:
        from padless.analysis.page import write_html

        write_html(analysis, html, title=", ".join(Path(name).name for name in data))
    if as_json:
        print(json.dumps(analysis.to_dict(), indent=1))
    else:
        _show(analysis, html)


def _fields(given: str | None, padded_apart: bool) -> Any:
    if given is None:
        if padded_apart:
            return [["prompt"], ["response"]]
        return None
    groups = [[name.strip() for name in group.split(",") if name.strip()] for group in given.split(";")]
    if not all(groups):
        raise PadlessError(f"--fields {given!r} names no column: write a,b or a,b;c,d")
    if padded_apart and len(groups) == 1:
        return [[name] for name in groups[0]]
    return groups[0] if len(groups) == 1 else groups


def _named(name: str) -> list[Path]:
    return [Path(name)] if name.endswith(".npy") else input_files(name)


def _read(name: str, options: dict[str, Any], *, quiet: bool) -> Measured:
    if name.endswith(".npy"):
        try:
            array = np.load(name, mmap_mode="r")
        except OSError as error:
            raise PadlessError(f"cannot read {name}: {error}") from None
        except (EOFError, ValueError):
            raise PadlessError(f"{name} holds no array of numbers: write one with numpy.save(path, lengths)") from None
        if array.ndim not in (1, 2) or array.dtype.kind not in "iu":
            raise PadlessError(
                f"{name} holds {array.dtype} of shape {array.shape}; expected lengths, (N,) or (N, fields)"
            )
        kept = {key: options[key] for key in ("max_length", "overlong")}
        return measure(np.asarray(array), **kept)
    files = input_files(name)
    with readable(name), progress_bar(quiet=quiet) as show, _loading_planners(options["workers"]) as began:
        source: Any = files[0] if len(files) == 1 else files
        stage = f"measuring {Path(name).name}"

        def progress(done: int, total: int | None) -> None:
            began()
            show(stage, done, total, "rows")

        try:
            with _warnings_in_one_line():
                return measure(source, progress=progress, **options)
        except PadlessError as error:
            if not str(error).startswith("row "):
                raise
            raise PadlessError(f"{name}, {error}") from error


@contextmanager
def _loading_planners(workers: int) -> Iterator[Callable[[], None]]:
    """While workers tokenize for some time, load what plans afterwards: a second or two that nobody then waits for.

    What is given is called once the workers run. No process is forked while modules are loaded: it would inherit locks
    that nobody releases.
    """
    timer = threading.Timer(_LONG_ENOUGH, _load_planners)
    timer.daemon = True

    def began() -> None:
        if workers > 0 and timer.ident is None:
            timer.start()

    try:
        yield began
    finally:
        timer.cancel()
    if timer.ident is not None:
        timer.join()  # workers of the next data set are forked


@contextmanager
def _warnings_in_one_line() -> Iterator[None]:
    def show(message: Warning | str, *_: Any, **__: Any) -> None:
        print(f"padless: {' '.join(str(message).split())}", file=sys.stderr)

    with warnings.catch_warnings():
        warnings.showwarning = show
        yield


def _load_planners() -> None:
    with suppress(Exception):  # whatever it is, it comes again, where it is told
        analyze_lengths(np.arange(1, 301), token_budget=1024)


def _weights(given: str, count: int) -> list[float]:
    try:
        numbers = [float(part) for part in given.split(",")]
    except ValueError:
        raise PadlessError(f"--weights {given!r}; expected numbers with commas between") from None
    if len(numbers) != count:
        raise PadlessError(f"--weights has {len(numbers)} numbers for {count} data sets: give one for each")
    return numbers


def _show(analysis: Analysis, html: Path | None) -> None:
    console = Console()
    data, facts, setup = analysis.data, analysis.lengths, analysis.setup
    console.print(
        f"[bold]{facts.count:,}[/bold] sequences, {facts.total:,} tokens: mean {facts.mean:,.1f},"
        f" median {facts.p50:,.0f}, p90 {facts.p90:,.0f}, p99 {facts.p99:,.0f}, longest {facts.max:,}"
        f" ({data.empty:,} empty, {data.dropped:,} dropped, {data.truncated:,} truncated of {data.rows:,} rows)",
        highlight=False,
    )
    console.print(_histogram_line(analysis), highlight=False)
    table = Table(
        title=f"token budget {setup.token_budget:,}, {setup.ranks} ranks, {setup.sequences_per_step:,} per step",
        title_justify="left",
    )
    table.add_column("strategy", no_wrap=True)
    for name in ("occupancy", "time", "batches", "imbalance", "corr."):
        table.add_column(name, justify="right", no_wrap=True)
    for name, found in analysis.figures.items():
        correlation = found.neighbour_correlation
        chosen = name == analysis.recommendation.strategy
        table.add_row(
            f"{name} *" if name == analysis.current else name,
            f"{found.occupancy:.1%}",
            f"{found.step_time_ratio:.3f}",
            f"{found.microbatches:,}",
            f"{found.rank_imbalance:.1%}",
            "-" if correlation is None else f"{correlation:+.2f}",
            style="bold" if chosen else None,
        )
    table.caption = (
        "* what is done now; time: over the padding-free bound; corr.: length correlation of neighbouring steps"
    )
    console.print(table)
    if analysis.model is not None:
        memory = analysis.model.memory(setup.token_budget)
        console.print(
            f"{analysis.model.name}: activations of a full micro-batch about {memory['activations_gib']:.1f} GiB,"
            f" {memory['activations_checkpointed_gib']:.1f} GiB with gradient checkpointing (estimates)",
            highlight=False,
        )
    for notice in analysis.warnings:
        console.print(f"[yellow]warning[/yellow]: {notice.message}", highlight=False)
    console.print(f"\n[bold]Recommendation: {analysis.recommendation.strategy}[/bold]", highlight=False)
    console.print(analysis.recommendation.reason, highlight=False)
    for framework in FRAMEWORKS:
        if framework in analysis.recommendation.settings:
            console.print(f"\n[bold]{framework}[/bold]")
            console.print(analysis.recommendation.settings[framework], highlight=False, markup=False, soft_wrap=True)
    if html is not None:
        console.print(f"\nwrote {html}", highlight=False)


def _histogram_line(analysis: Analysis) -> str:
    """The histogram in one line of block characters."""
    edges, counts = analysis.histogram["edges"], analysis.histogram["counts"]
    most = max(counts)
    blocks = " ▁▂▃▄▅▆▇█"
    line = "".join(blocks[-(-(len(blocks) - 1) * count // most)] for count in counts)
    return f"{edges[0]:,} [{line}] {edges[-1] - 1:,}"
