"""``padless pack``: a corpus into Parquet shards of packs, resumable at any moment."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from padless.cli._screen import load_object, number, progress_bar, read_text
from padless.data._pack_plan import WINDOW
from padless.data.packing import PackResult, pack_files
from padless.errors import choose

__all__ = ["pack"]

_UNITS = {"reading": "B", "tokenizing": "rows", "planning": "", "writing": "tokens"}


def pack(
    data: Annotated[list[str], typer.Argument(help="JSONL(.gz), JSON, Parquet or Arrow files, or folders of them.")],
    out: Annotated[Path, typer.Option(help="Folder for the shards and manifest.json.")],
    capacity: Annotated[int, typer.Option(help="Tokens that a pack holds at most.")],
    tokenizer: Annotated[
        str | None, typer.Option(help="Folder, tokenizer.json, qwen, deepseek, OWNER/NAME, or module:object.")
    ] = None,
    fields: Annotated[str | None, typer.Option(help="Columns of a document, joined: text, or prompt,response.")] = None,
    chat_template: Annotated[str | None, typer.Option(help="A file with a Jinja chat template.")] = None,
    special_tokens: Annotated[bool, typer.Option(help="Let the tokenizer add its own to plain text.")] = True,
    end_token: Annotated[
        bool | None, typer.Option("--end-token/--no-end-token", help="Append the end token [default: if there is one].")
    ] = None,
    join: Annotated[str, typer.Option(help="What stands between joined columns.")] = "",
    loss: Annotated[str, typer.Option(help="Which tokens are targets: auto, all, completion or assistant.")] = "auto",
    method: Annotated[
        str, typer.Option(help="How documents are fitted: auto, optimal, best-fit-decreasing, next-fit, ...")
    ] = "auto",
    overlong: Annotated[
        str, typer.Option(help="A document over the capacity: error, truncate, split or drop.")
    ] = "error",
    bad_rows: Annotated[str, typer.Option(help="A row that cannot be read: error or skip.")] = "error",
    leave_out: Annotated[
        str | None, typer.Option(help="Columns of lists that are not per token and may be left out: a,b.")
    ] = None,
    window: Annotated[int, typer.Option(help="Documents planned at once.")] = WINDOW,
    seed: Annotated[int, typer.Option(help="Order of the packs.", min=0)] = 0,
    shard_tokens: Annotated[int, typer.Option(help="Tokens of one shard.")] = 1 << 23,
    position_ids: Annotated[bool, typer.Option("--position-ids", help="Write positions, too.")] = False,
    compression: Annotated[str, typer.Option(help="zstd, snappy, gzip, lz4 or none.")] = "zstd",
    workers: Annotated[int, typer.Option(help="Processes; 0 works in this one.")] = 0,
    engine: Annotated[str, typer.Option(help="local, or ray: a Ray cluster, or a local one.")] = "local",
    address: Annotated[str | None, typer.Option(help="Address of the Ray cluster.")] = None,
    restart: Annotated[bool, typer.Option("--restart", help="Begin again: delete packs in --out.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Tokenise a corpus and write it as packs. Run it again after an interruption: it continues."""
    choose("engine", engine, ("local", "ray"))
    extra: dict[str, Any] = {}
    if engine == "ray":
        from padless.integrations.ray import ray_runner

        extra["runner"] = ray_runner(address=address)
    with progress_bar(quiet=as_json) as show:
        result = pack_files(
            data,
            out,
            capacity=capacity,
            tokenizer=load_object(tokenizer),
            fields=None if fields is None else _names(fields),
            chat_template=None if chat_template is None else read_text(chat_template),
            add_special_tokens=special_tokens,
            end_token=end_token,
            join=join,
            loss=loss,  # type: ignore[arg-type]
            method=method,  # type: ignore[arg-type]
            overlong=overlong,  # type: ignore[arg-type]
            bad_rows=bad_rows,  # type: ignore[arg-type]
            leave_out=_names(leave_out or ""),
            window=window,
            seed=seed,
            shard_tokens=shard_tokens,
            position_ids=position_ids,
            compression=compression,
            workers=workers,
            restart=restart,
            progress=lambda stage, done, total, tokens: show(stage, done, total, _UNITS[stage]),
            **extra,
        )
    if as_json:
        print(json.dumps(result.to_dict(), indent=1))
    else:
        _show(result)


def _names(given: str) -> list[str]:
    return [name.strip() for name in given.split(",") if name.strip()]


def _show(result: PackResult) -> None:
    totals = result.totals
    console = Console()
    console.print(
        f"[bold]{totals['documents']:,}[/bold] documents, {totals['tokens']:,} tokens in"
        f" [bold]{totals['packs']:,}[/bold] packs: {totals['efficiency']:.2%} full;"
        f" {len(result.shards):,} shards in {result.out}",
        highlight=False,
    )
    fates = {
        "empty rows": totals["empty"],
        "bad rows skipped": totals["bad_rows"],
        "dropped": totals["dropped"],
        "truncated": totals["truncated"],
        "split": totals["split"],
        "without a target": totals["without_targets"],
    }
    odd = ", ".join(f"{count:,} {name}" for name, count in fates.items() if count)
    if odd:
        console.print(f"of {totals['rows']:,} rows: {odd}", highlight=False)
    if result.manifest["columns_left_out"]:
        console.print(f"columns left out: {', '.join(result.manifest['columns_left_out'])}", highlight=False)
    rate = number(totals["tokens"] / max(result.seconds, 1e-9))
    console.print(
        f"{result.seconds:.1f} s, {rate} tokens/s" + (" (continued)" if result.resumed else ""), highlight=False
    )
