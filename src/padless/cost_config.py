"""Arithmetic of one token, read from a Hugging Face config: a cost model before any measurement."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from padless.cost import CostModel
from padless.errors import PadlessError
from padless.lengths import positive_int

__all__ = ["from_config", "token_work"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Multiply-adds of one token: ``linear``, and ``pairs`` for each of the ``width`` tokens it may see."""

    linear: float = 0.0
    windowed: float = 0.0
    pairs: float = 0.0


def from_config(config: Any, *, width: int, per_microbatch: float) -> CostModel:
    """See `CostModel.from_config`."""
    work = token_work(config, width=width)
    return CostModel(
        per_microbatch=per_microbatch,
        per_token=1.0 + work.windowed / work.linear,
        per_token_squared=work.pairs / work.linear,
        source="config",
    )


def token_work(config: Any, *, width: int) -> Work:
    """Multiply-adds of one token in a forward pass.

    ``linear`` counts every active weight (embeddings are looked up, the output head is counted; of the
    experts, those a token is routed to and the shared ones) and the recurrences of Mamba and linear
    attention; ``windowed`` is attention within sliding windows shorter than ``width``; ``pairs`` is causal
    attention, half of all pairs.
    """
    read = _Reader(config)
    width = positive_int(width, name="width")
    hidden, layers = read.need("hidden_size", "d_model", "n_embd"), read.need("num_hidden_layers", "n_layer")
    kinds = _layer_kinds(read, layers)
    linear = windowed = pairs = 0.0
    for index, kind in enumerate(kinds):
        if kind in ("full", "sliding", "hybrid"):
            projections, per_pair = _attention(read, hidden)
            linear += projections
            window = read.get("sliding_window", "attention_chunk_size", "attention_window_size")
            if kind == "sliding" and window and window < width:
                # A row of tokens sees min(position, window) others: on average this share of the window.
                windowed += per_pair * window * (1 - window / (2 * width))
            else:
                pairs += per_pair / 2
        if kind == "mamba" or (kind == "hybrid" and read.has_mamba):
            linear += _mamba(read, hidden)
        elif kind == "linear":
            linear += _linear_attention(read, hidden)
        elif kind == "conv":
            linear += 4.0 * hidden * hidden + read.get("conv_L_cache") * hidden
        linear += _feed_forward(read, hidden, index, kind)
    linear += hidden * read.need("vocab_size")
    return Work(linear=linear, windowed=windowed, pairs=pairs)


_STATES = ("mamba_d_state", "ssm_state_size", "state_size", "d_state")


class _Reader:
    """Looks keys up under their several names, in a config object or a dict, through a nested text config."""

    def __init__(self, config: Any) -> None:
        text = self._of(config, "text_config") or self._of(config, "llm_config") or self._of(config, "thinker_config")
        self._config = text if text is not None else config

    @staticmethod
    def _of(config: Any, name: str) -> Any:
        return config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)

    @property
    def has_mamba(self) -> bool:
        return self.get(*_STATES) > 0

    def any(self, *names: str) -> Any:
        return next((value for value in (self._of(self._config, name) for name in names) if value is not None), None)

    def get(self, *names: str) -> int:
        """The first of ``names`` that holds a number, as an int; 0 where none does."""
        for name in names:
            value = self._of(self._config, name)
            if isinstance(value, list | tuple):
                value = next((item for item in value if item), None)
            if isinstance(value, int | float) and not isinstance(value, bool):
                return int(value)
        return 0

    def need(self, *names: str) -> int:
        value = self.get(*names)
        if value < 1:
            raise PadlessError(
                f"the config has no {' or '.join(names)}; a cost needs it: pass a causal language model's config,"
                " or measure with CostModel.calibrate"
            )
        return value


