"""What padding costs and what removing it gains: counts that add up, and the rates that follow from them."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from padless.errors import PadlessError
from padless.lengths import Lengths, as_lengths, positive_int

__all__ = ["Meter", "Neighbours"]

Item = TypeVar("Item")


@dataclass(slots=True)
class Neighbours:
    """Correlation between the mean lengths of consecutive micro-batches, kept as sums, so that it adds with ``+``.

    Near 1 where batches come ordered by length (training then swings from short to long), near 0 where they do not.

    >>> ordered = Neighbours()
    >>> for mean_length in (10, 11, 30, 31, 90, 91):
    ...     ordered.add(mean_length)
    >>> round(ordered.correlation, 2)
    0.75
    """

    pairs: int = 0
    before: float = 0.0
    after: float = 0.0
    before_squared: float = 0.0
    after_squared: float = 0.0
    product: float = 0.0
    last: float | None = None

    def add(self, mean_length: float) -> None:
        """Note the next micro-batch; one without sequences (NaN) interrupts nothing."""
        if math.isnan(mean_length):
            return
        if self.last is not None:
            self.pairs += 1
            self.before += self.last
            self.after += mean_length
            self.before_squared += self.last * self.last
            self.after_squared += mean_length * mean_length
            self.product += self.last * mean_length
        self.last = float(mean_length)

    @property
    def correlation(self) -> float:
        """Pearson's coefficient over all pairs; NaN for fewer than two, or where all lengths are equal."""
        n = self.pairs
        spread = (n * self.before_squared - self.before**2) * (n * self.after_squared - self.after**2)
        scale = n * max(self.before_squared, self.after_squared, 1e-300)
        if n < 2 or spread <= (1e-9 * scale) ** 2:
            return math.nan
        return (n * self.product - self.before * self.after) / math.sqrt(spread)

    def __add__(self, other: Neighbours) -> Neighbours:
        """Both sets of pairs; no pair is made of the last of one and the first of the other."""
        summed = {
            item.name: getattr(self, item.name) + getattr(other, item.name)
            for item in fields(self)
            if item.name != "last"
        }
        return Neighbours(**summed, last=other.last if other.last is not None else self.last)


