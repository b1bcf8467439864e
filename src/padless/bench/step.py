"""One optimizer step of a policy update: reference pass, clipped policy gradient with a KL penalty, AdamW."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from padless.bench.arms import Micro, Setting, Shape, group
from padless.bench.batch import Batch
from padless.bench.equality import Evidence
from padless.bench.measure import Clock, PeakMemory
from padless.loss import Denominators, aggregate, denominators

__all__ = ["OPTIMIZER", "Step", "Trajectory", "policy_loss", "run_step"]

_COMPARED = 200_000_000
"""Parameters that are compared; of a larger model every second one, every third, and so on."""

CLIP, KL = 0.2, 0.001  # the usual ones of GRPO
OPTIMIZER = {"lr": 1e-5, "betas": (0.9, 0.95), "eps": 1e-6, "weight_decay": 0.01}
"""AdamW's options. ``eps`` is above its default of 1e-8 for a reason: where a gradient is as small as its own rounding,
``g / (|g| + eps)`` with a tiny eps is the sign of a rounding error, and two runs that differ by nothing but the number
of threads already disagree there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What one optimizer step cost, and what it computed where it was asked to keep that.

    Attributes:
        seconds: ``reference``, ``train`` (with the optimizer) and ``overhead`` (planning and tensor work).
        loss: of the step.
        micros: the shape of each micro-batch.
        peak_memory_bytes: see `padless.bench.measure.PeakMemory`.
        evidence: of the first step.
    """

    seconds: dict[str, float]
    loss: float
    micros: tuple[Shape, ...]
    peak_memory_bytes: int | None
    evidence: Evidence | None = None

    @property
    def total(self) -> float:
        """Seconds of the whole step."""
        return sum(self.seconds.values())


class Trajectory:
    """A policy that one arm trains: a copy of the model with its own optimizer.

    With ``shared`` the arms train one and the same copy, which is set back before each step: for models of which the
    memory holds only one.
    """

    def __init__(self, reference: Any, *, policy: Any = None, checkpointing: bool = False) -> None:
        self.reference = reference
        self.shared = policy is not None
        self.policy = policy if self.shared else copy_of(reference, checkpointing=checkpointing)
        self.optimizer = self._fresh()
        self.stride = max(1, sum(p.numel() for p in reference.parameters()) // _COMPARED)

    def _fresh(self) -> torch.optim.Optimizer:
        options: dict[str, Any] = dict(OPTIMIZER)
        return torch.optim.AdamW(self.policy.parameters(), **options)

    def begin(self) -> None:
        """Set a shared policy back to where every arm begins."""
        if self.shared:
            with torch.no_grad():
                for mine, theirs in zip(self.policy.parameters(), self.reference.parameters(), strict=True):
                    mine.copy_(theirs)
            self.optimizer = self._fresh()

    def update(self) -> list[torch.Tensor]:
        """What each parameter has changed by, on the host."""
        pairs = zip(self.policy.parameters(), self.reference.parameters(), strict=True)
        return [(self._sample(mine) - self._sample(theirs)).cpu() for mine, theirs in pairs]

    def gradient(self) -> list[torch.Tensor]:
        """The gradient of each parameter, on the host."""
        given = (torch.zeros_like(p) if p.grad is None else p.grad for p in self.policy.parameters())
        return [self._sample(tensor).cpu().clone() for tensor in given]

    def _sample(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().reshape(-1)[:: self.stride]


def copy_of(reference: Any, *, checkpointing: bool) -> Any:
    """A trainable copy of the reference model."""
    policy = copy.deepcopy(reference)
    policy.train()
    policy.requires_grad_(True)
    if checkpointing:
        policy.gradient_checkpointing_enable({"use_reentrant": False})
    return policy


def policy_loss(log_probs: torch.Tensor, fields: Batch, denominator: Denominators) -> torch.Tensor:
    """A micro-batch's part of the step's loss, averaged over the step's response tokens.

    Clipped policy gradient against the log-probabilities of the rollout, and a penalty on leaving the reference policy
    (the low-variance estimate of the Kullback-Leibler divergence, as in GRPO).
    """
    ratio = torch.exp(log_probs - fields["old_log_probs"])
    gain = fields["advantages"] * ratio
    clipped = fields["advantages"] * ratio.clamp(1 - CLIP, 1 + CLIP)
    apart = fields["ref_log_probs"] - log_probs
    values = KL * (torch.exp(apart) - apart - 1) - torch.minimum(gain, clipped)
    return aggregate(values, fields["response_mask"], denominators=denominator)


def run_step(
    arm: str,
    trajectory: Trajectory,
    batch: Batch,
    setting: Setting,
    *,
    device: str = "cpu",
    keep: bool = False,
    reference: torch.Tensor | None = None,
    tick: Callable[[], None] | None = None,
) -> Step:
    """Run one optimizer step of an arm on its trajectory.

    Args:
        arm: a name from `padless.bench.arms`.
        trajectory: whose policy is trained, against whose reference.
        batch: from `make_batch`, with the rollout's log-probabilities (`add_rollout`).
        setting: what the arm is given.
        device: where time and memory are measured.
        keep: keep log-probabilities, loss and gradient of this step (the clock and the memory meter stand still).
        reference: (N, R) log-probabilities under the frozen model, to go without the pass that computes them.
        tick: called after each micro-batch.
    """
    clock = Clock(device)
    trains: list[torch.Tensor] = []
    total = torch.zeros((), dtype=torch.float64, device=batch["input_ids"].device)
    with PeakMemory(device) as memory:
        with clock("overhead"):
            groups = group(arm, batch if reference is None else {**batch, "ref_log_probs": reference}, setting)
            # All at once: between two passes through the model, caches would be cold for each.
            prepared = [groups.micro(index) for index in range(len(groups))]
        if reference is None:
            found = _reference_pass(prepared, trajectory.reference, clock, tick)
            with clock("overhead"):
                reference = groups.restore(found)  # for whoever reports them, in the caller's order
                prepared = [micro.with_reference(values) for micro, values in zip(prepared, found, strict=True)]
        with clock("train"):
            denominator = denominators(batch["response_mask"])
        for micro in prepared:
            with clock("train"):
                log_probs, loss = forward_backward(micro, trajectory.policy, denominator)
                total += loss
            if keep:
                trains.append(log_probs)
            del log_probs
            if tick is not None:
                tick()
    evidence = None
    if keep:
        gradient = trajectory.gradient()
        train = groups.restore(trains).cpu()
        evidence = Evidence(reference=reference.cpu(), train=train, loss=float(total), gradient=gradient)
    with clock("train"):
        trajectory.optimizer.step()
        trajectory.optimizer.zero_grad(set_to_none=True)
    return Step(
        seconds={"reference": 0.0, "train": 0.0, "overhead": 0.0, **clock.parts},
        loss=float(total),
        micros=tuple(micro.shape for micro in prepared),
        peak_memory_bytes=memory.peak,
        evidence=evidence,
    )


def _reference_pass(
    prepared: list[Micro], reference: Any, clock: Clock, tick: Callable[[], None] | None
) -> list[torch.Tensor]:
    """Log-probabilities under the frozen model, micro-batch by micro-batch."""
    outputs = []
    for micro in prepared:
        with clock("reference"), torch.no_grad():
            outputs.append(micro.log_probs(reference))
        if tick is not None:
            tick()
    return outputs


def forward_backward(micro: Micro, policy: Any, denominator: Denominators) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities and loss of a micro-batch, its gradient added to the policy's."""
    log_probs = micro.log_probs(policy)
    loss = policy_loss(log_probs, micro.fields, denominator)
    with micro.backward_context(policy):
        loss.backward()  # type: ignore[no-untyped-call]
    return log_probs.detach(), loss.detach().double()
