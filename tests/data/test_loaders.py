"""Samplers under DataLoader workers, torchdata, and a clock."""

from __future__ import annotations

import os
import time
from itertools import islice
from typing import Any

import numpy as np
import pytest
from torch.utils.data import DataLoader

from padless import PadlessError
from padless.data import PaddedCollator, TokenBudgetSampler
from padless.metrics import Meter
from padless.tensors import Field

LENGTHS = np.random.default_rng(0).integers(2, 60, 300)
DATA = [{"input_ids": [i % 50] * int(n)} for i, n in enumerate(LENGTHS)]


def build(**options: Any) -> TokenBudgetSampler:
    chosen = {"token_budget": 300, "sequences_per_step": 32, "seed": 1, "method": "lean", **options}
    return TokenBudgetSampler(LENGTHS, **chosen)


def loader_of(sampler: TokenBudgetSampler, workers: int, **options: Any) -> Any:
    return DataLoader(
        DATA,
        batch_sampler=sampler,
        collate_fn=PaddedCollator(),
        num_workers=workers,
        **options,  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("workers", [0, 2])
def test_a_followed_loop_saves_what_it_received_and_not_what_workers_fetched(workers: int) -> None:
    expected = [list(batch) for batch in build()]
    sampler = build()
    taken, states = [], []
    for _ in islice(sampler.follow(loader_of(sampler, workers, prefetch_factor=4 if workers else None)), 7):
        taken.append(list(sampler.current))
        states.append(sampler.state_dict())
        assert sampler.at_step_boundary == sampler.current.ends_step
    assert taken == expected[:7]
    for k in (1, 4, 7):
        other = build()
        other.load_state_dict(states[k - 1])
        rest = []
        for _ in other.follow(loader_of(other, 0 if workers else 2)):
            rest.append(list(other.current))
        assert rest == expected[k:]
        assert other.epoch == 1


@pytest.mark.parametrize("workers", [0, 2])
def test_stateful_data_loader_keeps_the_state_itself(workers: int) -> None:
    torchdata = pytest.importorskip("torchdata.stateful_dataloader")

    def make() -> Any:
        return torchdata.StatefulDataLoader(
            DATA, batch_sampler=build(), collate_fn=PaddedCollator(), num_workers=workers
        )

    expected = [batch["input_ids"].tolist() for batch in make()]
    loader = make()
    taken = [batch["input_ids"].tolist() for batch in islice(loader, 9)]
    fresh = make()
    fresh.load_state_dict(loader.state_dict())
    assert taken + [batch["input_ids"].tolist() for batch in fresh] == expected


def test_a_loader_that_regroups_batches_is_noticed() -> None:
    sampler = build()
    with pytest.raises(PadlessError, match="more batches than this sampler"):
        for _ in sampler.follow(iter([1])):
            pass


def test_a_worker_sends_a_batch_as_one_block_of_memory() -> None:
    sampler = build()
    columns = [{**row, "advantages": [0.5] * len(row["input_ids"])} for row in DATA]
    options: dict[str, Any] = {"batch_sampler": sampler, "collate_fn": PaddedCollator(fields={"advantages": Field()})}
    for sent, held in zip(DataLoader(columns, num_workers=2, **options), DataLoader(columns, **options), strict=True):
        assert {key: value.tolist() for key, value in sent.items()} == {k: v.tolist() for k, v in held.items()}
        assert {key: value.dtype for key, value in sent.items()} == {k: v.dtype for k, v in held.items()}
        assert len({value.untyped_storage().data_ptr() for value in sent.values()}) == 1
        assert len({value.untyped_storage().data_ptr() for value in held.values()}) == len(held) > 3
        sampler.set_epoch(0)


def test_two_workers_keep_ahead_of_a_step_of_20_milliseconds() -> None:
    sampler = build(token_budget=3000, sequences_per_step=128)
    data = [{"input_ids": [1] * int(n)} for n in LENGTHS]
    loader = DataLoader(
        data,  # type: ignore[arg-type]
        batch_sampler=sampler,
        collate_fn=PaddedCollator(),
        num_workers=2,
        persistent_workers=True,
    )
    waited, worked = [], []
    for _ in range(6):
        meter, began = Meter(), 0.0
        for batch in meter.watch(sampler.follow(loader), skip_first=True):
            worked += [time.thread_time() - began] if began else []
            time.sleep(0.020)
            meter.add_batch(batch)
            meter.step()
            began = time.thread_time()
        assert meter.steps >= 3
        waited.append(meter.waiting_share)
    # What the loop itself spends on a batch, on any machine; and where cores are free, that it waits for nothing else.
    assert np.median(worked) < 0.1 * 0.020
    if os.getloadavg()[0] < 0.75 * (os.cpu_count() or 1):
        assert min(waited) < 0.1, "the loader may not take long on top of the step"


def test_accelerate_cannot_shard_the_sampler_a_second_time() -> None:
    data_loader = pytest.importorskip("accelerate.data_loader")
    with pytest.raises(PadlessError, match="already deals out"):
        data_loader.BatchSamplerShard(build(ranks=2, rank=0), num_processes=2, process_index=0)