@dataclass(slots=True, eq=False)
class Meter:
    """Counts tokens, time and memory of a training loop. Meters add with ``+``; every rate is a ratio of sums.

    Args:
        flops_per_token: useful floating-point operations per real token of a step (6 x active parameters for
            a forward and backward pass); see `for_model`.
        flops_per_token_squared: those per squared segment length (12 x layers x hidden size, halved for causal
            attention that skips what it masks).
        peak_flops: of the device, per second. Without it there is no MFU.

    Everything else is counted. ``waiting`` is the time blocked on the next batch, ``seconds`` all time, waiting
    included; ``attention`` and ``attention_computed`` are sums of squared lengths of segments, and of the rows that
    the device computed.

    >>> meter = Meter()
    >>> meter.micro_batch([7, 3], padded_tokens=2 * 8)
    >>> meter.step(seconds=0.5)
    >>> meter.real_tokens_per_second, meter.padded_tokens_per_second, meter.occupancy
    (20.0, 32.0, 0.625)
    """

    flops_per_token: float = 0.0
    flops_per_token_squared: float = 0.0
    peak_flops: float | None = None
    real_tokens: int = 0
    padded_tokens: int = 0
    sequences: int = 0
    attention: float = 0.0
    attention_computed: float = 0.0
    micro_batches: int = 0
    steps: int = 0
    seconds: float = 0.0
    waiting: float = 0.0
    peak_memory: int = 0
    rank_tokens: npt.NDArray[np.int64] | None = None
    rank_seconds: npt.NDArray[np.float64] | None = None
    neighbours: Neighbours = field(default_factory=Neighbours)
    _clock: float | None = None

    @classmethod
    def for_model(cls, model: Any, *, peak_flops: float | None = None, causal: bool = True) -> Meter:
        """A meter that knows a model's arithmetic: its parameters (input embeddings are looked up, not multiplied).

        Args:
            model: a module with ``config`` (layers and hidden size), as transformers models have.
            peak_flops: of the device, per second.
            causal: half of the attention square is useful.

        Mixtures of experts count the parameters that a token uses where the config says how many.
        """
        config = getattr(model.config, "get_text_config", lambda: model.config)()
        layers = _first(config, "num_hidden_layers", "n_layer", "num_layers")
        hidden = _first(config, "hidden_size", "n_embd", "d_model")
        weights = float(sum(p.numel() for p in model.parameters()))
        embedding = model.get_input_embeddings().weight
        output = model.get_output_embeddings()
        if output is None or output.weight is not embedding:
            weights -= embedding.numel()
        experts, used = getattr(config, "num_local_experts", 0) or getattr(config, "num_experts", 0), None
        if experts:
            used = getattr(config, "num_experts_per_tok", None)
        if experts and used:
            in_experts = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
            weights -= in_experts * (1 - used / experts)
        square = 12.0 * layers * hidden / (2 if causal else 1)
        return cls(flops_per_token=6.0 * weights, flops_per_token_squared=square, peak_flops=peak_flops)

    # --- counting

    def micro_batch(self, lengths: Lengths, *, padded_tokens: int, computed_lengths: Lengths | None = None) -> None:
        """Count one micro-batch.

        Args:
            lengths: tokens of its sequences (segments, where rows are packed), (rows,) or (rows, F); may be empty.
            padded_tokens: positions that the device computes: rows x width, or the packed row's capacity.
            computed_lengths: row lengths that attention computes; by default one rectangle of rows of equal width
                for padded rows, and the segments for packed ones (where padding is less than a row).
        """
        held = np.asarray(lengths)
        if held.size:
            held = as_lengths(held, minimum=0).astype(np.int64)
        total = held.sum(axis=1) if held.ndim == 2 else held  # (rows,)
        real, padded = int(total.sum()), positive_int(padded_tokens, name="padded_tokens", minimum=0)
        if real > padded:
            raise PadlessError(f"lengths sum to {real}, more than padded_tokens={padded}: one of them is wrong")
        squares = float(np.square(total.astype(np.float64)).sum())
        self.real_tokens += real
        self.padded_tokens += padded
        self.sequences += len(total)
        self.attention += squares
        if computed_lengths is not None:
            self.attention_computed += float(np.square(np.asarray(computed_lengths, dtype=np.float64)).sum())
        elif len(total):
            # A rectangle computes rows x width^2; for a packed row the same formula is never below its segments.
            self.attention_computed += max(squares, padded * (padded / len(total)))
        self.micro_batches += 1
        self.neighbours.add(real / len(total) if len(total) else math.nan)

    def add_batch(self, batch: Any) -> None:
        """Count a batch of tensors: by its ``cu_seq_lens_q`` if it is packed, else by its ``attention_mask``."""
        offsets = batch.get("cu_seq_lens_q", batch.get("cu_seqlens"))
        ids = batch.get("input_ids", batch.get("inputs_embeds"))
        if ids is None:
            raise PadlessError(
                "the batch has no input_ids or inputs_embeds, so its size is not known: use micro_batch()"
            )
        padded = int(ids.shape[0] * ids.shape[1])
        if offsets is not None:
            segments = np.diff(np.asarray(offsets.tolist(), dtype=np.int64))
            self.micro_batch(segments, padded_tokens=padded, computed_lengths=segments)
            return
        mask = batch.get("attention_mask")
        if mask is None:
            raise PadlessError(
                "the batch has no attention_mask, so padding cannot be told from tokens: use micro_batch()"
            )
        lengths = np.asarray((mask != 0).sum(-1).tolist(), dtype=np.int64)
        self.micro_batch(lengths, padded_tokens=padded)

    def watch(self, batches: Iterable[Item], *, skip_first: bool = False) -> Iterator[Item]:
        """Pass batches through and count the time blocked on each; ``skip_first`` leaves the loader's start out."""
        source = iter(batches)
        while True:
            began = time.perf_counter()
            try:
                item = next(source)
            except StopIteration:
                return
            now = time.perf_counter()
            if skip_first:
                skip_first, self._clock = False, now
            else:
                self.wait(now - began)
                if self._clock is None:
                    self._clock = began
            yield item

    def wait(self, seconds: float) -> None:
        """Count time blocked on the next batch; it is part of the step that follows."""
        self.waiting += seconds

    def start(self) -> None:
        """Start the clock of the next step; `watch` does it for its first batch."""
        self._clock = time.perf_counter()

    def step(self, *, seconds: float | None = None) -> None:
        """Close an optimizer step: its time is what passed since the last one, or ``seconds``."""
        now = time.perf_counter()
        if seconds is None:
            if self._clock is None:
                raise PadlessError(
                    "step() has no beginning to measure from: call start(), use watch(), or pass seconds="
                )
            seconds = now - self._clock
        self._clock = now
        self.seconds += seconds
        self.steps += 1
        torch = sys.modules.get("torch")
        if torch is not None and torch.cuda.is_available():
            self.peak_memory = max(self.peak_memory, int(torch.cuda.max_memory_allocated()))

    def lap(self) -> Meter:
        """What was counted since the last lap, as a meter of its own; counting starts at zero again.

        The sum of all laps is the whole: rates over one lap never mix with counts from another.
        """
        taken = self + self.empty()
        for item in fields(self):
            if item.name not in ("_clock", *_KEPT):
                setattr(self, item.name, getattr(self.empty(), item.name))
        self.neighbours.last = taken.neighbours.last
        return taken

    def empty(self) -> Meter:
        """A meter of the same model and device, with nothing counted."""
        return Meter(**{name: getattr(self, name) for name in _KEPT})

    # --- adding

    def __add__(self, other: Meter) -> Meter:
        """Counts of both; times add, as of one loop after another. For ranks that ran side by side see `across`."""
        if not isinstance(other, Meter):
            return NotImplemented
        total = self.empty()
        for name in _KEPT:
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine and theirs and mine != theirs:
                raise PadlessError(f"meters of different models or devices do not add: {name} is {mine} and {theirs}")
            setattr(total, name, mine or theirs)
        for name in _SUMMED:
            setattr(total, name, getattr(self, name) + getattr(other, name))
        for name in ("rank_tokens", "rank_seconds"):
            setattr(total, name, _sum_ranks(getattr(self, name), getattr(other, name), name))
        total.peak_memory = max(self.peak_memory, other.peak_memory)
        total.neighbours = self.neighbours + other.neighbours
        return total

    def __radd__(self, other: Any) -> Meter:
        """``sum(meters)`` works."""
        return self if other == 0 else NotImplemented

    @classmethod
    def across(cls, meters: Sequence[Meter]) -> Meter:
        """One meter of ranks that ran side by side: counts add, time is the slowest's, and the imbalance is known."""
        if not meters:
            raise PadlessError("across() needs the meter of at least one rank")
        total = sum(meters[1:], meters[0] + meters[0].empty())
        total.seconds = max(m.seconds for m in meters)
        total.waiting = max(m.waiting for m in meters)
        total.steps = max(m.steps for m in meters)
        if total.peak_flops is not None:
            total.peak_flops *= len(meters)
        total.rank_tokens = np.array([m.padded_tokens for m in meters], dtype=np.int64)  # (R,)
        total.rank_seconds = np.array([m.seconds - m.waiting for m in meters])  # (R,)
        return total

    def gather(self, process_group: Any = None) -> Meter:
        """`across` over a torch.distributed group; every rank must call it, and gets the same answer."""
        import torch.distributed as dist

        if not (dist.is_available() and dist.is_initialized()):
            return Meter.across([self])
        everyone: list[Any] = [None] * dist.get_world_size(process_group)
        dist.all_gather_object(everyone, self + self.empty(), group=process_group)
        return Meter.across(everyone)

    # --- rates

    @property
    def occupancy(self) -> float:
        """Real over padded tokens; NaN where nothing was counted."""
        return self.real_tokens / self.padded_tokens if self.padded_tokens else math.nan

    @property
    def real_tokens_per_second(self) -> float:
        """The headline: tokens of sequences, padding not counted."""
        return self.real_tokens / self.seconds if self.seconds else math.nan

    @property
    def padded_tokens_per_second(self) -> float:
        """Positions that the device computes; it may fall while `real_tokens_per_second` rises."""
        return self.padded_tokens / self.seconds if self.seconds else math.nan

    @property
    def waiting_share(self) -> float:
        """Share of the time that was spent blocked on the loader."""
        return self.waiting / self.seconds if self.seconds else math.nan

    @property
    def useful_flops(self) -> float:
        """Operations that real tokens need: linear in tokens, quadratic in each segment's length, none for padding."""
        return self.flops_per_token * self.real_tokens + self.flops_per_token_squared * self.attention

    @property
    def mfu(self) -> float:
        """Model FLOPs utilisation by segment: useful over possible operations; NaN without ``peak_flops``.

        Padding is not useful work, so that adding it never raises the figure (PaLM's definition, taken by segment).
        """
        if not self.peak_flops or not self.seconds or not self.flops_per_token:
            return math.nan
        return self.useful_flops / (self.seconds * self.peak_flops)

    @property
    def imbalance(self) -> dict[str, float]:
        """Over ranks: largest padded tokens over their mean, and smallest over largest; NaN before `gather`."""
        if self.rank_tokens is None or not self.rank_tokens.sum():
            return {"max_over_mean": math.nan, "min_over_max": math.nan}
        tokens = self.rank_tokens
        return {
            "max_over_mean": float(tokens.max() / tokens.mean()),
            "min_over_max": float(tokens.min() / tokens.max()),
        }

    def to_dict(self) -> dict[str, Any]:
        """Counts and rates, ready for JSON or a logger; what is not known is ``None``."""
        told: dict[str, Any] = {name: getattr(self, name) for name in (*_SUMMED, "peak_memory")}
        for name in _RATES:
            value = getattr(self, name)
            told[name] = None if math.isnan(value) else value
        told.update({name: None if math.isnan(value) else value for name, value in self.imbalance.items()})
        correlation = self.neighbours.correlation
        told["neighbour_correlation"] = None if math.isnan(correlation) else correlation
        return told

    def __repr__(self) -> str:
        told = self.to_dict()
        rates = {name: f"{told[name]:.4g}" for name in (*_RATES, "neighbour_correlation") if told[name] is not None}
        return (
            f"Meter({self.steps} steps, {self.micro_batches} micro-batches, {self.real_tokens} real tokens"
            + "".join(f", {name}={value}" for name, value in rates.items())
            + ")"
        )


_KEPT = ("flops_per_token", "flops_per_token_squared", "peak_flops")
_SUMMED = (
    "real_tokens",
    "padded_tokens",
    "sequences",
    "attention",
    "attention_computed",
    "micro_batches",
    "steps",
    "seconds",
    "waiting",
)
_RATES = ("occupancy", "real_tokens_per_second", "padded_tokens_per_second", "waiting_share", "mfu")


def _sum_ranks(a: Any, b: Any, name: str) -> Any:
    if a is None or b is None:
        return a if b is None else b
    if len(a) != len(b):
        raise PadlessError(f"{name}: meters of {len(a)} and {len(b)} ranks do not add")
    return a + b


def _first(config: Any, *names: str) -> int:
    for name in names:
        value = getattr(config, name, None)
        if isinstance(value, int):
            return value
    raise PadlessError(f"the model's config has none of {', '.join(names)}: give flops_per_token yourself")
