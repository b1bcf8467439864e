"""Rows to ranks: the hooks in verl's two trainers, on their own ``_balance_batch``."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

from padless.integrations.verl_options import VerlOptions

RANKS, MINI_BATCH, STEPS = 4, 32, 2


@pytest.fixture
def install() -> Iterator[Any]:
    import padless.integrations.verl as integration

    integration.uninstall()
    yield lambda **options: integration.install(VerlOptions(**options))
    integration.uninstall()


def config(**model: Any) -> Any:
    return OmegaConf.create(
        {
            "actor_rollout_ref": {
                "model": {"use_remove_padding": False} | model,
                "actor": {"use_dynamic_bsz": True, "ppo_mini_batch_size": 8, "ppo_max_token_len_per_gpu": 2048},
                "rollout": {"n": 4},
            }
        }
    )


def lengths() -> np.ndarray:
    draw = np.random.default_rng(0).lognormal(5, 0.8, MINI_BATCH * STEPS)
    return np.clip(draw, 8, 1024).astype(np.int64)


def first_trainer(settings: Any) -> list[int]:
    """Rows in the order that `RayPPOTrainer` dispatches them."""
    from verl import DataProto
    from verl.trainer.ppo import ray_trainer

    held = torch.as_tensor(lengths())
    mask = (torch.arange(1024) < held[:, None]).long()
    batch = DataProto.from_dict({"attention_mask": mask, "row": torch.arange(len(held))})
    trainer = SimpleNamespace(config=settings, actor_rollout_wg=None, _get_dp_size=lambda *_: RANKS)
    metrics: dict[str, Any] = {}
    ray_trainer.RayPPOTrainer._balance_batch(trainer, batch, metrics)
    assert "global_seqlen/balanced_max" in metrics
    return batch.batch["row"].tolist()


def second_trainer(settings: Any) -> list[int]:
    """Rows in the order that the trainer of verl 0.9 dispatches them."""
    base = pytest.importorskip("verl.trainer.ppo.v1.trainer_base", exc_type=ImportError)
    from transfer_queue import KVBatchMeta

    tags = [{"seq_len": int(length)} for length in lengths()]
    batch = KVBatchMeta(partition_id="train", keys=[str(row) for row in range(len(tags))], tags=tags)
    trainer = SimpleNamespace(
        config=settings,
        actor_rollout_wg=SimpleNamespace(_dispatch_info={"actor": list(range(RANKS))}),
        tokenizer=SimpleNamespace(eos_token_id=2),
        _get_required_batch_multiple=lambda _: 1,
    )
    return [int(key) for key in base.PPOTrainer._balance_batch(trainer, batch, {}).keys]


@pytest.mark.parametrize("trainer", [first_trainer, second_trainer])
def test_optimizer_steps_keep_their_members_and_ranks_get_equally_many_rows(install: Any, trainer: Any) -> None:
    install()
    order = np.array(trainer(config())).reshape(RANKS, STEPS, MINI_BATCH // RANKS)
    for step in range(STEPS):
        members = sorted(order[:, step].ravel().tolist())
        assert members == list(range(step * MINI_BATCH, (step + 1) * MINI_BATCH))


@pytest.mark.parametrize("trainer", [first_trainer, second_trainer])
def test_ranks_wait_less_for_each_other_than_with_verls_assignment(install: Any, trainer: Any) -> None:
    from padless.integrations.verl_plan import Request, makespan, plan_ranks

    def time(order: list[int]) -> float:
        """Modelled time of the optimizer steps."""
        held, request = lengths(), Request(token_budget=2048)
        parts = np.array(order).reshape(RANKS, STEPS, -1)
        return sum(makespan(plan_ranks([held[rows] for rows in parts[:, step]], request)) for step in range(STEPS))

    before = time(trainer(config()))
    install()
    assert time(trainer(config())) <= before


@pytest.mark.parametrize("trainer", [first_trainer, second_trainer])
@pytest.mark.parametrize("why", ["packed", "switched-off"])
def test_verls_assignment_stays_where_padless_does_not_plan(install: Any, trainer: Any, why: str) -> None:
    settings = config(use_remove_padding=True) if why == "packed" else config()
    before = trainer(settings)
    install(balance=why == "packed")
    assert trainer(settings) == before
