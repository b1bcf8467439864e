"""One job: the same policy-update step by verl alone and with padless, on two small models.

Run by `support.verl_env.run_ranks`; the result of each rank is a dict of `Run` by (model, arm).
"""

from __future__ import annotations

import os
import pickle
import sys
from pathlib import Path
from typing import Any

import numpy as np

from support.verl_worker import make_batch, make_model, make_worker, step

ROWS = 64
# Lengths are the RL mix at 1 / scale, and so are the budget (16k) and the overhead of a micro-batch (500).
SCALES = {"qwen2": 8, "jamba": 32}
BUDGET = 16_384
OVERHEAD = 500


def rl_mix(rows: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Prompt and response lengths of the RL mix, or draws with its quantiles without the data folder."""
    rng = np.random.default_rng(seed)
    folder = os.environ.get("PADLESS_DATA")
    if folder:
        with np.load(Path(folder) / "lengths.npz") as stored:
            pick = rng.choice(len(stored["mix_rl_gsm8k_heavy.lengths"]), rows, replace=False)
            prompts = stored["mix_rl_gsm8k_heavy.prompt_lengths"][pick]
            return prompts.astype(np.int64), stored["mix_rl_gsm8k_heavy.response_lengths"][pick].astype(np.int64)
    prompts = np.clip(rng.lognormal(np.log(120), 0.6, rows), 16, 2_875)
    responses = np.clip(rng.lognormal(np.log(330), 1.1, rows), 8, 8_192)
    return prompts.astype(np.int64), responses.astype(np.int64)


def arms(kind: str, folder: Path) -> dict[str, Any]:
    """verl alone, then padless, then verl alone again after ``uninstall``: one new worker each."""
    from padless.integrations.verl import install, last_step, uninstall

    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    scale = SCALES[kind]
    prompts, responses = (-(-lengths // scale) for lengths in rl_mix(ROWS))
    mine = slice(rank * ROWS // ranks, (rank + 1) * ROWS // ranks)
    path = folder / kind
    os.environ["PADLESS_VERL_OVERHEAD"] = str(OVERHEAD / scale)
    found: dict[str, Any] = {}
    for arm in ("stock", "padless", "restored"):
        (install if arm == "padless" else uninstall)()
        data = make_batch(prompts[mine], responses[mine], seed=rank)
        worker = make_worker(path, BUDGET // scale)
        found[arm] = step(worker, data)
        found[arm]["real_tokens"] = int((prompts + responses)[mine].sum())
        found[arm]["budget"] = BUDGET // scale
        found[arm]["figures"] = last_step() if arm == "padless" else {}
    uninstall()
    return found


def refusals(folder: Path) -> dict[str, str]:
    """What each rank raises when only rank 0 has a row over the budget, or other options than the rest."""
    import torch.distributed as dist

    from padless.errors import PadlessError
    from padless.integrations.verl import VerlOptions, install, uninstall

    rank = int(os.environ["RANK"])
    told: dict[str, str] = {}
    worker = make_worker(folder / "qwen2", 64)
    cases = {
        "overlong": (VerlOptions(), [40 if rank else 80, 9, 7, 5]),
        "options": (VerlOptions(multiple_of=1 + rank), [20, 9, 7, 5]),
    }
    for name, (options, lengths) in cases.items():
        uninstall()
        install(options)
        try:
            step(worker, make_batch([3] * 4, [n - 3 for n in lengths]))
            told[name] = "ran"
        except PadlessError as error:
            told[name] = str(error)
        dist.barrier()
    uninstall()
    return told


def leak(folder: Path) -> str:
    """What each rank raises when a leaking model is loaded packed, its parameters sharded over the ranks."""
    from padless.errors import PadlessError
    from padless.integrations.verl import VerlOptions, install, uninstall

    install(VerlOptions(on_leak="error"))
    try:
        make_worker(folder / "jamba", 256, use_remove_padding=True)
        return "loaded"
    except PadlessError as error:
        return str(error)
    finally:
        uninstall()


def main() -> None:
    import torch.distributed as dist

    folder = Path(sys.argv[1])
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo")
    if rank == 0:
        for kind in SCALES:
            make_model(kind, folder)
    dist.barrier()
    result: dict[str, Any] = {kind: arms(kind, folder) for kind in SCALES}
    result["refusals"] = refusals(folder)
    result["leak"] = leak(folder)
    (folder / f"rank{rank}.pkl").write_bytes(pickle.dumps(result))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
