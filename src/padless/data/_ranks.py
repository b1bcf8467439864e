"""Which rank of how many this process is, and whether all of them were built alike."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Mapping
from typing import Any

from padless.errors import PadlessError
from padless.lengths import positive_int

__all__ = ["find_ranks", "require_agreement"]


def find_ranks(ranks: int | None, rank: int | None) -> tuple[int, int, bool]:
    """(ranks, rank, whether they come from torch.distributed).

    Raises:
        PadlessError: only one of the two was given, a rank outside, or a launcher's environment says that there are
            several processes while torch.distributed has not been initialised: all of them would take all data.
    """
    if (ranks is None) != (rank is None):
        raise PadlessError(
            f"ranks={ranks} and rank={rank}: give both or neither (they then come from torch.distributed)"
        )
    if ranks is not None and rank is not None:
        ranks, rank = positive_int(ranks, name="ranks"), positive_int(rank, name="rank", minimum=0)
        if rank >= ranks:
            raise PadlessError(f"rank={rank} is not below ranks={ranks}")
        return ranks, rank, False
    distributed = _distributed()
    if distributed is not None:
        return int(distributed.get_world_size()), int(distributed.get_rank()), True
    world = os.environ.get("WORLD_SIZE", "1")
    if world.isdigit() and int(world) > 1:
        raise PadlessError(
            f"WORLD_SIZE is {world}, but torch.distributed is not initialised, so every rank would take all the data:"
            " call torch.distributed.init_process_group() first, or pass ranks= and rank="
        )
    return 1, 0, False


def require_agreement(mine: Mapping[str, Any]) -> None:
    """Compare over torch.distributed what every rank was built with; raise on all of them if one differs."""
    distributed = _distributed()
    if distributed is None or distributed.get_world_size() == 1:
        return
    digests = {name: _digest(value) for name, value in mine.items()}
    everyone: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(everyone, (digests, mine["seed"]))
    for rank, (theirs, seed) in enumerate(everyone):
        differing = [name for name in digests if theirs[name] != everyone[0][0][name]]
        if differing:
            raise PadlessError(
                f"rank {rank} was built with other {', '.join(differing)} than rank 0"
                + (f" (seeds {seed} and {everyone[0][1]})" if "seed" in differing else "")
                + ": ranks would overlap and skip sequences; build all of them alike"
            )


def _digest(value: Any) -> str:
    return hashlib.blake2b(json.dumps(value, sort_keys=True).encode(), digest_size=8).hexdigest()


def _distributed() -> Any:
    """torch.distributed if it is in use; torch is not imported to find out."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return None
    return torch.distributed
