"""What a micro-batch costs: a constant, a term per column, per token and per token squared."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from padless.errors import PadlessError, shown

__all__ = ["DEFAULT_COST", "CostModel", "check_cost"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """Modelled time of one micro-batch of shape (rows, width).

    ``cost = per_microbatch + per_column * width + per_token * rows * width
    + per_token_squared * rows * width**2``

    The unit is whatever the coefficients are in: seconds when fitted, tokens' worth of time by
    default (a micro-batch's fixed cost is taken as 500 tokens). ``per_column`` is what a recurrent
    scan or a launch-bound device pays for every column, however many rows there are;
    ``per_token_squared`` is attention.

    Attributes:
        source: where the coefficients come from (``"default"``, ``"given"``, ``"fit"``, ...).
        residual: median absolute relative error of the fit, where there was one.
        noise: how much repeated measurements of one shape differ, as a share of their median (the
            median over shapes), where there were repeats.

    >>> CostModel().seconds(4, 100)
    900.0
    """

    per_microbatch: float = 500.0
    per_column: float = 0.0
    per_token: float = 1.0
    per_token_squared: float = 0.0
    source: str = "given"
    residual: float | None = None
    noise: float | None = None

    def __post_init__(self) -> None:
        for name in ("per_microbatch", "per_column", "per_token", "per_token_squared"):
            value = getattr(self, name)
            if not (isinstance(value, int | float | np.number) and np.isfinite(value) and value >= 0):
                raise PadlessError(f"{name}={shown(value)}; expected a finite number of at least 0")
            object.__setattr__(self, name, float(value))
        if self.per_microbatch + self.per_column + self.per_token + self.per_token_squared == 0:
            raise PadlessError("every coefficient of the cost model is 0; at least one must be positive")

    def seconds(self, rows: Any, width: Any) -> Any:
        """Modelled cost of padded micro-batches; scalars or arrays that broadcast."""
        return (
            self.per_microbatch
            + self.per_column * width
            + self.per_token * rows * width
            + self.per_token_squared * rows * width * width
        )

    def padded(self, rows: npt.NDArray[np.int64], widths: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """Cost of each padded micro-batch: ``rows`` (G,), ``widths`` (G,) or (G, F) for F fields padded apart."""
        wide = widths.astype(np.float64).reshape(len(rows), -1)  # (G, F)
        count = rows.astype(np.float64)  # (G,)
        return np.asarray(
            self.per_microbatch
            + self.per_column * wide.sum(axis=1)
            + self.per_token * count * wide.sum(axis=1)
            + self.per_token_squared * count * np.square(wide).sum(axis=1)
        )

    def packed(self, tokens: npt.NDArray[np.int64], squares: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Cost of each packed row: ``tokens`` (G,) and ``squares`` (G,), the sum of its squared segment lengths."""
        width = tokens.astype(np.float64)  # (G,)
        return np.asarray(
            self.per_microbatch + (self.per_column + self.per_token) * width + self.per_token_squared * squares
        )

    @classmethod
    def fit(cls, measurements: Iterable[tuple[float, float, float]], *, source: str = "fit") -> CostModel:
        """Coefficients from measured micro-batches, none negative, outliers discounted.

        Relative errors are minimised (a short micro-batch counts as much as a long one) by iteratively
        reweighted least squares with Huber's weights; the constraint is kept by solving every subset
        of the four terms, and of equally good subsets the smallest is taken.

        Args:
            measurements: (rows, width, seconds) of single micro-batches, at least two distinct shapes.
            source: recorded in the model.

        Returns:
            A model in the unit of the measurements, with ``residual`` and, where shapes repeat, ``noise``.

        Raises:
            PadlessError: fewer than two shapes, or a value that is not positive and finite (its index is named).

        >>> shapes = [(1, 100), (1, 800), (4, 100), (4, 800)]
        >>> model = CostModel.fit([(rows, width, 2.0 + 0.001 * rows * width) for rows, width in shapes])
        >>> round(model.per_microbatch, 6), round(model.per_token, 6), model.per_token_squared
        (2.0, 0.001, 0.0)
        """
        from padless.cost_fit import fit

        return fit(measurements, source=source)

    @classmethod
    def calibrate(
        cls,
        step_fn: Callable[[int, int], float | None],
        *,
        shapes: Iterable[tuple[int, int]] | None = None,
        max_rows: int = 8,
        max_width: int = 1024,
        repeats: int = 3,
        max_seconds: float = 60.0,
        warmup: int = 1,
    ) -> CostModel:
        """Time ``step_fn(rows, width)`` on a few shapes and fit.

        Shapes are run from small to large, once per round, so that slow drift of the machine spreads
        over all of them. A shape that would not end within ``max_seconds`` is left out.

        Args:
            step_fn: runs one padded micro-batch of that shape and returns when the device is done
                (on a GPU: synchronise). If it returns a number, that is taken as the seconds.
            shapes: (rows, width) pairs; by default a grid of 3 row counts and 4 widths up to the maxima.
            max_rows, max_width: corners of the default grid; choose them near the shapes you will run.
            repeats: rounds; the median of each shape is fitted.
            max_seconds: no new measurement starts that would end later, warm-up included.
            warmup: untimed runs of every shape (compilation, allocator).

        Returns:
            A model in seconds with ``source="calibrated"``, its ``residual`` and ``noise``.

        >>> model = CostModel.calibrate(lambda rows, width: 0.01 + 1e-6 * rows * width)
        >>> round(model.per_microbatch, 6), model.source
        (0.01, 'calibrated')
        """
        from padless.cost_fit import calibrate

        return calibrate(
            step_fn,
            shapes=shapes,
            max_rows=max_rows,
            max_width=max_width,
            repeats=repeats,
            max_seconds=max_seconds,
            warmup=warmup,
        )

    @classmethod
    def from_config(cls, config: Any, *, width: int = 4096, per_microbatch: float = 500.0) -> CostModel:
        """Relative cost of tokens and of squared tokens from a Hugging Face config, without a measurement.

        Arithmetic is counted: every active weight once per token, attention once per pair of tokens it
        sees. The unit is the work of one token without attention (``per_token`` is 1 unless sliding windows
        or linear attention add to it), so ``per_microbatch`` stays an assumption in tokens' worth of time.

        Args:
            config: a ``PretrainedConfig`` or its dict; transformers is not imported. A nested text
                config is used if there is one.
            width: the widest micro-batch planned. A sliding window shorter than it is counted as work
                per token, a longer one as full attention.
            per_microbatch: fixed cost of a micro-batch in tokens' worth of time.

        Raises:
            PadlessError: the config lacks its sizes (the missing key is named).

        >>> CostModel.from_config({"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        ...     "intermediate_size": 256, "vocab_size": 1000}).per_token
        1.0
        """
        from padless.cost_config import from_config

        return from_config(config, width=width, per_microbatch=per_microbatch)

    def to_dict(self) -> dict[str, Any]:
        """Coefficients and their source, ready for JSON."""
        return asdict(self)


DEFAULT_COST = CostModel(source="default")
"""Used where no cost is given: 500 tokens' worth of time per micro-batch, 1 per token."""


def check_cost(cost: Any) -> CostModel | None:
    """``cost`` if it is a cost model or None.

    Raises:
        PadlessError: anything else.

    >>> check_cost(DEFAULT_COST).per_microbatch
    500.0
    """
    if cost is None or isinstance(cost, CostModel):
        return cost
    raise PadlessError(
        f"cost={shown(cost)}; expected a CostModel, such as padless.CostModel(per_microbatch=500), or None"
    )
