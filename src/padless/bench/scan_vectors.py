"""Vectors of `LANES` numbers as values in compiled code (numba), for the kernels of the selective scan.

numba leaves it to the compiler to find vector instructions in loops over arrays, which fails where it cannot tell that
the arrays do not overlap. Here the vector is a type: what is written is what runs. LLVM splits the vectors where the
machine's registers are shorter. No operation assumes finite numbers: NaN stays visible.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba.core import cgutils, types
from numba.extending import intrinsic, models, register_model

__all__ = [
    "LANES", "add", "decay", "flush", "fma", "fold", "load", "mul", "rate_unit", "same", "silu", "silu_slope",
    "softplus", "softplus_slope", "spread", "store", "turn", "widen",
]  # fmt: skip

LANES = 16
"""Numbers in a vector: one 512-bit register of float32."""

LOG2_E = 1.4426950408889634
_TINY = 1e-30
_POWER_OF_TWO = (1.0, 6.9314697760e-1, 2.4022242085e-1, 5.5507337437e-2, 9.6715126489e-3, 1.3264727065e-3)
"""2**f for |f| <= 1/2 within 0.8 units of the last place of float32 (least maximum error, by Lawson's iteration)."""


class _Vector(types.Type):
    """The type of a vector, for numba."""

    def __init__(self, scalar: Any) -> None:
        self.scalar = scalar
        super().__init__(name=f"Vector({scalar} x {LANES})")


@register_model(_Vector)
class _VectorModel(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, ir.VectorType(manager.lookup(kind.scalar).get_value_type(), LANES))


class _Value:
    """A vector while code is generated: arithmetic on it writes instructions."""

    def __init__(self, builder: Any, value: Any) -> None:
        self.builder, self.value = builder, value
        self.single = str(value.type.element) == "float"

    def of(self, number: float) -> _Value:
        """The number in every lane."""
        return _Value(self.builder, ir.Constant(self.value.type, [number] * LANES))

    def _other(self, other: _Value | float) -> Any:
        return other.value if isinstance(other, _Value) else self.of(other).value

    def __add__(self, other: _Value | float) -> _Value:
        return _Value(self.builder, self.builder.fadd(self.value, self._other(other)))

    def __sub__(self, other: _Value | float) -> _Value:
        return _Value(self.builder, self.builder.fsub(self.value, self._other(other)))

    def __mul__(self, other: _Value | float) -> _Value:
        return _Value(self.builder, self.builder.fmul(self.value, self._other(other)))

    def __truediv__(self, other: _Value) -> _Value:
        return _Value(self.builder, self.builder.fdiv(self.value, other.value))

    def call(self, name: str, *others: _Value) -> _Value:
        """An LLVM intrinsic of vectors, such as ``fabs``."""
        kind = self.value.type
        full = f"llvm.{name}.v{LANES}{'f32' if self.single else 'f64'}"
        signature = ir.FunctionType(kind, [kind] * (1 + len(others)))
        function = cgutils.get_or_insert_function(self.builder.module, signature, full)
        return _Value(self.builder, self.builder.call(function, [self.value, *(other.value for other in others)]))

    def fma(self, factor: _Value | float, addend: _Value | float) -> _Value:
        """``self * factor + addend``, rounded once where the machine can."""
        others = (_Value(self.builder, self._other(other)) for other in (factor, addend))
        return self.call("fmuladd", *others)

    def where_below(self, limit: float, then: _Value | float, otherwise: _Value | float) -> _Value:
        """``then`` where this is below the limit; NaN is not."""
        below = self.builder.fcmp_ordered("<", self.value, self.of(limit).value)
        return _Value(self.builder, self.builder.select(below, self._other(then), self._other(otherwise)))

    def mix(self, other: _Value, lanes: list[int]) -> _Value:
        """Lanes of the two, numbered through."""
        mask = ir.Constant(ir.VectorType(ir.IntType(32), LANES), lanes)
        return _Value(self.builder, self.builder.shuffle_vector(self.value, other.value, mask))


def _power_of_two(whole: _Value, rest: _Value) -> _Value:
    """``2 ** (whole + rest)`` in float32, where ``whole`` is an integer above -127 plus 1.5 * 2**23 + 127.

    That large number leaves the integer in the low bits, ready to be shifted into the exponent's place.
    """
    result = rest.of(_POWER_OF_TWO[-1])
    for coefficient in reversed(_POWER_OF_TWO[:-1]):
        result = result.fma(rest, coefficient)
    integer = ir.VectorType(ir.IntType(32), LANES)
    bits = rest.builder.bitcast(whole.value, integer)
    bits = rest.builder.shl(bits, ir.Constant(integer, [23] * LANES))
    return result * _Value(rest.builder, rest.builder.bitcast(bits, rest.value.type))


_SHIFT = 1.5 * 2**23 + 127


def _exp(x: _Value) -> _Value:
    """``exp(x)`` for x <= 0: the library's in float64; within 2 units of the last place in float32."""
    if not x.single:
        return x.call("exp")
    x = x.where_below(-69.0, -69.0, x)
    whole = x.fma(LOG2_E, _SHIFT)
    k = whole - _SHIFT
    rest = x.fma(1.44269502162933349609375, k * -1.0)  # log2(e) in two parts
    return _power_of_two(whole, x.fma(1.92596299e-8, rest))


def _sigmoids(x: _Value) -> tuple[_Value, _Value]:
    """Those of x and of -x."""
    e = _exp(x.call("fabs") * -1.0)
    large = x.of(1.0) / (e + 1.0)
    small = e * large
    return x.where_below(0.0, small, large), x.where_below(0.0, large, small)


def _above(x: _Value, limit: float) -> float:
    """The next number above a limit, in the precision of x."""
    return float(np.nextafter(np.float32(limit), np.float32(np.inf)) if x.single else np.nextafter(limit, np.inf))


# --- what kernels call: arithmetic


def _generator(write: Callable[..., _Value]) -> Any:
    def generate(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        return write(*(_Value(builder, value) for value in given)).value

    return generate


@intrinsic  # type: ignore[untyped-decorator]
def add(typing: Any, a: Any, b: Any) -> Any:
    """``a + b``"""
    return a(a, b), _generator(lambda a, b: a + b)


@intrinsic  # type: ignore[untyped-decorator]
def mul(typing: Any, a: Any, b: Any) -> Any:
    """``a * b``"""
    return a(a, b), _generator(lambda a, b: a * b)


@intrinsic  # type: ignore[untyped-decorator]
def fma(typing: Any, a: Any, b: Any, c: Any) -> Any:
    """``a * b + c``"""
    return a(a, b, c), _generator(lambda a, b, c: a.fma(b, c))


@intrinsic  # type: ignore[untyped-decorator]
def decay(typing: Any, step: Any, rate: Any) -> Any:
    """``exp(step * A)`` where ``rate`` is A times `rate_unit`; not less than 2**-100 in float32."""

    def write(step: _Value, rate: _Value) -> _Value:
        x = step * rate
        if not x.single:
            return _exp(x)
        x = x.where_below(-100.0, -100.0, x)
        whole = x + _SHIFT
        return _power_of_two(whole, x - (whole - _SHIFT))

    return step(step, rate), _generator(write)


@intrinsic  # type: ignore[untyped-decorator]
def silu(typing: Any, x: Any) -> Any:
    """``x * sigmoid(x)``"""
    return x(x), _generator(lambda x: x * _sigmoids(x)[0])


@intrinsic  # type: ignore[untyped-decorator]
def silu_slope(typing: Any, x: Any) -> Any:
    """The derivative of `silu`."""

    def write(x: _Value) -> _Value:
        share, rest = _sigmoids(x)
        return (x * share).fma(rest, share)

    return x(x), _generator(write)


@intrinsic  # type: ignore[untyped-decorator]
def softplus(typing: Any, x: Any) -> Any:
    """``log(1 + exp(x))``, and ``x`` itself above 20, as in PyTorch."""

    def write(x: _Value) -> _Value:
        # log(1 + e) = 2 atanh(s) = 2 (s + s**3 / 3 + s**5 / 5 + ...) with s = e / (2 + e) <= 1/3
        e = _exp(x.call("fabs") * -1.0)
        s = e / (e + 2.0)
        square, last = s * s, 8 if x.single else 17
        series = x.of(1 / (2 * last + 1))
        for k in reversed(range(last)):
            series = series.fma(square, 1 / (2 * k + 1))
        small = s * series * 2.0
        return x.where_below(0.0, small, x.where_below(_above(x, 20.0), small + x, x))

    return x(x), _generator(write)


@intrinsic  # type: ignore[untyped-decorator]
def softplus_slope(typing: Any, x: Any) -> Any:
    """The derivative of `softplus`: 1 above 20, as in PyTorch."""
    return x(x), _generator(lambda x: x.where_below(_above(x, 20.0), _sigmoids(x)[0], 1.0))


@intrinsic  # type: ignore[untyped-decorator]
def flush(typing: Any, x: Any) -> Any:
    """0 in the place of numbers below 1e-30: long before they become subnormal, which is slow."""
    return x(x), _generator(lambda x: x.call("fabs").where_below(_TINY, 0.0, x))


# --- what kernels call: arrays. An index is not checked and does not count from the end.


def _spread(builder: Any, kind: Any, number: Any) -> Any:
    first = builder.insert_element(ir.Constant(kind, ir.Undefined), number, ir.Constant(ir.IntType(32), 0))
    value = _Value(builder, first)
    return value.mix(value, [0] * LANES).value


def _address(context: Any, builder: Any, kind: Any, array: Any, index: Any) -> Any:
    made = context.make_array(kind)(context, builder, array)
    return cgutils.get_item_pointer(context, builder, kind, made, cgutils.unpack_tuple(builder, index))


def _pointer(context: Any, builder: Any, kind: Any, array: Any, index: Any) -> tuple[Any, int]:
    """Where the vector that begins at an index lies, and the alignment that is certain."""
    address = _address(context, builder, kind, array, index)
    vector = context.get_value_type(_Vector(kind.dtype))
    return builder.bitcast(address, vector.as_pointer()), kind.dtype.bitwidth // 8


@intrinsic  # type: ignore[untyped-decorator]
def load(typing: Any, array: Any, index: Any) -> Any:
    """The `LANES` numbers from an index on, along the last axis, whose stride is one number."""

    def generate(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        pointer, align = _pointer(context, builder, array, *given)
        return builder.load(pointer, align=align)

    return _Vector(array.dtype)(array, index), generate


@intrinsic  # type: ignore[untyped-decorator]
def store(typing: Any, array: Any, index: Any, value: Any) -> Any:
    """Write `LANES` numbers from an index on, along the last axis, whose stride is one number."""

    def generate(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        pointer, align = _pointer(context, builder, array, *given[:2])
        builder.store(given[2], pointer, align=align)
        return context.get_dummy_value()

    return types.void(array, index, value), generate


@intrinsic  # type: ignore[untyped-decorator]
def spread(typing: Any, array: Any, index: Any) -> Any:
    """One number of an array in all lanes."""

    def generate(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        number = builder.load(_address(context, builder, array, *given))
        return _spread(builder, context.get_value_type(signature.return_type), number)

    return _Vector(array.dtype)(array, index), generate


@intrinsic  # type: ignore[untyped-decorator]
def same(typing: Any, like: Any, number: Any) -> Any:
    """A number in all lanes of a vector of the same type as another."""

    def generate(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        return _spread(builder, given[0].type, context.cast(builder, given[1], number, like.scalar))

    return like(like, number), generate


@intrinsic  # type: ignore[untyped-decorator]
def widen(typing: Any, array: Any, index: Any, value: Any) -> Any:
    """Add a vector to `LANES` float64 numbers from an index on."""

    def generate(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        pointer, align = _pointer(context, builder, array, *given[:2])
        wide = context.get_value_type(_Vector(array.dtype))
        more = given[2] if given[2].type == wide else builder.fpext(given[2], wide)
        builder.store(builder.fadd(builder.load(pointer, align=align), more), pointer, align=align)
        return context.get_dummy_value()

    return types.void(array, index, value), generate


def _lines(context: Any, builder: Any, kind: Any, array: Any, index: Any) -> list[tuple[Any, int]]:
    """Pointers to `LANES` vectors, one below the other along the last axis but one."""
    made = context.make_array(kind)(context, builder, array)
    first, align = _pointer(context, builder, kind, array, index)
    stride = cgutils.unpack_tuple(builder, made.strides)[-2]  # in bytes
    offsets = [builder.mul(stride, ir.Constant(stride.type, line)) for line in range(LANES)]
    return [(cgutils.pointer_add(builder, first, offset, first.type), align) for offset in offsets]


def _load_lines(context: Any, builder: Any, kind: Any, array: Any, index: Any) -> list[_Value]:
    lines = _lines(context, builder, kind, array, index)
    return [_Value(builder, builder.load(line, align=align)) for line, align in lines]


_LOW = [lane // 2 + lane % 2 * LANES for lane in range(LANES)]  # 0, 16, 1, 17, ...: the lower halves of two vectors
_HIGH = [lane + LANES // 2 for lane in _LOW]


def _halves(values: list[_Value]) -> list[tuple[_Value, _Value]]:
    half = len(values) // 2
    return list(zip(values[:half], values[half:], strict=True))


@intrinsic  # type: ignore[untyped-decorator]
def turn(typing: Any, source: Any, at: Any, target: Any, to: Any) -> Any:
    """Transpose a square of `LANES` by `LANES` numbers from one array into another."""

    def generate(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        values = _load_lines(context, builder, source, *given[:2])
        for _ in range(LANES.bit_length() - 1):  # interleaving the two halves of the lines moves one bit of the index
            values = [a.mix(b, lanes) for a, b in _halves(values) for lanes in (_LOW, _HIGH)]
        for value, (line, align) in zip(values, _lines(context, builder, target, *given[2:]), strict=True):
            builder.store(value.value, line, align=align)
        return context.get_dummy_value()

    return types.void(source, at, target, to), generate


@intrinsic  # type: ignore[untyped-decorator]
def fold(typing: Any, source: Any, at: Any, target: Any, to: Any) -> Any:
    """The sums of `LANES` lines of `LANES` numbers, as `LANES` numbers along the target's last axis."""

    def generate(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        values = _load_lines(context, builder, source, *given[:2])
        while len(values) > 1:
            values = [a.mix(b, _LOW) + a.mix(b, _HIGH) for a, b in _halves(values)]
        pointer, align = _pointer(context, builder, target, *given[2:])
        builder.store(values[0].value, pointer, align=align)
        return context.get_dummy_value()

    return types.void(source, at, target, to), generate


def rate_unit(dtype: np.dtype[Any]) -> float:
    """What A is multiplied with before `decay`: in float32 it takes powers of two."""
    return LOG2_E if dtype.itemsize == 4 else 1.0
