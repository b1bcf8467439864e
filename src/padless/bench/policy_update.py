"""The benchmark: all arms on the same sequences from the same weights, step by step in turn."""

from __future__ import annotations

import copy
import gc
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from padless.bench.arms import ALONE, ARMS, MASKED, Micro, Setting, group, pick_arms
from padless.bench.batch import Batch, add_rollout, make_batch
from padless.bench.equality import LIMITS, Evidence, Limits, Probe, alone_log_probs, probe_layouts
from padless.bench.measure import machine, versions
from padless.bench.models import Built, build, pick_device, pick_dtype
from padless.bench.results import ArmResult, BenchReport, ModelResult
from padless.bench.scan import linear_scan
from padless.bench.step import OPTIMIZER, Step, Trajectory, copy_of, forward_backward, run_step
from padless.bench.workloads import Workload
from padless.cost import DEFAULT_COST, CostModel
from padless.errors import PadlessError
from padless.lengths import positive_int
from padless.loss import Denominators

__all__ = ["BenchOptions", "run"]

Progress = Callable[[str], None]

_PROBED = 8
"""Sequences on which a model in half precision is probed."""

_UPDATES = 3
"""Optimizer steps after which parameters are compared."""

_SLOW, _MORE = ("fixed", "truncate"), {"cpu": (3, 6), "cuda": (0, 6)}
"""The other arms run at least and at most so many more steps, between that as many as fit one step of the slowest. On
CPUs steps scatter more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOptions:
    """How to run the benchmark.

    Attributes:
        models: names for `padless.bench.models.build`.
        arms: names from `padless.bench.arms.ALL_ARMS`.
        rows: rows of a micro-batch in ``fixed`` and ``truncate``.
        token_budget: most padded tokens of a micro-batch in the others; ``None`` takes one row of ``fixed``.
        repeats: optimizer steps of each arm, one of each in turn; quick arms run a few more. The time is their median.
        device, dtype: where and in what precision.
        seed: of weights; the workload has its own.
        masks: also time ``truncate``, ``greedy`` and ``balanced`` with an attention mask.
        checkpointing: recompute activations in the backward pass.
        calibration_seconds: the most that measuring the cost model may take.
    """

    models: tuple[str, ...] = ("qwen2", "jamba")
    arms: tuple[str, ...] = ARMS
    rows: int = 4
    token_budget: int | None = None
    repeats: int = 3
    device: str = "cpu"
    dtype: str = "float32"
    seed: int = 0
    masks: bool = True
    checkpointing: bool = False
    calibration_seconds: float = 3.0

    def checked(self, workload: Workload) -> BenchOptions:
        """The same with every value checked and the token budget filled in."""
        if not self.models:
            raise PadlessError("no model was named")
        arms = pick_arms(self.arms)
        rows, repeats = positive_int(self.rows, name="rows"), positive_int(self.repeats, name="repeats")
        pick_device(self.device)
        pick_dtype(self.dtype)
        budget = default_budget(workload) if self.token_budget is None else self.token_budget
        budget = positive_int(budget, name="token_budget")
        longest = int(workload.lengths.argmax())
        if workload.lengths[longest] > budget:
            raise PadlessError(
                f"sequence {longest} has {workload.lengths[longest]} tokens, over the token budget {budget}:"
                " raise --token-budget, or lower --scale or the maxima"
            )
        return replace(self, arms=arms, rows=rows, repeats=repeats, token_budget=budget)


def default_budget(workload: Workload) -> int:
    """One row of ``fixed``: the smallest budget that any sequence of the workload fits."""
    return workload.width


def run(workload: Workload, options: BenchOptions | None = None, *, progress: Progress | None = None) -> BenchReport:
    """Run the benchmark.

    Args:
        workload: from `padless.bench.workloads`.
        options: how.
        progress: told what is being done, in words.

    Raises:
        PadlessError: an option that cannot be met, a model that cannot be built, a sequence over the token budget.
    """
    from padless import __version__

    options = (options or BenchOptions()).checked(workload)
    tell = progress or (lambda _: None)
    began = time.perf_counter()
    models: dict[str, ModelResult] = {}
    for name in options.models:
        with linear_scan():
            tell(f"{name}: building the model")
            built = build(name, device=options.device, dtype=options.dtype, seed=options.seed)
            _check_positions(built, workload)
            if built.name in models:
                raise PadlessError(f"model {built.name} is named more than once")
            models[built.name] = _Run(built, workload, options, tell).result()
            del built
    return BenchReport(
        padless=__version__,
        machine=machine(options.device),
        versions=versions(),
        workload={**workload.to_dict(), **_described(options)},
        lengths=workload.lengths.tolist(),
        token_budget=int(options.token_budget or 0),
        models=models,
        seconds=time.perf_counter() - began,
    )


def _described(options: BenchOptions) -> dict[str, Any]:
    return {
        "rows": options.rows,
        "repeats": options.repeats,
        "dtype": options.dtype,
        "optimizer": {"name": "AdamW", **{k: list(v) if isinstance(v, tuple) else v for k, v in OPTIMIZER.items()}},
        "checkpointing": options.checkpointing,
    }


def _check_positions(built: Built, workload: Workload) -> None:
    limit = getattr(built.model.config, "max_position_embeddings", None)
    longest = int(workload.lengths.max())
    if isinstance(limit, int) and longest > limit:
        raise PadlessError(
            f"the longest sequence has {longest} tokens; model {built.name} has {limit} positions: lower --scale"
        )


class _Run:
    """All arms on one model."""

    def __init__(self, built: Built, workload: Workload, options: BenchOptions, tell: Progress) -> None:
        self.built, self.options, self.tell = built, options, tell
        self.reference = built.model.eval().requires_grad_(False)
        self.batch = make_batch(workload.folded(built.vocabulary), device=options.device)
        self.real = int(workload.lengths.sum())
        self.lengths, self.seed = workload.lengths, workload.seed
        self.setting = Setting(rows=options.rows, token_budget=int(options.token_budget or 0), cost=DEFAULT_COST)
        # On the CPU each arm trains a copy of its own; on CUDA one copy serves all, set back before each step.
        self.policy = copy_of(self.reference, checkpointing=options.checkpointing) if options.device == "cuda" else None

    def result(self) -> ModelResult:
        self.tell(f"{self.built.name}: checking layouts")
        self.alone = self._first_pass()
        self.batch = add_rollout(self.batch, self.alone, seed=self.seed)
        probes = self._probe(self.alone)
        self.setting = _with_layouts(self.setting, probes)
        self.tell(f"{self.built.name}: measuring what a micro-batch costs")
        cost, seconds = self._calibrate()
        self.setting = replace(self.setting, cost=cost)
        # What exists now need not be searched for garbage before every step: that takes longer than a small step.
        gc.freeze()
        try:
            steps, evidence = self._steps(self._names())
        finally:
            gc.unfreeze()
        arms = {name: self._arm(name, steps[name], evidence, probes) for name in steps if name != ALONE}
        asked = {name: arms[name] for name in self.options.arms}
        return ModelResult(
            name=self.built.name,
            described=self.built.to_dict(),
            arms=asked,
            leaks=_leaks(probes, arms, self.setting),
            cost=cost,
            calibration_seconds=seconds,
            updates=1 if self.policy is not None else min(_UPDATES, self.options.repeats),
        )

    def _first_pass(self) -> torch.Tensor:
        """Each sequence alone: here a model that was built but cannot run tells so."""
        try:
            return alone_log_probs(self.reference, self.batch, self.setting)
        except Exception as error:  # whatever the model's own code raises
            raise PadlessError(f"model {self.built.name} cannot run: {type(error).__name__}: {error}") from error

    def _probe(self, alone: torch.Tensor) -> dict[str, Probe]:
        """On the whole batch; in half precision with a float32 copy of the model, on a few middling sequences."""
        if self.options.dtype == "float32":
            return probe_layouts(self.reference, self.batch, self.setting, alone, arms=self.options.arms)
        middle = len(self.lengths) // 2
        rows = np.argsort(self.lengths, kind="stable")[max(0, middle - _PROBED // 2) : middle + _PROBED // 2]
        part = {name: value[torch.from_numpy(rows).to(value.device)] for name, value in self.batch.items()}
        exact = copy.deepcopy(self.reference).float()
        return probe_layouts(
            exact, part, self.setting, alone_log_probs(exact, part, self.setting), arms=self.options.arms
        )

    def _names(self) -> list[str]:
        """The arms asked for, and their twins with a mask where the mask makes a difference."""
        names = list(self.options.arms)
        if self.options.masks and self.setting.no_mask:
            names += [twin for twin, arm in MASKED.items() if arm in names and twin not in names]
        return names

    def _calibrate(self) -> tuple[CostModel, float]:
        if not any(name.startswith("balanced") for name in self.options.arms):
            return DEFAULT_COST, 0.0
        began = time.perf_counter()
        policy = self.policy or copy_of(self.reference, checkpointing=self.options.checkpointing)
        vocabulary = self.built.vocabulary

        def step(rows: int, width: int) -> None:
            micro = _stand_in(rows, width, vocabulary, device=self.options.device, mask=not self.setting.no_mask)
            with torch.no_grad():
                micro.log_probs(self.reference)
            forward_backward(micro, policy, Denominators(targets=rows * width, sequences=rows))
            if self.options.device == "cuda":
                torch.cuda.synchronize()

        shapes = _shapes(self.lengths, self.setting.token_budget)
        for _ in range(2):  # whatever is compiled or allocated for the first time
            step(*shapes[0])
        try:
            cost = CostModel.calibrate(
                step,
                shapes=shapes,
                max_rows=max(rows for rows, _ in shapes),
                max_width=max(width for _, width in shapes),
                repeats=4,
                max_seconds=self.options.calibration_seconds,
            )
        except PadlessError:  # no two shapes in the time allowed: the report says which costs were used
            cost = DEFAULT_COST
        policy.zero_grad(set_to_none=True)
        return cost, time.perf_counter() - began

    def _steps(self, names: Sequence[str]) -> tuple[dict[str, list[Step]], dict[str, Evidence]]:
        """Every arm's steps, in turn, and what each computed."""
        every = [ALONE, *names]
        steps: dict[str, list[Step]] = {name: [] for name in every}
        evidence: dict[str, Evidence] = {}
        trajectories = {name: Trajectory(self.reference, **self._sharing()) for name in every}
        self._warm_up(names)
        last = 1 if self.policy is not None else min(_UPDATES, self.options.repeats)
        for repeat in range(self.options.repeats):
            turn = repeat % len(names)
            for name in [*names[turn:], *names[:turn], ALONE]:
                if repeat >= self._most(name, last):
                    continue
                self.tell(f"{self.built.name}: {name}, step {repeat + 1} of {self.options.repeats}")
                trajectory = trajectories[name]
                trajectory.begin()
                step = run_step(
                    name,
                    trajectory,
                    self.batch,
                    self.setting,
                    device=self.options.device,
                    keep=repeat == 0,
                    reference=self.alone if name == ALONE else None,  # its time counts for nothing
                )
                if step.evidence is not None:
                    evidence[name] = step.evidence
                if repeat + 1 == last:
                    evidence[name] = replace(evidence[name], update=trajectory.update())
                steps[name].append(replace(step, evidence=None))
        if self.options.repeats > 1:
            self._more_of_the_quick(steps, trajectories)
        return steps, evidence

    def _most(self, name: str, updates: int) -> int:
        """Steps of an arm: those run for comparison only need no more than that takes."""
        if name == ALONE:
            return updates
        return self.options.repeats if name in self.options.arms else 1

    def _more_of_the_quick(self, steps: dict[str, list[Step]], trajectories: dict[str, Trajectory]) -> None:
        """More steps of the arms that take a small part of the slowest one: theirs is the closest comparison."""
        usual = {name: statistics.median(step.total for step in steps[name]) for name in self.options.arms}
        slowest = max(usual.values())
        quick = [name for name in self.options.arms if name not in _SLOW]
        least, most = _MORE[self.options.device]
        fit = int(slowest / sum(usual[name] for name in quick)) if quick else 0
        rounds = min(most, max(least, fit)) if len(quick) > 1 else 0
        for more in range(rounds):
            turn = more % len(quick)
            for name in [*quick[turn:], *quick[:turn]]:
                self.tell(f"{self.built.name}: {name}, step {len(steps[name]) + 1}")
                trajectories[name].begin()
                steps[name].append(
                    run_step(name, trajectories[name], self.batch, self.setting, device=self.options.device)
                )

    def _sharing(self) -> dict[str, Any]:
        return {"policy": self.policy, "checkpointing": self.options.checkpointing}

    def _warm_up(self, names: Sequence[str]) -> None:
        """One micro-batch of each arm, untimed: compilers, allocators and caches have their first time here."""
        policy = self.policy or copy_of(self.reference, checkpointing=self.options.checkpointing)
        for name in names:
            self.tell(f"{self.built.name}: warming up {name}")
            groups = group(name, self.batch, self.setting)
            micro = groups.micro(0)
            values = micro.log_probs(policy)
            with micro.backward_context(policy):
                values.mean().backward()  # type: ignore[no-untyped-call]
        policy.zero_grad(set_to_none=True)

    def _arm(
        self, name: str, steps: Sequence[Step], evidence: dict[str, Evidence], probes: dict[str, Probe]
    ) -> ArmResult:
        mask = self.batch["response_mask"].cpu()
        differences = evidence[name].differences(self._references(name, evidence, mask), mask)
        valid = _is_exact(name, probes, self.setting)
        if self.options.dtype == "float32":
            valid = valid and within(differences, LIMITS)
        return ArmResult(
            name=name,
            steps=tuple(steps),
            real_tokens=self.real,
            padded_tokens=sum(micro.rows * micro.width for micro in steps[0].micros),
            valid=valid,
            differences=differences,
        )

    def _references(self, name: str, evidence: dict[str, Evidence], mask: torch.Tensor) -> list[Evidence]:
        """Each sequence alone; and ``fixed``, unless the model cannot do left padding and it is wrong itself."""
        alone, fixed = evidence[ALONE], evidence.get("fixed")
        if name == "fixed" or fixed is None:
            return [alone]
        sound = self.options.dtype != "float32" or within(fixed.differences([alone], mask), LIMITS)
        return [alone, fixed] if sound else [alone]


