"""Padless for any Hugging Face ``Trainer``: the rows of each optimizer step, regrouped under a token budget."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any, Literal, TypeVar

import torch

from padless.errors import PadlessError
from padless.integrations._guard import check_seams, check_version, require
from padless.integrations._hosts import Host
from padless.integrations._options import PadlessOptions, naming_options, options_of
from padless.integrations._step import Stepper

__all__ = ["PadlessMixin", "PadlessOptions", "with_padless"]

SEAMS: dict[str, tuple[str, ...]] = {
    "get_batch_samples": ("epoch_iterator", "num_batches", "device"),
    "training_step": ("model", "inputs", "num_items_in_batch"),
    "prediction_step": ("model", "inputs", "prediction_loss_only", "ignore_keys"),
    "compute_loss": ("model", "inputs", "return_outputs", "num_items_in_batch"),
    "_prepare_inputs": (),
    "_get_num_items_in_batch": ("batch_samples", "device"),
    "log": ("logs", "start_time"),
}

T = TypeVar("T", bound=type)


class PadlessMixin:
    """Put before a ``Trainer`` class; the optimizer steps keep their rows and their result, and lose their padding.

    The Trainer draws and collates its batches as always. When the last batch of an optimizer step is there, the rows
    of all of them are regrouped (over all ranks) into micro-batches of at most ``token_budget`` padded tokens, and
    each runs through the Trainer's own ``training_step``: its loss, its scaling, its backward. Losses are weighted so
    that their sum is the step's, whatever the grouping.

    Args:
        token_budget: ceiling on a micro-batch's padded tokens, or ``"auto"`` (see `PadlessOptions`).
        padless: further options; a ``token_budget`` in both places must be the same.

    ``class MyTrainer(PadlessMixin, Trainer)``, then ``MyTrainer(..., token_budget=16_384)``.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Refuse a class order in which the hooks would never run."""
        super().__init_subclass__(**kwargs)
        order = cls.__mro__
        late = next((base for base in order[: order.index(PadlessMixin)] if _is_host(base)), None)
        if late is not None:
            raise PadlessError(f"put PadlessMixin before {late.__name__} in the bases of {cls.__name__}")

    def __init__(
        self,
        *args: Any,
        token_budget: int | Literal["auto"] | None = None,
        padless: PadlessOptions | None = None,
        **kwargs: Any,
    ) -> None:
        options = options_of(padless, token_budget)
        _check_class(type(self))
        with naming_options(kwargs):
            super().__init__(*args, **kwargs)
        _check_parallelism(self)
        host = self._padless_host(options)
        self.padless = Stepper(self, options, host)

    def _padless_host(self, options: PadlessOptions) -> Host:
        """What this trainer's batches mean; chosen by its class."""
        if _is_trl(type(self)):
            from padless.integrations.trl import host_for

            return host_for(self, options)
        return Host(self, options)

    # --- hooks of transformers.Trainer

    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device) -> Any:
        """Draw the batches of one optimizer step (the host's method); forget an unfinished step."""
        self.padless.window = []
        begun = time.perf_counter()
        self.padless.drawing = True
        try:
            drawn = super().get_batch_samples(epoch_iterator, num_batches, device)  # type: ignore[misc]
        finally:
            self.padless.drawing = False
        self.padless.figures.load(time.perf_counter() - begun, self.model)  # type: ignore[attr-defined]
        return drawn

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """Collect a batch; with the last one of the step, regroup and run them all."""
        stepper = self.padless
        model.train()
        begun = time.perf_counter()
        stepper.window.append(self._prepare_inputs(inputs))
        stepper.host.collected(time.perf_counter() - begun)
        if len(stepper.window) < self.current_gradient_accumulation_steps:  # type: ignore[attr-defined]
            stepper.host.skipped()
            return torch.zeros((), device=self.args.device)  # type: ignore[attr-defined]
        return stepper.train(model, num_items_in_batch, super().training_step)  # type: ignore[misc]

    def compute_loss(
        self,
        model: Any,
        inputs: Any,
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
        **kwargs: Any,
    ) -> Any:
        """The host's loss, weighted by the micro-batch's share of the step."""
        host_loss = super().compute_loss  # type: ignore[misc]
        if not self.padless.running:
            return host_loss(
                model, inputs, return_outputs=return_outputs, num_items_in_batch=num_items_in_batch, **kwargs
            )
        with self.padless.host.calling(model) as called:
            result = host_loss(
                called, inputs, return_outputs=return_outputs, num_items_in_batch=num_items_in_batch, **kwargs
            )
        factor = self.padless.factor
        if factor is None or factor == 1.0:
            return result
        if return_outputs:
            return result[0] * factor, *result[1:]
        return result * factor

    def prediction_step(
        self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[Any, Any, Any]:
        """The host's evaluation step on regrouped rows; outputs in the order they came."""
        stepper = self.padless
        host_step = super().prediction_step  # type: ignore[misc]
        if not stepper.options.evaluate or not stepper.host.evaluates(prediction_loss_only):
            return host_step(model, inputs, prediction_loss_only, ignore_keys=ignore_keys)  # type: ignore[no-any-return]
        prepared = self._prepare_inputs(inputs)
        items = stepper.host.eval_items(prepared)

        def run(model: Any, inputs: Any, loss_only: bool) -> tuple[Any, Any, Any]:
            return host_step(model, inputs, loss_only, ignore_keys=ignore_keys)  # type: ignore[no-any-return]

        return stepper.predict(model, prepared, prediction_loss_only, items, run)

    def _prepare_inputs(self, inputs: Any) -> Any:
        """The host's preparation, once per collated batch; micro-batches are prepared already."""
        return inputs if self.padless.running else super()._prepare_inputs(inputs)  # type: ignore[misc]

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> Any:
        """The denominator of the whole step, also when the host asks for that of a micro-batch."""
        if self.padless.running:
            return self.padless.items
        if self.padless.drawing:
            batch_samples = self.padless.host.counted(batch_samples)
        return super()._get_num_items_in_batch(batch_samples, device)  # type: ignore[misc]

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """The host's log with padless' figures in it."""
        if self.padless.options.log and "loss" in logs:
            logs.update(self.padless.figures.take(self.padless.world))
            if self.padless.options.token_budget == "auto":
                logs["padless/token_budget"] = self.padless.budget
        super().log(logs, start_time)  # type: ignore[misc]


def with_padless(trainer_class: T) -> T:
    """A subclass of a ``Trainer`` class (transformers' or TRL's, or your own) that regroups its optimizer steps.

    Raises:
        PadlessError: not a Trainer, a TRL trainer that is not supported, or a version whose hooks moved.

    ``SFTTrainer = with_padless(SFTTrainer)``, then ``SFTTrainer(..., token_budget=16_384)``.
    """
    require("transformers", "transformers")
    from transformers import Trainer

    if not (isinstance(trainer_class, type) and issubclass(trainer_class, Trainer)):
        raise PadlessError(f"with_padless({trainer_class!r}); expected a subclass of transformers.Trainer")
    if issubclass(trainer_class, PadlessMixin):
        return trainer_class
    mixin: type = PadlessMixin
    if _is_trl(trainer_class):
        from padless.integrations.trl import mixin_for

        mixin = mixin_for(trainer_class)
    made: Any = type(
        f"Padless{trainer_class.__name__}", (mixin, trainer_class), {"__module__": trainer_class.__module__}
    )
    return made  # type: ignore[no-any-return]


def _is_trl(trainer_class: type) -> bool:
    return any(base.__module__.startswith("trl.") for base in trainer_class.__mro__)


def _is_host(base: type) -> bool:
    """Whether a base is a host's trainer, and not one of padless' own or a user's."""
    return base.__module__.split(".")[0] in ("transformers", "trl") and not issubclass(base, PadlessMixin)


def _check_class(trainer_class: type) -> None:
    """The installed Trainer has the hooks."""
    from transformers import Trainer

    if not issubclass(trainer_class, Trainer):
        raise PadlessError(
            f"{trainer_class.__name__} mixes PadlessMixin into something that is no transformers.Trainer"
        )
    check_version("transformers")
    check_seams(Trainer, SEAMS, "transformers")


def _check_parallelism(trainer: Any) -> None:
    """Refuse what was never tested rather than train something else."""
    sizes = {"tensor": trainer.get_tp_size(), "context": trainer.get_cp_size(), "sequence": trainer.get_sp_size()}
    for name, size in sizes.items():
        if size > 1:
            raise PadlessError(f"{name} parallelism of {size} ranks: padless' Trainer hooks know data parallelism only")
    if trainer.args.n_gpu > 1:
        raise PadlessError(
            f"{trainer.args.n_gpu} devices in one process (DataParallel): start one process per device with torchrun or"
            " accelerate launch"
        )
    if getattr(trainer, "is_deepspeed_enabled", False):
        raise PadlessError(
            "DeepSpeed counts micro-batches itself and was not tested with padless: use FSDP or DDP, or"
            " padless.regroup in a loop of your own"
        )
