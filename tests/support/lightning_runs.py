"""A Lightning module on a tiny model: the host alone (one wide batch per step), and with padless."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.strategies import ModelParallelStrategy

from padless.integrations.lightning import PadlessModuleMixin
from padless.integrations.transformers import PadlessOptions
from padless.logits import token_losses
from padless.loss import target_mask
from support.loop_runs import LR, STEPS, host_loss, losses_of, shard
from support.trainers import CountTokens, Outcome, collate, sft_rows, tiny_model, whole

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class HostModule(lightning.LightningModule):
    """Automatic optimisation; the model's own mean loss, or the mean over sequences."""

    def __init__(self, kind: str, mode: str = "token-mean", sharded: bool = False) -> None:
        super().__init__()
        self.model = tiny_model(kind)
        self.counter = CountTokens(self.model)
        self.mode = mode
        self.sharded, self.ready = sharded, False
        self.losses: list[float] = []
        self.norms: list[float] = []

    def configure_model(self) -> None:
        """Shard where the strategy asks for it."""
        if self.sharded and not self.ready:
            shard(self.model)
            self.ready = True

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        targets = target_mask(batch["labels"], batch["attention_mask"])
        loss = host_loss(losses_of(self.model, batch), targets, self.mode)
        self.losses.append(self.over_ranks(loss))
        return loss

    def over_ranks(self, loss: torch.Tensor) -> float:
        """The mean over ranks, as a logger with ``sync_dist`` shows it."""
        return float(self.trainer.strategy.reduce(loss.detach().clone(), reduce_op="mean"))

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        grads = [p.grad for p in self.model.parameters() if p.grad is not None]
        self.norms.append(float(whole(torch.nn.utils.get_total_norm(grads))))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=LR)


class PadlessHost(PadlessModuleMixin, HostModule):
    """The same module with padless."""

    def token_losses(self, inputs: Any) -> Any:
        logits = self.model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits
        return token_losses(logits, inputs["labels"])

    def log(self, name: str, value: Any, **options: Any) -> None:
        if name == "train_loss":
            self.losses.append(self.over_ranks(value))
        super().log(name, value, **options)

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        return self.regrouped_loss(batch)


def run(
    kind: str,
    folder: Path | str,
    *,
    padless: bool,
    mode: str = "token-mean",
    ranks: int = 1,
    options: PadlessOptions | None = None,
    wrap: str = "ddp",
    rows: int = 8,
    high: int = 40,
    budget: int = 96,
) -> Outcome:
    """Ten steps of ``rows`` rows per rank."""
    sharded = wrap == "fsdp2" and ranks > 1
    if padless:
        module: Any = PadlessHost(
            kind,
            mode,
            sharded,
            padless=options or PadlessOptions(token_budget=budget),
            loss_mode=mode,
        )
    else:
        module = HostModule(kind, mode, sharded)
    data = sft_rows(rows * STEPS * ranks, high=high)
    loader = torch.utils.data.DataLoader(data, batch_size=rows, collate_fn=collate)
    strategy: Any = "ddp" if ranks > 1 else "auto"
    if sharded:
        strategy = ModelParallelStrategy(data_parallel_size=ranks, tensor_parallel_size=1)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=ranks,
        strategy=strategy,
        max_steps=STEPS,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=True,
        default_root_dir=str(folder),
    )
    trainer.fit(module, loader)
    return Outcome(
        losses=module.losses,
        grad_norms=module.norms,
        parameters={name: whole(value.detach()).clone() for name, value in module.model.named_parameters()},
        logs=[],
        padded_tokens=module.counter.total,
    )


def both(kind: str, folder: str, ranks_asked: int, mode: str = "token-mean") -> tuple[Outcome, Outcome]:
    """The host alone and with padless, on this rank."""
    return tuple(run(kind, folder, padless=padless, mode=mode, ranks=ranks_asked) for padless in (False, True))  # type: ignore[return-value]


def tensor_parallel(folder: str) -> str:
    """What a module hears whose strategy leaves nothing to data parallelism."""
    module = PadlessHost("qwen2", "token-mean", True, token_budget=96)
    loader = torch.utils.data.DataLoader(sft_rows(16), batch_size=8, collate_fn=collate)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=ModelParallelStrategy(),
        max_steps=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    try:
        trainer.fit(module, loader)
    except Exception as error:
        return str(error)
    return "nothing"