_KINDS = {
    "attention": "full",
    "full_attention": "full",
    "hybrid": "hybrid",
    "sliding_attention": "sliding",
    "chunked_attention": "sliding",
    "local_attention": "sliding",
    "linear_attention": "linear",
    "mamba": "mamba",
    "mamba2": "mamba",
    "conv": "conv",
    "moe": "moe",
    "mlp": "mlp",
    "recurrent": "linear",
}
_FEED_FORWARD_ALONE = ("moe", "mlp")
_SHARED_EXPERTS = ("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size", "shared_intermediate_size")
_UNGATED = ("gpt2", "gpt_neo", "gpt_neox", "gptj", "opt", "bloom", "falcon", "mpt", "phi", "starcoder2", "nemotron")


def _layer_kinds(read: _Reader, layers: int) -> list[str]:
    """For each layer: full, sliding, hybrid, linear, mamba or conv; or mlp and moe, feed-forward parts alone."""
    listed = read.any("layer_types", "layers_block_type", "block_types", "_block_types")
    if isinstance(listed, list | tuple) and listed:
        kinds = [_KINDS.get(str(name), "full") for name in listed]
        if read.has_mamba:  # newer configs call every recurrent mixer linear attention
            kinds = ["mamba" if kind == "linear" else kind for kind in kinds]
        if read.get("sliding_window", "attention_window_size") and "recurrent" in listed:
            kinds = ["sliding" if kind == "full" else kind for kind in kinds]
        return [kinds[index % len(kinds)] for index in range(layers)]
    pattern = read.any("hybrid_override_pattern")
    if isinstance(pattern, str):
        return [{"M": "mamba", "*": "full", "-": "mlp", "E": "moe"}.get(sign, "full") for sign in pattern]
    period = read.get("attn_layer_period")
    if period:
        offset = read.get("attn_layer_offset")
        return ["full" if index % period == offset else "mamba" for index in range(layers)]
    attending = read.any("attn_layer_indices")
    if isinstance(attending, list | tuple):
        return ["full" if index in attending else "mamba" for index in range(layers)]
    if not read.get("num_attention_heads", "n_head", "num_heads") or "mamba" in str(read.any("model_type") or ""):
        return ["mamba" if read.has_mamba else "linear"] * layers
    return _windows(read, layers)


def _windows(read: _Reader, layers: int) -> list[str]:
    """Attention throughout: all full, all sliding, or a repeating pattern of both."""
    if not read.get("sliding_window") or read.any("use_sliding_window") is False:
        return ["full"] * layers
    pattern = read.get("sliding_window_pattern")
    if pattern:
        return ["full" if (index + 1) % pattern == 0 else "sliding" for index in range(layers)]
    first = read.get("max_window_layers") if read.any("use_sliding_window") else 0
    return ["sliding" if index >= first else "full" for index in range(layers)]


def _attention(read: _Reader, hidden: int) -> tuple[float, float]:
    """Multiply-adds of the four projections, and of one pair of tokens (scores and values)."""
    heads = read.need("num_attention_heads", "n_head", "num_heads")
    if read.get("kv_lora_rank"):  # latent attention: low-rank queries, keys and values
        rotary, plain, value = read.get("qk_rope_head_dim"), read.get("qk_nope_head_dim"), read.get("v_head_dim")
        low, rank = read.get("q_lora_rank"), read.get("kv_lora_rank")
        queries = low * (hidden + heads * (rotary + plain)) if low else hidden * heads * (rotary + plain)
        keys = hidden * (rank + rotary) + rank * heads * (plain + value)
        return queries + keys + heads * value * hidden, heads * (rotary + plain + value)
    size = read.get("head_dim", "attention_head_dim") or hidden // heads
    shared = read.get("num_key_value_heads", "num_kv_heads") or (1 if read.any("multi_query") else heads)
    return hidden * size * (2 * heads + 2 * shared), 2.0 * heads * size


