"""What a check of a model's layouts costs: passes, seconds and bytes, measured small, and bytes computed at 7 billion.

    python scripts/verify_cost.py    # the figures of docs/verify.md; a minute on one core

Bytes are those of tensors alive at once, beyond the model's own, counted operation by operation. The 7 billion
parameters are on torch's meta device: their forward pass is run by shapes alone.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from support.live import LiveBytes

TOKENS = (5, 14)
"""Rows and columns of the widest micro-batch that a check runs by default."""
SIZES = {
    "small": {"hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 2, "vocab_size": 128},
    "7 billion": {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "vocab_size": 32000},
}


def llama(size: str, device: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    """A Llama of random weights, or of none on the meta device."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    heads = SIZES[size]["hidden_size"] // (128 if size == "7 billion" else 16)
    config = LlamaConfig(**SIZES[size], num_attention_heads=heads, num_key_value_heads=heads)
    with torch.device(device):
        model: nn.Module = AutoModelForCausalLM.from_config(config, dtype=dtype)
    return model


def forward_bytes(model: nn.Module) -> int:
    """Peak of one forward pass with its graph over :data:`TOKENS`."""
    device = next(model.parameters()).device
    ids = torch.zeros(TOKENS, dtype=torch.long, device=device)
    mask = torch.zeros(TOKENS[0], 1, TOKENS[1], TOKENS[1], device=device, dtype=next(model.parameters()).dtype)
    with LiveBytes() as live:
        output = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
    assert output.shape[:2] == TOKENS
    return live.peak


def check(model: nn.Module) -> dict[str, Any]:
    """Passes, CPU seconds and peak bytes of ``check_layouts`` with its defaults."""
    from padless.verify import check_layouts
    from padless.verify.runs import Run, Runner

    passes = {"forward": 0, "backward": 0}
    run, support = Runner.outputs, Run.support

    def counted_run(self: Runner, keywords: Any) -> Any:
        passes["forward"] += 1
        return run(self, keywords)

    def counted_support(self: Run, cotangent: Any) -> Any:
        passes["backward"] += 1
        return support(self, cotangent)

    Runner.outputs, Run.support = counted_run, counted_support  # type: ignore[method-assign]
    try:
        with LiveBytes() as live:
            check_layouts(model, cache=False)
        started = time.process_time()
        check_layouts(model, cache=False)
        seconds = time.process_time() - started
    finally:
        Runner.outputs, Run.support = run, support  # type: ignore[method-assign]
    return {"peak": live.peak, "seconds": seconds, **{kind: count // 2 for kind, count in passes.items()}}


def main() -> None:
    """Print everything."""
    torch.set_num_threads(1)
    for dtype in (torch.float32, torch.bfloat16):
        model = llama("small", "cpu", dtype)
        copy = 4 * sum(p.numel() for p in model.parameters())
        found, once = check(model), forward_bytes(llama("small", "cpu"))
        print(
            f"small, {dtype}: {found['forward']} forward and {found['backward']} backward passes,"
            f" {found['seconds']:.1f} s of CPU time; peak {found['peak']:,} bytes = float32 copy {copy:,}"
            f" + {(found['peak'] - copy) / once:.2f} x a float32 forward pass with its graph ({once:,})"
        )
    large = llama("7 billion", "meta")
    parameters, once = sum(p.numel() for p in large.parameters()), forward_bytes(large)
    print(
        f"7 billion, computed: {parameters:,} parameters, float32 copy {4 * parameters / 1e9:.1f} GB, a float32"
        f" forward pass with its graph over {TOKENS[0]} x {TOKENS[1]} tokens {once / 1e9:.2f} GB"
    )


if __name__ == "__main__":
    main()
