"""``padless tune``: the largest token budget that fits, and what micro-batches cost, in a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from padless.cli._screen import check_targets
from padless.errors import PadlessError
from padless.tuning.profile import DEFAULT_PATH, Profile

if TYPE_CHECKING:
    from padless.tuning import Trial

__all__ = ["tune"]

OPTIMIZERS = ("adamw", "sgd", "sgd-momentum")


def tune(
    model: Annotated[
        str, typer.Argument(help="Folder with config.json or weights, a config file, a built-in name, OWNER/NAME.")
    ],
    max_length: Annotated[int, typer.Option(help="Longest row of the data, in tokens.")] = 4096,
    memory_limit: Annotated[
        str | None, typer.Option(help="What a step may use, as 80GiB; on a GPU its free memory if not given.")
    ] = None,
    headroom: Annotated[float, typer.Option(help="Share of the limit that stays free.")] = 0.1,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "float32",
    gradient_checkpointing: Annotated[
        bool, typer.Option("--gradient-checkpointing", help="Recompute activations, as the training will.")
    ] = False,
    optimizer: Annotated[str, typer.Option(help=f"Room for its state: {', '.join(OPTIMIZERS)}.")] = "adamw",
    max_budget: Annotated[int | None, typer.Option(help="Do not look further.")] = None,
    tolerance: Annotated[float, typer.Option(help="How close to the largest that fits.")] = 0.05,
    calibrate_seconds: Annotated[
        float, typer.Option(help="Time for measuring the cost model; 0 leaves it out.")
    ] = 30.0,
    out: Annotated[Path, typer.Option(help="Where to write; the integrations look here.")] = Path(DEFAULT_PATH),
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Find the largest token budget that fits in memory, measure what micro-batches cost, and write both to a file."""
    check_targets([out], make_folders=True)
    import torch

    from padless.bench.models import build, pick_device
    from padless.errors import choose
    from padless.tuning import tune as search

    choose("optimizer", optimizer, OPTIMIZERS)
    pick_device(device)
    built = build(model, device=device, dtype=dtype)
    if gradient_checkpointing:
        if not built.model.supports_gradient_checkpointing:
            raise PadlessError(f"{type(built.model).__name__} does not support gradient checkpointing")
        built.model.gradient_checkpointing_enable()
    made = None
    if optimizer != "adamw":
        momentum = 0.9 if optimizer == "sgd-momentum" else 0.0
        made = torch.optim.SGD(built.model.parameters(), lr=0.0, momentum=momentum)
    console = Console(stderr=True)
    with console.status(f"{built.name}: building") as status:

        def show(trial: Trial) -> None:
            verdict = f"{trial.peak / 2**20:,.0f} MiB" if trial.fits else "does not fit"
            status.update(
                f"{built.name}: {trial.rows} x {trial.width} = {trial.rows * trial.width:,} tokens: {verdict}"
            )

        profile = search(
            built.model,
            max_length=max_length,
            optimizer=made,
            memory_limit=memory_limit,
            headroom=headroom,
            max_budget=max_budget,
            tolerance=tolerance,
            calibrate_seconds=calibrate_seconds,
            on_trial=show,
        )
    profile.save(out)
    if as_json:
        typer.echo(json.dumps({**profile.to_dict(), "path": str(out)}))
    else:
        _print(profile, out)


def _print(profile: Profile, out: Path) -> None:
    table = Table(title=f"{profile.model.split(':')[0]} on {profile.device}", show_header=False)
    table.add_row("token budget", f"{profile.token_budget:,}")
    table.add_row(
        "memory needed / limit", f"{profile.peak_memory / 2**20:,.0f} / {profile.memory_limit / 2**20:,.0f} MiB"
    )
    table.add_row("longest row", f"{profile.max_length:,} tokens")
    table.add_row("trials", f"{len(profile.trials)}, {sum(not fits for _, _, fits, _ in profile.trials)} did not fit")
    if profile.cost is not None:
        cost = profile.cost
        table.add_row(
            "a micro-batch costs", f"{cost.per_microbatch * 1e3:.2f} ms + {cost.per_token * 1e6:.3f} µs per token"
        )
        if cost.per_column:
            table.add_row("", f"+ {cost.per_column * 1e6:.3f} µs per column")
        if cost.per_token_squared:
            table.add_row("", f"+ {cost.per_token_squared * 1e9:.4f} ns per token and column")
        if cost.residual is not None:
            table.add_row("unexplained", f"{cost.residual:.1%}")
    console = Console()
    console.print(table)
    console.print(f'Written to {out}: token_budget="auto" reads it.')
