"""Tiny models, data and runs with which a host trainer alone is compared with the same trainer under padless."""

from __future__ import annotations

import functools
import logging
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

warnings.filterwarnings("ignore")
logging.getLogger("transformers").setLevel(logging.ERROR)

VOCAB = 64
PAD = 0
EOS = 1
MODELS = ("qwen2", "jamba")


def tiny_model(kind: str, *, seed: int = 0, layers: int = 2, hidden: int = 32, vocab: int = VOCAB) -> Any:
    """A small random decoder: ``qwen2`` (attention) or ``jamba`` (attention and Mamba layers)."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(tiny_config(kind, layers=layers, hidden=hidden, vocab=vocab))
    with torch.no_grad():  # larger than the default initialisation, so that outputs depend on their context
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(3.0)
    return model.float()


def tiny_config(kind: str, *, layers: int = 2, hidden: int = 32, vocab: int = VOCAB) -> Any:
    """The config of `tiny_model`."""
    from transformers import AutoConfig

    common: dict[str, Any] = {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "pad_token_id": PAD,
        "bos_token_id": None,
        "eos_token_id": EOS,
        "tie_word_embeddings": False,
        "use_cache": False,
    }
    if kind == "jamba":
        common |= {
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "expert_layer_period": 100,
            "expert_layer_offset": 99,
            "num_experts": 1,
            "num_experts_per_tok": 1,
            "mamba_d_state": 4,
            "mamba_d_conv": 4,
            "mamba_expand": 2,
            "use_mamba_kernels": False,
            "router_aux_loss_coef": 0.0,  # one expert: there is nothing to balance
        }
    return AutoConfig.for_model(kind, **common)


@functools.cache
def tiny_tokenizer() -> Any:
    """Whitespace-separated words t2, t3, ...; the padding and end tokens are 0 and 1."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": PAD, "<eos>": EOS} | {f"t{i}": i for i in range(2, VOCAB)}
    raw = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="<pad>", eos_token="<eos>", unk_token="<pad>")


def skewed_lengths(count: int, *, seed: int = 0, low: int = 3, high: int = 40) -> np.ndarray:
    """Log-normal lengths, (count,): most short, a few long."""
    draw = np.random.default_rng(seed).lognormal(np.log(3 * low), 0.8, size=count)
    return np.clip(draw, low, high).astype(int)


def ids_of(length: int, rng: np.random.Generator) -> list[int]:
    """Random tokens, none of them padding or the end."""
    return rng.integers(2, VOCAB, size=length).tolist()


