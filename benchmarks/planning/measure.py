"""Clocks, time caps and the lengths that are planned."""

from __future__ import annotations

import gc
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

__all__ = [
    "MIXES",
    "Caps",
    "TooLong",
    "clock",
    "distributions",
    "limit",
    "log_normal",
    "pools",
    "side_by_side",
    "timed",
]

MIXES = ("mix_rl_gsm8k_heavy", "mix_rl_longcot")
Call = Callable[[], Any]


class TooLong(Exception):
    """A call was ended because it ran past its limit."""


@contextmanager
def limit(seconds: float) -> Iterator[None]:
    """End the block with `TooLong` after so many CPU seconds (as soon as the interpreter gets to it)."""

    def stop(*_: Any) -> None:
        raise TooLong(f"ended after {seconds:.0f} s")

    previous = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, previous)


def timed(call: Call) -> tuple[Any, float, float]:
    """The result, wall seconds and CPU seconds of one call."""
    gc.collect()
    wall, cpu = time.perf_counter(), time.process_time()
    result = call()
    return result, time.perf_counter() - wall, time.process_time() - cpu


def clock(call: Call, repeats: int = 5, *, warm: bool = True) -> dict[str, float]:
    """Median wall and CPU seconds."""
    return side_by_side({"": call}, repeats, warm=warm)[""]


def side_by_side(calls: dict[str, Call], repeats: int = 5, *, warm: bool = True) -> dict[str, dict[str, float]]:
    """Median wall and CPU seconds of several calls that take turns."""
    if warm:
        for call in calls.values():
            call()
    samples: dict[str, list[tuple[float, float]]] = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            samples[name].append(timed(call)[1:])
    medians = {name: np.median(taken, axis=0) for name, taken in samples.items()}
    return {name: {"wall": float(wall), "cpu": float(cpu)} for name, (wall, cpu) in medians.items()}


@dataclass(slots=True)
class Caps:
    """Which calls a peer is still given: it stops at the first size whose predicted CPU seconds are over the cap.

    The seconds are those of the whole adapter: turning lengths into what the peer takes, and a search for its options.
    """

    seconds: float
    history: dict[str, list[tuple[int, float]]] = field(default_factory=dict)
    stopped: dict[str, str] = field(default_factory=dict)

    def predict(self, name: str, size: int) -> float:
        """Seconds at ``size``: the last seconds, grown as between the last two sizes, but at least linearly."""
        past = self.history.get(name, [])
        if not past:
            return 0.0
        power, (last, spent) = 1.0, past[-1]
        if len(past) > 1 and past[-2][1] > 2e-3:
            power = max(1.0, np.log(spent / past[-2][1]) / np.log(last / past[-2][0]))
        return float(spent * (size / last) ** power)

    def allows(self, name: str, size: int) -> bool:
        if name not in self.stopped and (ahead := self.predict(name, size)) > self.seconds:
            self.stopped[name] = f"{ahead:.0f} s predicted for {size:,} sequences; the cap is {self.seconds:.0f} s"
        return name not in self.stopped

    def note(self, name: str, size: int, seconds: float) -> None:
        self.history.setdefault(name, []).append((size, seconds))

    def run(self, name: str, size: int, call: Call, *, force: bool = False) -> Any:
        """What the call returns, or None where the peer is over its cap or fails (then the reason is kept)."""
        if not force and not self.allows(name, size):
            return None
        started = time.process_time()
        try:
            with limit(240 if force else 2 * self.seconds):
                result = call()
        except Exception as error:  # a peer may fail in any way
            self.stopped[name] = f"at {size:,} sequences: {type(error).__name__}: {error}"[:200]
            return None
        self.note(name, size, time.process_time() - started)
        return result


def pools(folder: str) -> dict[str, np.ndarray]:
    with np.load(Path(folder) / "lengths.npz") as stored:
        return {mix: stored[f"{mix}.lengths"].astype(np.int64) for mix in MIXES}


def log_normal(count: int) -> np.ndarray:
    """Lengths of supervised fine-tuning, int32: median 350, 8 to 4,096."""
    draw = np.random.default_rng(0).normal(np.log(350), 0.9, count).astype(np.float32)
    np.exp(draw, out=draw)
    return np.clip(draw, 8, 4096).astype(np.int32)


def distributions(mixes: dict[str, np.ndarray], count: int) -> dict[str, tuple[np.ndarray, int]]:
    """(lengths, capacity) by name."""
    rng = np.random.default_rng(0)
    return {
        "sft log-normal": (log_normal(count).astype(np.int64), 4096),
        "rl mix": (rng.choice(mixes["mix_rl_gsm8k_heavy"], count), 32_768),
        "web": (np.clip(rng.lognormal(np.log(600), 1.3, count), 8, 8192).astype(np.int64), 8192),
        "bimodal": (np.where(np.arange(count) % 3 == 0, 2060, 1010), 4096),
        "uniform": (rng.integers(1, 4097, count), 4096),
    }
