"""Configs of tiny models, as files that the benchmark can build."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

QWEN2: dict[str, Any] = {
    "model_type": "qwen2", "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 4096,
}  # fmt: skip
JAMBA: dict[str, Any] = {
    "model_type": "jamba", "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "attn_layer_period": 2, "attn_layer_offset": 1,
    "num_experts": 2, "num_experts_per_tok": 1, "max_position_embeddings": 4096, "initializer_range": 0.1,
}  # fmt: skip
BAMBA: dict[str, Any] = {
    "model_type": "bamba", "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "attn_layer_indices": [1], "mamba_n_heads": 4,
    "mamba_d_head": 16, "mamba_d_state": 8, "mamba_chunk_size": 16, "max_position_embeddings": 4096,
}  # fmt: skip
RECURRENT_GEMMA: dict[str, Any] = {
    "model_type": "recurrent_gemma", "vocab_size": 96, "hidden_size": 32, "intermediate_size": 96,
    "num_hidden_layers": 3, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "lru_width": 32,
    "attention_window_size": 512,
}  # fmt: skip


def config_file(folder: Path, name: str, config: dict[str, Any]) -> str:
    """Write a config and return its path."""
    path = folder / f"{name}.json"
    path.write_text(json.dumps(config))
    return str(path)
