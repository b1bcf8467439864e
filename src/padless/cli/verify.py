"""``padless verify``: which layouts a model may be fed, with figures and reasons."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from padless.cli._screen import check_targets, error_console, load_object
from padless.errors import PadlessError, choose

if TYPE_CHECKING:
    from torch import nn

    from padless.verify import LayoutReport

__all__ = ["verify"]

DTYPES = ("float32", "bfloat16", "float16")
ATTENTION = ("eager", "sdpa", "flex_attention", "flash_attention_2", "flash_attention_3")
_WEIGHTS = ("*.safetensors", "*.bin", "*.pt")


def verify(
    model: Annotated[
        str,
        typer.Argument(
            help="A checkpoint folder; a config file or folder, or a model type such as qwen2 (built small, with"
            " random weights); or MODULE:FUNCTION that returns a model."
        ),
    ],
    layouts: Annotated[
        str | None, typer.Option(help="Comma-separated layouts that must be exact; all are reported without it.")
    ] = None,
    dtype: Annotated[str, typer.Option(help=f"{', '.join(DTYPES)}.")] = "float32",
    attn: Annotated[str | None, typer.Option(help=f"Attention implementation: {', '.join(ATTENTION)}.")] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ...")] = "cpu",
    full_size: Annotated[bool, typer.Option("--full-size", help="Build a configuration as large as it says.")] = False,
    trust_remote_code: Annotated[bool, typer.Option("--trust-remote-code", help="Run code in the folder.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
    html: Annotated[Path | None, typer.Option(help="Also write the report as a page.")] = None,
    cache: Annotated[bool, typer.Option(help="Use and keep reports on disk.")] = True,
) -> None:
    """Check which layouts keep each token's outputs and gradients exactly those of its sequence alone.

    Exit code 1 if a layout named in --layouts is not exact, 2 if the model or an option is no good.
    """
    choose("dtype", dtype, DTYPES)
    if attn is not None:
        choose("attn", attn, ATTENTION)
    names = None if layouts is None else [name.strip() for name in layouts.split(",") if name.strip()]
    _check_names(names)
    check_targets([] if html is None else [html])
    console = error_console()
    with console.status("building the model") as status:
        built = _load(model, dtype=dtype, attn=attn, device=device, full_size=full_size, trusted=trust_remote_code)
        from padless.verify import check_layouts

        status.update(f"{type(built).__name__}: checking")
        report = check_layouts(
            built,
            layouts=names,
            cache=cache,
            progress=lambda line: status.update(f"{type(built).__name__}: {line}"),
        )
    if html is not None:
        try:
            report.to_html(html)
        except OSError as error:
            raise PadlessError(f"cannot write {html}: {error.strerror or error}") from None
    if as_json:
        typer.echo(json.dumps(report.to_dict(), indent=2))
    else:
        _print(report, html)
    refused = [] if names is None else [name for name in report.layouts if not report.allows(name)]
    if refused:
        if not as_json:
            console.print(f"not exact: {', '.join(refused)}", style="bold red", highlight=False)
        raise typer.Exit(1)


def _check_names(names: list[str] | None) -> None:
    from padless.verify import LAYOUTS

    if names is not None and not names:
        raise PadlessError(f"--layouts names no layout; choose from {', '.join(LAYOUTS)}")
    for name in names or ():
        choose("layout", name, LAYOUTS)


def _print(report: LayoutReport, html: Path | None) -> None:
    console = Console()
    console.print(report)
    for note in report.remarks():
        console.print(note, highlight=False)
    where = ", ".join(str(report.environment[name]) for name in ("attention", "dtype", "device"))
    source = "read from the cache" if report.from_cache else f"checked in {report.seconds} s"
    console.print(f"Fastest exact layout: {report.best or 'none'} ({where}; {source})", highlight=False)
    if html is not None:
        console.print(f"Written to {html}", highlight=False)


def _load(spec: str, *, dtype: str, attn: str | None, device: str, full_size: bool, trusted: bool) -> nn.Module:
    """The model that a specification names.

    Raises:
        PadlessError: nothing by that name, or it cannot be loaded; in one line.
    """
    import torch

    kind = getattr(torch, dtype)
    options: dict[str, Any] = {} if attn is None else {"attn_implementation": attn}
    try:
        if ":" in spec and not Path(spec).exists():
            built = _call(spec)
            setter = getattr(built, "set_attn_implementation", None)
            if attn is not None and setter is not None:
                setter(attn)
        elif Path(spec).is_dir() and any(any(Path(spec).glob(pattern)) for pattern in _WEIGHTS):
            from transformers import AutoModelForCausalLM

            common = {"local_files_only": True, "trust_remote_code": trusted, **options}
            built = AutoModelForCausalLM.from_pretrained(spec, dtype=kind, **common)
        else:
            built = _random(spec, full_size=full_size, trusted=trusted, options=options)
        return built.to(device, kind)
    except PadlessError:
        raise
    except Exception as error:
        raise PadlessError(f"{spec} cannot be loaded: {type(error).__name__}: {str(error)[:300]}") from None


def _call(spec: str) -> nn.Module:
    import torch

    built = load_object(spec)
    if not isinstance(built, torch.nn.Module) and callable(built):
        built = built()
    if not isinstance(built, torch.nn.Module):
        raise PadlessError(f"{spec} gave {type(built).__name__}, not a torch.nn.Module")
    return built


def _random(spec: str, *, full_size: bool, trusted: bool, options: dict[str, Any]) -> nn.Module:
    """A configuration, or a model type, with random weights."""
    import torch

    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError:
        raise PadlessError('configurations need transformers: pip install "padless[transformers]"') from None
    from padless.verify import build_small, causal_lm_types, shrink

    path = Path(spec)
    if not path.exists():
        if spec in causal_lm_types():
            return build_small(spec, attn=options.get("attn_implementation"))  # type: ignore[no-any-return]
        raise PadlessError(
            f"{spec!r} is no folder, file, MODULE:FUNCTION or model type of the installed transformers"
            " (qwen2, llama, jamba, ...)"
        )
    config = AutoConfig.from_pretrained(spec, local_files_only=True, trust_remote_code=trusted)
    torch.manual_seed(0)
    model: nn.Module = AutoModelForCausalLM.from_config(
        config if full_size else shrink(config), trust_remote_code=trusted, **options
    )
    return model
