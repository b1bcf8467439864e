"""What padless refuses or warns about when a verl engine gets a batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from padless.errors import PadlessError
from padless.integrations.verl_hooks import log

__all__ = ["WidthRule", "check_batch", "loss_config", "setting", "warn_once", "width_rule"]

_warned: set[str] = set()


def warn_once(key: str, message: str) -> None:
    """Log a warning the first time ``key`` is seen in this process."""
    if key not in _warned:
        _warned.add(key)
        log.warning("padless: %s", message)


def setting(data: Any, key: str, default: Any) -> Any:
    """A non-tensor entry of verl's TensorDict (``use_remove_padding``, ``use_dynamic_bsz``, ...)."""
    from verl.utils import tensordict_utils

    return tensordict_utils.get_non_tensor_data(data=data, key=key, default=default)


def loss_config(loss_function: Any) -> Any:
    """The actor's or critic's configuration, which verl binds to the loss with ``functools.partial``."""
    return (getattr(loss_function, "keywords", None) or {}).get("config")


def check_batch(engine: Any, data: Any, loss_function: Any, *, training: bool) -> None:
    """Refuse what would change the result with the split; warn about what keeps padding in.

    Raises:
        PadlessError: ``loss_agg_mode="seq-mean-token-sum-norm"`` without a ``loss_scale_factor`` on
            jagged fields: verl then divides by the widest response of each micro-batch, so the loss
            depends on how rows are grouped, by padless or by verl itself.
    """
    if training:
        _refuse_moving_loss(data, loss_config(loss_function))
    if not setting(data, "use_dynamic_bsz", True):
        warn_once(
            "static",
            "use_dynamic_bsz=False: verl cuts micro-batches of micro_batch_size_per_gpu rows in the given order, and"
            " padless has nothing to plan. Set actor.use_dynamic_bsz=True (and rollout.log_prob_use_dynamic_bsz,"
            " ref.log_prob_use_dynamic_bsz) with ppo_max_token_len_per_gpu",
        )
    if not setting(data, "use_remove_padding", True) and width_rule(engine).to_the_widest:
        warn_once(
            "bshd",
            "Megatron's pad_bshd_to_minibatch_max=True pads every micro-batch to the widest row of the mini-batch:"
            " budgets are kept, but the padding stays. Set actor.megatron.pad_bshd_to_minibatch_max=False",
        )


def _refuse_moving_loss(data: Any, config: Any) -> None:
    if getattr(config, "loss_agg_mode", None) != "seq-mean-token-sum-norm":
        return
    if getattr(config, "loss_scale_factor", None) is not None:
        return
    mask = data["response_mask"] if "response_mask" in data.keys() else None  # noqa: SIM118 - a TensorDict
    if mask is not None and mask.is_nested:
        raise PadlessError(
            "loss_agg_mode='seq-mean-token-sum-norm' with loss_scale_factor=null divides by the widest response of"
            " each micro-batch, so the loss and its gradient depend on how rows are grouped: set"
            " actor_rollout_ref.actor.loss_scale_factor (the maximum response length is what the padded trainers"
            " used), or choose another loss_agg_mode"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class WidthRule:
    """How an engine's padded path chooses the width of a micro-batch, and whether micro-batches run in a pipeline.

    Attributes:
        multiple_of: widths are rounded up to it.
        to_the_widest: every micro-batch is as wide as the widest row of the mini-batch.
        pipeline: micro-batches run in a pipeline.
    """

    multiple_of: int = 1
    to_the_widest: bool = False
    pipeline: bool = False


def width_rule(engine: Any) -> WidthRule:
    """The rule of an engine, by the settings that only Megatron's has; the other engines cut to the longest row.

    Megatron aligns widths to the tensor-parallel size, twice the context-parallel size where there is
    one, and, in FP8, so that rows x width splits into blocks of 128 (any number of rows: 128 x both sizes).
    """
    config = getattr(engine, "engine_config", None)
    tensor = getattr(config, "tensor_model_parallel_size", None)
    if config is None or tensor is None:
        return WidthRule()
    context = getattr(config, "context_parallel_size", 1) or 1
    multiple = tensor * context * 2 if context > 1 else tensor
    if getattr(getattr(engine, "tf_config", None), "fp8", None):
        multiple = 128 * tensor * context * (2 if context > 1 else 1)
    return WidthRule(
        multiple_of=multiple,
        to_the_widest=bool(getattr(config, "pad_bshd_to_minibatch_max", False)),
        pipeline=(getattr(config, "pipeline_model_parallel_size", 1) or 1) > 1,
    )
