"""The same optimizer steps in every host: one leader imports the libraries once and forks the ranks of each group.

Run as ``python -m support.same_result RANKS FOLDER [all]``: writes ``FOLDER/cells.json``, a list of what each cell
gave. Without ``all``, two ranks run one half of the combinations of model and mode, and four ranks the other.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

HOSTS = {
    "loop": ("token-mean", "seq-mean-token-mean"),
    "accelerate": ("token-mean", "seq-mean-token-mean"),
    "lightning": ("token-mean", "seq-mean-token-mean"),
    "trainer": ("token-mean", "seq-mean-token-mean"),
    "sft": ("token-mean",),  # TRL has no other
    "dpo": ("sigmoid", "ipo"),  # means over pairs of summed, and of mean log-probabilities
    "grpo": ("dapo", "grpo"),  # token mean, mean of sequence means
}
KINDS = ("qwen2", "jamba")
ROWS = 4
BUDGET = {"loop": 64, "accelerate": 64, "lightning": 64, "trainer": 64, "sft": 64, "dpo": 128, "grpo": 96}


def wraps_of(ranks: int) -> tuple[str, ...]:
    """How parameters are held."""
    return ("one",) if ranks == 1 else ("ddp", "fsdp2")


def combinations(ranks: int, everything: bool) -> list[tuple[str, str, str]]:
    """(host, model, mode)."""
    found = []
    for host, modes in HOSTS.items():
        for i, kind in enumerate(KINDS):
            for j, mode in enumerate(modes):
                first_half = (i + j) % 2 == 0
                if everything or ranks == 1 or first_half == (ranks == 2) or len(modes) == 1:
                    found.append((host, kind, mode))
    return found


def cells_of(ranks: int, everything: bool) -> list[tuple[str, str, str, str]]:
    """(host, model, mode, wrap) of all cells."""
    return [(*cell, wrap) for cell in combinations(ranks, everything) for wrap in wraps_of(ranks)]


def host_is_off(host: str, kind: str, wrap: str) -> bool:
    """TRL's fused head computes another gradient for a Jamba that transformers shards, without padless too."""
    return wrap == "fsdp2" and kind == "jamba" and host in ("sft", "dpo", "grpo")


