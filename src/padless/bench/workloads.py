"""What the benchmark trains on: one optimizer step of prompts and responses, drawn from real lengths or read from data.

Built-in workloads draw lengths from committed quantiles of real generations (``quantiles.json``; the script that wrote
it is ``benchmarks/policy_update/make_quantiles.py``). The prompt's length is drawn from its own quantiles, the
response's from those of the prompts of about that length (eighths), which keeps how the two depend on each other. Draws
are spread evenly over the distribution, so that a small batch is a typical one. Token ids are random: they change
neither the time nor the padding.

``scale`` shrinks a workload to the machine: lengths and maxima alike, so that the ratio of the longest to the mean,
which decides how much is padding, stays that of the real setting.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from padless.bench.reading import Sample, load_tokenizer, read_samples
from padless.errors import PadlessError, choose
from padless.lengths import as_lengths, positive_int

__all__ = ["WORKLOADS", "Workload", "built_in", "from_data", "from_lengths"]

WORKLOADS = ("gsm8k-rl", "longcot-rl", "sft-mix")
"""Built-in workloads."""

FIRST_ID = 3
"""Ids below it are left to padding and special tokens."""

Ids = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Workload:
    """Sequences of one optimizer step.

    Attributes:
        name: a built-in name, or the file's.
        source: where the lengths come from.
        prompts, responses: token ids of each sequence; every one has at least one token.
        prompt_max, response_max: what the arm ``fixed`` pads to, in tokens, scaled.
        scale: lengths and maxima are those of the source times this.
        truncated: sequences whose prompt or response was longer than the maximum and was cut.
        rows: rows in the source.
        seed: what drew the sequences.
    """

    name: str
    source: str
    prompts: list[Ids]
    responses: list[Ids]
    prompt_max: int
    response_max: int
    scale: float
    truncated: int = 0
    rows: int = 0
    seed: int = 0

    def __len__(self) -> int:
        return len(self.prompts)

    @property
    def prompt_lengths(self) -> Ids:
        """Tokens of each prompt, (N,)."""
        return np.array([len(prompt) for prompt in self.prompts], dtype=np.int64)

    @property
    def response_lengths(self) -> Ids:
        """Tokens of each response, (N,)."""
        return np.array([len(response) for response in self.responses], dtype=np.int64)

    @property
    def lengths(self) -> Ids:
        """Tokens of each sequence, (N,)."""
        return self.prompt_lengths + self.response_lengths

    @property
    def width(self) -> int:
        """Columns of the arm ``fixed``."""
        return self.prompt_max + self.response_max

    def folded(self, vocabulary: int) -> Workload:
        """The same lengths with ids a model with ``vocabulary`` ids can embed."""

        def fold(ids: Ids) -> Ids:
            return np.where(ids < vocabulary, ids, FIRST_ID + ids % max(1, vocabulary - FIRST_ID)) % vocabulary

        return _replace(self, prompts=[fold(ids) for ids in self.prompts], responses=[fold(r) for r in self.responses])

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON; without the token ids."""
        return {
            "name": self.name,
            "source": self.source,
            "sequences": len(self),
            "scale": self.scale,
            "prompt_max": self.prompt_max,
            "response_max": self.response_max,
            "prompt_mean": float(self.prompt_lengths.mean()),
            "response_mean": float(self.response_lengths.mean()),
            "longest": int(self.lengths.max()),
            "real_tokens": int(self.lengths.sum()),
            "truncated": self.truncated,
            "rows": self.rows,
            "seed": self.seed,
        }


def built_in(
    name: str,
    *,
    sequences: int,
    scale: float = 1.0,
    prompt_max: int | None = None,
    response_max: int | None = None,
    seed: int = 0,
    vocabulary: int = 2048,
) -> Workload:
    """Draw a built-in workload.

    Args:
        name: ``"gsm8k-rl"``, ``"longcot-rl"`` or ``"sft-mix"``.
        sequences: how many sequences make the optimizer step.
        scale: multiplies lengths and maxima.
        prompt_max, response_max: instead of the workload's own, before scaling; longer ones are cut.
        seed: two equal seeds draw the same sequences.
        vocabulary: ids are drawn below it.

    >>> step = built_in("gsm8k-rl", sequences=32, scale=0.125)
    >>> len(step), step.prompt_max, step.response_max
    (32, 512, 1024)
    """
    choose("workload", name, WORKLOADS)
    count = positive_int(sequences, name="sequences")
    scale = _scale(scale)
    table = _tables()["workloads"][name]
    levels = np.array(_tables()["levels"])
    rng = np.random.default_rng([seed, WORKLOADS.index(name)])
    place = _spread(rng, count)  # of each prompt among all prompts
    prompts = np.interp(place, levels, table["prompt"])  # (N,)
    groups = np.minimum((place * len(table["response"])).astype(int), len(table["response"]) - 1)
    draws = _spread(rng, count)
    responses = np.array([np.interp(u, levels, table["response"][g]) for u, g in zip(draws, groups, strict=True)])
    limits = (
        table["prompt_max"] if prompt_max is None else positive_int(prompt_max, name="prompt_max"),
        table["response_max"] if response_max is None else positive_int(response_max, name="response_max"),
    )
    return _drawn(name, table["source"], prompts, responses, limits, scale, seed, vocabulary)


