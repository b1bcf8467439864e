"""Search for the largest token budget that fits: worst shapes first, out-of-memory survived, nothing left changed."""

from __future__ import annotations

import contextlib
import platform
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from padless.cost import CostModel
from padless.errors import PadlessError, shown
from padless.lengths import positive_int
from padless.tuning.memory import AllocationMeter, free_cached, is_out_of_memory, parse_bytes
from padless.tuning.profile import Profile, describe

__all__ = ["StepFunction", "Trial", "memory_limit_of", "tune"]

StepFunction: TypeAlias = Callable[[nn.Module, int, int], None]
"""Runs the forward and backward of one micro-batch of (rows, width) and leaves gradients in place."""

_BROKEN = -1  # a trial that failed, not for want of memory
_SHORT = 16  # the shape of many short rows is this much narrower than the longest row


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One shape that was tried: did it fit, and how many bytes did it need at most (0 where it did not get there)."""

    rows: int
    width: int
    fits: bool
    peak: int


def tune(
    model: nn.Module,
    *,
    max_length: int,
    optimizer: Any = None,
    step: StepFunction | None = None,
    memory_limit: int | str | None = None,
    headroom: float = 0.1,
    max_budget: int | None = None,
    tolerance: float = 0.05,
    calibrate_seconds: float = 30.0,
    on_trial: Callable[[Trial], None] | None = None,
    process_group: Any = None,
    rows_together: int = 1,
    also_held: int = 0,
) -> Profile:
    """Find the largest number of padded tokens whose forward and backward fit in memory.

    For each candidate two shapes run: few rows of the longest length (attention) and many short ones (states per
    row). Candidates double until one does not fit, then the bracket is halved. Gradients and the optimizer's state
    are counted whether they exist yet or not.

    The model's parameters, buffers, gradients and mode, and the random states of torch, NumPy and Python, are as before
    afterwards; the optimizer is never stepped.

    Args:
        model: on the device where it will train.
        max_length: longest row of the data, in tokens.
        optimizer: room is kept for its state if that does not exist yet; ``None`` counts AdamW's two moments.
        step: runs one micro-batch; by default the model's own loss on random tokens.
        memory_limit: bytes or ``"80GiB"``. On a GPU the free memory is taken where nothing is given; on a CPU a limit
            must be stated.
        headroom: share of the limit that stays free.
        max_budget: do not look further; by default 1024 rows of ``max_length``.
        tolerance: the result is within this share of the largest that fits.
        calibrate_seconds: time spent on measuring what micro-batches cost; 0 leaves the cost model out.
        on_trial: called after each trial.
        process_group: ranks that agree on every trial and take the smallest result. The step itself must not
            communicate: a rank that runs out of memory inside a collective would leave the others waiting.
        rows_together: rows that always share a micro-batch (2 for preference pairs): the smallest budget tried.
        also_held: bytes that stay in memory beside model and optimizer (a reference model). A GPU counts them itself.

    Raises:
        PadlessError: one row of ``max_length`` does not fit, or no limit is known.
        Exception: what a step raised that is not about memory. The other ranks then raise a `PadlessError`.

    >>> from transformers import AutoModelForCausalLM, Qwen2Config
    >>> config = Qwen2Config(vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
    ...     num_attention_heads=2, num_key_value_heads=1)
    >>> model = AutoModelForCausalLM.from_config(config)
    >>> profile = tune(model, max_length=32, memory_limit="2MB", calibrate_seconds=0)
    >>> profile.token_budget >= 32 and profile.peak_memory <= 2_000_000
    True
    """
    longest = positive_int(max_length, name="max_length")
    least = longest * positive_int(rows_together, name="rows_together")
    top = least * 1024 if max_budget is None else positive_int(max_budget, name="max_budget", minimum=least)
    if not 0 <= headroom < 1:
        raise PadlessError(f"headroom={shown(headroom)}; expected a share of at least 0 and below 1")
    device = next(model.parameters()).device
    limit = memory_limit_of(device, memory_limit)
    run = step or language_model_step
    trials: list[Trial] = []
    # An evaluation may be what asks: trials need gradients all the same.
    with torch.inference_mode(False), torch.enable_grad(), _untouched(model, optimizer) as held_by_model:
        held = held_by_model + also_held
        bench = _Bench(model, run, device, int(limit * (1 - headroom)), held, process_group)

        def fits(budget: int) -> bool:
            for rows, width in shapes_of(budget, longest):
                trial = bench.run(rows, width)
                trials.append(trial)
                if on_trial is not None:
                    on_trial(trial)
                if not trial.fits:
                    return False
            return True

        budget = _largest(fits, least, top, tolerance)
        if budget is None:
            what = "one row" if rows_together == 1 else f"{rows_together} rows"
            raise PadlessError(
                f"{what} of {longest} tokens {'does' if rows_together == 1 else 'do'} not fit in"
                f" {int(limit * (1 - headroom)):,} bytes ({held:,} of them"
                " are the model, its gradients and optimizer state): raise memory_limit, lower headroom or max_length,"
                " or use gradient checkpointing or another optimizer"
            )
        cost, untimed = bench.calibrate(budget, longest, calibrate_seconds) if calibrate_seconds > 0 else (None, "")
    return Profile(
        token_budget=budget,
        cost=cost,
        model=describe(model),
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else str(device.type),
        max_length=longest,
        memory_limit=limit,
        peak_memory=max(trial.peak for trial in trials if trial.fits),
        trials=tuple((trial.rows, trial.width, trial.fits, trial.peak) for trial in trials),
        details={
            "dtype": str(next(model.parameters()).dtype).removeprefix("torch."),
            "gradient_checkpointing": bool(getattr(model, "is_gradient_checkpointing", False)),
            "headroom": headroom,
            "torch": torch.__version__,
            "machine": platform.machine(),
            **({"no cost model": untimed} if untimed else {}),
        },
    )


def shapes_of(budget: int, longest: int) -> list[tuple[int, int]]:
    """Worst shapes (rows, width) of a budget: the widest rows first, then many short ones.

    >>> shapes_of(1000, 400)
    [(3, 333), (40, 25)]
    """
    rows = -(-budget // longest)
    wide = (rows, budget // rows)
    narrow = max(longest // _SHORT, 1)
    return [wide] if budget // narrow <= rows else [wide, (budget // narrow, narrow)]


def language_model_step(model: nn.Module, rows: int, width: int) -> None:
    """Forward and backward of the model's own loss on random tokens, all of them real."""
    config: Any = model.config
    vocabulary = int(getattr(config, "get_text_config", lambda: config)().vocab_size)
    device = next(model.parameters()).device
    ids = torch.randint(0, vocabulary, (rows, width), device=device)
    outputs = model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids, use_cache=False)
    outputs.loss.backward()


