"""TRL's SFT and GRPO on a CPU: the host's default, the host's own best options, and padless, in one run.

    python benchmarks/trainers/bench.py            # writes result.json beside this file
    python benchmarks/trainers/bench.py --quick    # a short look

Arms take turns, repeat by repeat; figures are medians over steps of all repeats. Samplers choose their rows in their
own way, so arms are compared by real tokens per second.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import statistics
import subprocess
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

# ruff: noqa: E402 (the libraries read these when they are imported)
os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", TRL_EXPERIMENTAL_SILENCE="1")
warnings.filterwarnings("ignore")

import numpy as np
import torch
from datasets import Dataset
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, TrainerCallback
from trl import GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

from padless import CostModel
from padless.bench.measure import machine, versions
from padless.bench.models import build
from padless.integrations.trl import PadlessOptions, with_padless
from padless.tuning.search import language_model_step

logging.getLogger("transformers").setLevel(logging.ERROR)
HERE = Path(__file__).resolve().parent


def lengths_of(name: str, column: str, cap: int) -> np.ndarray:
    """Measured lengths of a data set where PADLESS_DATA has them, else a log-normal with the same mean."""
    folder = os.environ.get("PADLESS_DATA")
    if folder and (Path(folder) / "lengths.npz").exists():
        with np.load(Path(folder) / "lengths.npz") as stored:
            held = stored[f"{name}.{column}"]
    else:
        median = {"prompt_lengths": 90, "response_lengths": 350}.get(column, 250)
        held = np.random.default_rng(1).lognormal(np.log(median), 1.0, size=8000).astype(int)
    held = np.clip(held, 4, None)
    return held[held <= cap] if column == "lengths" else np.minimum(held, cap)


class Clock(TrainerCallback):
    """Seconds of each optimizer step, from its first batch to after the update."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._begun = time.perf_counter()

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self._begun = time.perf_counter()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        now = time.perf_counter()
        self.seconds.append(now - self._begun)
        self._begun = now


class Positions:
    """Positions that the model computes, and the most in one forward pass."""

    def __init__(self, model: Any) -> None:
        self.total, self.most = 0, 0
        model.model.register_forward_pre_hook(self._count, with_kwargs=True)

    def _count(self, module: Any, args: Any, kwargs: Any) -> None:
        size = kwargs["input_ids"].numel()
        self.total += size
        self.most = max(self.most, size)


def tokenizer(vocabulary: int) -> Any:
    words = {"<pad>": 0, "<eos>": 1} | {f"t{i}": i for i in range(2, vocabulary)}
    raw = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="<pad>", eos_token="<eos>")


def common(folder: str, steps: int, rows: int, accumulation: int, seed: int) -> dict[str, Any]:
    return {
        "output_dir": folder,
        "max_steps": steps,
        "per_device_train_batch_size": rows,
        "gradient_accumulation_steps": accumulation,
        "learning_rate": 1e-4,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "disable_tqdm": True,
        "seed": seed,
        "dataloader_pin_memory": False,
    }


SFT_ARMS: dict[str, dict[str, Any]] = {
    "host": {},
    "host, group_by_length": {"train_sampling_strategy": "group_by_length"},
    "host, batch_rebalance": {"train_sampling_strategy": "batch_rebalance"},
    "host, packing": {"packing": True, "packing_strategy": "bfd"},
    "padless": {},
}


