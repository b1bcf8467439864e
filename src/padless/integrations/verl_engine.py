"""Inside verl's engines: the planner behind ``rearrange_micro_batches``, and what happens around each batch."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from padless.errors import PadlessError
from padless.integrations.verl_guards import WidthRule, check_batch, setting, warn_once, width_rule
from padless.integrations.verl_metrics import PhaseStats, Recorder, as_metrics, count, log_lines
from padless.integrations.verl_options import VerlOptions
from padless.integrations.verl_plan import Request, plan_ranks

__all__ = ["RECORDER", "rearranger", "wrap_batch"]

Index = npt.NDArray[np.int64]
RECORDER = Recorder()
"""Figures of this process' phases."""


@dataclass(slots=True)
class _Call:
    """The engine call that is running in this process."""

    engine: Any
    stats: PhaseStats | None = None


_CALL: ContextVar[_Call | None] = ContextVar("padless_verl_call", default=None)


# --- the planner


def rearranger(stock: Callable[..., Any], options: VerlOptions) -> Callable[..., Any]:
    """verl's ``rearrange_micro_batches`` with a budget that counts padding.

    Where the engine removes padding itself there is nothing to plan and the stock function runs.
    Same arguments, same result: the micro-batches and, for each, the rows it holds.
    """

    takes = inspect.signature(stock).parameters

    @functools.wraps(stock)
    def rearrange_micro_batches(
        batch: Any,
        max_token_len: int,
        dp_group: Any = None,
        num_batches_divided_by: int | None = None,
        same_micro_num_in_dp: bool = True,
        min_num_micro_batch: int | None = None,
        use_dynamic_bsz_balance: bool = True,
        force_group_size: int = 1,
    ) -> tuple[list[Any], list[list[int]]]:
        padded = not setting(batch, "use_remove_padding", True)
        call = _CALL.get()
        rule = width_rule(call.engine) if call else WidthRule()
        if padded and batch["input_ids"].is_nested:
            request = _request(
                options,
                rule,
                max_token_len,
                at_least=min_num_micro_batch or 1,
                count_multiple_of=num_batches_divided_by or 1,
                group_size=force_group_size,
            )
            groups = _plan(batch, request, rule, dp_group if same_micro_num_in_dp else None)
            micro_batches = _select(batch, groups)
        else:
            asked = {
                "dp_group": dp_group,
                "num_batches_divided_by": num_batches_divided_by,
                "same_micro_num_in_dp": same_micro_num_in_dp,
                "min_num_micro_batch": min_num_micro_batch,
                "use_dynamic_bsz_balance": use_dynamic_bsz_balance,
                "force_group_size": force_group_size,
            }
            micro_batches, groups = stock(batch, max_token_len, **{k: v for k, v in asked.items() if k in takes})
        if call is not None and batch["input_ids"].is_nested:
            lengths = _lengths(batch)
            computed = np.full_like(lengths, lengths.max()) if padded and rule.to_the_widest else lengths
            stats = count(computed, groups, int(max_token_len), padded=padded, multiple_of=rule.multiple_of)
            call.stats = replace(stats, real_tokens=int(lengths.sum()))
        return micro_batches, groups

    return rearrange_micro_batches


def _request(options: VerlOptions, rule: WidthRule, token_budget: int, **asked: int) -> Request:
    order: Literal["largest-first", "small-ends"]
    if options.order == "auto":
        order = "small-ends" if rule.pipeline or asked["count_multiple_of"] > 1 else "largest-first"
    else:
        order = options.order
    return Request(
        token_budget=int(token_budget),
        multiple_of=int(np.lcm(rule.multiple_of, options.multiple_of)),
        max_sequences=options.max_sequences,
        overlong=options.overlong,
        order=order,
        cost=options.cost,
        **asked,
    )


def _lengths(batch: Any) -> Index:
    """Tokens of each row, (N,)."""
    input_ids = batch["input_ids"]
    held = input_ids.offsets().diff() if input_ids.is_nested else batch["attention_mask"].sum(dim=-1)
    return np.asarray(held.cpu().numpy(), dtype=np.int64)