def from_lengths(
    prompt_lengths: Any,
    response_lengths: Any,
    *,
    prompt_max: int,
    response_max: int,
    scale: float = 1.0,
    seed: int = 0,
    vocabulary: int = 2048,
    name: str = "lengths",
    source: str = "given lengths",
) -> Workload:
    """A workload of given lengths, with random token ids.

    >>> from_lengths([3, 5], [10, 4], prompt_max=8, response_max=8).lengths
    array([11,  9])
    """
    prompts = as_lengths(prompt_lengths, name="prompt_lengths").astype(np.float64)
    responses = as_lengths(response_lengths, name="response_lengths").astype(np.float64)
    if prompts.shape != responses.shape or prompts.ndim != 1:
        raise PadlessError(
            f"{prompts.shape} prompt lengths and {responses.shape} response lengths; give as many of both"
        )
    return _drawn(name, source, prompts, responses, (prompt_max, response_max), _scale(scale), seed, vocabulary)


def from_data(
    path: str | Path,
    *,
    tokenizer: str | None = None,
    sequences: int,
    scale: float = 1.0,
    prompt_max: int = 4096,
    response_max: int = 8192,
    seed: int = 0,
) -> Workload:
    """Read a workload from a file of rows: a seeded sample of ``sequences`` of them.

    Rows have a prompt and a response, a text, messages, or token counts (``prompt_length`` and ``response_length``;
    ids are then random). A plain text counts as a response to its first token. Prompts keep their first ``prompt_max``
    tokens and responses their first ``response_max``; ``scale`` below 1 then keeps that share of each, from the front.

    Raises:
        PadlessError: a file that cannot be read or holds no row, a missing field, an empty prompt or response.
    """
    count = positive_int(sequences, name="sequences")
    scale = _scale(scale)
    limits = (positive_int(prompt_max, name="prompt_max"), positive_int(response_max, name="response_max"))
    sample = read_samples(path, count=count, seed=seed)
    name = Path(path).name
    if sample.lengths is not None:
        drawn = from_lengths(
            *sample.lengths,
            prompt_max=limits[0],
            response_max=limits[1],
            scale=scale,
            seed=seed,
            name=name,
            source=name,
        )
        return _replace(drawn, rows=sample.rows)
    if tokenizer is None:
        raise PadlessError(
            f"--data {name} holds text; --tokenizer is missing: a folder, a tokenizer.json, 'qwen' or 'deepseek'"
        )
    prompts, responses = _encode(sample, tokenizer, name)
    cut = [len(p) > limits[0] or len(r) > limits[1] for p, r in zip(prompts, responses, strict=True)]
    return Workload(
        name=name,
        source=f"{len(prompts)} of {sample.rows} rows of {name}, tokenizer {Path(tokenizer).name}",
        prompts=[_share(ids[: limits[0]], scale) for ids in prompts],
        responses=[_share(ids[: limits[1]], scale) for ids in responses],
        prompt_max=_scaled(limits[0], scale),
        response_max=_scaled(limits[1], scale),
        scale=scale,
        truncated=sum(cut),
        rows=sample.rows,
        seed=seed,
    )


def _encode(sample: Sample, tokenizer: str, name: str) -> tuple[list[Ids], list[Ids]]:
    encode = load_tokenizer(tokenizer)
    prompts, responses = [], []
    for index, prompt, response in sample.texts(encode.render):
        if prompt is None:
            ids = encode(response)
            if len(ids) < 2:
                raise PadlessError(f"{name}, row {index}: {len(ids)} tokens of text; a sequence needs at least 2")
            prompts.append(ids[:1])
            responses.append(ids[1:])
            continue
        prompts.append(encode(prompt))
        responses.append(encode(response))
        for ids, what in ((prompts[-1], "prompt"), (responses[-1], "response")):
            if not len(ids):
                raise PadlessError(f"{name}, row {index}: the {what} has no token: remove the row, or fill it")
    return prompts, responses


def _drawn(
    name: str,
    source: str,
    prompts: npt.NDArray[np.float64],
    responses: npt.NDArray[np.float64],
    limits: tuple[int, int],
    scale: float,
    seed: int,
    vocabulary: int,
) -> Workload:
    rng = np.random.default_rng([seed, 1, len(prompts)])

    def ids(lengths: npt.NDArray[np.float64], limit: int) -> list[Ids]:
        counts = [_scaled(min(length, limit), scale) for length in lengths]
        return [rng.integers(min(FIRST_ID, vocabulary - 1), vocabulary, size=count, dtype=np.int64) for count in counts]

    return Workload(
        name=name,
        source=source,
        prompts=ids(prompts, limits[0]),
        responses=ids(responses, limits[1]),
        prompt_max=_scaled(limits[0], scale),
        response_max=_scaled(limits[1], scale),
        scale=scale,
        truncated=int(((prompts > limits[0]) | (responses > limits[1])).sum()),
        rows=len(prompts),
        seed=seed,
    )


def _spread(rng: np.random.Generator, count: int) -> npt.NDArray[np.float64]:
    """Uniform draws in [0, 1), (count,), one in each of ``count`` equal parts, shuffled (a Latin hypercube).

    A few dozen independent draws from a long-tailed distribution often miss the tail altogether; these always are a
    typical batch.
    """
    return rng.permutation((np.arange(count) + rng.random(count)) / count)


def _scaled(length: float, scale: float) -> int:
    return max(1, round(length * scale))


def _share(ids: Ids, scale: float) -> Ids:
    return ids[: min(len(ids), _scaled(len(ids), scale))]


def _scale(scale: float) -> float:
    if not (isinstance(scale, int | float) and 0 < scale <= 1):
        raise PadlessError(f"scale={scale!r}; expected a number over 0 and at most 1")
    return float(scale)


def _replace(workload: Workload, **changes: Any) -> Workload:
    from dataclasses import replace

    return replace(workload, **changes)


@cache
def _tables() -> dict[str, Any]:
    text = files("padless.bench").joinpath("quantiles.json").read_text(encoding="utf-8")
    tables: dict[str, Any] = json.loads(text)
    return tables
