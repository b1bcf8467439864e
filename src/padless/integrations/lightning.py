"""Padless for Lightning: each batch of the loader is an optimizer step, regrouped under a token budget."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from padless.errors import PadlessError, choose
from padless.integrations._auto import auto_profile, longest_in, trial_batch
from padless.integrations._figures import Figures
from padless.integrations._guard import check_seams, check_version, require
from padless.integrations._merge import merge
from padless.integrations._options import PadlessOptions, naming_options, options_of
from padless.lengths import positive_int
from padless.loss import MODES, Denominators, Mode, aggregate, denominators, target_mask

__all__ = ["PadlessModuleMixin", "PadlessOptions"]

SEAMS: dict[str, tuple[str, ...]] = {
    "manual_backward": ("loss",),
    "clip_gradients": ("optimizer", "gradient_clip_val"),
    "optimizers": (),
    "log_dict": ("dictionary",),
}


class PadlessModuleMixin:
    """Put before ``LightningModule``; write ``token_losses``, and leave ``training_step`` to it.

    One batch of the train loader (or ``batches_per_step`` of them) is one optimizer step. Its rows, over all ranks,
    run as micro-batches; gradients meet once. The loss is that of the whole step, in any of the field's modes.

    Args:
        token_budget: ceiling on a micro-batch's padded tokens, or ``"auto"`` (see `PadlessOptions`).
        padless: further options.
        loss_mode: ``"token-mean"`` (default), ``"seq-mean-token-mean"``, ...; see `padless.loss`.
        loss_norm: the constant of ``"seq-mean-token-sum-norm"``.
        clip_norm: clip the gradient to it once per step (the Trainer's own option is for automatic optimisation).
        batches_per_step: batches of the loader that make one optimizer step.

    Logged: ``train_loss``, ``grad_norm`` and padless' figures. Schedulers with ``interval="step"`` are stepped.
    """

    def __init__(
        self,
        *args: Any,
        token_budget: Any = None,
        padless: PadlessOptions | None = None,
        loss_mode: Mode = "token-mean",
        loss_norm: float | None = None,
        clip_norm: float | None = None,
        batches_per_step: int = 1,
        **kwargs: Any,
    ) -> None:
        require("lightning", "lightning")
        import lightning

        if not isinstance(self, lightning.LightningModule):
            raise PadlessError(
                f"{type(self).__name__} mixes PadlessModuleMixin into something that is no LightningModule"
            )
        check_version("lightning")
        check_seams(lightning.LightningModule, SEAMS, "lightning")
        options = options_of(padless, token_budget)
        with naming_options(kwargs):
            super().__init__(*args, **kwargs)
        self.automatic_optimization = False
        self.padless = options
        if self.padless.layout != "padded":
            raise PadlessError(
                f"layout={self.padless.layout!r} is not wired into the Lightning mixin: use padless.regroup(report=...)"
            )
        self.padless_figures = Figures()
        self._mode: Mode = choose("loss_mode", loss_mode, MODES)
        self._norm = loss_norm
        self._clip_norm = clip_norm
        self._batches = positive_int(batches_per_step, name="batches_per_step")
        self._window: list[Mapping[str, Any]] = []
        self._cost = self.padless.cost
        self._ended = time.perf_counter()

    # --- what a user writes

    def token_losses(self, inputs: Mapping[str, Any]) -> Tensor:
        """Loss of each token (B, W), at the token that is predicted; cells without a target may hold anything."""
        raise PadlessError(f"{type(self).__name__} has no token_losses(inputs): return per-token losses (B, W)")

    def token_targets(self, inputs: Mapping[str, Any]) -> Tensor:
        """Which cells (B, W) count; by default the labels that a causal model predicts."""
        return target_mask(inputs["labels"], inputs.get("attention_mask"))

    # --- the steps

    def training_step(self, batch: Mapping[str, Any], batch_idx: int) -> None:
        """Collect; with the last batch of the step, regroup, run all micro-batches and step the optimizer."""
        trainer: Any = self.trainer  # type: ignore[attr-defined]
        self.padless_figures.load(time.perf_counter() - self._ended, self)
        self._window.append(batch)
        if len(self._window) < self._batches and not trainer.is_last_batch:
            return
        window, self._window = self._window, []
        optimizer: Any = self.optimizers()  # type: ignore[attr-defined]
        if isinstance(optimizer, list):
            raise PadlessError(
                f"{len(optimizer)} optimizers: PadlessModuleMixin steps one; call padless.regroup yourself"
            )
        if "16-mixed" in str(trainer.precision) and "bf16" not in str(trainer.precision):
            raise PadlessError("precision='16-mixed' was not tested with padless: use 'bf16-mixed' or '32-true'")
        tensor_ranks = getattr(trainer.strategy, "_tensor_parallel_size", 1)
        if isinstance(tensor_ranks, int) and tensor_ranks > 1:
            raise PadlessError(
                f"tensor parallelism of {tensor_ranks} ranks: padless' Lightning mixin knows data parallelism only;"
                " give ModelParallelStrategy(data_parallel_size=..., tensor_parallel_size=1)"
            )
        rows = merge(window, self.padless.fields)
        counts = denominators(self.token_targets(rows), process_group=self._group())
        grouped = self._regroup(rows, "rows" if self.padless.exchange != "never" else "never")
        optimizer.zero_grad()
        total = torch.zeros((), device=self.device)  # type: ignore[attr-defined]
        for at, micro in enumerate(grouped):
            loss = self._part(micro, counts)
            with contextlib.nullcontext() if at == len(grouped) - 1 else _held(trainer.strategy):
                self.manual_backward(loss)  # type: ignore[attr-defined]
            total += loss.detach()
            self.padless_figures.ran(micro)
        self.padless_figures.planned(grouped.plan)
        self._finish(optimizer, total)

    def regrouped_loss(self, batch: Mapping[str, Any]) -> Tensor:
        """The loss of one evaluation batch, for ``validation_step`` and ``test_step``; rows stay on their rank."""
        with torch.no_grad():
            counts = denominators(self.token_targets(batch))
            grouped = self._regroup(batch, "never", self.padless.eval_token_budget)
            return torch.stack([self._part(micro, counts) for micro in grouped]).sum()

    # --- parts of a step

    def _part(self, micro: Any, counts: Denominators) -> Tensor:
        inputs = micro.inputs
        losses, targets = self.token_losses(inputs), self.token_targets(inputs)
        part = aggregate(losses, targets, self._mode, denominators=counts, norm=self._norm)
        return part if micro.weight else torch.nan_to_num(part) * 0.0

    def _finish(self, optimizer: Any, total: Tensor) -> None:
        trainer: Any = self.trainer  # type: ignore[attr-defined]
        if self._clip_norm is not None:
            self.clip_gradients(  # type: ignore[attr-defined]
                optimizer, gradient_clip_val=self._clip_norm, gradient_clip_algorithm="norm"
            )
        optimizer.step()
        for config in trainer.lr_scheduler_configs:
            if config.interval == "step":
                config.scheduler.step()
        self.log("train_loss", total, sync_dist=trainer.world_size > 1, prog_bar=True)  # type: ignore[attr-defined]
        self._ended = time.perf_counter()
        if self.padless.log and trainer.global_step % trainer.log_every_n_steps == 0:
            self.log_dict(self.padless_figures.take(trainer.world_size))  # type: ignore[attr-defined]

    def _group(self) -> Any:
        several = self.trainer.world_size > 1  # type: ignore[attr-defined]
        return torch.distributed.group.WORLD if several else None

    def _regroup(self, rows: Mapping[str, Any], exchange: str, budget: int | None = None) -> Any:
        import padless

        options = self.padless
        more: dict[str, Any] = {}
        group = self._group()
        if group is not None:
            more = {"process_group": group, "exchange": exchange, "sync": "step"}
        return padless.regroup(
            rows,
            budget or self._budget(rows),
            fields=options.fields,
            method=options.method,
            cost=self._cost,
            multiple_of=options.multiple_of,
            ladder=options.ladder,
            overlong=options.overlong,
            **more,
        )

    def _budget(self, rows: Mapping[str, Any]) -> int:
        if self.padless.token_budget == "auto":
            profile = self._search(rows)
            self._cost = self._cost or profile.cost
            self.padless = replace(self.padless, token_budget=profile.token_budget)
        return int(self.padless.token_budget)

    def _search(self, rows: Mapping[str, Any]) -> Any:
        """A profile that holds on all ranks; trials run this module's loss without collectives."""
        trainer: Any = self.trainer  # type: ignore[attr-defined]
        optimizers = trainer.optimizers

        def step(module: Any, count: int, width: int) -> None:
            made = trial_batch(rows, self.padless.fields or {}, count, width)
            counts = denominators(self.token_targets(made))
            with trainer.precision_plugin.train_step_context():
                losses, targets = self.token_losses(made), self.token_targets(made)
                loss: Any = aggregate(losses, targets, self._mode, denominators=counts, norm=self._norm)
                loss.backward()

        return auto_profile(
            self.padless,
            self,  # type: ignore[arg-type]
            step=step,
            longest=lambda: longest_in(getattr(trainer.train_dataloader, "dataset", None), [("input_ids",)]),
            optimizer=optimizers[0] if optimizers else None,
            process_group=self._group(),
            writes=bool(trainer.local_rank == 0),
            check=False,  # the command tunes the model inside
        )


def _held(strategy: Any) -> Any:
    """No gradient reduction before the last micro-batch of the step."""
    block = getattr(strategy, "block_backward_sync", None)
    return contextlib.nullcontext() if block is None else block()
