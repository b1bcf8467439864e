"""A small model of the same architecture: the configuration shrunk by what its fields mean, random weights."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from padless.errors import PadlessError, choose

__all__ = ["build_small", "causal_lm_types", "shrink"]

# Sizes by the name of the field. Windows and chunks are shorter than the probe's longer sequences, so that they matter.
_SIZES: dict[str, int] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "embedding_dim", "emb_dim", "embedding_size"), 64),
    **dict.fromkeys(("word_embed_proj_dim", "input_embedding_size", "output_embedding_size", "lru_width"), 64),
    **dict.fromkeys(("intermediate_size", "moe_intermediate_size", "decoder_ffn_dim", "encoder_ffn_dim"), 32),
    **dict.fromkeys(("ffn_dim", "dim_ff", "dff", "d_inner", "feed_forward_size", "ffn_hidden_size"), 64),
    **dict.fromkeys(("shared_expert_intermediate_size", "shared_intermediate_size", "intermediate_size_mlp"), 32),
    **dict.fromkeys(("expert_ffn_hidden_size", "moe_shared_expert_intermediate_size", "router_hidden_size"), 32),
    **dict.fromkeys(("dense_intermediate_size", "shared_experts_intermediate_size", "mamba_d_ssm"), 64),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads"), 4),
    **dict.fromkeys(("decoder_attention_heads", "encoder_attention_heads", "num_decoder_attention_heads"), 4),
    **dict.fromkeys(("num_encoder_attention_heads", "swa_num_attention_heads", "mamba_n_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "swa_num_key_value_heads", "num_query_groups"), 2),
    **dict.fromkeys(("head_dim", "swa_head_dim", "kv_channels", "d_head", "dim_head", "attention_head_size"), 16),
    **dict.fromkeys(("global_head_dim", "linear_key_head_dim", "linear_value_head_dim", "linear_head_dim"), 16),
    **dict.fromkeys(("qk_nope_head_dim", "v_head_dim", "index_head_dim", "rotary_dim", "query_pre_attn_scalar"), 16),
    **dict.fromkeys(("qk_rope_head_dim", "mamba_d_state", "state_size", "ssm_state_size", "adapter_rank"), 8),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "o_lora_rank", "laurel_rank", "loop_gate_rank", "d_rel"), 16),
    **dict.fromkeys(("hc_lowrank", "gated_norm_rank", "mamba_dt_rank", "time_step_rank"), 8),
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads", "linear_num_heads"), 4),
    "index_n_heads": 16,  # few heads tie at zero, and ties are broken by the row's width
    **dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k"), 2),
    **dict.fromkeys(("n_group", "topk_group", "num_expert_group", "zero_expert_num"), 1),
    **dict.fromkeys(("sliding_window", "attention_window_size", "sliding_window_size", "window_size"), 4),
    **dict.fromkeys(("attention_chunk_size", "local_attention", "keep_window_size", "index_topk"), 4),
    **dict.fromkeys(("chunk_size", "mamba_chunk_size"), 8),
    **dict.fromkeys(("attn_layer_period", "expert_layer_period", "global_attn_every_n_layers"), 2),
    **dict.fromkeys(("attn_layer_offset", "expert_layer_offset", "first_k_dense_replace", "num_dense_layers"), 1),
    **dict.fromkeys(("sliding_window_pattern", "_sliding_window_pattern", "no_rope_layer_interval"), 2),
    **dict.fromkeys(("hidden_size_per_layer_input", "pronunciation_embed_dim", "shape_embed_dim"), 16),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "num_blocks"), 2),
    **dict.fromkeys(("encoder_layers", "num_encoder_layers", "num_decoder_layers"), 2),
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input", "decoder_vocab_size", "unpadded_vocab_size"), 128),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "context_length"), 256),
    **dict.fromkeys(("model_max_length",), 256),
}
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "num_blocks")

# What the rules cannot know: sizes that are tied to each other, and layers named by their index.
_SPECIAL: dict[str, dict[str, Any]] = {
    "cohere_compass_text": {"layer_types": ["full_attention", "full_attention"]},
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "kv_n_heads": 2, "clip_qkv": 8}},
    "deepseek_v2": {"num_experts_per_tok": 2, "n_routed_experts": 4},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1},
    "dots3_note_text": {"num_attention_heads": 4, "num_key_value_heads": 4},
    "gemma3n_text": {"num_kv_shared_layers": 0},
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16},
    "lfm2": {"layer_types": ["conv", "full_attention"], "full_attn_idxs": [1]},
    "lfm2_moe": {"layer_types": ["full_attention", "conv"]},
    "mamba2": {"num_heads": 8, "head_dim": 16, "n_groups": 2},
    "ministral": {"head_dim": 16},
    "nemotron": {"head_dim": 16, "num_key_value_heads": 2},
    "qwen4_exp_text": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 8,
        "indexer_compress_ratio": 2,
        "ngram_vocab_size_base": 64,
        "ple_embed_dim": 64,
    },
    "reformer": {"is_decoder": True, "axial_pos_embds": False},
    "zamba": {"layers_block_type": ["linear_attention", "hybrid"] * 2, "num_hidden_layers": 4},
    "xmod": {"default_language": "en_XX"},
}


def causal_lm_types() -> list[str]:
    """Every ``model_type`` for which the installed transformers names a causal language model, sorted.

    >>> {"qwen2", "jamba", "recurrent_gemma"} <= set(causal_lm_types())
    True
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def shrink(config: Any) -> Any:
    """A new configuration of the same class, small enough to probe on a CPU in a second; ``config`` is left alone.

    At least two layers, one of every kind that the original has; windows of 4 tokens, 4 experts, 128 token ids.

    Raises:
        PadlessError: the class refuses the small sizes; the message says why.
    """
    changes = {**_changes(config), **_SPECIAL.get(config.model_type, {})}
    full = {key: value for key, value in config.to_dict().items() if key not in ("transformers_version", "model_type")}
    try:
        return type(config)(**{**full, **changes})
    except Exception as error:
        raise PadlessError(f"{type(config).__name__} cannot be shrunk: {_line(error)}") from None


