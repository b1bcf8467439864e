"""Padless for TRL's trainers: SFT, DPO, reward modelling and GRPO, through their own code."""

from __future__ import annotations

from typing import Any

from padless.errors import PadlessError
from padless.integrations._grpo import GRPOHost, PadlessGRPOMixin
from padless.integrations._guard import check_seams, check_version, require
from padless.integrations._hosts import Host
from padless.integrations._options import PadlessOptions
from padless.integrations._trl_hosts import DPOHost, RewardHost, SFTHost, TrlHost
from padless.integrations.transformers import PadlessMixin, with_padless

__all__ = ["PadlessGRPOMixin", "PadlessMixin", "PadlessOptions", "with_padless"]

HOSTS: dict[str, type[TrlHost]] = {
    "SFTTrainer": SFTHost,
    "DPOTrainer": DPOHost,
    "RewardTrainer": RewardHost,
    "GRPOTrainer": GRPOHost,
}
SEAMS: dict[str, dict[str, tuple[str, ...]]] = {
    "GRPOTrainer": {
        "_get_per_token_logps_and_entropies": (
            *("model", "input_ids", "attention_mask", "logits_to_keep", "batch_size", "compute_entropy"),
        ),
        "_prepare_inputs": ("generation_batch",),
        "_compute_loss": ("model", "inputs"),
    },
    "SFTTrainer": {"compute_loss": ("model", "inputs", "return_outputs", "num_items_in_batch")},
    "DPOTrainer": {"_compute_loss": ("model", "inputs", "return_outputs")},
    "RewardTrainer": {"compute_loss": ("model", "inputs", "return_outputs", "num_items_in_batch")},
}


def known_base(trainer_class: type) -> type:
    """The supported TRL trainer that a class derives from.

    Raises:
        PadlessError: another TRL trainer, or one whose hooks moved.
    """
    require("trl", "trl")
    for base in trainer_class.__mro__:
        if base.__module__.startswith("trl.") and base.__name__ in HOSTS:
            check_version("trl")
            check_seams(base, SEAMS[base.__name__], "trl")
            return base
    raise PadlessError(f"{trainer_class.__name__} is not supported; TRL trainers that are: {', '.join(HOSTS)}")


def mixin_for(trainer_class: type) -> type[PadlessMixin]:
    """The mixin that goes before a TRL trainer."""
    return PadlessGRPOMixin if known_base(trainer_class).__name__ == "GRPOTrainer" else PadlessMixin


def host_for(trainer: Any, options: PadlessOptions) -> Host:
    """How a TRL trainer's batches are read."""
    base = known_base(type(trainer))
    if base.__name__ == "GRPOTrainer" and not isinstance(trainer, PadlessGRPOMixin):
        raise PadlessError(
            f"{type(trainer).__name__} mixes PadlessMixin into GRPOTrainer; take PadlessGRPOMixin from"
            " padless.integrations.trl, or with_padless(GRPOTrainer)"
        )
    return HOSTS[base.__name__](trainer, options)
