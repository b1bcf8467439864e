"""TRL's SFT on one CPU: the host's default, its own options, and padless, on the same rows."""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
import torch
from arms import Clock, Passes, Run, arguments, history, lengths_of, tokenizer
from datasets import Dataset
from trl import SFTConfig, SFTTrainer

from padless.bench.models import build
from padless.integrations.trl import PadlessOptions, with_padless

ARMS: dict[str, dict[str, Any]] = {
    "host": {},
    "host, group_by_length": {"train_sampling_strategy": "group_by_length"},
    "host, batch_rebalance": {"train_sampling_strategy": "batch_rebalance"},
    "host, padding_free": {"padding_free": True},
    "host, packing": {"packing": True, "packing_strategy": "bfd"},
    "padless": {},
}


def rows_of(setting: argparse.Namespace, repeat: int, vocabulary: int) -> list[dict[str, Any]]:
    """One epoch: ``sft_steps`` optimizer steps of ``sft_step`` rows, in order."""
    rng = np.random.default_rng([11, repeat])
    lengths = lengths_of("mix_sft_general", "lengths", setting.sft_scale)
    chosen = rng.choice(lengths, size=setting.sft_steps * setting.sft_step, replace=False)
    return [{"input_ids": rng.integers(2, vocabulary, size=int(n)).tolist()} for n in chosen]


def arranged(rows: list[dict[str, Any]], arm: str) -> list[dict[str, Any]]:
    """The rows in the order that gives every arm the same optimizer steps, where its sampler allows that.

    Rows are random already and run in this order; batch_rebalance shuffles with a seed of its own, which is undone.
    """
    if "batch_rebalance" not in arm:
        return rows
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(42)).tolist()
    placed = dict(zip(order, rows, strict=True))
    return [placed[at] for at in range(len(rows))]


def run(arm: str, repeat: int, setting: argparse.Namespace, folder: str) -> Run:
    """One epoch of an arm."""
    built = build(setting.model, seed=0)
    model, passes, clock = built.model, Passes(built.model), Clock()
    model.config.pad_token_id, model.config.eos_token_id = 0, 1
    rows = rows_of(setting, repeat, built.vocabulary)
    real = sum(len(row["input_ids"]) for row in rows)
    options: dict[str, Any] = {"train_sampling_strategy": "sequential", "max_length": None, **ARMS[arm]}
    made = arguments(folder, setting.sft_steps, setting.sft_step // 8, seed=repeat)
    if options.get("packing"):  # rows as long as a micro-batch of padless may be, about as many tokens in a step
        made |= {"per_device_train_batch_size": 1, "max_steps": -1, "num_train_epochs": 1}
        made["gradient_accumulation_steps"] = max(round(real / setting.sft_steps / setting.sft_budget), 1)
        options["max_length"] = setting.sft_budget
    trainer_class: Any = SFTTrainer
    more: dict[str, Any] = {}
    if arm.startswith("padless"):
        trainer_class = with_padless(SFTTrainer)
        more["padless"] = PadlessOptions(token_budget=setting.sft_budget, cost=setting.cost)
    trainer = trainer_class(
        model=model,
        args=SFTConfig(**made, **options),
        train_dataset=Dataset.from_list(arranged(rows, arm)),
        processing_class=tokenizer(built.vocabulary),
        callbacks=[clock],
        **more,
    )
    trainer.train()
    return Run(wall=clock.wall, cpu=clock.cpu, real_tokens=real, times_run=1, passes=passes, **history(trainer))
