"""What a benchmark found, as values and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, median
from typing import Any

from padless.bench.step import Step
from padless.cost import CostModel

__all__ = ["ArmResult", "BenchReport", "ModelResult"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmResult:
    """One arm on one model.

    Attributes:
        name: of the arm.
        steps: the optimizer steps that were timed.
        real_tokens, padded_tokens: of one pass over the step's sequences.
        valid: the arm computes the same as each sequence alone; false for what is kept for its time only.
        differences: the largest ones from each sequence alone and from ``fixed``.
    """

    name: str
    steps: tuple[Step, ...]
    real_tokens: int
    padded_tokens: int
    valid: bool
    differences: dict[str, float | None]

    @property
    def seconds_all(self) -> list[float]:
        """Seconds of each step."""
        return [step.total for step in self.steps]

    @property
    def seconds(self) -> float:
        """Median seconds of a step."""
        return median(self.seconds_all)

    def part(self, name: str) -> float:
        """Median seconds of one part of the step."""
        return median(step.seconds[name] for step in self.steps)

    @property
    def overhead_share(self) -> float:
        """Planning and tensor work as a share of the step."""
        return self.part("overhead") / self.seconds

    @property
    def peak_memory_bytes(self) -> int | None:
        """The most of all steps."""
        known = [step.peak_memory_bytes for step in self.steps if step.peak_memory_bytes is not None]
        return max(known) if known else None

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return {
            "seconds": self.seconds,
            "seconds_all": self.seconds_all,
            "reference_seconds": self.part("reference"),
            "train_seconds": self.part("train"),
            "overhead_seconds": self.part("overhead"),
            "real_tokens": self.real_tokens,
            "padded_tokens": self.padded_tokens,
            "occupancy": self.real_tokens / self.padded_tokens,
            "real_tokens_per_second": self.real_tokens / self.seconds,
            "peak_memory_bytes": self.peak_memory_bytes,
            "microbatches": len(self.steps[0].micros),
            "valid": self.valid,
            **self.differences,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelResult:
    """All arms on one model.

    Attributes:
        name: of the model.
        described: what it is (`padless.bench.models.Built.to_dict`).
        arms: by name, in the order they were asked for.
        leaks: by layout, what it does to this model (`padless.bench.equality.Probe.to_dict`), and the times with and
            without an attention mask.
        cost: what ``balanced`` planned with.
        calibration_seconds: what measuring it took.
        updates: optimizer steps after which the parameters were compared.
    """

    name: str
    described: dict[str, Any]
    arms: dict[str, ArmResult]
    leaks: dict[str, Any]
    cost: CostModel
    calibration_seconds: float
    updates: int

    def ratio_to(self, other: str) -> dict[str, float]:
        """Seconds of each arm over those of ``other``, round by round; empty if that did not run.

        Arms take turns, so the middle of the rounds' ratios does not move when the machine is slower for a few rounds,
        which moves the ratio of two medians. Slow arms run in fewer rounds than packed: what quick arms are to them
        goes by way of packed, so that all ratios rank the arms alike.
        """
        if other not in self.arms:
            return {}
        if other != "packed" and "packed" in self.arms:
            ratio = self.ratio_to("packed")
            return {name: each / ratio[other] for name, each in ratio.items()}
        beside = self.arms[other].seconds_all
        return {
            name: middle([a / b for a, b in zip(arm.seconds_all, beside, strict=False)])  # common rounds
            for name, arm in self.arms.items()
        }

    @property
    def gain_recovered(self) -> dict[str, float]:
        """How much of the step time that padding-free training saves each arm saves, too: 1 is all of it."""
        ratio = self.ratio_to("packed")
        if ratio.get("fixed", 0.0) <= 1.0:
            return {}
        return {name: (ratio["fixed"] - each) / (ratio["fixed"] - 1.0) for name, each in ratio.items()}

    @property
    def failed(self) -> list[str]:
        """padless's arms that should compute the same as each sequence alone, and do not."""
        return [name for name, arm in self.arms.items() if not arm.valid and name not in ("fixed", "packed")]

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return {
            "arms": {name: arm.to_dict() for name, arm in self.arms.items()},
            "ratio_to_packed": self.ratio_to("packed"),
            "ratio_to_fixed": self.ratio_to("fixed"),
            "gain_recovered": self.gain_recovered,
            "leaks": self.leaks,
        }


def middle(values: Sequence[float]) -> float:
    """The mean without the smallest and the largest quarter, at least one each: of three or four values the median.

    As deaf to a few odd rounds as the median, and it scatters less.

    >>> middle([1.0, 9.0, 2.0, 3.0, 1.0])
    2.0
    """
    cut = max(1, len(values) // 4) if len(values) > 2 else 0
    return mean(sorted(values)[cut : len(values) - cut])


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchReport:
    """A whole run.

    Attributes:
        padless: the version.
        machine, versions: where it ran, and on what.
        workload: what was trained on (`Workload.to_dict`), and how.
        lengths: real tokens of each sequence.
        token_budget: most padded tokens of a micro-batch.
        models: by name.
        seconds: what the run took.
    """

    padless: str
    machine: dict[str, Any]
    versions: dict[str, str]
    workload: dict[str, Any]
    lengths: list[int]
    token_budget: int
    models: dict[str, ModelResult]
    seconds: float

    @property
    def disturbed(self) -> str | None:
        """What to know of the times where other work ran beside; ``None`` on a quiet machine."""
        load, threads, cores = (self.machine.get(key) or 0 for key in ("load_average", "threads", "cores"))
        if load < max(threads + 1, cores):
            return None
        return (
            f"Other work ran beside this one (load {load} on {cores} cores, {threads} threads here): times and their"
            " ratios mean little. Run it again on a quiet machine."
        )

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON; the keys are described in docs/bench.md."""
        how = {
            name: {
                **model.described,
                "cost": model.cost.to_dict(),
                "calibration_seconds": model.calibration_seconds,
                "updates_compared": model.updates,
            }
            for name, model in self.models.items()
        }
        return {
            "padless": self.padless,
            "machine": self.machine,
            "versions": self.versions,
            "workload": {**self.workload, "models": how, "run_seconds": self.seconds},
            "token_budget": self.token_budget,
            "models": {name: model.to_dict() for name, model in self.models.items()},
        }
