"""From records (see `pack_kernels`) to the sequences of each pack, at the speed of memory.

Packs are laid out a block at a time, so that all work on a block stays in the processor's caches. First each
sequence number is put where its block will look for it (one stream of numbers for each length, in one pass over the
lengths), then each block is put in the order of its packs. Both happen in the memory of the result, which
is therefore all that is needed: fresh memory is what a large plan spends most of its time on.
"""

# mypy: disable-error-code="no-any-return"
from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.extending import intrinsic

from padless.planning.kernels import jit

__all__ = ["cut_blocks", "gather", "rearrange", "settle", "sums"]

Array = Any


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
def cut_blocks(records: Array, packs: int, bits: int, spread: int) -> tuple[Array, Array, Array, Array]:
    """Cut records at blocks of ``1 << bits`` packs: (starts (B + 1,), entries (P,), before (B + 1,), pieces (P, 2)).

    ``entries[starts[b] : starts[b + 1]]`` are the records that reach into block b, and ``before[b]`` counts the
    sequences in blocks before it. ``pieces`` are the places that they are gathered at, first and last + 1, record
    after record: a block of n sequences has ``spread * n`` places, of which it uses the last n.
    """
    blocks = (packs + (1 << bits) - 1) >> bits
    starts, before = np.zeros(blocks + 2, dtype=np.int64), np.zeros(blocks + 1, dtype=np.int64)
    for k in range(len(records)):
        first, stop, each = records[k, 1], records[k, 1] + records[k, 2], records[k, 3]
        for block in range(first >> bits, (stop + (1 << bits) - 1) >> bits):
            starts[block + 2] += 1
            before[block + 1] += each * (min(stop, (block + 1) << bits) - max(first, block << bits))
    place = np.empty(blocks, dtype=np.int64)
    for block in range(blocks):
        starts[block + 2] += starts[block + 1]
        place[block] = spread * before[block] + (spread - 1) * before[block + 1]
        before[block + 1] += before[block]
    entries, pieces = np.empty(starts[blocks + 1], dtype=np.int64), np.empty((starts[blocks + 1], 2), dtype=np.int64)
    piece = 0
    for k in range(len(records)):
        first, stop, each = records[k, 1], records[k, 1] + records[k, 2], records[k, 3]
        for block in range(first >> bits, (stop + (1 << bits) - 1) >> bits):
            entries[starts[block + 1]] = k
            starts[block + 1] += 1
            pieces[piece, 0] = place[block]
            place[block] += each * (min(stop, (block + 1) << bits) - max(first, block << bits))
            pieces[piece, 1] = place[block]
            piece += 1
    return starts[: blocks + 1], entries, before, pieces


@jit
def gather(lengths: Array, counts: Array, pieces: Array, table: Array, scratch: Array) -> None:
    """Put the number of each sequence into the pieces of its length, in turn.

    ``counts`` (longest + 1,) is the histogram of ``lengths`` (N,). ``table`` (longest + 1, 2) is room for the next
    place of each length, and where its piece ends. A line is fetched while the one before is half full.
    """
    following = np.empty(len(counts), dtype=np.int64)  # the next piece of each length; longest first
    piece = 0
    for length in range(len(counts) - 1, -1, -1):
        left = counts[length]
        if left > 0:
            table[length, 0], table[length, 1] = pieces[piece, 0], pieces[piece, 1]
            following[length] = piece + 1
        while left > 0:
            left -= pieces[piece, 1] - pieces[piece, 0]
            piece += 1
    for i in range(len(lengths)):
        length = lengths[i]
        at = table[length, 0]
        scratch[at] = i
        if at & 15 == 8:
            _fetch(scratch, np.int64(at) + 16)  # past the end nothing happens
        at += 1
        if at == table[length, 1] and following[length] < len(pieces):
            piece = following[length]
            following[length] = piece + 1
            at = pieces[piece, 0]
            table[length, 1] = pieces[piece, 1]
            _fetch(scratch, np.int64(at))
        table[length, 0] = at


@jit
def settle(
    records: Array,
    starts: Array,
    entries: Array,
    before: Array,
    bits: int,
    spread: int,
    scratch: Array,
    order: Array,
    offsets: Array,
) -> None:
    """Put each block in the order of its packs: ``order`` (N,), of which ``scratch`` may be a view, ``offsets``."""
    largest = 0
    for block in range(len(before) - 1):
        largest = max(largest, before[block + 1] - before[block])
    numbers, filled = np.empty(largest, dtype=scratch.dtype), np.empty(1 << bits, dtype=np.int64)
    offsets[0] = 0
    for block in range(len(before) - 1):
        front, total = block << bits, before[block]
        size, held = min(1 << bits, len(offsets) - 1 - front), before[block + 1] - total
        source = spread * total + (spread - 1) * held
        for i in range(held):
            numbers[i] = scratch[source + i]
        filled[:] = 0
        for e in range(starts[block], starts[block + 1]):
            k = entries[e]
            first = records[k, 1] - front
            for pack in range(max(first, 0), min(first + records[k, 2], size)):
                filled[pack] += records[k, 3]
        for pack in range(size):
            each = filled[pack]
            filled[pack] = total
            total += each
            offsets[front + pack + 1] = total
        i = 0
        for e in range(starts[block], starts[block + 1]):
            k = entries[e]
            first, each = records[k, 1] - front, records[k, 3]
            for pack in range(max(first, 0), min(first + records[k, 2], size)):
                at = filled[pack]
                for _ in range(each):
                    order[at] = numbers[i]
                    at += 1
                    i += 1
                filled[pack] = at


@jit
def sums(order: Array, offsets: Array, values: Array, result: Array) -> None:
    """Sum of the values of each pack's items: ``values`` (N,), ``result`` (packs,)."""
    for pack in range(len(result)):
        total = result[pack] * 0
        for at in range(offsets[pack], offsets[pack + 1]):
            total += values[order[at]]
        result[pack] = total


@jit
def rearrange(order: Array, offsets: Array, packs: Array, moved: Array, bounds: Array) -> None:
    """Packs in another order: ``packs`` (G,) says which comes where; ``moved`` (N,) and ``bounds`` (G + 1,) result."""
    total = 0
    bounds[0] = 0
    for g in range(len(packs)):
        for at in range(offsets[packs[g]], offsets[packs[g] + 1]):
            moved[total] = order[at]
            total += 1
        bounds[g + 1] = total