def sft_rows(count: int, *, seed: int = 0, low: int = 3, high: int = 40) -> list[dict[str, list[int]]]:
    """Tokenised rows whose first third is a prompt without a target."""
    rng = np.random.default_rng(seed)
    rows = []
    for length in skewed_lengths(count, seed=seed, low=low, high=high):
        ids = ids_of(int(length), rng)
        rows.append({"input_ids": ids, "labels": [-100] * (len(ids) // 3) + ids[len(ids) // 3 :]})
    return rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a training run did: per optimizer step, and in the end."""

    losses: list[float]
    grad_norms: list[float]
    parameters: dict[str, torch.Tensor]
    logs: list[dict[str, Any]]
    padded_tokens: int


class CountTokens:
    """Counts the positions that a model's forward passes compute."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.total = 0
        self.shapes: list[tuple[int, ...]] = []
        base = getattr(model, "model", model)
        base.register_forward_pre_hook(self._count, with_kwargs=True)

    def _count(self, module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        ids = kwargs.get("input_ids", args[0] if args else None)
        if ids is None:
            ids = kwargs["inputs_embeds"][..., 0]
        self.total += ids.numel()
        self.shapes.append(tuple(ids.shape))


def outcome_of(trainer: Any, counter: CountTokens | None = None) -> Outcome:
    """Train to the end and read the host's own log."""
    trainer.train()
    steps = [entry for entry in trainer.state.log_history if "grad_norm" in entry]
    model = trainer.accelerator.unwrap_model(trainer.model)
    return Outcome(
        losses=[entry["loss"] for entry in steps],
        grad_norms=[float(entry["grad_norm"]) for entry in steps],
        parameters={name: whole(value.detach()).clone() for name, value in model.named_parameters()},
        logs=steps,
        padded_tokens=counter.total if counter else 0,
    )


def whole(value: Any) -> torch.Tensor:
    """A parameter that is sharded over ranks, gathered."""
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def assert_same_run(
    host: Outcome, ours: Outcome, *, rtol: float = 2e-4, atol: float = 2e-5, keys: tuple[str, ...] = ()
) -> None:
    """Losses, gradient norms, parameters (and the named log entries) agree to float32 rounding."""
    assert len(host.losses) == len(ours.losses) > 0
    np.testing.assert_allclose(ours.losses, host.losses, rtol=rtol, atol=atol, err_msg="losses")
    np.testing.assert_allclose(ours.grad_norms, host.grad_norms, rtol=rtol, atol=atol, err_msg="gradient norms")
    assert host.parameters.keys() == ours.parameters.keys()
    for name, value in host.parameters.items():
        torch.testing.assert_close(
            ours.parameters[name], value, rtol=rtol, atol=atol, msg=lambda m, n=name: f"{n}: {m}"
        )
    for key in keys:
        np.testing.assert_allclose(
            [entry[key] for entry in ours.logs], [entry[key] for entry in host.logs], rtol=1e-3, atol=1e-5, err_msg=key
        )


def common_arguments(folder: Path, **changes: Any) -> dict[str, Any]:
    """Training arguments that every run here shares: CPU, 10 steps, every step logged in full."""
    return {
        "output_dir": str(folder),
        "max_steps": 10,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "learning_rate": 0.3,
        "optim": "sgd",
        "lr_scheduler_type": "constant",
        "max_grad_norm": 1.0,
        "logging_steps": 1,
        "logging_strategy": "steps",
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "disable_tqdm": True,
        "seed": 7,
        "data_seed": 7,
        "dataloader_pin_memory": False,
    } | changes


def collate(rows: list[dict[str, list[int]]], *, side: str = "right") -> dict[str, torch.Tensor]:
    """Pad to the longest row of the batch, on one side."""
    width = max(len(row["input_ids"]) for row in rows)

    def pad(values: list[int], fill: int) -> list[int]:
        gap = [fill] * (width - len(values))
        return gap + values if side == "left" else values + gap

    return {
        "input_ids": torch.tensor([pad(row["input_ids"], PAD) for row in rows]),
        "attention_mask": torch.tensor([pad([1] * len(row["input_ids"]), 0) for row in rows]),
        "labels": torch.tensor([pad(row["labels"], -100) for row in rows]),
    }


def collate_left(rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    """The same, padded on the left."""
    return collate(rows, side="left")


def plain_trainer(
    folder: Path, kind: str, *, padless: Any = None, model: Any = None, collator: Any = collate, **changes: Any
) -> tuple[Any, CountTokens]:
    """``transformers.Trainer``, with or without padless, and the counter of its model's tokens."""
    from transformers import Trainer, TrainingArguments

    from padless.integrations.transformers import with_padless

    model = tiny_model(kind) if model is None else model
    more = changes.pop("more", {})
    counter = CountTokens(model)
    host: Any = more.pop("trainer_class", None) or Trainer
    trainer_class: Any = with_padless(host) if padless else host
    trainer = trainer_class(
        model=model,
        args=TrainingArguments(**common_arguments(folder, **changes)),
        train_dataset=more.pop("train_dataset", None) or sft_rows(80),
        eval_dataset=sft_rows(11, seed=5),
        data_collator=collator,
        **more,
        **({"padless": padless} if padless else {}),
    )
    return trainer, counter


def run_plain(folder: Path, kind: str, **settings: Any) -> Outcome:
    """Train with `plain_trainer`."""
    return outcome_of(*plain_trainer(folder, kind, **settings))
