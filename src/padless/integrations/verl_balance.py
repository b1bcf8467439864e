"""Which rank gets which rows, before verl's trainer dispatches them.

verl's ``_balance_batch`` reorders the batch so that ranks hold equal sums of a workload estimate. In the padded
path what counts is that the ranks' micro-batches resemble each other. Every rank must get equally many rows, so a
free plan over all ranks cannot be dispatched; the best of three assignments is taken: verl's, rows dealt in order of
length, and the free plan with its groups shared out and the surplus rows moved. Rows stay in their mini-batch:
the optimizer steps have the members that the batch was given with.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from contextvars import ContextVar
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

from padless.cost import CostModel
from padless.errors import PadlessError
from padless.integrations.verl_hooks import Hooks, log
from padless.integrations.verl_plan import Request, makespan, plan_ranks
from padless.planning import microbatch

__all__ = ["assign", "deal", "hook_trainer"]

Index = npt.NDArray[np.int64]
_STEP: ContextVar[_Step | None] = ContextVar("padless_verl_step", default=None)
_SOLVER = "get_seqlen_balanced_partitions"


def deal(lengths: Any, ranks: int) -> list[list[int]]:
    """Equally many rows for every rank, back and forth by falling length: all ranks get the same profile.

    >>> deal([9, 1, 5, 3], 2)
    [[0, 1], [2, 3]]
    """
    order = np.argsort(-np.asarray(lengths), kind="stable")
    rounds = order.reshape(-1, ranks)  # (rows per rank, R)
    rounds[1::2] = rounds[1::2, ::-1]
    return [np.sort(rounds[:, rank]).tolist() for rank in range(ranks)]


def share_out(lengths: Index, ranks: int, request: Request) -> list[list[int]]:
    """The free plan's groups, each micro-step's largest to the rank with the fewest rows; then counts are evened."""
    plan = microbatch(lengths, request.token_budget, ranks=ranks, cost=request.cost, multiple_of=request.multiple_of)
    held: list[list[int]] = [[] for _ in range(ranks)]
    for step in range(plan.steps):
        groups = sorted((plan.group(step, rank).tolist() for rank in range(ranks)), key=len, reverse=True)
        for rank, group in zip(sorted(range(ranks), key=lambda r: len(held[r])), groups, strict=True):
            held[rank].extend(group)
    each = len(lengths) // ranks
    surplus: list[int] = []
    for mine in held:
        mine.sort(key=lambda row: -int(lengths[row]))
        surplus += mine[each:]  # the shortest rows move
        del mine[each:]
    surplus.sort(key=lambda row: -int(lengths[row]))
    for mine in sorted(held, key=len, reverse=True):
        while len(mine) < each:
            mine.append(surplus.pop(0))
    return [sorted(mine) for mine in held]


def assign(
    lengths: Any,
    ranks: int,
    request: Request,
    *,
    mini_batch: int | None = None,
    known: Callable[..., Any] | None = None,
) -> list[list[int]]:
    """Rows of each rank, equally many, each mini-batch on its own: the assignment with the least modelled time.

    Args:
        lengths: (N,) tokens of the rows; N is a multiple of ``ranks``.
        ranks: data-parallel ranks, R.
        request: how each rank will plan its micro-batches.
        mini_batch: rows of one optimizer step over all ranks, a multiple of R; ``None``: all of them.
        known: another assignment to compare with, called with (lengths, ranks) of a mini-batch.

    Returns:
        Per rank N / R rows, mini-batch after mini-batch.

    >>> assign([9, 1, 5, 3], 2, Request(token_budget=10))
    [[0, 1], [2, 3]]
    """
    values = np.asarray(lengths, dtype=np.int64)
    size = mini_batch or len(values)
    result: list[list[int]] = [[] for _ in range(ranks)]
    for start in range(0, len(values), size):
        held = values[start : start + size]
        best = min(_candidates(held, ranks, request, known), key=lambda parts: _time(held, parts, request))
        for rank, rows in enumerate(best):
            result[rank] += [start + row for row in rows]
    return result


def _candidates(
    lengths: Index, ranks: int, request: Request, known: Callable[..., Any] | None
) -> list[list[list[int]]]:
    found = [deal(lengths, ranks)]
    if lengths.max() <= request.token_budget:
        found.append(share_out(lengths, ranks, request))
    if known is not None:
        found.append([sorted(rows) for rows in known(lengths, ranks)])
    return found


def _time(lengths: Index, parts: list[list[int]], request: Request) -> float:
    try:
        return makespan(plan_ranks([lengths[rows] for rows in parts], request))
    except PadlessError:  # counts that no rank can reach: the workers will say so
        return float("inf")


class _Step:
    """What a trainer's configuration says about its optimizer steps.

    Attributes:
        rows: rows of one step over all ranks.
        request: how the actor's update will plan.
    """

    def __init__(self, rows: int, request: Request) -> None:
        self.rows = rows
        self.request = request

    @classmethod
    def of(cls, config: Any, cost: CostModel) -> _Step | None:
        """``None`` unless the actor runs padded, with dynamic micro-batches under a budget."""
        try:
            role = config.actor_rollout_ref
            if role.model.get("use_remove_padding", True) or not role.actor.get("use_dynamic_bsz", False):
                return None
            rows = int(role.actor.ppo_mini_batch_size) * int(role.rollout.n)
            budget = int(role.actor.ppo_max_token_len_per_gpu)
            return cls(rows, Request(token_budget=budget, overlong="alone", cost=cost))
        except (AttributeError, TypeError, ValueError):
            return None

    def assign(self, lengths: Any, ranks: int, known: Callable[..., Any] | None) -> list[list[int]]:
        size = self.rows if len(lengths) % self.rows == 0 and self.rows % ranks == 0 else len(lengths)
        return assign(lengths, ranks, self.request, mini_batch=size, known=known)


def hook_trainer(module: ModuleType, hooks: Hooks, cost: CostModel) -> None:
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
        wrapped = _reorder_rows(module, solver, stock, cost) if sorts_again else _with_step(stock, cost)
        hooks.replace(owner, "_balance_batch", wrapped)


def _workload(lengths: Index) -> Index:
    """verl's estimate of a row's work, which is what its partition function is given."""
    return 24_576 * lengths + lengths**2


def _by_verl(solver: Callable[..., Any]) -> Callable[..., Any]:
    def known(lengths: Index, ranks: int) -> Any:
        return solver(seqlen_list=_workload(lengths).tolist(), k_partitions=ranks, equal_size=True)

    return known


def _partitions(stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def get_seqlen_balanced_partitions(seqlen_list: Any, k_partitions: int, equal_size: bool) -> Any:
        step = _STEP.get()
        if step is not None and equal_size and len(seqlen_list) % k_partitions == 0:
            work = np.array([int(value) for value in seqlen_list], dtype=np.int64)  # (N,)
            lengths = np.rint((np.sqrt(24_576.0**2 + 4.0 * work) - 24_576.0) / 2).astype(np.int64)
            if (_workload(lengths) == work).all():
                return step.assign(lengths, k_partitions, _by_verl(stock))
        return stock(seqlen_list, k_partitions=k_partitions, equal_size=equal_size)

    return get_seqlen_balanced_partitions


def _with_step(stock: Callable[..., Any], cost: CostModel) -> Callable[..., Any]:
    """``_balance_batch`` that lets the partition function know the optimizer steps, in the padded path only."""

    @functools.wraps(stock)
    def _balance_batch(self: Any, *args: Any, **kwargs: Any) -> Any:
        token = _STEP.set(_Step.of(getattr(self, "config", None), cost))
        try:
            return stock(self, *args, **kwargs)
        finally:
            _STEP.reset(token)

    return _balance_batch


def _reorder_rows(
    module: ModuleType, solver: Callable[..., Any], stock: Callable[..., Any], cost: CostModel
) -> Callable[..., Any]:
    """``RayPPOTrainer._balance_batch``, which holds a whole `DataProto` and reorders it."""

    @functools.wraps(stock)
    def _balance_batch(self: Any, batch: Any, metrics: Any, *args: Any, **kwargs: Any) -> Any:
        step = _Step.of(getattr(self, "config", None), cost)
        lengths = batch.batch["attention_mask"].flatten(1).sum(-1).tolist()  # (N,)
        ranks = self._get_dp_size(self.actor_rollout_wg, "actor")
        if step is None or getattr(self, "use_prefix_grouper", False) or len(lengths) % ranks:
            return stock(self, batch, metrics, *args, **kwargs)
        import torch

        parts = step.assign(lengths, ranks, _by_verl(solver))
        batch.reorder(torch.tensor([row for part in parts for row in part]))
        prefix = kwargs.get("logging_prefix", args[0] if args else "global_seqlen")
        metrics.update(module.log_seqlen_unbalance(seqlen_list=lengths, partitions=parts, prefix=prefix))
        return None

    return _balance_batch
