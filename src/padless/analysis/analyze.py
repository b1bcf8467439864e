"""Lengths in, an `Analysis` out: pure, no files and no screen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from padless.analysis.facts import DataFacts, LengthFacts, Notice, histogram, length_facts, notices
from padless.analysis.figures import Figures, figures_of
from padless.analysis.model import ModelFacts
from padless.analysis.recommend import Recommendation, recommend
from padless.analysis.schedule import STRATEGIES, Setup, make_schedule
from padless.analysis.settings import settings_for
from padless.cost import DEFAULT_COST, CostModel
from padless.errors import PadlessError, choose
from padless.lengths import Lengths, as_ids, as_lengths, positive_int
from padless.plan import Sync
from padless.shapes import round_up

__all__ = ["Analysis", "analyze_lengths", "epoch"]

Index = npt.NDArray[np.int64]

_SEQUENCES_PER_STEP = 256
_SMALLEST_BUDGET = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class Analysis:
    """What the data look like, what each strategy would make of them, and what to do.

    Attributes:
        data, lengths: what was read, and its lengths.
        histogram: ``edges`` and ``counts``.
        setup: the settings that the strategies were given; those not asked for were chosen from the data.
        figures: by strategy.
        current: the strategy that is compared with.
        recommendation, warnings: conclusions.
        simulated: sequences that were scheduled; figures that count are scaled to the epoch.
        epoch: sequences of one epoch (with mixture weights, as many as there are rows).
        sample: (simulated, F) their lengths, in epoch order.
        model: what the model's config said, if one was given.
    """

    data: DataFacts
    lengths: LengthFacts
    histogram: dict[str, list[int]]
    setup: Setup
    figures: dict[str, Figures]
    current: str
    recommendation: Recommendation
    warnings: tuple[Notice, ...]
    simulated: int
    epoch: int
    sample: Index
    model: ModelFacts | None = None

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        setup = self.setup
        told: dict[str, Any] = {
            "data": self.data.to_dict(),
            "lengths": self.lengths.to_dict(),
            "histogram": self.histogram,
            "setup": {
                "token_budget": setup.token_budget,
                "ranks": setup.ranks,
                "sequences_per_step": setup.sequences_per_step,
                "padded_to": setup.widest,
                "multiple_of": setup.multiple_of,
                "sync": setup.sync,
                "seed": setup.seed,
                "cost": setup.cost.to_dict(),
                "current": self.current,
                "simulated": self.simulated,
                "epoch": self.epoch,
            },
            "strategies": {name: figures.to_dict() for name, figures in self.figures.items()},
            "recommendation": self.recommendation.to_dict(),
            "warnings": [notice.to_dict() for notice in self.warnings],
        }
        if self.model is not None:
            told["model"] = {**self.model.to_dict(), "memory": self.model.memory(setup.token_budget)}
        return told


def analyze_lengths(
    lengths: Lengths,
    *,
    token_budget: int | None = None,
    ranks: int = 1,
    sequences_per_step: int | None = None,
    cost: CostModel | None = None,
    sync: Sync = "microbatch",
    multiple_of: int = 1,
    model: ModelFacts | None = None,
    current: str | None = None,
    data: DataFacts | None = None,
    max_length: int | None = None,
    sources: Any = None,
    names: Sequence[str] = (),
    weights: Sequence[float] | None = None,
    sample: int = 16_384,
    seed: int = 0,
    rows: int | None = None,
) -> Analysis:
    """Simulate every strategy on one epoch of these lengths.

    Args:
        lengths: (N,) tokens of each sequence, or (N, F) for fields padded apart by ``fixed`` and
            ``longest-in-batch`` (prompt and response of RL); the other strategies roll them into one.
        token_budget: padded tokens of one micro-batch; by default the power of two, at least 8192, that holds the
            longest sequence.
        ranks: data-parallel ranks.
        sequences_per_step: sequences in one optimizer step over all ranks; by default 256, or all if there are fewer.
        cost: cost model; by default the model's, or `padless.cost.DEFAULT_COST`.
        sync, multiple_of: as in `padless.microbatch`.
        model: facts of the model, see `read_model`. Without one packing is not recommended.
        current: the strategy in use today: ``"longest-in-batch"`` by default, ``"fixed"`` for several fields.
        data: what was read, for the report.
        max_length: the limit that truncated the data, for a warning.
        sources, names: (N,) file of each sequence, and the files' names.
        weights: how often each file is drawn from, relative to the others; by default all rows are used once.
        sample: most sequences to simulate; whole optimizer steps are.
        seed: order of the epoch.
        rows: sequences in one micro-batch of ``fixed`` and ``longest-in-batch`` (the batch size of one device); by
            default as many as always fit the token budget.

    Raises:
        PadlessError: no sequence within the token budget, or options that make no sense.

    >>> analyze_lengths([512] * 1000, token_budget=4096).recommendation.strategy
    'change nothing'
    """
    array = as_lengths(lengths)
    fields = array.reshape(len(array), -1).astype(np.int64)  # (N, F)
    total = fields.sum(axis=1)  # (N,)
    budget = _default_budget(total, token_budget)
    source = None if sources is None else as_ids(sources, len(total), name="sources")
    facts = data or DataFacts(rows=len(total))
    warned = notices(total, facts, token_budget=budget, max_length=max_length, sources=source, names=names)
    fitting = np.flatnonzero(round_up(total, positive_int(multiple_of, name="multiple_of")) <= budget)
    if not len(fitting):
        raise PadlessError(
            f"no sequence fits the token budget {budget}: the shortest has {int(total.min())} tokens; raise it,"
            " or truncate with max_length"
        )
    drawn = epoch(len(fitting), source=None if source is None else source[fitting], weights=weights, seed=seed)
    size = min(len(drawn), _SEQUENCES_PER_STEP) if sequences_per_step is None else sequences_per_step
    size = positive_int(size, name="sequences_per_step")
    kept = len(drawn) if len(drawn) <= sample else max(size, sample // size * size)
    chosen = fields[fitting[drawn[:kept]]]  # (S, F)
    setup = Setup(
        token_budget=budget,
        ranks=positive_int(ranks, name="ranks"),
        sequences_per_step=size,
        widest=int(round_up(fields[fitting].max(axis=0), multiple_of).sum()),
        cost=cost or (model.cost if model is not None else DEFAULT_COST),
        sync=choose("sync", sync, ("microbatch", "step")),  # type: ignore[arg-type]
        multiple_of=multiple_of,
        seed=seed,
        rows=None if rows is None else positive_int(rows, name="rows"),
    )
    share = len(chosen) / len(drawn)
    figures = {name: figures_of(make_schedule(name, chosen, setup), setup, epoch_share=share) for name in STRATEGIES}
    today = choose("current", current or ("fixed" if fields.shape[1] > 1 else "longest-in-batch"), STRATEGIES)
    advice = recommend(figures, current=today, model=model)
    return Analysis(
        data=facts,
        lengths=length_facts(total),
        histogram=histogram(total),
        setup=setup,
        figures=figures,
        current=today,
        recommendation=replace(advice, settings=settings_for(advice.strategy, setup)),
        warnings=tuple(warned),
        simulated=len(chosen),
        epoch=len(drawn),
        sample=chosen,
        model=model,
    )


def epoch(count: int, *, source: Index | None, weights: Sequence[float] | None, seed: int) -> Index:
    """Sequences of one epoch in random order, (count,): each once, or drawn with the files' weights.

    With weights a file's share of the epoch is its weight over the sum of weights, whatever its size; its
    sequences repeat, or some stay out.
    """
    rng = np.random.default_rng(seed)
    if weights is None:
        return rng.permutation(count)
    if source is None or len(weights) <= int(source.max()):
        files = 0 if source is None else int(source.max()) + 1
        raise PadlessError(f"{len(weights)} weights for {files} files: give one for each")
    given = np.array(weights, dtype=np.float64)
    if not np.isfinite(given).all() or (given < 0).any() or given.sum() <= 0:
        raise PadlessError(f"weights={list(weights)}; expected numbers of at least 0, not all 0")
    rows = np.bincount(source, minlength=len(given))
    if (given[rows == 0] > 0).any():
        empty = int(np.flatnonzero((rows == 0) & (given > 0))[0])
        raise PadlessError(f"weights[{empty}] is {given[empty]}, but that file has no sequence to draw")
    each = np.where(rows > 0, given / np.maximum(rows, 1), 0.0)[source]  # (count,)
    return rng.choice(count, size=count, p=each / each.sum())


def _default_budget(total: Index, given: int | None) -> int:
    if given is not None:
        return positive_int(given, name="token_budget")
    return max(_SMALLEST_BUDGET, 1 << (int(total.max()) - 1).bit_length())