def run_sft(arm: str, setting: argparse.Namespace, folder: str, seed: int) -> dict[str, Any]:
    """Steps of ``sft_step`` rows in micro-batches of 8."""
    built = build(setting.model, seed=0)
    model, counter, clock = built.model, Positions(built.model), Clock()
    model.config.pad_token_id, model.config.eos_token_id = 0, 1
    rng = np.random.default_rng(seed)
    lengths = rng.permutation(lengths_of("mix_sft_general", "lengths", setting.sft_cap))[: setting.sft_rows]
    rows = [{"input_ids": rng.integers(2, built.vocabulary, size=int(n)).tolist()} for n in lengths]
    options = dict(SFT_ARMS[arm])
    size, accumulation = 8, setting.sft_step // 8
    if options.get("packing"):  # as many tokens in a row as a micro-batch of padless may have
        size, accumulation = 1, max(int(lengths.mean() * setting.sft_step / setting.budget), 1)
        options["max_length"] = setting.budget
    else:
        options["max_length"] = None
    arguments = SFTConfig(**common(folder, setting.steps + 1, size, accumulation, seed), **options)
    made: Any = with_padless(SFTTrainer) if arm == "padless" else SFTTrainer
    more = {"padless": PadlessOptions(token_budget=setting.budget, cost=setting.cost)} if arm == "padless" else {}
    trainer = made(
        model=model,
        args=arguments,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer(built.vocabulary),
        callbacks=[clock],
        **more,
    )
    trainer.train()
    tokens = [entry["num_tokens"] for entry in trainer.state.log_history if "grad_norm" in entry]
    return {"seconds": clock.seconds, "tokens": np.diff([0, *tokens]).tolist(), "counter": counter}