def _largest(fits: Callable[[int], bool], first: int, top: int, tolerance: float) -> int | None:
    """The largest budget that fits, to within ``tolerance``; None where ``first`` does not."""
    if not fits(first):
        return None
    good, bad = first, None
    while bad is None and good < top:
        candidate = min(2 * good, top)
        if fits(candidate):
            good = candidate
        else:
            bad = candidate
    while bad is not None and bad - good > max(1, int(tolerance * good)):
        middle = (good + bad) // 2
        if fits(middle):
            good = middle
        else:
            bad = middle
    return good


@dataclass(slots=True)
class _Bench:
    """Runs shapes and says whether they fit, on all ranks alike."""

    model: nn.Module
    step: StepFunction
    device: torch.device
    limit: int
    held: int
    group: Any

    def run(self, rows: int, width: int) -> Trial:
        free_cached(self.device, collect=False)
        peak, ok = 0, True
        try:
            peak = self._measure(rows, width)
            ok = peak <= self.limit
        except Exception as error:
            if not is_out_of_memory(error):
                self._agree(_BROKEN)
                raise
            ok = False
            # The traceback holds the frames, and these the activations of the failed pass.
            error.__traceback__ = None
        if not ok:
            free_cached(self.device)
        return Trial(rows=rows, width=width, fits=self._agree(int(ok)), peak=peak)

    def _measure(self, rows: int, width: int) -> int:
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            self.step(self.model, rows, width)
            torch.cuda.synchronize(self.device)
            return int(torch.cuda.max_memory_reserved(self.device))
        with AllocationMeter(limit=self.limit, held=self.held) as meter:
            self.step(self.model, rows, width)
        return int(meter.peak)

    def _agree(self, verdict: int) -> bool:
        """Whether every rank fits; ``verdict`` is 1, 0, or that this rank's step is broken."""
        if self.group is None or not torch.distributed.is_initialized():
            return bool(verdict)
        held = torch.tensor([verdict], device=self.device)
        torch.distributed.all_reduce(held, op=torch.distributed.ReduceOp.MIN, group=self.group)
        if int(held.item()) == _BROKEN and verdict != _BROKEN:
            raise PadlessError("a trial failed on another rank, not for want of memory: its error says why")
        return bool(held.item())

    def calibrate(self, budget: int, longest: int, seconds: float) -> tuple[CostModel | None, str]:
        """Time shapes from one short row to the whole budget; no model, and why, where the time is too short."""
        shapes = set()
        for width in {longest, max(longest // 4, 1), max(longest // _SHORT, 1)}:
            for tokens in {budget, budget // 4, budget // 16, width}:
                shapes.add((max(tokens // width, 1), width))

        def timed(rows: int, width: int) -> float:
            begun = time.perf_counter()
            self.step(self.model, rows, width)
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            return time.perf_counter() - begun

        try:
            return CostModel.calibrate(timed, shapes=shapes, max_seconds=seconds), ""
        except PadlessError as error:  # the budget that was found must not be lost for it
            return None, str(error)


def memory_limit_of(device: torch.device, stated: int | str | None) -> int:
    """Bytes that a step may use: those stated, or what is free on a GPU."""
    if stated is not None:
        return parse_bytes(stated)
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free + torch.cuda.memory_reserved(device))
    raise PadlessError(
        f"the memory of device {device.type!r} is shared with everything else: state a limit, memory_limit='8GiB'"
    )


@contextlib.contextmanager
def _untouched(model: nn.Module, optimizer: Any) -> Iterator[int]:
    """Zero gradients and room for the optimizer's state while trials run; everything as before afterwards.

    Yields the bytes that are held all the time: parameters, buffers, gradients, optimizer state.
    """
    parameters = list(model.parameters())
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    device = parameters[0].device
    gradients = [parameter.grad for parameter in parameters]
    buffers = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
    training = {module: module.training for module in model.modules()}
    states = torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    others = random.getstate(), np.random.get_state()  # noqa: NPY002 (the state that a user's code draws from)
    state_bytes, missing = _optimizer_bytes(optimizer, trained)
    room: list[Tensor] = []
    try:
        model.train()
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
        if device.type == "cuda" and missing:
            room.append(torch.empty(missing, dtype=torch.uint8, device=device))
        yield _bytes([*parameters, *model.buffers(), *trained]) + state_bytes + missing
    finally:
        room.clear()
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        with torch.no_grad():
            for name, buffer in model.named_buffers():
                buffer.copy_(buffers[name])
        for module, mode in training.items():
            module.training = mode
        torch.set_rng_state(states[0])
        if states[1] is not None:
            torch.cuda.set_rng_state(states[1], device)
        random.setstate(others[0])
        np.random.set_state(others[1])  # noqa: NPY002
        free_cached(device, collect=False)


def _bytes(tensors: list[Tensor]) -> int:
    return sum(int(tensor.numel()) * tensor.element_size() for tensor in tensors)


def _optimizer_bytes(optimizer: Any, trained: list[nn.Parameter]) -> tuple[int, int]:
    """(bytes of state that exists, bytes that the first step will add)."""
    if optimizer is not None and optimizer.state:
        held = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
        return _bytes(held), 0
    copies = 2  # the moments of Adam and its kin
    if "SGD" in type(optimizer).__name__:
        copies = int(any(group.get("momentum") for group in optimizer.param_groups))
    return 0, copies * _bytes(list(trained))
