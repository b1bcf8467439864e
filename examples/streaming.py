"""A stream without length: pooled, grouped, emitted within a token budget, and resumed with other workers."""

import random
from collections.abc import Iterator
from itertools import islice

from torch.utils.data import DataLoader

from padless.data import PackedCollator, PooledStream


def documents(epoch: int) -> Iterator[dict[str, list[int]]]:
    """What a file, a queue or ``datasets.load_dataset(..., streaming=True)`` would yield, alike on every rank."""
    rng = random.Random(epoch)
    for _ in range(600):
        yield {"input_ids": [rng.randrange(100) for _ in range(rng.randrange(5, 300))]}


def stream() -> PooledStream:
    return PooledStream(documents, token_budget=2048, pool_size=256, collate=PackedCollator())


def main() -> float:
    first = stream()
    for batch in islice(first.follow(DataLoader(first, batch_size=None, num_workers=2)), 10):
        assert batch["input_ids"].shape[1] <= 2048
    checkpoint = first.state_dict()  # of what the loop received, whatever the workers had fetched

    second = stream()
    second.load_state_dict(checkpoint)
    for _ in second.follow(DataLoader(second, batch_size=None, num_workers=1)):
        pass
    assert second.epoch == 1
    assert second.diagnostics.sequences == 600
    return second.diagnostics.occupancy


if __name__ == "__main__":
    print(f"600 documents, each once, in padded micro-batches that are {main():.1%} full")
