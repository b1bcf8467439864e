"""What a micro-batch costs: a constant, a term per column, per token and per token squared."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from padless.errors import PadlessError

__all__ = ["DEFAULT_COST", "CostModel"]


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

    >>> CostModel().seconds(4, 100)
    900.0
    """

    per_microbatch: float = 500.0
    per_column: float = 0.0
    per_token: float = 1.0
    per_token_squared: float = 0.0
    source: str = "given"
    residual: float | None = None

    def __post_init__(self) -> None:
        for name in ("per_microbatch", "per_column", "per_token", "per_token_squared"):
            value = getattr(self, name)
            if not (isinstance(value, int | float | np.number) and np.isfinite(value) and value >= 0):
                raise PadlessError(f"{name}={value!r}; expected a finite number of at least 0")
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

    def to_dict(self) -> dict[str, Any]:
        """Coefficients and their source, ready for JSON."""
        return asdict(self)


DEFAULT_COST = CostModel(source="default")
"""Used where no cost is given: 500 tokens' worth of time per micro-batch, 1 per token."""
