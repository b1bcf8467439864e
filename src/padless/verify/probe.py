"""The three tests, measured: equality with each sequence alone, independence of the others, gradient support."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from padless.errors import PadlessError
from padless.verify.feeds import ALONE, Feed, Place, build_feed, draw, redraw
from padless.verify.runs import Mode, Run, Runner
from padless.verify.subject import Subject

__all__ = ["Baseline", "Measured", "Probe", "Refused"]


class Refused(Exception):
    """The model raised on a layout that it was given; the message is its own."""


@dataclass(slots=True, kw_only=True)
class Baseline:
    """What the layouts are judged against, in one mode: each sequence alone, and how exact that is."""

    outputs: list[Tensor]
    """(n, ...) for each sequence."""
    scale: float
    """Largest absolute output; every difference is relative to it."""
    noise: float
    """The same sequence in batches of other shapes: the rounding of this model on this device."""
    rerun: float
    """The same call twice: zero where kernels are deterministic."""
    tolerance: float
    mixing: float
    """Largest gradient of a sequence's last output to an earlier token, over that to its last token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Three relative differences for one layout in one mode; NaN in an output counts as infinity."""

    equality: float
    """Largest difference to the sequence alone."""
    independence: float
    """Largest movement when other sequences' tokens, or the padding's, are changed."""
    padding: float
    """The part of ``independence`` that the padding's tokens caused."""
    parity: int
    """Which half of the sequences moved the others most when changed: the even ones, 0, or the odd ones, 1."""
    support: float | None
    """Largest gradient with respect to a foreign embedding over the largest to an own one; None without gradients."""
    by_sequence: tuple[float, ...] = field(default=())
    """``equality`` of each sequence."""