def run_grpo(arm: str, setting: argparse.Namespace, folder: str, seed: int) -> dict[str, Any]:
    """Steps of 32 completions (8 x 4) of 4 prompts, with a reference model; rollouts are given, not generated."""
    built = build(setting.model, seed=0)
    model, counter, clock = built.model, Positions(built.model), Clock()
    model.config.pad_token_id, model.config.eos_token_id = 0, 1
    reference = Path(folder) / f"reference-{setting.model}"
    if not reference.exists():
        reference.mkdir()
        model.config.architectures = [type(model).__name__]
        model.config.to_json_file(reference / "config.json", use_diff=False)
        save_file(
            {k: v.contiguous() for k, v in model.state_dict().items()},
            reference / "model.safetensors",
            {"format": "pt"},
        )
    model.config._name_or_path = str(reference)
    prompts = lengths_of("mix_rl_gsm8k_heavy", "prompt_lengths", setting.prompt_cap)
    responses = lengths_of("mix_rl_gsm8k_heavy", "response_lengths", setting.response_cap)
    real: list[int] = []

    def rollout(texts: list[str], trainer: Any) -> dict[str, Any]:
        rng = np.random.default_rng([seed, trainer.state.global_step])
        group = trainer.num_generations
        chosen = np.repeat(rng.choice(prompts, size=len(texts) // group), group)
        answers = rng.choice(responses, size=len(texts))
        real.append(int(chosen.sum() + answers.sum()))
        draw = lambda sizes: [rng.integers(2, built.vocabulary, size=int(n)).tolist() for n in sizes]  # noqa: E731
        completions = draw(answers)
        return {
            "prompt_ids": draw(chosen),
            "completion_ids": completions,
            "logprobs": [[0.0] * len(ids) for ids in completions],
        }

    def reward(completions: list[str], **kwargs: Any) -> list[float]:
        return [(at * 7 % 11) / 11 for at, _ in enumerate(completions)]

    arguments = GRPOConfig(
        **common(folder, setting.steps + 1, 8, 4, seed),
        num_generations=8,
        max_completion_length=setting.response_cap,
        beta=0.04,
    )
    made: Any = with_padless(GRPOTrainer) if arm == "padless" else GRPOTrainer
    more = {"padless": PadlessOptions(token_budget=setting.budget, cost=setting.cost)} if arm == "padless" else {}
    trainer = made(
        model=model,
        reward_funcs=reward,
        args=arguments,
        train_dataset=Dataset.from_list([{"prompt": f"t{i % 100 + 2}"} for i in range(512)]),
        processing_class=tokenizer(built.vocabulary),
        rollout_func=rollout,
        callbacks=[clock],
        **more,
    )
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "grad_norm" in entry]
    return {"seconds": clock.seconds, "tokens": real[: len(clock.seconds)], "counter": counter, "losses": losses}


def calibrated(setting: argparse.Namespace) -> CostModel:
    """What micro-batches of this model cost here, as ``padless tune`` measures it."""
    model = build(setting.model, seed=0).model

    def step(rows: int, width: int) -> None:
        language_model_step(model, rows, width)

    shapes = [(1, 64), (1, 512), (1, setting.budget // 2), (4, 128), (16, 64), (8, setting.budget // 8)]
    return CostModel.calibrate(step, shapes=shapes, repeats=2, max_seconds=60)


def measure(run: Any, arms: list[str], setting: argparse.Namespace, folder: str) -> list[dict[str, Any]]:
    """All arms, repeat by repeat; the first step of each is a warm-up."""
    held: dict[str, list[dict[str, Any]]] = {arm: [] for arm in arms}
    for repeat in range(setting.repeats):
        for arm in arms if repeat % 2 == 0 else reversed(arms):
            held[arm].append(run(arm, setting, folder, seed=repeat))
            print(f"{run.__name__} {arm}: {statistics.median(held[arm][-1]['seconds'][1:]):.3f} s per step", flush=True)
    rows = []
    for arm in arms:
        seconds = [s for part in held[arm] for s in part["seconds"][1:]]
        tokens = [t for part in held[arm] for t in part["tokens"][1:]]
        rates = [t / s for s, t in zip(seconds, tokens, strict=True)]
        rows.append(
            {
                "arm": arm,
                "step_seconds": statistics.median(seconds),
                "real_tokens_per_second": sum(tokens) / sum(seconds),
                "spread": float(np.std(rates) / np.mean(rates)),
                "most_positions_in_a_micro_batch": max(part["counter"].most for part in held[arm]),
                "losses": held[arm][0].get("losses"),
            }
        )
    for row in rows:
        row["times_host"] = row["real_tokens_per_second"] / rows[0]["real_tokens_per_second"]
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="qwen2", help="a built-in model of padless bench, or a config")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--budget", type=int, default=4096)
    parser.add_argument("--sft-cap", type=int, default=2048, help="longer rows are left out")
    parser.add_argument("--sft-rows", type=int, default=1024)
    parser.add_argument("--sft-step", type=int, default=64, help="rows of one optimizer step")
    parser.add_argument("--prompt-cap", type=int, default=1024)
    parser.add_argument("--response-cap", type=int, default=2048)
    parser.add_argument("--only", choices=["sft", "grpo"])
    parser.add_argument("--quick", action="store_true", help="short rows, one repeat")
    parser.add_argument("--out", type=Path, default=HERE / "result.json")
    setting = parser.parse_args()
    if setting.quick:
        setting.steps, setting.repeats, setting.budget = 2, 1, 2048
        setting.sft_cap, setting.prompt_cap, setting.response_cap = 1024, 256, 512
        setting.sft_rows, setting.sft_step = 256, 32
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    result: dict[str, Any] = {"machine": machine("cpu"), "versions": versions(), "threads": torch.get_num_threads()}
    git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=HERE, capture_output=True, text=True, check=False)
    result |= {"commit": git.stdout.strip(), "setting": {k: v for k, v in vars(setting).items() if k != "out"}}
    setting.cost = calibrated(setting)
    result["cost"] = setting.cost.to_dict()
    with tempfile.TemporaryDirectory() as folder:
        if setting.only != "grpo":
            result["sft"] = measure(run_sft, list(SFT_ARMS), setting, folder)
        if setting.only != "sft":
            result["grpo"] = measure(run_grpo, ["host", "padless"], setting, folder)
    setting.out.write_text(json.dumps(result, indent=2) + "\n")
    for part in ("sft", "grpo"):
        for row in result.get(part, []):
            rate, times = row["real_tokens_per_second"], row["times_host"]
            print(f"{part:5} {row['arm']:24} {row['step_seconds']:8.3f} s  {rate:9.0f} real tokens/s  {times:.2f} x")


if __name__ == "__main__":
    main()
