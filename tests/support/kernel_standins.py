"""Plain PyTorch in place of causal-conv1d and flash-linear-attention: same signatures, same boundary arguments.

Run as a program, it installs them before transformers is imported, checks the models named, and prints their verdicts.
"""

from __future__ import annotations

import json
import sys
from itertools import pairwise
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

LAYOUTS = ("packed-position-ids", "packed-cu-seqlens", "packed-seq-idx", "packed-fla")


def causal_conv1d_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    seq_idx: Tensor | None = None,
    activation: str | None = None,
) -> Tensor:
    """(B, D, T): a depthwise causal convolution that stops where ``seq_idx`` (B, T) changes."""
    taps, width = weight.shape[-1], x.shape[-1]
    out = torch.zeros_like(x)
    for back in range(min(taps, width)):
        moved = torch.nn.functional.pad(x, (back, 0))[..., :width]
        if seq_idx is not None:
            other = torch.nn.functional.pad(seq_idx, (back, 0), value=-1)[..., :width]
            moved = moved * (other == seq_idx)[:, None]
        out = out + moved * weight[:, taps - 1 - back, None]
    out = out if bias is None else out + bias[:, None]
    return torch.nn.functional.silu(out) if activation in ("silu", "swish") else out


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """(B, T, H, D) and a decay per head (B, T, H), or per channel (B, T, H, K)."""
    if cu_seqlens is not None:
        if len(q) != 1:
            raise ValueError(f"the batch size must be 1 with cu_seqlens, not {len(q)}")
        edges = cu_seqlens.tolist()
        pairs = [slice(a, b) for a, b in pairwise(edges) if b > a]
        parts = [_delta(*(one[:, pair] for one in (q, k, v, g, beta)), use_qk_l2norm_in_kernel) for pair in pairs]
        return torch.cat(parts, 1), None
    return _delta(q, k, v, g, beta, use_qk_l2norm_in_kernel), None


def chunk_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The same rule with a decay per channel."""
    return chunk_gated_delta_rule(q, k, v, g, beta, None, False, use_qk_l2norm_in_kernel, cu_seqlens)


def _delta(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, normed: bool) -> Tensor:
    shared = v.shape[2] // q.shape[2]
    q, k = q.repeat_interleave(shared, 2), k.repeat_interleave(shared, 2)
    if normed:
        q, k = torch.nn.functional.normalize(q, dim=-1), torch.nn.functional.normalize(k, dim=-1)
    decay = g.float().exp() if g.dim() == 4 else g.float().exp()[..., None]  # (B, T, H, K or 1)
    state = q.new_zeros(q.shape[0], q.shape[2], q.shape[3], v.shape[3], dtype=torch.float32)  # (B, H, K, V)
    out = []
    for t in range(q.shape[1]):
        state = state * decay[:, t, :, :, None]
        wrong = v[:, t].float() - torch.einsum("bhk,bhkv->bhv", k[:, t].float(), state)
        state = state + torch.einsum("bhk,bhv->bhkv", k[:, t].float(), wrong * beta[:, t, :, None].float())
        out.append(torch.einsum("bhk,bhkv->bhv", q[:, t].float() * q.shape[-1] ** -0.5, state))
    return torch.stack(out, 1).to(v.dtype)


def install() -> None:
    """As the packages would be found; only before transformers' models are imported."""
    for name, own in {
        "causal_conv1d": {"causal_conv1d_fn": causal_conv1d_fn},
        "fla": {},
        "fla.ops": {},
        "fla.ops.gated_delta_rule": {"chunk_gated_delta_rule": chunk_gated_delta_rule},
        "fla.ops.kda": {"chunk_kda": chunk_kda},
    }.items():
        module = ModuleType(name)
        vars(module).update(own)
        sys.modules[name] = module
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)


def main(families: list[str]) -> None:
    install()
    from padless.verify import build_small, check_layouts

    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    for family in families:
        report = check_layouts(build_small(family), layouts=LAYOUTS, seeds=(0,), cache=False)
        found[family] = {
            "verdicts": {name: result.verdict for name, result in report.layouts.items()},
            "causes": {name: result.cause for name, result in report.layouts.items()},
            "why": {name: result.why for name, result in report.layouts.items()},
            "rows": {one.layout: one.verdict for one in report.conditions if one.name == "several-rows"},
        }
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1:])
