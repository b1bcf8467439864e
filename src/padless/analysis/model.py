"""What a model's config says: cost of tokens, memory of a micro-batch, and whether packing is a question."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from padless.cost import CostModel
from padless.cost_config import _layer_kinds, _Reader, token_work
from padless.errors import PadlessError

__all__ = ["ModelFacts", "read_model"]

_RECURRENT = ("mamba", "linear", "conv", "hybrid")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What matters of a model for batching.

    Attributes:
        name: its ``model_type``.
        recurrent: some layers carry state or a convolution along the row, and leak between packed sequences.
        cost: arithmetic, in units of one token without attention.
        parameters: weights that one token meets, roughly (of experts, those it is sent to).
        bytes_per_token: activations kept for the backward pass and logits, in bf16 with float32 logits, roughly.
        bytes_per_token_checkpointed: the same with gradient checkpointing.
    """

    name: str
    recurrent: bool
    cost: CostModel
    parameters: int
    bytes_per_token: int
    bytes_per_token_checkpointed: int

    def memory(self, token_budget: int) -> dict[str, float]:
        """GiB of activations for one micro-batch, with and without gradient checkpointing. An estimate."""
        return {
            "activations_gib": token_budget * self.bytes_per_token / 2**30,
            "activations_checkpointed_gib": token_budget * self.bytes_per_token_checkpointed / 2**30,
        }

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return {**asdict(self), "cost": self.cost.to_dict()}


def read_model(config: str | Path | Mapping[str, Any], *, width: int) -> ModelFacts:
    """Read a ``config.json``, its folder, or a config as a dict.

    Args:
        width: the longest sequence; sliding windows shorter than it are counted as such.

    Raises:
        PadlessError: no such file, not JSON, or sizes that are missing.
    """
    loaded = _load(config)
    cost = CostModel.from_config(loaded, width=width)
    work = token_work(loaded, width=width)
    read = _Reader(loaded)
    hidden, layers = read.need("hidden_size", "d_model", "n_embd"), read.need("num_hidden_layers", "n_layer")
    inner = read.get("intermediate_size", "n_inner", "d_inner", "ffn_dim") or 4 * hidden
    vocabulary = read.need("vocab_size")
    # Half precision: about 17 hidden-sized and 3 feed-forward-sized values a layer with a fused attention kernel
    # (Korthikanti et al., arXiv 2205.05198, without the attention matrix); logits once more in float32 with gradient.
    logits = vocabulary * (2 + 4 + 4)
    kept = layers * 2 * (17 * hidden + 3 * inner)
    return ModelFacts(
        name=str(loaded.get("model_type") or "model"),
        recurrent=any(kind in _RECURRENT for kind in _layer_kinds(read, layers)),
        cost=cost,
        parameters=int(work.linear),
        bytes_per_token=int(kept + logits),
        bytes_per_token_checkpointed=int(layers * 2 * hidden + kept / layers + logits),
    )


def _load(config: str | Path | Mapping[str, Any]) -> dict[str, Any]:
    if isinstance(config, Mapping):
        return dict(config)
    path = Path(config)
    path = path / "config.json" if path.is_dir() else path
    try:
        loaded = json.loads(path.read_text())
    except OSError as error:
        raise PadlessError(
            f"cannot read the model config {path}: {error.strerror or error}; name a config.json or a checkpoint folder"
        ) from None
    except ValueError as error:
        raise PadlessError(f"{path} is not JSON: {error}") from None
    if not isinstance(loaded, dict):
        raise PadlessError(f"{path} holds a {type(loaded).__name__}; expected a model config")
    return loaded
