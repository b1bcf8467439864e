"""A small decoder that is exact in every layout it can be, and the same one broken on purpose in one way."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn


class Decoder(nn.Module):
    """Two pre-norm layers with learned positions; boundaries are read off ``position_ids``.

    ``broken`` names one mistake, made in the first layer.
    """

    def __init__(self, broken: str = "", *, vocab: int = 64, hidden: int = 32, window: int | None = None) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab, hidden)
        self.embed_positions = nn.Embedding(256, hidden)
        self.layers = nn.ModuleList(Layer(hidden, broken if i == 0 else "", window) for i in range(2))
        self.norm = nn.LayerNorm(hidden)
        self.head = nn.Linear(hidden, vocab, bias=False)
        self.broken = broken

    def get_input_embeddings(self) -> nn.Module:
        return self.embed_tokens

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, position_ids: Tensor | None = None
    ) -> Tensor:
        column = torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)  # (B, T)
        positions = column if position_ids is None else position_ids
        begins = torch.ones_like(input_ids, dtype=torch.bool)
        begins[:, 1:] = positions[:, 1:] <= positions[:, :-1]
        documents = begins.cumsum(1)
        if attention_mask is not None:  # padded rows: one document, holes and padding left out
            documents = torch.where(attention_mask > 0, 1, 0)
        if self.broken == "one row only" and len(input_ids) > 1:  # as kernels that look for boundaries in one row do
            documents = torch.zeros_like(column)
        if self.broken == "shared prefix":  # a prefix that two sequences share is taken for one sequence
            documents = _merged(documents, input_ids)
        if self.broken == "position ids":
            positions, documents = column, torch.zeros_like(column)
        if self.broken == "positions only":
            positions = column
        hidden = self.embed_tokens(input_ids) + self.embed_positions(positions)
        for layer in self.layers:
            hidden = layer(hidden, documents, positions)
        return self.head(self.norm(hidden))


class Layer(nn.Module):
    def __init__(self, hidden: int, broken: str, window: int | None) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.attention = Attention(hidden, broken, window)
        self.mlp = nn.Sequential(nn.Linear(hidden, 2 * hidden), nn.GELU(), nn.Linear(2 * hidden, hidden))
        self.extra = {
            "convolution": CausalMix,
            "batch statistics": Centre,
            "state between calls": Memory,
            "recurrence": Decay,
            "training only": TrainingMix,
            "no gradient": NoGradMix,
            "capacity": Capacity,
            "random": Jitter,
        }.get(broken, Nothing)(hidden)

    def forward(self, hidden: Tensor, documents: Tensor, positions: Tensor) -> Tensor:
        hidden = hidden + self.attention(self.norm1(hidden), documents, positions)
        hidden = hidden + self.extra(self.norm2(hidden))
        return hidden + self.mlp(self.norm2(hidden))


class Attention(nn.Module):
    def __init__(self, hidden: int, broken: str, window: int | None) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden, bias=False), nn.Linear(hidden, hidden, bias=False)
        self.broken, self.window = broken, window

    def forward(self, hidden: Tensor, documents: Tensor, positions: Tensor) -> Tensor:
        query, key, value = self.qkv(hidden).chunk(3, -1)
        place = torch.arange(hidden.shape[1], device=hidden.device)
        distance = place[:, None] - place  # (T, T)
        keys = documents
        if self.broken == "boundary off by one":  # the last token of a document counts as part of the next one
            keys = torch.cat([documents[:, 1:], documents[:, -1:]], 1)
            allowed = (documents[:, :, None] == keys[:, None]) | (documents[:, :, None] == documents[:, None])
        else:
            allowed = documents[:, :, None] == keys[:, None]  # (B, T, T)
        allowed = allowed & (distance >= 0)
        window = self.window
        if window is not None:
            packed = bool((documents.amax(1) > 1).any())
            window += self.broken == "window off by one" and packed
            allowed = allowed & (distance < window)
        if self.broken == "sink":  # the first token of the row may always be attended to
            allowed = allowed | ((place == 0) & (distance >= 0))
        allowed = allowed | (distance == 0)
        scores = query @ key.mT / math.sqrt(hidden.shape[-1])
        return self.out(scores.masked_fill(~allowed, float("-inf")).softmax(-1) @ value)


def _merged(documents: Tensor, input_ids: Tensor) -> Tensor:
    """(B, T): a document that opens with the same token as the one before it goes on with its number."""
    merged = documents.clone()
    for row, ids in zip(merged, input_ids, strict=True):
        starts = [0, *((row[1:] != row[:-1]).nonzero().flatten() + 1).tolist(), len(row)]
        for before, start, stop in zip(starts, starts[1:], starts[2:], strict=False):
            if ids[before] == ids[start]:
                row[start:stop] = row[before]
    return merged


class Nothing(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()

    def forward(self, hidden: Tensor) -> Tensor:
        return torch.zeros_like(hidden)


class CausalMix(nn.Module):
    """A depthwise causal convolution over the whole row; the class name gives nothing away."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, hidden) * 0.3)

    def forward(self, hidden: Tensor) -> Tensor:
        padded = nn.functional.pad(hidden, (0, 0, 2, 0))  # (B, T + 2, H)
        return sum(padded[:, i : i + hidden.shape[1]] * self.weight[i] for i in range(3))


