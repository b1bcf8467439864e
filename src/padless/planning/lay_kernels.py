"""From records (see `pack_kernels`) to the sequences of each pack, at the speed of memory.

Two steps, both kept in the processor's caches: sequence numbers are sorted by length (counting), and packs are
filled a block at a time, so that the plan is written from its front to its end however large it is.
"""

# mypy: disable-error-code="no-any-return"
from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.extending import intrinsic

from padless.planning.kernels import jit

__all__ = ["lay_out", "sort_by_length"]

Array = Any
_BLOCK = 12  # bits of a pack's number within its block


@intrinsic  # type: ignore[untyped-decorator]
def _fetch(typing_context: Any, array: Any, at: Any) -> Any:
    """Have the line of ``array[at]`` brought near before it is written to; without effect on any value."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        view = context.make_array(signature.args[0])(context, builder, arguments[0])
        address = builder.bitcast(builder.gep(view.data, [arguments[1]]), ir.IntType(8).as_pointer())
        flag = ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [address.type, flag, flag, flag])
        prefetch = builder.module.declare_intrinsic("llvm.prefetch", [address.type], kind)
        builder.call(prefetch, [address, flag(1), flag(3), flag(1)])  # for writing, to keep, data
        return context.get_dummy_value()

    return types.void(array, types.int64), generate


@jit
def sort_by_length(lengths: Array, counts: Array, by_length: Array) -> None:
    """Sequence numbers by descending length into ``by_length`` (N,), equal lengths in their order.

    ``counts`` (longest + 1,) as `count_lengths` gives it. Each length is a stream of its own that grows slowly: its
    next line of 16 numbers is fetched while the last one is half full.
    """
    place = np.empty(len(counts), dtype=np.int64)  # where the next sequence of each length goes
    total = 0
    for length in range(len(counts) - 1, -1, -1):
        place[length] = total
        total += counts[length]
    for i in range(len(lengths)):
        length = lengths[i]
        at = place[length]
        by_length[at] = i
        place[length] = at + 1
        if at & 15 == 8:
            _fetch(by_length, at + 16)  # past the end nothing happens


@jit
def _by_block(records: Array, packs: int) -> tuple[Array, Array]:
    """Records that reach into each block of packs: (starts (blocks + 1,), numbers of records, block by block)."""
    blocks = (packs + (1 << _BLOCK) - 1) >> _BLOCK
    starts = np.zeros(blocks + 2, dtype=np.int64)
    for k in range(len(records)):
        last = records[k, 1] + records[k, 2] - 1
        for block in range(records[k, 1] >> _BLOCK, (last >> _BLOCK) + 1):
            starts[block + 2] += 1
    for block in range(blocks):
        starts[block + 2] += starts[block + 1]
    entries = np.empty(starts[blocks + 1], dtype=np.int64)
    for k in range(len(records)):
        last = records[k, 1] + records[k, 2] - 1
        for block in range(records[k, 1] >> _BLOCK, (last >> _BLOCK) + 1):
            entries[starts[block + 1]] = k
            starts[block + 1] += 1
    return starts[: blocks + 1], entries


@jit
def lay_out(records: Array, packs: int, by_length: Array, order: Array, offsets: Array) -> None:
    """Turn records into ``order`` (N,) and ``offsets`` (packs + 1,); each takes the next stretch of ``by_length``."""
    starts, entries = _by_block(records, packs)
    taken = np.empty(len(records), dtype=np.int64)  # where the stretch of each record starts
    total = 0
    for k in range(len(records)):
        taken[k] = total
        total += records[k, 2] * records[k, 3]
    filled = np.empty(1 << _BLOCK, dtype=np.int64)
    total = 0
    offsets[0] = 0
    for block in range(len(starts) - 1):
        front = block << _BLOCK
        size = min(1 << _BLOCK, packs - front)
        filled[:] = 0
        for e in range(starts[block], starts[block + 1]):
            k = entries[e]
            first = records[k, 1] - front
            for pack in range(max(first, 0), min(first + records[k, 2], size)):
                filled[pack] += records[k, 3]
        for pack in range(size):
            held = filled[pack]
            filled[pack] = total
            total += held
            offsets[front + pack + 1] = total
        for e in range(starts[block], starts[block + 1]):
            k = entries[e]
            first, each = records[k, 1] - front, records[k, 3]
            source = taken[k] + (max(first, 0) - first) * each
            for pack in range(max(first, 0), min(first + records[k, 2], size)):
                at = filled[pack]
                for _ in range(each):
                    order[at] = by_length[source]
                    at += 1
                    source += 1
                filled[pack] = at
