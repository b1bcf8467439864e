"""The model under test: its tokens, device, dtype, attention implementation, and what its verdicts depend on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import Tensor, nn

from padless.errors import PadlessError

__all__ = ["KERNELS", "Subject", "installed"]

KERNELS = ("flash-attn", "mamba-ssm", "causal-conv1d", "flash-linear-attention", "kernels", "xformers")
"""Optional packages whose presence changes which code a model runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """What the probe must know about a model.

    Attributes:
        model: as the user gave it.
        inner: without adapters and wrappers.
        config: its Hugging Face configuration, or None.
        tokens: (V,) ids that may be drawn, ascending, special ones left out.
        pad: the id put into padding.
        dtype: of its floating point parameters.
        device: where they are.
        attention: attention implementation, None where the model has no such choice.
    """

    model: nn.Module
    inner: nn.Module
    config: Any
    tokens: Tensor
    pad: int
    dtype: torch.dtype
    device: torch.device
    attention: str | None

    @classmethod
    def of(cls, model: nn.Module, *, vocab_size: int | None = None, pad_token_id: int | None = None) -> Subject:
        """Read everything off a model.

        Raises:
            PadlessError: it is no module, has no parameters, or its vocabulary cannot be told.
        """
        if not isinstance(model, nn.Module):
            raise PadlessError(f"a torch.nn.Module is needed, not {type(model).__name__}")
        inner = _unwrapped(model)
        parameter = next((p for p in model.parameters() if p.is_floating_point()), None)
        if parameter is None:
            raise PadlessError(f"{type(model).__name__} has no floating point parameters, so nothing can be measured")
        config = getattr(inner, "config", None)
        text = _text_config(config)
        size = vocab_size or getattr(text, "vocab_size", None) or _embedded_tokens(inner)
        if not isinstance(size, int) or size < 2:
            raise PadlessError("the vocabulary's size cannot be told from the model: pass vocab_size=")
        special = _special_ids(config)
        usual = [token for token in range(min(3, size - 2), min(size, 4096)) if token not in special]
        pad = pad_token_id if pad_token_id is not None else getattr(text, "pad_token_id", None)
        return cls(
            model=model,
            inner=inner,
            config=config,
            tokens=torch.tensor(usual if len(usual) > 1 else range(size)),
            pad=pad if isinstance(pad, int) and 0 <= pad < size else 0,
            dtype=parameter.dtype,
            device=parameter.device,
            attention=getattr(text, "_attn_implementation", None),
        )

    @property
    def text_config(self) -> Any:
        """The configuration of the language model in a model of several modalities; else the configuration."""
        return _text_config(self.config)

    def twin(self, seed: int) -> Subject | None:
        """A small float32 model of the same architecture on the same device; None where it cannot be built."""
        from padless.verify.small import shrink

        try:
            with torch.random.fork_rng():
                torch.manual_seed(seed)
                small: nn.Module = type(self.inner)(shrink(self.config)).to(self.device, torch.float32)
            small.train(self.model.training)
            setter = getattr(small, "set_attn_implementation", None)
            if setter is not None and self.attention in ("eager", "sdpa", "flex_attention"):
                setter(self.attention)
            return Subject.of(small)
        except Exception:  # any failure of foreign code only means that there is no twin
            return None

    def environment(self) -> dict[str, Any]:
        """What the verdicts hold for, in plain types."""
        import padless

        return {
            "attention": self.attention,
            "dtype": str(self.dtype).removeprefix("torch."),
            "device": torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else self.device.type,
            "torch": torch.__version__,
            "transformers": installed("transformers"),
            "kernels": {name: found for name in KERNELS if (found := installed(name)) is not None},
            "padless": padless.__version__,
        }


def installed(package: str) -> str | None:
    """Version of an installed package, or None.

    >>> installed("no-such-package") is None
    True
    """
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _unwrapped(model: nn.Module) -> nn.Module:
    """Through adapters (peft) and data parallel wrappers."""
    seen: nn.Module = model
    for _ in range(4):
        getter: Any = getattr(seen, "get_base_model", None)
        inner = getter() if callable(getter) else getattr(seen, "module", None)
        if not isinstance(inner, nn.Module):
            break
        seen = inner
    return seen


def _text_config(config: Any) -> Any:
    getter = getattr(config, "get_text_config", None)
    return getter() if callable(getter) else config


def _embedded_tokens(model: nn.Module) -> int | None:
    """Rows of the input embedding: the model's own answer, else the first embedding in it."""
    getter: Any = getattr(model, "get_input_embeddings", None)
    try:
        own = getter() if callable(getter) else None
    except NotImplementedError:
        own = None
    known = (
        own
        if isinstance(own, nn.Embedding)
        else next((m for m in model.modules() if isinstance(m, nn.Embedding)), None)
    )
    return None if known is None else known.num_embeddings


def _special_ids(config: Any) -> set[int]:
    to_dict = getattr(config, "to_dict", None)
    return set(_ids(to_dict())) if callable(to_dict) else set()


def _ids(values: Mapping[str, Any]) -> Iterator[int]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _ids(value)
        elif str(key).endswith(("_id", "_index", "_ids")):
            yield from (item for item in (value if isinstance(value, list) else [value]) if isinstance(item, int))