def within(differences: dict[str, float | None], limits: Limits) -> bool:
    """Whether all measured differences are rounding."""
    allowed = {
        "max_logprob_difference": limits.logprob,
        "loss_difference": limits.loss,
        "gradient_difference": limits.gradient,
        "update_difference": limits.update,
    }
    return all(value is None or value <= allowed[name] for name, value in differences.items())


def _with_layouts(setting: Setting, probes: dict[str, Probe]) -> Setting:
    """Go without a mask only where that is exact; pack the way that is exact, if one is."""
    bare = probes.get("right-padded-no-mask")
    ids = probes.get("packed-position-ids")
    return replace(setting, no_mask=bare is not None and bare.exact, segments=ids is None or not ids.exact)


def _is_exact(name: str, probes: dict[str, Probe], setting: Setting) -> bool:
    if name == "fixed":
        return True  # judged by its differences
    if name == "packed":
        return probes["packed"].exact or not setting.segments
    layout = "right-padded-no-mask" if setting.no_mask and name not in MASKED else "right-padded"
    return probes[layout].exact


def _leaks(probes: dict[str, Probe], arms: dict[str, ArmResult], setting: Setting) -> dict[str, Any]:
    """Layouts and what they do to the model; and what the mask costs where it can be left out."""
    leaks: dict[str, Any] = {name: probe.to_dict() for name, probe in probes.items()}
    if "right-padded-no-mask" in leaks:
        leaks["right-padded-no-mask"]["used"] = setting.no_mask
        leaks["right-padded-no-mask"]["seconds"] = {
            arm: {"with_mask": arms[twin].seconds, "without_mask": arms[arm].seconds}
            for twin, arm in MASKED.items()
            if twin in arms and arm in arms
        }
    return leaks