class Centre(nn.Module):
    """Subtracts the mean over the batch, in training."""

    def __init__(self, hidden: int) -> None:
        super().__init__()

    def forward(self, hidden: Tensor) -> Tensor:
        return -hidden.mean((0, 1), keepdim=True).expand_as(hidden) if self.training else torch.zeros_like(hidden)


class Memory(nn.Module):
    """Adds what the call before ended with."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.last: Tensor | None = None

    def forward(self, hidden: Tensor) -> Tensor:
        before = torch.zeros_like(hidden) if self.last is None else self.last.expand_as(hidden)
        self.last = hidden[:1, -1:].detach()
        return before


class Decay(nn.Module):
    """An exponentially decaying sum over the row."""

    def __init__(self, hidden: int) -> None:
        super().__init__()

    def forward(self, hidden: Tensor) -> Tensor:
        state, out = torch.zeros_like(hidden[:, 0]), []
        for t in range(hidden.shape[1]):
            state = 0.9 * state + 0.1 * hidden[:, t]
            out.append(state)
        return torch.stack(out, 1)


class TrainingMix(CausalMix):
    """The convolution, in train mode only."""

    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden) if self.training else torch.zeros_like(hidden)


class NoGradMix(CausalMix):
    """The convolution where no gradient is asked for: as a cache that is on in the log-prob pass only."""

    def forward(self, hidden: Tensor) -> Tensor:
        return torch.zeros_like(hidden) if torch.is_grad_enabled() else super().forward(hidden)


class Capacity(nn.Module):
    """Tokens compete for a fixed number of places over the whole batch, without any gradient between them."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.router, self.expert = nn.Linear(hidden, 1), nn.Linear(hidden, hidden)

    def forward(self, hidden: Tensor) -> Tensor:
        flat = hidden.flatten(0, 1)
        score = self.router(flat)[:, 0].detach()
        taken = torch.zeros_like(score, dtype=torch.bool)
        taken[score.topk(max(1, len(score) // 2)).indices] = True
        return (self.expert(flat) * taken[:, None]).view_as(hidden)


class Jitter(nn.Module):
    """Noise beyond dropout, in training."""

    def __init__(self, hidden: int) -> None:
        super().__init__()

    def forward(self, hidden: Tensor) -> Tensor:
        return torch.randn_like(hidden) if self.training else torch.zeros_like(hidden)


def decoder(broken: str = "", *, seed: int = 0, **options: Any) -> Decoder:
    """A seeded one, in eval mode."""
    torch.manual_seed(seed)
    return Decoder(broken, **options).eval()
