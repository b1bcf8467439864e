"""Cost coefficients from measurements: robust, non-negative, with what the fit left unexplained."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from itertools import combinations

import numpy as np
import numpy.typing as npt

from padless.cost import CostModel
from padless.errors import PadlessError, shown
from padless.lengths import positive_int

__all__ = ["calibrate", "fit"]

Floats = npt.NDArray[np.float64]
_TERMS = ("per_microbatch", "per_token", "per_token_squared", "per_column")
_ROUNDS = 30
_HUBER = 1.345  # 95 % efficiency on normal errors
_BETTER = 1.0 - 1e-3  # a further term must explain at least this much more of the squared error


def fit(measurements: Iterable[tuple[float, float, float]], *, source: str = "fit") -> CostModel:
    """See `CostModel.fit`."""
    table = _read(measurements)  # (M, 3)
    rows, width, seconds = table.T
    terms = np.stack([np.ones_like(rows), rows * width, rows * width**2, width], axis=1)  # (M, 4)
    relative = terms / seconds[:, None]  # (M, 4) so that the target is 1 everywhere
    scale = np.abs(relative).max(axis=0)  # (4,)
    weights = np.ones(len(rows))
    coefficients = np.zeros(4)
    for _ in range(_ROUNDS):
        before = coefficients
        coefficients = _non_negative(relative / scale, weights)
        errors = np.abs(relative / scale @ coefficients - 1.0)  # (M,)
        spread = max(1.4826 * float(np.median(errors)), 1e-9)
        weights = np.minimum(1.0, _HUBER * spread / np.maximum(errors, 1e-12))
        if np.allclose(before, coefficients, rtol=1e-9, atol=0):
            break
    values = coefficients / scale
    return CostModel(
        **{name: float(value) for name, value in zip(_TERMS, values, strict=True)},
        source=source,
        residual=float(np.median(np.abs(terms @ values - seconds) / seconds)),
        noise=_noise(table),
    )


def _read(measurements: Iterable[tuple[float, float, float]]) -> Floats:
    listed = [tuple(item) for item in measurements]
    for index, item in enumerate(listed):
        if len(item) != 3:
            raise PadlessError(f"measurements[{index}] is {shown(item)}; expected (rows, width, seconds)")
        if not all(np.isfinite(value) and value > 0 for value in item):
            raise PadlessError(
                f"measurements[{index}] is {shown(item)}; rows, width and seconds must be positive and finite"
            )
    shapes = {item[:2] for item in listed}
    if len(shapes) < 2:
        raise PadlessError(
            f"{len(listed)} measurements of {len(shapes)} shapes; a fit needs at least two different (rows, width)"
        )
    return np.array(listed, dtype=np.float64)


def _non_negative(terms: Floats, weights: Floats) -> Floats:
    """Weighted least squares against 1 with no negative coefficient: (M, 4) terms, (M,) weights -> (4,).

    Four terms have 15 subsets: each is solved, and those with a negative coefficient or without a
    unique solution are skipped. The best of what is left is the constrained optimum.
    """
    root = np.sqrt(weights)[:, None]  # (M, 1)
    target = root[:, 0]
    best, lowest = np.zeros(terms.shape[1]), float(target @ target)
    for size in range(1, terms.shape[1] + 1):
        winner, winner_error = best, lowest
        for subset in combinations(range(terms.shape[1]), size):
            chosen = terms[:, subset] * root  # (M, size)
            solution, _, rank, _ = np.linalg.lstsq(chosen, target, rcond=1e-10)
            if rank < size or solution.min() < 0:
                continue
            error = float(np.sum((chosen @ solution - target) ** 2))
            if error < winner_error * _BETTER:
                winner, winner_error = np.zeros(terms.shape[1]), error
                winner[list(subset)] = solution
        best, lowest = winner, winner_error
    return best


def _noise(table: Floats) -> float | None:
    """Median over repeated shapes of (largest - smallest) / median seconds."""
    by_shape: dict[tuple[float, float], list[float]] = {}
    for rows, width, seconds in table.tolist():
        by_shape.setdefault((rows, width), []).append(seconds)
    spreads = [(max(times) - min(times)) / float(np.median(times)) for times in by_shape.values() if len(times) > 1]
    return float(np.median(spreads)) if spreads else None


def calibrate(
    step_fn: Callable[[int, int], float | None],
    *,
    shapes: Iterable[tuple[int, int]] | None,
    max_rows: int,
    max_width: int,
    repeats: int,
    max_seconds: float,
    warmup: int,
) -> CostModel:
    """See `CostModel.calibrate`."""
    max_rows, max_width = positive_int(max_rows, name="max_rows"), positive_int(max_width, name="max_width")
    repeats, warmup = positive_int(repeats, name="repeats"), positive_int(warmup, name="warmup", minimum=0)
    if not max_seconds > 0:
        raise PadlessError(f"max_seconds={shown(max_seconds)}; expected a positive number of seconds")
    grid = _grid(max_rows, max_width) if shapes is None else sorted({(int(r), int(w)) for r, w in shapes}, key=_area)
    if len(grid) < 2:
        raise PadlessError(f"shapes={grid}; calibration needs at least two different (rows, width)")
    deadline = time.perf_counter() + max_seconds
    times: dict[tuple[int, int], list[float]] = {shape: [] for shape in grid}
    seen: dict[tuple[int, int], float] = {}  # wall seconds of the last run of each shape
    for number in range(warmup + repeats):
        for shape in grid:
            if time.perf_counter() + _guess(shape, seen) > deadline:
                continue
            started = time.perf_counter()
            told = step_fn(*shape)
            seen[shape] = time.perf_counter() - started
            if number >= warmup:
                times[shape].append(seen[shape] if told is None else float(told))
    measured = [(float(r), float(w), value) for (r, w), values in times.items() for value in values]
    if len({item[:2] for item in measured}) < 2:
        raise PadlessError(
            f"only {len(measured)} micro-batches ended within max_seconds={max_seconds};"
            " allow more time, or pass smaller shapes"
        )
    medians = [(r, w, float(np.median(values))) for (r, w), values in times.items() if values]
    model = fit(medians, source="calibrated")
    return CostModel(**{**model.to_dict(), "noise": _noise(np.array(measured))})


def _grid(max_rows: int, max_width: int) -> list[tuple[int, int]]:
    rows = {1, max(1, max_rows // 2), max_rows}
    widths = {max(1, max_width // part) for part in (8, 4, 2, 1)}
    return sorted({(r, w) for r in rows for w in widths}, key=_area)


def _area(shape: tuple[int, int]) -> tuple[int, int]:
    return shape[0] * shape[1], shape[1]


def _guess(shape: tuple[int, int], seen: dict[tuple[int, int], float]) -> float:
    """Seconds this shape will take: as before, or in proportion to the largest smaller one (squared width at worst)."""
    if shape in seen:
        return seen[shape]
    if not seen:
        return 0.0
    nearest = max(seen, key=_area)
    return seen[nearest] * max(1.0, _area(shape)[0] / _area(nearest)[0]) * max(1.0, shape[1] / nearest[1])