def _mamba(read: _Reader, hidden: int) -> float:
    """Projections, short convolution and state update of a Mamba or Mamba-2 mixer."""
    heads = read.get("mamba_n_heads", "mamba_num_heads", "n_mamba_heads", "num_heads")
    size = read.get("mamba_d_head", "mamba_head_dim", "mamba_headdim", "head_dim")
    expand = read.any("mamba_expand", "expand") or 2
    inner = read.get("mamba_d_ssm") or (heads * size if heads and size else int(expand * hidden))
    state = read.get(*_STATES) or 16
    kernel = read.get("mamba_d_conv", "conv_kernel", "d_conv") or 4
    update = 3.0 * inner * state  # decay, input, readout
    if heads:  # Mamba-2: one projection of gate, input, both state vectors and steps
        groups = read.get("mamba_n_groups", "n_groups", "mamba_ngroups") or 1
        convolved = inner + 2 * groups * state
        return hidden * (inner + convolved + heads) + kernel * convolved + inner * hidden + update
    rank = read.get("mamba_dt_rank", "time_step_rank") or -(-hidden // 16)
    return 3.0 * hidden * inner + kernel * inner + inner * (rank + 2 * state) + rank * inner + update


def _linear_attention(read: _Reader, hidden: int) -> float:
    """Projections and state update of gated linear attention (gated DeltaNet, RWKV, RG-LRU and kin)."""
    key_heads, value_heads = read.get("linear_num_key_heads"), read.get("linear_num_value_heads")
    if key_heads and value_heads:
        keys = key_heads * read.need("linear_key_head_dim")
        values = value_heads * read.need("linear_value_head_dim")
        kernel = read.get("linear_conv_kernel_dim") or 4
        projections = hidden * (2 * keys + 2 * values + 2 * value_heads) + values * hidden
        return projections + kernel * (2 * keys + values) + 3.0 * values * read.need("linear_key_head_dim")
    inner = read.get("lru_width", "attention_hidden_size") or hidden
    size = read.get("head_dim", "head_size") or 64
    return 4.0 * hidden * inner + 3.0 * inner * size


def _feed_forward(read: _Reader, hidden: int, index: int, kind: str) -> float:
    """Multiply-adds of a layer's feed-forward part: dense, or the experts that a token is sent to."""
    model = str(read.any("model_type") or "")
    if model in ("mamba", "mamba2", "falcon_mamba"):
        return 0.0
    if kind not in _FEED_FORWARD_ALONE and _separate(read):
        return 0.0
    matrices = 2 if _ungated(read, model) else 3
    inner = read.get("intermediate_size", "n_inner", "d_inner", "ffn_dim") or 4 * hidden
    if model == "recurrent_gemma":
        inner //= 2  # the config counts gate and input together
    experts = read.get("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
    beside = read.get(*_SHARED_EXPERTS)
    if experts < 2 or kind == "mlp" or not _is_sparse(read, index):
        only_shared = read.any("num_local_experts") == 0 and beside
        return float(matrices * hidden * (beside if only_shared else inner))
    each = read.get("moe_intermediate_size", "expert_intermediate_size") or inner
    routed = read.get("num_experts_per_tok", "num_experts_per_token", "moe_topk", "top_k") or 1
    beside = beside or each * read.get("n_shared_experts", "num_shared_experts")
    return float(hidden * experts + matrices * hidden * (routed * each + beside))


def _separate(read: _Reader) -> bool:
    """Whether mixers and feed-forward parts are layers of their own."""
    listed = read.any("layer_types", "layers_block_type") or ()
    return isinstance(read.any("hybrid_override_pattern"), str) or any(kind in listed for kind in _FEED_FORWARD_ALONE)


def _ungated(read: _Reader, model: str) -> bool:
    """Two matrices (up, down) instead of three (gate, up, down)."""
    if model in _UNGATED:
        return True
    return read.any("mlp_hidden_act") == "relu2" or read.any("is_gated_act") is False


def _is_sparse(read: _Reader, index: int) -> bool:
    """Whether this layer's feed-forward part is a mixture of experts."""
    if index in (read.any("mlp_only_layers") or ()) or index < read.get("first_k_dense_replace"):
        return False
    period = read.get("expert_layer_period")
    if period:
        return index % period == read.get("expert_layer_offset")
    step = read.get("decoder_sparse_step", "moe_layer_freq") or 1
    return (index + 1) % step == 0
