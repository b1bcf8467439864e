"""Which rank gets which rows, before verl's trainer dispatches them.

verl's ``_balance_batch`` reorders the batch so that ranks hold equal sums of a workload estimate. In the padded
path what counts is that the ranks' micro-batches resemble each other: rows are dealt in order of length, so
that every rank has the same profile of lengths. Rows stay in their mini-batch: the optimizer steps have
the members that the batch was given with.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from contextvars import ContextVar
from types import ModuleType
from typing import Any

import numpy as np

from padless.integrations.verl_hooks import Hooks, log

__all__ = ["deal", "hook_trainer"]

_MINI_BATCH: ContextVar[int | None] = ContextVar("padless_verl_mini_batch", default=None)
_SOLVER = "get_seqlen_balanced_partitions"


def deal(workloads: Any, ranks: int, *, mini_batch: int | None = None) -> list[list[int]]:
    """Rows of each rank, equally many, each mini-batch dealt on its own, back and forth by falling workload.

    Args:
        workloads: (N,) anything that grows with a row's length.
        ranks: data-parallel ranks, R; N is a multiple of it.
        mini_batch: rows of one optimizer step over all ranks; ``None``: all of them.

    Returns:
        Per rank N / R rows, mini-batch after mini-batch.

    >>> deal([9, 1, 5, 3], 2)
    [[0, 1], [2, 3]]
    """
    values = np.asarray(workloads)
    size = mini_batch or len(values)
    result: list[list[int]] = [[] for _ in range(ranks)]
    for start in range(0, len(values), size):
        order = start + np.argsort(-values[start : start + size], kind="stable")
        rounds = order.reshape(-1, ranks)  # (rows per rank, R)
        rounds[1::2] = rounds[1::2, ::-1]
        for rank in range(ranks):
            result[rank].extend(np.sort(rounds[:, rank]).tolist())
    return result


def hook_trainer(module: ModuleType, hooks: Hooks) -> None:
    """Hook the trainer class of ``module`` and the partition function that its ``_balance_batch`` calls."""
    solver = vars(module).get(_SOLVER)
    owners = [
        value
        for value in vars(module).values()
        if inspect.isclass(value) and value.__module__ == module.__name__ and "_balance_batch" in vars(value)
    ]
    expected = ["seqlen_list", "k_partitions", "equal_size"]
    if solver is None or not owners or list(inspect.signature(solver).parameters) != expected:
        log.warning("padless: %s balances ranks in a new way; padless leaves it alone", module.__name__)
        return
    hooks.replace(module, _SOLVER, _partitions(solver))
    for owner in owners:
        stock = vars(owner)["_balance_batch"]
        sorts_again = hasattr(owner, "_get_dp_size")  # the first trainer orders each rank's rows by workload afterwards
        wrap = _reorder_rows(module, stock) if sorts_again else _with_mini_batch(stock)
        hooks.replace(owner, "_balance_batch", wrap)


def _partitions(stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def get_seqlen_balanced_partitions(seqlen_list: Any, k_partitions: int, equal_size: bool) -> Any:
        size = _MINI_BATCH.get()
        if size is None or not equal_size or len(seqlen_list) % k_partitions:
            return stock(seqlen_list, k_partitions=k_partitions, equal_size=equal_size)
        values = np.asarray([int(value) for value in seqlen_list])
        if len(values) % size or size % k_partitions:
            size = len(values)
        return deal(values, k_partitions, mini_batch=size)

    return get_seqlen_balanced_partitions


def _with_mini_batch(stock: Callable[..., Any]) -> Callable[..., Any]:
    """``_balance_batch`` that lets the partition function know the mini-batch, in the padded path only."""

    @functools.wraps(stock)
    def _balance_batch(self: Any, *args: Any, **kwargs: Any) -> Any:
        token = _MINI_BATCH.set(_mini_batch(getattr(self, "config", None)))
        try:
            return stock(self, *args, **kwargs)
        finally:
            _MINI_BATCH.reset(token)

    return _balance_batch


def _reorder_rows(module: ModuleType, stock: Callable[..., Any]) -> Callable[..., Any]:
    """``RayPPOTrainer._balance_batch``, which holds a whole `DataProto` and reorders it."""

    @functools.wraps(stock)
    def _balance_batch(self: Any, batch: Any, metrics: Any, *args: Any, **kwargs: Any) -> Any:
        size = _mini_batch(getattr(self, "config", None))
        if size is None or getattr(self, "use_prefix_grouper", False):
            return stock(self, batch, metrics, *args, **kwargs)
        import torch

        lengths = batch.batch["attention_mask"].flatten(1).sum(-1).tolist()  # (N,)
        ranks = self._get_dp_size(self.actor_rollout_wg, "actor")
        if len(lengths) % size or size % ranks:
            size = len(lengths)
        if size % ranks:
            return stock(self, batch, metrics, *args, **kwargs)
        parts = deal(lengths, ranks, mini_batch=size)
        batch.reorder(torch.tensor([row for part in parts for row in part]))
        prefix = kwargs.get("logging_prefix", args[0] if args else "global_seqlen")
        metrics.update(module.log_seqlen_unbalance(seqlen_list=lengths, partitions=parts, prefix=prefix))
        return None

    return _balance_batch


def _mini_batch(config: Any) -> int | None:
    """Rows of one optimizer step where the actor runs padded with dynamic micro-batches; else ``None``."""
    try:
        role = config.actor_rollout_ref
        if role.model.get("use_remove_padding", True) or not role.actor.get("use_dynamic_bsz", False):
            return None
        return int(role.actor.ppo_mini_batch_size) * int(role.rollout.n)
    except AttributeError:
        return None
