"""Accumulation windows: micro-batches until a target of tokens or examples is reached."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeVar

import numpy as np

from padless.errors import PadlessError, choose
from padless.lengths import as_lengths, positive_int

__all__ = ["Window", "Windows", "count_windows", "windows"]

Item = TypeVar("Item")
Tail = Literal["short", "drop"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Window(Generic[Item]):
    """The micro-batches of one optimizer step on this rank, and what the step holds over all ranks.

    ``tokens`` and ``examples`` are actual totals: the denominators, also of a short last window (``complete`` false).
    """

    items: list[Item]
    tokens: int
    examples: int
    complete: bool


@dataclass(slots=True, kw_only=True)
class Windows(Iterable[Window[Item]]):
    """Iterates over windows; afterwards says what the tail policy left out.

    Attributes:
        dropped: micro-batches of an incomplete last window that ``tail="drop"`` left out.
        steps: windows yielded.
    """

    items: Iterable[Item]
    target: int
    by: Literal["tokens", "examples"]
    size: Callable[[Any], tuple[int, int]]
    tail: Tail
    group: Any
    dropped: list[Item] = field(default_factory=list)
    steps: int = 0

    def __iter__(self) -> Iterator[Window[Item]]:
        self.dropped, self.steps = [], 0
        held: list[Item] = []
        tokens = examples = 0
        for item, more_tokens, more_examples in self._together():
            held.append(item)
            tokens, examples = tokens + more_tokens, examples + more_examples
            if (tokens if self.by == "tokens" else examples) >= self.target:
                self.steps += 1
                yield Window(items=held, tokens=tokens, examples=examples, complete=True)
                held, tokens, examples = [], 0, 0
        if held and self.tail == "short":
            self.steps += 1
            yield Window(items=held, tokens=tokens, examples=examples, complete=False)
        else:
            self.dropped = held

    def _together(self) -> Iterator[tuple[Item, int, int]]:
        """Items of this rank with the sizes of all ranks' items beside them."""
        if self.group is None:
            for item in self.items:
                yield item, *self.size(item)
            return
        import torch.distributed as dist

        from padless.exchange import gather_table

        ranks = dist.get_world_size(self.group)
        ones = np.ones(ranks, dtype=np.int64)
        iterator = iter(self.items)
        while True:
            found = next(iterator, _NONE)
            row = [0, 0, 0] if found is _NONE else [1, *self.size(found)]
            table = gather_table(np.array([row], dtype=np.int64), ones, self.group)  # (R, 3)
            if not table[:, 0].any():
                return
            if not table[:, 0].all():
                short = np.flatnonzero(table[:, 0] == 0).tolist()
                raise PadlessError(f"ranks {short} have no micro-batch where the others have one: plan a common number")
            yield found, int(table[:, 1].sum()), int(table[:, 2].sum())  # type: ignore[misc]


_NONE = object()


def windows(
    items: Iterable[Item],
    *,
    tokens: int | None = None,
    examples: int | None = None,
    size: Callable[[Any], tuple[int, int]] | None = None,
    tail: Tail = "short",
    process_group: Any = None,
) -> Windows[Item]:
    """Group micro-batches into optimizer steps: a step ends when its running total reaches the target.

    Packs hold a varying number of examples and tokens; a fixed number of micro-batches per step would let the batch
    size drift.

    Args:
        items: micro-batches.
        tokens: target of real tokens per step; or
        examples: target of sequences per step.
        size: tokens and examples of an item; by default a `MicroBatch`'s.
        tail: what happens to an incomplete last window: ``"short"`` yields it, with its own totals; ``"drop"`` leaves
            it out and names it in ``Windows.dropped``.
        process_group: count over all ranks: one small collective per micro-batch, none for an empty window.

    >>> [w.items for w in windows([40, 50, 30, 60, 20], tokens=100, size=lambda n: (n, 1))]
    [[40, 50, 30], [60, 20]]
    """
    choose("tail", tail, ("short", "drop"))
    if (tokens is None) == (examples is None):
        raise PadlessError(f"tokens={tokens!r} and examples={examples!r}; give one target")
    target = positive_int(
        tokens if tokens is not None else examples, name="tokens" if tokens is not None else "examples"
    )
    return Windows(
        items=items,
        target=target,
        by="tokens" if tokens is not None else "examples",
        size=size or _micro_batch_size,
        tail=tail,
        group=process_group,
    )


def count_windows(sizes: Any, target: int, *, tail: Tail = "short") -> int:
    """The exact number of optimizer steps for micro-batches of these sizes, (N,) tokens or examples.

    >>> count_windows([40, 50, 30, 60, 20], 100), count_windows([40, 50, 30, 60, 20], 100, tail="drop")
    (2, 1)
    """
    values = as_lengths(sizes, minimum=0, name="sizes").tolist()
    made = windows(values, examples=positive_int(target, name="target"), size=lambda n: (0, n), tail=tail)
    return sum(1 for _ in made)


def _micro_batch_size(item: Any) -> tuple[int, int]:
    try:
        return int(item.real_tokens), len(item.indices)
    except AttributeError:
        raise PadlessError(
            f"a {type(item).__name__} does not say its tokens and examples: give size=function of it"
        ) from None
