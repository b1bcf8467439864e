"""A Lightning module on a tiny model: the host alone (one wide batch per step), and with padless."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import lightning
import torch

from padless.integrations.lightning import PadlessModuleMixin
from padless.integrations.transformers import PadlessOptions
from padless.logits import token_losses
from support.trainers import CountTokens, Outcome, collate, sft_rows, tiny_model

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
LR = 0.3
STEPS = 10


class HostModule(lightning.LightningModule):
    """Automatic optimisation; the model's own mean loss, or the mean over sequences."""

    def __init__(self, kind: str, mode: str = "token-mean") -> None:
        super().__init__()
        self.model = tiny_model(kind)
        self.counter = CountTokens(self.model)
        self.mode = mode
        self.losses: list[float] = []
        self.norms: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.mode == "token-mean":
            loss = self.model(**batch).loss
        else:
            logits = self.model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
            losses = torch.nn.functional.cross_entropy(
                logits[:, :-1].transpose(1, 2), batch["labels"][:, 1:], ignore_index=-100, reduction="none"
            )
            held = batch["labels"][:, 1:] != -100
            loss = ((losses * held).sum(1) / held.sum(1)).mean()
        self.losses.append(float(loss.detach()))
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        grads = [p.grad for p in self.model.parameters() if p.grad is not None]
        self.norms.append(float(torch.nn.utils.get_total_norm(grads)))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=LR)


class PadlessHost(PadlessModuleMixin, HostModule):
    """The same module with padless."""

    def token_losses(self, inputs: Any) -> Any:
        logits = self.model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits
        return token_losses(logits, inputs["labels"])

    def log(self, name: str, value: Any, **options: Any) -> None:
        if name == "train_loss":
            self.losses.append(float(value))
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
) -> Outcome:
    """Ten steps of eight rows per rank."""
    if padless:
        module: Any = PadlessHost(
            kind,
            mode,
            padless=options or PadlessOptions(token_budget=96),
            loss_mode="token-mean" if mode == "token-mean" else mode,
        )
    else:
        module = HostModule(kind, mode)
    loader = torch.utils.data.DataLoader(sft_rows(8 * STEPS * ranks), batch_size=8, collate_fn=collate)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=ranks,
        strategy="ddp" if ranks > 1 else "auto",
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
        parameters={name: value.detach().clone() for name, value in module.model.named_parameters()},
        logs=[],
        padded_tokens=module.counter.total,
    )


def both(kind: str, folder: str, ranks_asked: int, mode: str = "token-mean") -> tuple[Outcome, Outcome]:
    """The host alone and with padless, on this rank."""
    return tuple(run(kind, folder, padless=padless, mode=mode, ranks=ranks_asked) for padless in (False, True))  # type: ignore[return-value]