def build_small(model_type: str, *, seed: int = 0, attn: str | None = None, dtype: str = "float32") -> Any:
    """A small random model of one architecture of the installed transformers, in eval mode.

    ``dtype`` is given to transformers, which keeps in float32 what the architecture wants there.

    >>> model = build_small("qwen2")
    >>> model.config.num_hidden_layers, model.num_parameters() < 200_000
    (2, True)
    """
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if model_type not in CONFIG_MAPPING:
        raise PadlessError(f"model_type={model_type!r} is unknown to the installed transformers")
    choose("dtype", dtype, ("float32", "bfloat16", "float16"))
    config_class = CONFIG_MAPPING[model_type]
    changes = {**_changes(_default(config_class)), **_SPECIAL.get(model_type, {})}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = config_class(**changes)
        options = {} if attn is None else {"attn_implementation": attn}
        return AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype), **options).eval()


def _default(config_class: Any) -> Any:
    try:
        return config_class()
    except Exception as error:
        special = _SPECIAL.get(config_class.model_type)
        if special:
            return config_class(**special)
        raise PadlessError(f"{config_class.__name__} has no default: {_line(error)}") from None


def _changes(config: Any) -> dict[str, Any]:
    """Field -> small value, for the fields that this configuration has; sub-configurations as dicts."""
    from transformers import PretrainedConfig

    fields = {**vars(config)}
    changes: dict[str, Any] = {}
    for name, value in fields.items():
        if isinstance(value, PretrainedConfig):
            changes[name] = {**_own(value), **_changes(value)}
        elif name in _SIZES and isinstance(value, int) and not isinstance(value, bool) and value > 0:
            changes[name] = _SIZES[name] if name in _LAYERS else min(value, _SIZES[name])
        elif name.endswith("_token_id") and isinstance(value, int | list):
            changes[name] = None if isinstance(value, list) else value % 128
    if "qk_rope_head_dim" in changes:  # latent attention: head_dim sizes the rotary part, and no head is shared
        if "head_dim" in changes:
            changes["head_dim"] = changes["qk_rope_head_dim"]
        changes.update({name: 4 for name in changes if name.endswith("num_key_value_heads")})
    changes.update(_layers(config, fields))
    return changes


def _own(config: Any) -> dict[str, Any]:
    return {key: value for key, value in config.to_dict().items() if key not in ("transformers_version",)}


def _layers(config: Any, fields: dict[str, Any]) -> dict[str, Any]:
    """Two layers or more, one of every kind; every per-layer list keeps the entries of those same layers."""
    count = next((name for name in _LAYERS if isinstance(fields.get(name), int)), None)
    if count is None:
        return {}
    lists = {
        name: value for name, value in fields.items() if isinstance(value, list | tuple) and len(value) == fields[count]
    }
    kinds = [tuple(repr(value[i]) for name, value in lists.items() if "type" in name) for i in range(fields[count])]
    first = sorted({kind: i for i, kind in reversed(list(enumerate(kinds)))}.values())
    spare: Iterator[int] = (i for i in range(fields[count]) if i not in first)
    chosen = sorted([*first, *_take(spare, 2 - len(first))])[:6]
    return {count: max(2, len(chosen)), **{name: [value[i] for i in chosen] for name, value in lists.items()}}


def _take(source: Iterable[int], count: int) -> list[int]:
    return [value for _, value in zip(range(count), source, strict=False)]


def _line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