def _plan(batch: Any, request: Request, rule: WidthRule, dp_group: Any) -> list[list[int]]:
    lengths = _lengths(batch)
    everyone, rank = _gather(lengths, request, dp_group)
    if rule.to_the_widest:  # every row costs as much as the widest of its rank
        everyone = [np.full_like(held, held.max(initial=0)) for held in everyone]
    plan = plan_ranks(everyone, request)[rank]
    return [group.tolist() for group in plan]


def _gather(lengths: Index, request: Request, dp_group: Any) -> tuple[list[Index], int]:
    """Lengths of every rank of the group, and this rank's place in it.

    What any rank must refuse is known to all of them afterwards, so that all raise and none waits.
    """
    import torch.distributed as dist

    if dp_group is None or not dist.is_initialized() or dist.get_world_size(dp_group) == 1:
        return [lengths], 0
    told: list[Any] = [None] * dist.get_world_size(dp_group)
    dist.all_gather_object(told, (lengths, request), group=dp_group)
    rank = dist.get_rank(dp_group)
    for other, (_, asked) in enumerate(told):
        if asked != told[0][1]:
            raise PadlessError(
                f"rank {other} plans with other options than rank 0: {asked} against {told[0][1]}. Give every process"
                " the same PADLESS_VERL_... variables and the same max_token_len_per_gpu"
            )
    return [held for held, _ in told], rank


def _select(batch: Any, groups: list[list[int]]) -> list[Any]:
    from verl.utils import tensordict_utils

    return [tensordict_utils.index_select_tensor_dict(batch, group) for group in groups]


# --- around each batch


def wrap_batch(
    stock: Callable[..., Any], options: VerlOptions, *, training: bool, leak_guard: Callable[[Any, Any], None]
) -> Callable[..., Any]:
    """``BaseEngine.train_batch`` or ``infer_batch`` with padless' checks before and its figures after."""

    @functools.wraps(stock)
    def batch(self: Any, data: Any, *args: Any, **kwargs: Any) -> Any:
        loss_function = kwargs.get("loss_function", args[0] if args else None)
        check_batch(self, data, loss_function, training=training)
        leak_guard(self, data)
        with _running(self) as call:
            outputs = stock(self, data, *args, **kwargs)
        if call.stats is not None:
            phase = _phase(self, data, training=training)
            RECORDER.add(phase, call.stats)
            _report(self, outputs, options, phase, call.stats, training=training)
        return outputs

    return batch


@contextmanager
def _running(engine: Any) -> Iterator[_Call]:
    call = _Call(engine)
    token = _CALL.set(call)
    try:
        yield call
    finally:
        _CALL.reset(token)


def _phase(engine: Any, data: Any, *, training: bool) -> str:
    """``update``, ``old_log_prob``, ``ref`` or ``values`` (with ``critic_`` before a critic's update)."""
    model_type = getattr(getattr(engine, "model_config", None), "model_type", "language_model")
    critic = model_type == "value_model"
    if training:
        return "critic_update" if critic else "update"
    if critic:
        return "values"
    forward_only = getattr(getattr(engine, "engine_config", None), "forward_only", False)
    # verl asks for the entropy in the old log-prob pass and not in the reference's; a LoRA run uses one engine for both
    if forward_only or not setting(data, "calculate_entropy", False):
        return "ref"
    return "old_log_prob"


def _report(engine: Any, outputs: Any, options: VerlOptions, phase: str, stats: PhaseStats, *, training: bool) -> None:
    """Into verl's metrics with an update; else kept for the next update, or logged where none comes."""
    if not training:
        if options.log:
            log_lines({phase: stats}, loud=True)
        elif any(waiting.calls > 1 for waiting in RECORDER.pending.values()):  # nothing here updates
            log_lines(RECORDER.flush(), loud=False)
        return
    taken = RECORDER.flush()
    if options.log or not options.metrics:
        log_lines({phase: stats} if options.log else taken, loud=options.log)
    metrics = outputs.get("metrics") if isinstance(outputs, dict) else None
    if not options.metrics or metrics is None or not engine.is_mp_src_rank_with_outputs():
        return
    from verl.utils.metric import Metric

    # Only a host that already takes figures per rank and micro-batch can take ours: the SFT trainer logs plain numbers.
    if any(isinstance(value, Metric | list) for value in metrics.values()):
        metrics.update(as_metrics(taken))
    else:
        warn_once("metrics", "this trainer takes no further figures; set PADLESS_VERL_LOG=1 to have them logged")
