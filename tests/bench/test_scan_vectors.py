"""Vectors in compiled code: functions are exact to a few units of the last place, squares turn, lines fold."""

from __future__ import annotations

import numba
import numpy as np
import pytest

from padless.bench import scan_vectors as vectors
from padless.bench.scan_vectors import LANES

POINTS = np.concatenate(
    [np.linspace(-60, 60, 24_000), [20.0], np.geomspace(1e-8, 1, 4_000), -np.geomspace(1e-8, 1, 3_999)]
)


def applied(operation, x):
    @numba.njit
    def run(source, target):
        for i in range(len(source)):
            vectors.store(target, (i, 0), operation(vectors.load(source, (i, 0))))

    lines = x.reshape(-1, LANES)
    result = np.empty_like(lines)
    run(lines, result)
    return result.reshape(x.shape)


def softplus(x):
    return np.where(x > 20, x, np.log1p(np.exp(x)))


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(
    ("operation", "function"),
    [
        (vectors.softplus, softplus),
        (vectors.softplus_slope, lambda x: np.where(x > 20, 1, sigmoid(x))),
        (vectors.silu, lambda x: x * sigmoid(x)),
    ],
    ids=["softplus", "softplus_slope", "silu"],
)
def test_functions_are_exact_to_a_few_units_of_the_last_place(operation, function, dtype):
    x = POINTS.astype(dtype)
    expected = function(x.astype(np.longdouble))
    found = applied(operation, x)
    assert np.abs(found / expected - 1).max() < 4 * np.finfo(dtype).eps


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_slope_of_silu_is_exact_beside_its_largest_value(dtype):
    x = POINTS.astype(dtype)
    fine = x.astype(np.longdouble)
    expected = sigmoid(fine) * (1 + fine * sigmoid(-fine))
    assert np.abs(applied(vectors.silu_slope, x) - expected).max() < 4 * np.finfo(dtype).eps


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_decay_is_as_exact_as_the_product_in_the_exponent_can_be(dtype):
    unit = vectors.rate_unit(np.dtype(dtype))

    @numba.njit
    def run(steps, rates, target):
        for i in range(len(steps)):
            vectors.store(target, (i, 0), vectors.decay(vectors.load(steps, (i, 0)), vectors.load(rates, (i, 0))))

    rng = np.random.default_rng(0)
    steps = rng.exponential(1, (500, LANES)).astype(dtype)
    A = -rng.exponential(4, (500, LANES)).astype(dtype)
    found = np.empty_like(steps)
    run(steps, (A * unit).astype(dtype), found)
    exponent = steps.astype(np.longdouble) * A
    limit = (2 + 2 * np.abs(exponent)) * np.finfo(dtype).eps
    inside = exponent > -65
    assert (np.abs(found / np.exp(exponent) - 1) < limit)[inside].all()
    assert ((found >= 0) & (found < 1e-27))[~inside].all()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("operation", [vectors.softplus, vectors.silu, vectors.silu_slope, vectors.flush])
def test_not_a_number_passes_through_with_any_payload(operation, dtype):
    x = np.ones(LANES, dtype)
    bits = x.view(np.int32 if dtype is np.float32 else np.int64)
    x[2] = np.nan
    x[5] = np.nan
    bits[5] += 1
    assert np.isnan(applied(operation, x)).nonzero()[0].tolist() == [2, 5]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_squares_turn_and_lines_fold(dtype):
    @numba.njit
    def run(source, turned, sums):
        vectors.turn(source, (1, 2, 5), turned, (3, 0))
        vectors.fold(source, (0, 1, 4), sums, (7,))

    source = np.random.default_rng(0).normal(size=(2, LANES + 3, 2 * LANES)).astype(dtype)
    turned, sums = np.zeros((LANES + 4, LANES), dtype), np.zeros(LANES + 8, dtype)
    run(source, turned, sums)
    assert np.array_equal(turned[3:-1], source[1, 2 : 2 + LANES, 5 : 5 + LANES].T)
    assert not turned[:3].any()
    assert not turned[-1].any()
    assert np.allclose(sums[7:-1], source[0, 1 : 1 + LANES, 4 : 4 + LANES].sum(1), rtol=1e-5)
    assert not sums[:7].any()
    assert sums[-1] == 0


def test_small_numbers_are_flushed_and_others_kept():
    x = np.array([0, 1e-31, -1e-31, 1e-29, -1e-29, 1, -1, np.inf] * 2, np.float32)
    found = applied(vectors.flush, x)
    assert found[:8].tolist() == [0, 0, 0, *x[3:8].tolist()]