class Probe:
    """Some sequences and a runner: measures layouts. Holds one layout's forward passes at a time."""

    def __init__(
        self,
        runner: Runner,
        *,
        lengths: Sequence[int],
        tokens: Tensor,
        device: torch.device,
        dtype: torch.dtype,
        pad: int,
        seed: int,
    ) -> None:
        self.runner, self.tokens, self.seed = runner, tokens, seed
        self.device, self.dtype, self.pad = device, dtype, pad
        self.sequences = draw(lengths, tokens, seed=seed)
        self._leaking: dict[tuple[str, float], list[tuple[Tensor, Measured]]] = {}

    @classmethod
    def of(cls, subject: Subject, runner: Runner, lengths: Sequence[int], seed: int, *, float32: bool = False) -> Probe:
        """A probe of one model; ``float32`` where its parameters are in single precision for the time being."""
        half = subject.dtype in (torch.float16, torch.bfloat16)
        return cls(
            runner,
            lengths=lengths,
            tokens=subject.tokens,
            device=subject.device,
            dtype=torch.float32 if float32 and half else subject.dtype,
            pad=subject.pad,
            seed=seed,
        )

    def feed(
        self, layout: str, sequences: Sequence[Tensor] | None = None, spare: int | None = None, rows: int = 1
    ) -> Feed:
        """The probe's sequences, or others, in a layout; packed into ``rows`` rows."""
        spare = max(3, self.width_multiple) if spare is None else spare
        given = self.sequences if sequences is None else sequences
        start = self.runner.position_start
        return build_feed(
            layout,
            given,
            device=self.device,
            dtype=self.dtype,
            pad=self.pad,
            spare=spare,
            start=start,
            rows=rows,
        )

    width_multiple = 1
    """Some models refuse widths that are no multiple of their chunk."""

    def run(self, feed: Feed, mode: Mode) -> Run:
        """One pass; what the model raises becomes :class:`Refused`."""
        try:
            return self.runner.run(feed, mode)
        except Exception as error:
            raise Refused(_line(error)) from error

    def alone(self, sequence: Tensor, mode: Mode) -> Tensor:
        """Output (n, ...) of one sequence by itself."""
        return self.run(self.feed(ALONE, [sequence]), mode).output[0].detach()

    def first_position(self, mode: Mode) -> int:
        """The first position that the model itself gives a sequence; RoBERTa and its kin do not begin at 0."""
        ids = max(self.sequences, key=len)
        due = self.alone(ids, mode)
        if not self.runner.takes("position_ids"):
            return 0
        feed = self.feed(ALONE, [ids])
        column = torch.arange(len(ids), device=self.device)[None]
        for start in dict.fromkeys((0, self.pad + 1, 2)):
            try:
                given = replace(feed, keywords={**feed.keywords, "position_ids": column + start})
                if torch.allclose(self.run(given, mode).output[0].float(), due.float(), rtol=1e-3, atol=1e-5):
                    return start
            except Refused:
                continue
        return 0

    def draws(self, mode: Mode) -> bool:
        """Whether a pass uses random numbers."""
        state = torch.cuda.get_rng_state if self.device.type == "cuda" else torch.get_rng_state
        torch.manual_seed(self.runner.seed)  # as every run begins
        before = state()
        self.alone(max(self.sequences, key=len), mode)
        return not torch.equal(before, state())

    def baseline(self, mode: Mode) -> Baseline:
        """Run every sequence alone, the longest also in other batch shapes and again."""
        outputs = [self.alone(ids, mode) for ids in self.sequences]
        scale = max(float(out.abs().max()) for out in outputs) or 1.0
        longest = max(range(len(outputs)), key=lambda i: len(self.sequences[i]))
        ids, reference = self.sequences[longest], outputs[longest]
        rerun = _difference(self.alone(ids, mode), reference) / scale
        noise = rerun
        for copies in (2, 3):
            feed = self.feed("right-padded-no-mask", [ids] * copies, spare=0)
            stacked = self.run(feed, mode).output.detach()  # (copies, n, ...)
            noise = max(noise, *(_difference(row, reference) / scale for row in stacked))
        epsilon = torch.finfo(reference.dtype).eps if reference.is_floating_point() else 0.0
        if self.dtype.is_floating_point:
            epsilon = max(epsilon, torch.finfo(self.dtype).eps)
        floor = (200 if epsilon < 1e-5 else 8) * epsilon
        return Baseline(
            outputs=outputs,
            scale=scale,
            noise=noise,
            rerun=rerun,
            tolerance=max(20 * min(noise, floor), floor),  # more than that is no rounding
            mixing=self._mixing(ids, mode),
        )

    def measure(self, layout: str, mode: Mode, base: Baseline, *, rows: int = 1) -> Measured:
        """The three tests for one layout."""
        feed = self.feed(layout, rows=rows)
        run = self.run(feed, mode)
        by_sequence = [
            _difference(place.of(run.output), alone) / base.scale
            for place, alone in zip(feed.places, base.outputs, strict=True)
        ]
        for known, same in self._leaking.get((mode.name, base.scale), []):
            if known.shape == run.output.shape and torch.equal(known, run.output):
                return (
                    same  # the same outputs, as far from each sequence alone: boundaries that the model does not read
                )
        last = len(feed.places) - 1
        support = self._support(feed, run, [last, last // 2, 0]) if mode.grad and run.leaves else None
        if support == float("inf") and bool(feed.padding().any()) and not self._spoils_parameters(feed, run):
            # The padding token's embedding may be all zero, where a norm has no gradient; no parameter sees it.
            # Whether anything flows is then asked with other tokens there.
            other = self.repadded(feed)
            support = self._support(other, self.run(other, mode), [last, last // 2, 0])
        output = run.output.detach()
        del run
        even, odd, padding = self._movement(feed, output, mode)
        measured = Measured(
            equality=max(by_sequence),
            independence=max(even, odd, padding) / base.scale,
            parity=int(odd > even),
            padding=padding / base.scale,
            support=support,
            by_sequence=tuple(by_sequence),
        )
        if measured.equality > base.tolerance and (support or measured.independence > base.tolerance):
            self._leaking.setdefault((mode.name, base.scale), []).append((output, measured))
        return measured

    def distance(self, layout: str, mode: Mode, base: Baseline) -> float:
        """The test of equality alone."""
        feed = self.feed(layout)
        output = self.run(feed, mode).output
        pairs = zip(feed.places, base.outputs, strict=True)
        return max(_difference(place.of(output), alone) for place, alone in pairs) / base.scale

    def control(self, layout: str, mode: Mode, base: Baseline) -> tuple[float, float | None]:
        """Equality and gradient support of a layout that must fail; the last sequence only."""
        feed = self.repadded(self.feed(layout))  # a padding token may embed to zero, and so not show
        run = self.run(feed, mode)
        pairs = zip(feed.places, base.outputs, strict=True)
        equality = max(_difference(place.of(run.output), alone) for place, alone in pairs) / base.scale
        support = self._support(feed, run, [len(feed.places) - 1]) if mode.grad and run.leaves else None
        return equality, support

    def single(self, layout: str, mode: Mode, base: Baseline) -> float:
        """The layout with one sequence in it and no padding, against that sequence alone; worst of all sequences."""
        worst = 0.0
        for ids, alone in zip(self.sequences, base.outputs, strict=True):
            feed = self.feed(layout, [ids], spare=0)
            worst = max(worst, _difference(feed.places[0].of(self.run(feed, mode).output), alone) / base.scale)
        return worst

    def perturbed(self, feed: Feed, *, parity: int) -> tuple[Feed, list[Place]]:
        """Change all sequences of one parity; the places of the others, in which nothing may move."""
        where = torch.zeros_like(feed.input_ids, dtype=torch.bool)
        for place in feed.places[parity::2]:
            place.of(where).fill_(True)
        return redraw(feed, where, self.tokens, seed=self.seed + 1), list(feed.places[1 - parity :: 2])

    def repadded(self, feed: Feed) -> Feed:
        """Other tokens in the padding."""
        return redraw(feed, feed.padding(), self.tokens, seed=self.seed + 2)

    def same_without(self, layout: str, mode: Mode, base: Baseline) -> bool:
        """Whether position_ids make no difference at all to what the model computes in this layout."""
        feed = self.feed(layout)
        bare = replace(feed, keywords={k: v for k, v in feed.keywords.items() if k != "position_ids"})
        found = _difference(self.run(bare, mode).output, self.run(feed, mode).output)
        return found <= base.rerun * base.scale

    def wrong_from(self, layout: str, mode: Mode, base: Baseline) -> int:
        """The first token, counted in its own sequence, that differs from the sequence alone; 0 where none does."""
        feed = self.feed(layout)
        output = self.run(feed, mode).output
        first = []
        for place, alone in zip(feed.places, base.outputs, strict=True):
            apart = (place.of(output).float() - alone.float()).abs().flatten(1).amax(1) / base.scale  # (n,)
            wrong = (~(apart <= base.tolerance)).nonzero().flatten()
            first += wrong[:1].tolist()
        return min(first, default=0)

    def _movement(self, feed: Feed, output: Tensor, mode: Mode) -> tuple[float, float, float]:
        """Absolute movement of the rest when the even sequences change, when the odd ones do, when the padding does."""
        others = []
        for parity in (0, 1):
            changed, kept = self.perturbed(feed, parity=parity)
            moved = self.run(changed, mode).output.detach()  # its graph goes before the next pass is made
            others.append(max(_difference(place.of(moved), place.of(output)) for place in kept))
        if not bool(feed.padding().any()):
            return others[0], others[1], 0.0
        moved = self.run(self.repadded(feed), mode).output.detach()
        return others[0], others[1], max(_difference(place.of(moved), place.of(output)) for place in feed.places)

    def _support(self, feed: Feed, run: Run, sequences: Sequence[int]) -> float:
        """Largest foreign gradient over the largest own one; stops at the first sequence that has any."""
        for index in sequences:
            place = feed.places[index]
            generator = torch.Generator().manual_seed(self.seed + index)
            cotangent = torch.zeros_like(run.output)
            own = place.of(cotangent)
            own.copy_(torch.randn(own.shape, generator=generator))
            found = _support_of(run, cotangent)  # (B, T)
            mine = float(place.of(found).max())
            place.of(found).zero_()
            foreign = float(found.max())
            if foreign != 0.0:
                return float("inf") if foreign != foreign else foreign / (mine or 1.0)
        return 0.0

    def _spoils_parameters(self, feed: Feed, run: Run) -> bool:
        """Whether the gradient of all own outputs is not a number for some parameter."""
        total = torch.stack([place.of(run.output).float().sum() for place in feed.places]).sum()
        parameters = [p for p in self.runner.model.parameters() if p.requires_grad]
        try:
            grads = torch.autograd.grad(total, parameters, retain_graph=True, allow_unused=True)
        except RuntimeError:  # reentrant checkpointing: it cannot be told, so what was found stands
            return True
        return any(grad is not None and bool(grad.isnan().any()) for grad in grads)

    def _mixing(self, ids: Tensor, mode: Mode) -> float:
        if not mode.grad:
            return 1.0
        run = self.run(self.feed(ALONE, [ids]), mode)
        if not run.leaves:
            return 1.0  # the controls say that there is no gradient test
        cotangent = torch.zeros_like(run.output)
        cotangent[:, -1] = 1.0
        found = _support_of(run, cotangent)[0]  # (n,)
        return float(found[:-1].max() / found[-1]) if len(found) > 1 and float(found[-1]) > 0 else 0.0


def _support_of(run: Run, cotangent: Tensor) -> Tensor:
    try:
        return run.support(cotangent)
    except Exception as error:  # kernels without a backward pass, for one
        raise Refused(f"no gradients: {_line(error)}") from error


def _line(error: Exception) -> str:
    kind = "" if isinstance(error, PadlessError) else f"{type(error).__name__}: "
    return f"{kind}{' '.join(str(error).split())[:300]}"


def _difference(one: Tensor, other: Tensor) -> float:
    """Largest absolute difference; infinite where either is not a number."""
    if not one.numel():
        return 0.0
    found = float((one.detach().float() - other.detach().float()).abs().max())
    return found if found == found else float("inf")
