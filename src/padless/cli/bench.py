"""``padless bench``: what padding costs a policy-update step on a real model, and what comes back without it."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from padless.cli._screen import check_targets
from padless.errors import PadlessError
from padless.files import write_text
from padless.lengths import positive_int

if TYPE_CHECKING:
    from padless.bench.results import BenchReport, ModelResult
    from padless.bench.workloads import Workload

__all__ = ["bench"]

_ARMS = "fixed,truncate,greedy,balanced,packed"
_SCALE = 0.036  # two cores take about two minutes
_SCALE_OF_DATA = 0.06  # of real texts, less would leave little of each


def bench(
    model: Annotated[
        list[str],
        typer.Option(
            help="qwen2, jamba, bamba, qwen2.5-1.5b, qwen2.5-7b, a folder or file with a Hugging Face config (and"
            " weights), or OWNER/NAME on a hub. Give it again for more."
        ),
    ] = ["qwen2", "jamba"],  # noqa: B006 - Typer reads it, nobody changes it
    workload: Annotated[str, typer.Option(help="Built-in lengths: gsm8k-rl, longcot-rl or sft-mix.")] = "gsm8k-rl",
    data: Annotated[
        Path | None, typer.Option(help="JSONL, JSONL.gz or Parquet with prompt and response, messages, or text.")
    ] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="For --data: a folder, a tokenizer.json, qwen, deepseek, or OWNER/NAME.")
    ] = None,
    arms: Annotated[
        str, typer.Option(help="Which to run, with commas; also truncate-mask, greedy-mask, balanced-mask.")
    ] = _ARMS,
    sequences: Annotated[str, typer.Option(metavar="N", help="Sequences of one optimizer step.")] = "80",
    token_budget: Annotated[
        str | None,
        typer.Option(metavar="N", help="Most padded tokens of a micro-batch [default: one row of fixed]."),
    ] = None,
    rows: Annotated[str, typer.Option(metavar="N", help="Rows of a micro-batch in fixed and truncate.")] = "4",
    scale: Annotated[
        float | None,
        typer.Option(
            help="Multiplies lengths and maxima: 1 is the real setting"
            f" [default: {_SCALE}; with --data {_SCALE_OF_DATA}]."
        ),
    ] = None,
    max_prompt: Annotated[
        str | None, typer.Option(metavar="N", help="Tokens that prompts are padded and cut to, before scaling.")
    ] = None,
    max_response: Annotated[str | None, typer.Option(metavar="N", help="The same for responses.")] = None,
    repeats: Annotated[str, typer.Option(metavar="N", help="Optimizer steps of each arm, in turn.")] = "3",
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "float32",
    threads: Annotated[str | None, typer.Option(metavar="N", help="CPU threads [default: all cores].")] = None,
    checkpointing: Annotated[
        bool, typer.Option("--checkpointing", help="Recompute activations in the backward pass.")
    ] = False,
    masks: Annotated[bool, typer.Option(help="Also time truncate, greedy and balanced with an attention mask.")] = True,
    seed: Annotated[int, typer.Option(help="Of weights and sequences.", min=0)] = 0,
    as_json: Annotated[
        str | None, typer.Option("--json", metavar="FILE|-", help="Write JSON; - is standard output.")
    ] = None,
    html: Annotated[Path | None, typer.Option(help="Write a self-contained HTML report.")] = None,
) -> None:
    """Time one policy-update step under every way of cutting it into micro-batches, and prove that all are equal."""
    only_json = as_json == "-"
    targets = [Path(as_json)] if as_json and not only_json else []
    check_targets([*targets, *([html] if html else [])], make_folders=True)
    from padless.bench.compiling import PARTS, compiled_beside

    parts = [part for part in PARTS if device == "cpu" or part != "scan"]
    with redirect_stdout(sys.stderr), _progress(quiet=only_json) as tell, compiled_beside(parts) as compiled:
        tell("loading torch and transformers")
        _prepare(threads, device)
        from padless.bench.policy_update import BenchOptions, run

        tell("reading sequences")
        sampled = _sequences(workload, data, tokenizer, sequences, scale, (max_prompt, max_response), seed)
        options = BenchOptions(
            models=tuple(name for given in model for name in _split(given)),
            arms=tuple(name.strip() for name in arms.split(",") if name.strip()),
            rows=_integer("--rows", rows),
            token_budget=None if token_budget is None else _integer("--token-budget", token_budget),
            repeats=_integer("--repeats", repeats),
            device=device,
            dtype=dtype,
            seed=seed,
            masks=masks,
            checkpointing=checkpointing,
        ).checked(sampled)
        tell("waiting for kernels, which are compiled once on a machine")
        compiled()
        report = run(sampled, options, progress=tell)
    _write(report, as_json, html, only_json)
    failed = {name: found.failed for name, found in report.models.items() if found.failed}
    if failed:
        told = "; ".join(f"{name}: {', '.join(arms)}" for name, arms in failed.items())
        print(f"padless: not equal to each sequence alone: {told}", file=sys.stderr)
        raise typer.Exit(1)


def _sequences(
    workload: str,
    data: Path | None,
    tokenizer: str | None,
    sequences: str,
    scale: float | None,
    maxima: tuple[str | None, str | None],
    seed: int,
) -> Workload:
    from padless.bench.workloads import built_in, from_data

    limits: dict[str, Any] = {}
    for name, option, given in zip(
        ("prompt_max", "response_max"), ("--max-prompt", "--max-response"), maxima, strict=True
    ):
        if given is not None:
            limits[name] = _integer(option, given)
    count = _integer("--sequences", sequences)
    if scale is None:
        scale = _SCALE if data is None else _SCALE_OF_DATA
    if data is not None:
        return from_data(data, tokenizer=tokenizer, sequences=count, scale=scale, seed=seed, **limits)
    if tokenizer is not None:
        raise PadlessError("--tokenizer goes with --data FILE; built-in workloads draw token ids at random")
    return built_in(workload, sequences=count, scale=scale, seed=seed, **limits)


def _prepare(threads: str | None, device: str) -> None:
    """Check what must be there, and set up torch and transformers."""
    from importlib.util import find_spec

    missing = [name for name in ("torch", "transformers") if find_spec(name) is None]
    if missing:
        raise PadlessError(f'the benchmark needs {" and ".join(missing)}: pip install "padless[transformers]"')
    import torch
    import transformers

    from padless.bench.models import pick_device

    pick_device(device)
    if threads is not None:
        torch.set_num_threads(_integer("--threads", threads))
    elif "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


def _split(given: str) -> list[str]:
    """``a,b`` names two models, unless it is a path."""
    return [given] if Path(given).exists() else [name.strip() for name in given.split(",") if name.strip()]


def _integer(option: str, given: str) -> int:
    try:
        number = int(given)
    except ValueError:
        raise PadlessError(f"{option}={given!r}; expected a whole number of at least 1") from None
    return positive_int(number, name=option)


@contextmanager
def _progress(*, quiet: bool) -> Iterator[Callable[[str], None]]:
    """A line on standard error that says what is being done; a list of lines where that is no terminal."""
    console = Console(file=sys.stderr)
    if not console.is_terminal:
        yield (lambda text: None) if quiet else (lambda text: print(text, file=sys.stderr, flush=True))
        return
    with console.status("starting") as status:
        yield status.update


def _write(report: BenchReport, as_json: str | None, html: Path | None, only_json: bool) -> None:
    """Files first: a screen that nobody reads to its end must not lose them."""
    text = json.dumps(report.to_dict(), indent=1)
    written = []
    if as_json and not only_json:
        try:
            write_text(as_json, text + "\n")
        except OSError as error:
            raise PadlessError(f"cannot write {as_json}: {error.strerror or error}") from None
        written.append(f"JSON: {as_json}")
    if html is not None:
        from padless.bench.report import write_html

        written.append(f"report: {write_html(report, html)}")
    if only_json:
        print(text)
        return
    _show(report)
    for line in written:
        print(line)


def _show(report: BenchReport) -> None:
    console = Console()
    if not console.is_terminal:
        console = Console(width=132)
    work = report.workload
    console.print(
        f"[bold]{work['name']}[/]: {work['sequences']} sequences, {work['real_tokens']:,} tokens, longest"
        f" {work['longest']:,}; fixed pads to {work['prompt_max']:,} + {work['response_max']:,};"
        f" token budget {report.token_budget:,}",
        highlight=False,
    )
    for name, found in report.models.items():
        console.print(_times(name, found))
        console.print(_equality(name, found))
        for line in _remarks(found):
            console.print(line, highlight=False)
    scale = report.workload["scale"]
    if scale != 1:
        console.print(f"lengths and maxima are {scale:g} of the workload's (--scale 1 keeps them)", highlight=False)
    console.print(f"{report.seconds:.0f} s on {report.machine['processor']}, {report.machine['threads']} threads")
    if report.disturbed:
        console.print(report.disturbed, style="bold", highlight=False)


def _times(name: str, found: ModelResult) -> Table:
    table = Table(title=f"{name}: one optimizer step", title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("arm", style="bold", no_wrap=True)
    for header in ("step", "spread", "vs fixed", "/ packed", "recovered", "occupancy", "micros", "tokens/s",
                   "peak MiB", "overhead"):  # fmt: skip
        table.add_column(header, justify="right", no_wrap=True)
    fixed, packed, gain = found.ratio_to("fixed"), found.ratio_to("packed"), found.gain_recovered
    for arm_name, arm in found.arms.items():
        times = arm.seconds_all
        memory = arm.peak_memory_bytes
        table.add_row(
            arm_name + ("" if arm.valid else " *"),
            f"{arm.seconds:.3g} s",
            f"{min(times):.3g}-{max(times):.3g}",
            f"{1 / fixed[arm_name]:.1f} x" if arm_name in fixed else "-",
            f"{packed[arm_name]:.2f}" if arm_name in packed else "-",
            f"{gain[arm_name]:.1%}" if arm_name in gain else "-",
            f"{arm.real_tokens / arm.padded_tokens:.1%}",
            str(len(arm.steps[0].micros)),
            f"{arm.real_tokens / arm.seconds:,.0f}",
            "-" if memory is None else f"{memory / 2**20:,.0f}",
            f"{arm.overhead_share:.2%}",
        )
    return table


def _equality(name: str, found: ModelResult) -> Table:
    table = Table(
        title=f"{name}: largest difference from each sequence alone, and from fixed",
        title_justify="left",
        box=SIMPLE_HEAD,
    )
    table.add_column("arm", style="bold")
    for header in ("log-prob", "loss", "gradient", f"update ({found.updates} steps)", ""):
        table.add_column(header, justify="right")
    for arm_name, arm in found.arms.items():
        cells = ["-" if value is None else f"{value:.1e}" for value in arm.differences.values()]
        told = "equal" if arm.valid else "timing only" if arm_name == "packed" else "DIFFERS"
        table.add_row(arm_name, *cells, told)
    return table


def _remarks(found: ModelResult) -> Iterator[str]:
    packed = found.leaks.get("packed")
    if packed is not None and "packed" in found.arms and not found.arms["packed"].valid:
        yield (
            "* packed is timing only: sequences that share a row change each other's log-probabilities by up to"
            f" {packed['foreign_influence']:.1e}"
        )
    bare = found.leaks.get("right-padded-no-mask", {})
    for arm, told in bare.get("seconds", {}).items():
        yield f"  {arm}: {told['without_mask']:.3g} s without an attention mask (shown), {told['with_mask']:.3g} s with"
    if bare and not bare["used"]:
        yield "  right-padded arms have an attention mask: without it this model is not exact"
    if found.described["linear_scan"]:
        yield "  the recurrent scan is the benchmark's own, linear in the width, equal to the stock one (docs/bench.md)"