def _stand_in(rows: int, width: int, vocabulary: int, *, device: str, mask: bool) -> Micro:
    """A micro-batch of random tokens with all the fields that the loss reads."""
    ids = torch.randint(0, vocabulary, (rows, width), device=device)
    inputs: Batch = {"input_ids": ids}
    if mask:
        inputs["attention_mask"] = torch.ones_like(ids)
    fields = {name: torch.zeros(rows, width, device=device) for name in ("old_log_probs", "ref_log_probs")}
    ones = {name: torch.ones(rows, width, device=device) for name in ("response_mask", "advantages")}
    return Micro(
        inputs=inputs, fields={**fields, **ones}, lengths=(width,) * rows, starts=(0,) * rows, rows=rows, width=width
    )


def _shapes(lengths: np.ndarray[Any, Any], budget: int) -> list[tuple[int, int]]:
    """Micro-batches to time: widths that the workload has, from one row up to the budget."""
    widths = sorted({int(w) for w in np.quantile(lengths, [0.1, 0.4, 0.7, 0.9, 1.0])})
    shapes = set()
    for width in widths:
        most = max(1, min(budget // width, len(lengths)))
        shapes |= {(1, width), (max(1, most // 3), width), (most, width)}
    return sorted(shapes, key=lambda shape: shape[0] * shape[1])
