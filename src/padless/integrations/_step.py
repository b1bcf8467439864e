"""One optimizer step of a host trainer, run as micro-batches under a token budget."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from padless.errors import PadlessError
from padless.integrations._auto import WAYS_OUT, auto_profile, bytes_of, unwrapped
from padless.integrations._figures import Figures, local_collectives
from padless.integrations._hosts import Host, StepRows, Unit
from padless.integrations._options import PadlessOptions
from padless.integrations._probe import LossProbe

__all__ = ["Stepper"]


class Stepper:
    """Collects the host's batches of an optimizer step, regroups their rows and runs them through the host's code.

    The host's own methods do all the work on each micro-batch: preparation, loss, scaling, backward. Only what depends
    on the grouping is corrected: the weight of each micro-batch's loss and of its logged figures.
    """

    def __init__(self, trainer: Any, options: PadlessOptions, host: Host) -> None:
        self.trainer = trainer
        self.options = options
        self.host = host
        self.window: list[Mapping[str, Any]] = []
        self.running = False
        self.drawing = False  # whether the host counts targets of rows that will be regrouped
        self.factor: float | None = None
        self.items: Any = None
        self.micro_inputs: Mapping[str, Any] | None = None
        self.figures = Figures()
        self._budget: int | None = None
        self._cost = options.cost
        self._probe = LossProbe(trainer, host, self._largest, lambda: self._inside("train"))

    # --- settings

    @property
    def world(self) -> int:
        """Data-parallel ranks."""
        return int(self.trainer.accelerator.num_processes)

    @property
    def budget(self) -> int:
        """The token budget; with ``"auto"`` it is known from the first step, or the profile, on."""
        return self._budget if self._budget is not None else self.budget_for(self.trainer.model)

    def budget_for(
        self, model: Any, rows: StepRows | None = None, *, num_items: Any = None, packs: bool = False
    ) -> int:
        """The token budget, which ``"auto"`` may have to search for, with the rows at hand as an example."""
        if self._budget is None:
            if self.options.token_budget == "auto":
                profile = self._search(model, rows, num_items, packs)
                self._budget = profile.token_budget
                self._cost = self._cost or profile.cost
            else:
                self._budget = int(self.options.token_budget)
        return self._budget

    def _search(self, model: Any, rows: StepRows | None, num_items: Any, packs: bool) -> Any:
        """A profile that holds on all ranks; trials run the host's loss on the live model, without collectives."""
        trainer, host = self.trainer, self.host
        packed = self._layout() if packs else {}
        reference = getattr(trainer, "ref_model", None)

        def step(inner: Any, count: int, width: int) -> None:
            if rows is None and not host.makes_trials:
                raise PadlessError(f"token_budget='auto': no rows to search with yet: {WAYS_OUT}")
            inputs = host.trial(rows, count, width, packed)
            with self._inside("train"), trainer.compute_loss_context_manager():
                self.micro_inputs = inputs
                trainer.compute_loss(inner, inputs, num_items_in_batch=num_items).backward()

        def longest() -> int | None:
            if self._sharded:
                raise PadlessError(
                    "token_budget='auto': parameters are sharded, so that a rank out of memory would leave the others"
                    f" waiting in a collective: {WAYS_OUT}"
                )
            return host.longest()

        counted = getattr(trainer, "_total_train_tokens", None)
        try:
            return auto_profile(
                self.options,
                unwrapped(model),
                step=step,
                longest=longest,
                rows_together=host.rows_together,
                optimizer=trainer.optimizer,
                also_held=0 if reference is None else bytes_of(trainer.accelerator.unwrap_model(reference)),
                process_group=torch.distributed.group.WORLD if self.world > 1 else None,
                writes=bool(trainer.is_local_process_zero()),
            )
        finally:
            if counted is not None:
                trainer._total_train_tokens = counted

    @property
    def _sharded(self) -> bool:
        """Whether ranks meet in every forward pass, to gather parameters; DDP meets at the end of the step."""
        loaded = getattr(self.trainer, "is_distributed_loading_by_transformers", False)
        return bool(self.trainer.is_fsdp_enabled or loaded)

    def _largest(self, value: int) -> int:
        """The largest value over the ranks."""
        if self.world == 1:
            return value
        held = torch.tensor([value], device=self.trainer.accelerator.device)
        torch.distributed.all_reduce(held, op=torch.distributed.ReduceOp.MAX)
        return int(held.item())

    def regroup(self, rows: StepRows, budget: int, *, moves: bool, packs: bool = False) -> Any:
        """``padless.regroup`` with this trainer's options; over all ranks where there are several."""
        import padless

        more: dict[str, Any] = {}
        if packs:
            more |= self._layout()
        if self.world > 1:
            more["process_group"] = torch.distributed.group.WORLD
            more["exchange"] = "rows" if moves else "never"
            more["sync"] = "microbatch" if self._sharded else "step"
        if self.options.ladder is not None:
            more["ladder"] = self.options.ladder
        return padless.regroup(
            rows.batch,
            budget,
            fields=rows.fields,
            atoms=rows.atoms,
            method=self.options.method,
            cost=self._cost,
            multiple_of=self.options.multiple_of,
            overlong=self.options.overlong,
            **more,
        )

    def _layout(self) -> dict[str, Any]:
        """Arguments of ``padless.regroup`` for another layout than the padded one."""
        return {} if self.options.layout == "padded" else {"layout": self.options.layout, "report": self.options.report}

    def _moves(self, num_items: Any, unit: Unit) -> bool:
        """Whether rows may change ranks: not where the host divides by each rank's own number of targets."""
        local = unit == "sum" and num_items is not None and not self.trainer.args.average_tokens_across_devices
        if local and self.options.exchange == "always" and self.world > 1:
            raise PadlessError(
                "exchange='always' with average_tokens_across_devices=False: each rank divides by its own targets, so"
                " a row's weight depends on its rank; set average_tokens_across_devices=True or exchange='never'"
            )
        return self.options.exchange != "never" and not local

    # --- training

    def train(self, model: Any, num_items: Any, run: Callable[[Any, Any, Any], Tensor]) -> Tensor:
        """Run the collected rows; ``run(model, inputs, num_items)`` is the host's ``training_step``."""
        trainer, host = self.trainer, self.host
        accumulated = trainer.current_gradient_accumulation_steps
        window, self.window = self.window, []
        if isinstance(num_items, Tensor):
            num_items = num_items.clamp(min=1)  # a step without targets is 0, not 0 / 0
        rows = host.build(window)
        unit = host.unit(num_items, True)
        if host.probes_denominator:
            unit = self._probe.unit(model, rows, num_items, unit)
        packs = host.packs and unit != "rows"
        if self.options.layout == "packed" and not packs:
            raise PadlessError(
                f"layout='packed': the loss of {type(trainer).__name__} is one over rows (or pairs), which a packed row"
                " does not keep apart; use layout='auto' or 'padded'"
            )
        budget = self.budget_for(model, rows, num_items=num_items, packs=packs)
        grouped = self.regroup(rows, budget, moves=self._moves(num_items, unit), packs=packs)
        count = len(grouped)
        # A mean is divided by the number of micro-batches, here or by the host; where nobody divides, the host's
        # step is the sum of its batches' means.
        times = count if host.divides_by_accumulation(num_items) else accumulated
        share = self._shares(rows, unit)
        total = torch.zeros((), device=trainer.args.device)
        trainer.current_gradient_accumulation_steps = count
        state = trainer.accelerator.gradient_state
        synced = state.sync_gradients
        try:
            host.begin(accumulated, count)
            with self._inside("train"):
                for at in range(count):
                    micro = grouped[at]
                    inputs = host.inputs(micro)
                    self.factor = micro.weight * (1.0 if unit == "sum" else times * share(inputs))
                    self.micro_inputs = inputs
                    last = at == count - 1
                    state._set_sync_gradients(last and synced)
                    with self._hold(model, last):
                        total += run(model, inputs, num_items)
                    self.figures.collect(inputs, micro.weight, host)
                    self.figures.ran(micro)
                    host.ran(micro.weight)
            self.figures.planned(grouped.plan)
            host.end("train", self.sum_over_ranks)
        finally:
            state._set_sync_gradients(synced)
            trainer.current_gradient_accumulation_steps = accumulated
        return total

    def _shares(self, rows: StepRows, unit: Unit) -> Callable[[Mapping[str, Any]], float]:
        """The share of a micro-batch in the step's mean, times the ranks that the gradient is averaged over."""
        if unit == "sum":
            return lambda inputs: 1.0
        counter = self.host.rows if unit == "rows" else self.host.targets
        (total,) = self.sum_over_ranks([float(counter(rows.batch))])
        return lambda inputs: counter(inputs) * self.world / max(total, 1.0)

    def sum_over_ranks(self, values: list[float]) -> list[float]:
        """Sums over the ranks."""
        if self.world == 1:
            return values
        device = self.trainer.accelerator.device
        held = torch.tensor(values, device=device, dtype=torch.float32 if device.type == "mps" else torch.float64)
        torch.distributed.all_reduce(held)
        return [float(value) for value in held]

    def _hold(self, model: Any, last: bool) -> Any:
        """No gradient reduction before the last micro-batch, as the Trainer does it."""
        trainer = self.trainer
        if last or trainer.accelerator.gradient_state.plugin_kwargs.get("sync_each_batch", False):
            return contextlib.nullcontext()
        if getattr(trainer, "is_distributed_loading_by_transformers", False):
            return trainer._defer_fsdp_gradient_reduction()
        return trainer.accelerator.no_sync(model)

    @contextlib.contextmanager
    def _inside(self, mode: str) -> Iterator[None]:
        """While micro-batches run: hooks pass through, and the host's figures are gathered once, at the end."""
        self.running = True
        try:
            with (
                local_collectives(self.trainer.accelerator),
                self.figures.lists(self.host.metrics(mode), self.host, self._gather),
            ):
                yield
        finally:
            self.running, self.factor, self.items, self.micro_inputs = False, None, None, None

    def _gather(self, values: Tensor) -> Tensor:
        """(K, C) from every rank as (R, K, C)."""
        if self.world == 1:
            return values[None]
        values = values.to(self.trainer.accelerator.device)
        parts = [torch.empty_like(values) for _ in range(self.world)]
        torch.distributed.all_gather(parts, values)
        return torch.stack(parts).cpu()

    # --- evaluation

    def predict(
        self,
        model: Any,
        prepared: Mapping[str, Any],
        loss_only: bool,
        items: Any,
        run: Callable[[Any, Any, bool], tuple[Any, Any, Any]],
    ) -> tuple[Any, Any, Any]:
        """Run one evaluation batch; outputs come back in the order and width of ``prepared``."""
        host = self.host
        rows = host.build([prepared])
        budget = self.options.eval_token_budget or self.budget_for(model, rows, num_items=items)
        grouped = self.regroup(rows, budget, moves=False)
        unit: Unit = "sum" if items is not None else host.unit(None, False)
        counter = host.targets if unit == "targets" else host.rows
        whole = max(float(counter(rows.batch)), 1.0)
        loss: Tensor | None = None
        outputs: list[Any] = []
        host.begin(1, 1)
        with self._inside("eval"):
            self.items = items
            for micro in grouped:
                inputs = host.inputs(micro)
                self.factor = micro.weight * (1.0 if unit == "sum" else counter(inputs) / whole)
                self.micro_inputs = inputs
                part, logits, _ = run(model, inputs, loss_only)
                if part is not None:
                    loss = part if loss is None else loss + part
                outputs.append(logits)
                self.figures.collect(inputs, micro.weight, host)
                host.ran(micro.weight)
        host.end("eval", self.sum_over_ranks)
        if loss_only or outputs[0] is None:
            return loss, None, host.labels(prepared) if not loss_only else None
        return loss, _restore(outputs, grouped), host.labels(prepared)


def _restore(outputs: list[Any], grouped: Any) -> Any:
    """Nested outputs of all micro-batches, each leaf in the caller's row order and width."""
    first = outputs[0]
    if isinstance(first, tuple | list):
        return type(first)(_restore([output[at] for output in outputs], grouped) for at in range(len(first)))
    if isinstance(first, Mapping):
        return {key: _restore([output[key] for output in outputs], grouped) for key in first}
    if first is None:
        return None
    if not isinstance(first, Tensor) or first.dim() == 0:
        raise PadlessError(
            f"a model output is {type(first).__name__} without rows: it cannot be put back in order; name its key in"
            " ignore_keys, or switch regrouping off in evaluation with PadlessOptions(evaluate=False)"
        )
    micros = [micro.padded_tokens // max(len(micro.indices), 1) for micro in grouped]  # widths
    per_token = all(
        output.dim() >= 2 and output.shape[1] == width for output, width in zip(outputs, micros, strict=True)
    )
    return grouped.restore(outputs, span="sequence" if per_token else "row")
