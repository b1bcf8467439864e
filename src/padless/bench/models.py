"""The models a benchmark trains: built-in ones from configs with random weights, or any of Hugging Face's."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from padless.bench.scan import SCAN_MODELS, has_kernels
from padless.data._hub import load_by_name
from padless.errors import PadlessError

__all__ = ["BUILT_IN", "Built", "build", "pick_device", "pick_dtype"]


def _qwen2() -> dict[str, Any]:
    """Wide, with few layers: what every micro-batch costs grows with those, and is little in a model of real size."""
    return {
        "model_type": "qwen2", "vocab_size": 1024, "hidden_size": 288, "intermediate_size": 768,
        "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 2, "max_position_embeddings": 32768,
        "tie_word_embeddings": False,
    }  # fmt: skip


def _jamba() -> dict[str, Any]:
    """One attention layer to seven of Mamba, a mixture of experts in every second layer: as Jamba mixes them."""
    return {
        "model_type": "jamba", "vocab_size": 1024, "hidden_size": 128, "intermediate_size": 320,
        "num_hidden_layers": 8, "num_attention_heads": 4, "num_key_value_heads": 1, "attn_layer_period": 8,
        "attn_layer_offset": 4, "expert_layer_period": 2, "expert_layer_offset": 1, "num_experts": 4,
        "num_experts_per_tok": 2, "mamba_d_state": 16, "mamba_d_conv": 4, "mamba_expand": 2,
        "max_position_embeddings": 32768, "tie_word_embeddings": False,
    }  # fmt: skip


def _bamba() -> dict[str, Any]:
    return {
        "model_type": "bamba", "vocab_size": 2048, "hidden_size": 128, "intermediate_size": 256,
        "num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 2, "attn_layer_indices": [3],
        "mamba_n_heads": 8, "mamba_d_head": 32, "mamba_d_state": 32, "mamba_n_groups": 1, "mamba_chunk_size": 64,
        "max_position_embeddings": 32768, "tie_word_embeddings": False,
    }  # fmt: skip


def _qwen25(hidden: int, inner: int, heads: int, kv: int, vocabulary: int, tied: bool) -> dict[str, Any]:
    return {
        "model_type": "qwen2", "vocab_size": vocabulary, "hidden_size": hidden, "intermediate_size": inner,
        "num_hidden_layers": 28, "num_attention_heads": heads, "num_key_value_heads": kv, "rope_theta": 1_000_000.0,
        "max_position_embeddings": 32768, "tie_word_embeddings": tied,
    }  # fmt: skip


BUILT_IN: dict[str, Callable[[], dict[str, Any]]] = {
    "qwen2": _qwen2,
    "jamba": _jamba,
    "bamba": _bamba,
    "qwen2.5-1.5b": lambda: _qwen25(1536, 8960, 12, 2, 151_936, True),
    "qwen2.5-7b": lambda: _qwen25(3584, 18_944, 28, 4, 152_064, False),
}
"""Configs by name. The first three are small enough for a laptop; the last two have the shapes of the real models."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """A model and what the report says about it.

    Attributes:
        name: as asked for.
        model: with ``use_cache`` off and dropout at 0.
        kind: ``model_type`` of its config.
        parameters: how many numbers are trained.
        source: ``"random weights"`` or ``"checkpoint"``.
        linear_scan: whether its scan is the benchmark's own (see `padless.bench.scan`).
    """

    name: str
    model: Any
    kind: str
    parameters: int
    source: str
    linear_scan: bool

    @property
    def vocabulary(self) -> int:
        """Ids that it can embed."""
        return int(self.model.get_input_embeddings().weight.shape[0])

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        config = self.model.config
        return {
            "type": self.kind,
            "parameters": self.parameters,
            "weights": self.source,
            "hidden_size": getattr(config, "hidden_size", None),
            "layers": getattr(config, "num_hidden_layers", None),
            "vocabulary": self.vocabulary,
            "linear_scan": self.linear_scan,
        }


def build(name: str, *, device: str = "cpu", dtype: str = "float32", seed: int = 0) -> Built:
    """Build a model.

    Args:
        name: a built-in name; a folder with ``config.json`` (weights are loaded if they lie there, otherwise random); a
            config file; or OWNER/NAME on a model hub.
        device, dtype: where it lives and in what precision.
        seed: of random weights.

    Raises:
        PadlessError: no such model, or its config cannot be built.
    """
    torch.manual_seed(seed)
    path = Path(name)
    source = "random weights"
    try:
        if name in BUILT_IN:
            model = _from_config(BUILT_IN[name](), device, pick_dtype(dtype))
        elif path.suffix == ".json" and path.is_file():
            model = _from_config(json.loads(path.read_text(encoding="utf-8")), device, pick_dtype(dtype))
        elif path.is_dir() and not _has_weights(path):
            config = _folder_config(path)
            model = _from_config(config, device, pick_dtype(dtype))
        elif path.is_dir() or _is_hub_name(name):
            model, source = _pretrained(name, device, pick_dtype(dtype)), "checkpoint"
        else:
            raise PadlessError(
                f"model {name!r} is unknown; name one of {', '.join(BUILT_IN)}, a folder with config.json, a config"
                " file, or OWNER/NAME on a model hub"
            )
    except PadlessError:
        raise
    except Exception as error:  # a config can fail in any way the model's code can
        raise PadlessError(f"model {name} cannot be built: {type(error).__name__}: {error}") from None
    _make_deterministic(model)
    kind = str(model.config.model_type)
    return Built(
        name=path.name if path.exists() else name,
        model=model,
        kind=kind,
        parameters=sum(p.numel() for p in model.parameters()),
        source=source,
        linear_scan=kind in SCAN_MODELS and not has_kernels(),
    )


def _folder_config(path: Path) -> dict[str, Any]:
    file = path / "config.json"
    if not file.exists():
        raise PadlessError(f"model folder {path} has no config.json")
    config: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return config


def _from_config(given: dict[str, Any], device: str, dtype: torch.dtype) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    given = dict(given)
    kind = given.pop("model_type", None)
    if kind is None:
        raise PadlessError("the model's config has no model_type; it says which architecture to build")
    config = AutoConfig.for_model(kind, **given)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=dtype)


def _pretrained(name: str, device: str, dtype: torch.dtype) -> Any:
    from transformers import AutoModelForCausalLM

    def load(local: bool) -> Any:
        return AutoModelForCausalLM.from_pretrained(name, dtype=dtype, local_files_only=local)

    return load_by_name("model", name, load).to(device)


def _has_weights(path: Path) -> bool:
    return any(any(path.glob(pattern)) for pattern in ("*.safetensors", "pytorch_model*.bin"))


def _is_hub_name(name: str) -> bool:
    return name.count("/") == 1 and not name.startswith((".", "/", "~")) and not name.endswith("/")


def _make_deterministic(model: Any) -> None:
    """No cache (it hides packing's boundaries) and no dropout (every arm must compute the same)."""
    model.config.use_cache = False
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        for name in ("attention_dropout", "dropout_p"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)


def pick_device(name: str) -> str:
    """``"cpu"`` or ``"cuda"``, if it is there."""
    if name not in ("cpu", "cuda"):
        raise PadlessError(f"device={name!r} is unknown; choose one of 'cpu', 'cuda'")
    if name == "cuda" and not torch.cuda.is_available():
        raise PadlessError("device='cuda' was asked for, but torch sees no CUDA device: use --device cpu")
    return name


def pick_dtype(name: str) -> torch.dtype:
    """``"float32"`` or ``"bfloat16"`` as torch calls it."""
    known = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    if name not in known:
        raise PadlessError(f"dtype={name!r} is unknown; choose one of {', '.join(map(repr, known))}")
    return known[name]
