"""What lengths say for themselves: statistics, a histogram, and warnings that save a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["DataFacts", "LengthFacts", "Notice", "histogram", "length_facts", "notices"]

Index = npt.NDArray[np.int64]

_OUTLIER = 4.0  # the longest sequence, in multiples of the 99th percentile
_PILE = 0.01  # share of sequences that have exactly the greatest length
_SOURCE = 0.2  # share of the variance of log length that the source explains


@dataclass(frozen=True, slots=True, kw_only=True)
class DataFacts:
    """What was read, and what became of the rows that are not among the lengths."""

    files: tuple[str, ...] = ()
    rows: int = 0
    empty: int = 0
    dropped: int = 0
    truncated: int = 0

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return {**asdict(self), "files": list(self.files)}


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthFacts:
    """Tokens of the sequences."""

    count: int
    min: int
    mean: float
    p50: float
    p90: float
    p99: float
    max: int
    total: int

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """A warning: what kind, how many sequences it is about, and a sentence."""

    kind: str
    count: int
    message: str

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return asdict(self)


def length_facts(total: Index) -> LengthFacts:
    """Statistics of (N,) lengths; percentiles interpolate as `numpy.quantile` does.

    >>> length_facts(np.array([1, 2, 3, 10])).mean
    4.0
    """
    p50, p90, p99 = (float(q) for q in np.quantile(total, [0.5, 0.9, 0.99]))
    return LengthFacts(
        count=len(total),
        min=int(total.min()),
        mean=float(total.mean()),
        p50=p50,
        p90=p90,
        p99=p99,
        max=int(total.max()),
        total=int(total.sum(dtype=np.int64)),
    )


def histogram(total: Index, bins: int = 60) -> dict[str, list[int]]:
    """Counts in at most ``bins`` ranges of equal width: ``edges`` (B + 1,) and ``counts`` (B,)."""
    low, high = int(total.min()), int(total.max())
    width = max(1, -(-(high - low + 1) // bins))
    count = -(-(high - low + 1) // width)
    edges = low + width * np.arange(count + 1)
    counts = np.bincount((total - low) // width, minlength=count)
    return {"edges": edges.tolist(), "counts": counts.tolist()}


def notices(
    total: Index,
    facts: DataFacts,
    *,
    token_budget: int,
    max_length: int | None,
    sources: Index | None,
    names: Sequence[str],
) -> list[Notice]:
    """Warnings about (N,) lengths, worst first. ``sources`` (N,) says which of ``names`` each comes from."""
    found = [
        _over_budget(total, token_budget),
        _outliers(total),
        _piled_up(total, max_length),
        _empty(facts),
        _by_source(total, sources, names),
    ]
    return [notice for notice in found if notice is not None]


def _over_budget(total: Index, budget: int) -> Notice | None:
    over = int((total > budget).sum())
    if not over:
        return None
    return Notice(
        kind="over-budget",
        count=over,
        message=(
            f"{over:,} sequences ({over / len(total):.2%}) are longer than the token budget {budget:,}; the longest has"
            f" {int(total.max()):,} tokens. They are left out of the figures below and would stop training: raise the"
            " budget, or set --max-length to truncate or drop them"
        ),
    )


def _outliers(total: Index) -> Notice | None:
    p99, longest = float(np.quantile(total, 0.99)), int(total.max())
    if longest < _OUTLIER * p99:
        return None
    beyond = int((total > p99).sum())
    waste = 1.0 - float(total.mean()) / longest
    return Notice(
        kind="outliers",
        count=beyond,
        message=(
            f"a few outliers dominate: the longest sequence has {longest:,} tokens, {longest / p99:.1f} times the 99th"
            f" percentile ({p99:,.0f}). Padding to it wastes {waste:.0%}; check whether those rows are worth it, or"
            " cut them with --max-length"
        ),
    )


def _piled_up(total: Index, max_length: int | None) -> Notice | None:
    longest = int(total.max())
    same = int((total == longest).sum())
    if same < 2 or same < _PILE * len(total) or same == len(total):
        return None
    cut = f"by --max-length {max_length:,}" if longest == max_length else "before the data was written"
    return Notice(
        kind="truncation",
        count=same,
        message=(
            f"{same:,} sequences ({same / len(total):.1%}) have exactly the greatest length, {longest:,}: they were"
            f" probably truncated {cut}, and have lost their end (and their end token)"
        ),
    )


def _empty(facts: DataFacts) -> Notice | None:
    if not facts.empty:
        return None
    return Notice(
        kind="empty",
        count=facts.empty,
        message=f"{facts.empty:,} of {facts.rows:,} rows hold no token: they train nothing, and shorten batches unseen",
    )


def _by_source(total: Index, sources: Index | None, names: Sequence[str]) -> Notice | None:
    """Correlation ratio: the part of the variance of log length that lies between the sources' means."""
    if sources is None or len(names) < 2:
        return None
    log = np.log(total.astype(np.float64))
    count = np.bincount(sources, minlength=len(names)).astype(np.float64)
    mean = np.bincount(sources, weights=log, minlength=len(names)) / np.maximum(count, 1)
    whole = float(np.square(log - log.mean()).sum())
    between = float((count * np.square(mean - log.mean())).sum())
    if whole == 0 or between / whole < _SOURCE:
        return None
    means = np.bincount(sources, weights=total, minlength=len(names)) / np.maximum(count, 1)
    short, long = int(np.argmin(means)), int(np.argmax(means))
    return Notice(
        kind="source-length",
        count=len(total),
        message=(
            f"length tells the source: {between / whole:.0%} of the variance of log length lies between the files"
            f" (mean {means[short]:,.0f} tokens in {names[short]}, {means[long]:,.0f} in {names[long]}). Grouping by"
            " length across steps would group by source: regroup inside each step instead"
        ),
    )