def runs_of(host: str, kind: str, mode: str, folder: Path, ranks: int) -> Callable[[bool, str], Any]:
    """``run(regrouped, wrap)`` of one host."""
    from padless.integrations.transformers import PadlessOptions
    from support import accelerate_runs, lightning_runs, loop_runs, trl_runs

    loops: dict[str, Any] = {"rows": ROWS, "high": 24, "budget": BUDGET[host], "mode": mode}
    if host == "loop":
        return lambda regrouped, wrap: loop_runs.run(kind, regrouped=regrouped, wrap=wrap, **loops)
    if host == "accelerate":
        return lambda regrouped, wrap: accelerate_runs.run(kind, regrouped=regrouped, wrap=wrap, **loops)
    if host == "lightning":
        return lambda regrouped, wrap: lightning_runs.run(
            kind, folder, padless=regrouped, wrap=wrap, ranks=ranks, **loops
        )
    changes: dict[str, Any] = {"per_device_train_batch_size": ROWS // 2, "gradient_accumulation_steps": 2}
    if host == "trainer":
        run: Any = trl_runs.run_plain
        if mode != "token-mean":
            changes["more"] = {"trainer_class": mean_loss()}
    else:
        run = trl_runs.RUNS[host]
        changes |= {} if host == "sft" else {"loss_type": mode}

    def go(regrouped: bool, wrap: str) -> Any:
        options = PadlessOptions(token_budget=BUDGET[host]) if regrouped else None
        given = {key: dict(value) if isinstance(value, dict) else value for key, value in changes.items()}
        model = {"model": trl_runs.sharded_model(folder, kind)} if wrap == "fsdp2" else {}
        return run(folder, kind, padless=options, **given, **model)

    return go


def mean_loss() -> type:
    """A Trainer whose loss is a mean over sequences of means over their targets."""
    from transformers import Trainer

    from padless.logits import token_losses
    from padless.loss import target_mask

    class SequenceMean(Trainer):
        loss_is_scaled_for_ga = False

        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
            outputs = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"])
            held = target_mask(inputs["labels"], inputs["attention_mask"])
            losses = token_losses(outputs.logits, inputs["labels"])
            loss = ((losses * held).sum(1) / held.sum(1).clamp(min=1)).mean()
            return (loss, outputs) if return_outputs else loss

    return SequenceMean


def compare(host: Any, ours: Any, kind: str) -> dict[str, float]:
    """Largest differences of losses and gradient norms (relative), of parameters (absolute); how far these moved."""
    import numpy as np

    from support.trainers import tiny_model

    def apart(a: list[float], b: list[float]) -> float:
        return float(np.max(np.abs(np.array(a) - np.array(b)) / np.maximum(np.abs(np.array(a)), 0.1)))

    assert len(host.losses) == len(ours.losses) == len(host.grad_norms) == len(ours.grad_norms) == 10
    assert host.parameters.keys() == ours.parameters.keys()
    apart_by = max(float((host.parameters[name] - value).abs().max()) for name, value in ours.parameters.items())
    begun = dict(tiny_model(kind).named_parameters())
    moved = max(float((begun[name] - value).abs().max()) for name, value in host.parameters.items())
    return {
        "moved": moved,
        "losses": apart(host.losses, ours.losses),
        "grad_norms": apart(host.grad_norms, ours.grad_norms),
        "parameters": apart_by,
    }


def rank_main(ranks: int, folder: Path, everything: bool) -> None:
    """All cells in turn; rank 0 writes the results as they come."""
    import torch.distributed as dist

    if ranks > 1:
        dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    results: list[dict[str, Any]] = []
    for host, kind, mode in combinations(ranks, everything):
        place = folder / f"{host}-{kind}-{mode}"
        place.mkdir(exist_ok=True)
        for wrap in wraps_of(ranks):
            results.append(run_cell(host, kind, mode, wrap, place, ranks))
            if rank == 0:
                (folder / "cells.json").write_text(json.dumps(results, indent=1))


_REFERENCE: dict[str, Any] = {}


def run_cell(host: str, kind: str, mode: str, wrap: str, folder: Path, ranks: int) -> dict[str, Any]:
    """The host alone against the host with padless. Sharded runs are held against the host's DDP run."""
    import torch.distributed as dist

    begun = time.perf_counter()
    cell: dict[str, Any] = {"host": host, "kind": kind, "mode": mode, "wrap": wrap, "ranks": ranks}
    run = runs_of(host, kind, mode, folder, ranks)
    try:
        if wrap != "fsdp2":
            _REFERENCE["run"] = run(False, wrap)
        alone, ours = _REFERENCE["run"], run(True, wrap)
        padded = [alone.padded_tokens, ours.padded_tokens]
        cell |= compare(alone, ours, kind)
        if host_is_off(host, kind, wrap):
            cell["host_alone"] = compare(alone, run(False, wrap), kind)["parameters"]
    except Exception:
        cell["error"] = traceback.format_exc()[-3000:]
        padded = [0, 0]
    if ranks > 1:
        parts: list[Any] = [None] * ranks
        dist.all_gather_object(parts, (cell, padded))
        for other, _ in parts:
            cell |= {"error": other["error"]} if "error" in other else {}
            for key in ("losses", "grad_norms", "parameters"):
                if key in cell and key in other:
                    cell[key] = max(cell[key], other[key])
        padded = [sum(part[at] for _, part in parts) for at in (0, 1)]
    return {**cell, "padded_tokens": padded, "seconds": time.perf_counter() - begun}


def main(ranks: int, folder: Path, everything: bool) -> int:
    """Import once, fork the ranks, wait."""
    os.environ |= {"HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1", "TOKENIZERS_PARALLELISM": "false"}
    import torch

    torch.set_num_threads(1)
    import accelerate
    import datasets
    import lightning
    import trl
    from trl import DPOTrainer, GRPOTrainer, SFTTrainer

    from support import accelerate_runs, lightning_runs, loop_runs, trl_runs
    from support.ranks import free_port

    assert all((accelerate, datasets, lightning, trl, DPOTrainer, GRPOTrainer, SFTTrainer))
    assert all((accelerate_runs, lightning_runs, loop_runs, trl_runs))
    datasets.disable_progress_bars()
    port, children = free_port(), []
    for rank in range(ranks):
        child = os.fork()
        if child:
            children.append(child)
            continue
        code = 1
        try:
            if ranks > 1:
                os.environ |= {"LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
                os.environ |= {"WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank)}
            os.environ["RANK"] = str(rank)
            if ranks == 1:
                os.environ.pop("WORLD_SIZE", None)
            rank_main(ranks, folder, everything)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    return max(map(abs, codes))


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:] == ["all"]))
