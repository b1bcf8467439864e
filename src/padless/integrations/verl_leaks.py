"""The leak guard: does the loaded model keep packed sequences apart, on the very path that verl trains with?

``use_remove_padding=True`` (verl's default) packs a micro-batch into one row and tells the model so by its
position ids alone. Recurrent, convolution and linear-attention layers read across the boundaries, and
nothing in verl notices.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from padless.errors import PadlessError
from padless.integrations.verl_guards import setting, warn_once
from padless.integrations.verl_hooks import log

__all__ = ["LeakGuard", "Opinion", "PackedProbe", "probe_packed", "second_opinion"]

_LENGTHS = (37, 53, 41)


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedProbe:
    """What a sequence between two others gives, packed, in the loaded model.

    Attributes:
        influence: largest change of its outputs when only the other sequences change.
        own: largest change when its own first token changes (the control: it must not be 0).
        noise: largest change when nothing changes.
        alone: largest difference from the same sequence run alone.
        scale: largest absolute output.
        half_precision: whether the forward pass rounds to 16 bits, which may hide a weak leak.
    """

    influence: float
    own: float
    noise: float
    alone: float
    scale: float
    half_precision: bool = False

    @property
    def leaks(self) -> bool:
        """Foreign tokens move the outputs, by more than repetition does."""
        return self.influence > 4 * self.noise

    @property
    def conclusive(self) -> bool:
        """Whether a leak would have been seen: the sequence's own tokens move its outputs."""
        return self.own > 4 * self.noise and np.isfinite(self.scale)


def probe_packed(engine: Any) -> PackedProbe:
    """Run three short random sequences packed, with changes, through the engine's own forward step.

    Five forward passes without gradients in evaluation mode; nothing of the engine changes. Every
    rank runs the same ones, so collectives inside the model match, and the largest figures over all
    ranks are returned on every rank.
    """
    import torch
    import torch.distributed as dist

    vocabulary = int(_text_config(engine).vocab_size)
    rng = np.random.default_rng(0)
    first, middle, last = (rng.integers(0, vocabulary, size=n) for n in _LENGTHS)
    others = [(row + vocabulary // 2) % vocabulary for row in (first, last)]  # every foreign token changes
    changed = middle.copy()
    changed[0] = (changed[0] + vocabulary // 2) % vocabulary
    with engine.eval_mode(), torch.no_grad():
        run = functools.partial(_outputs, engine)
        packed = run([first, middle, last], 1)
        again = run([first, middle, last], 1)
        foreign = run([others[0], middle, others[1]], 1)
        own = run([first, changed, last], 1)
        alone = run([middle], 0)
    figures = torch.stack(
        [(b - packed).abs().max() for b in (foreign, own, again, alone)] + [packed.abs().max()]
    ).double()
    if dist.is_initialized():
        dist.all_reduce(figures, op=dist.ReduceOp.MAX)
    influence, moved, noise, apart, scale = figures.tolist()
    dtype = getattr(engine, "_autocast_dtype", torch.bfloat16)
    return PackedProbe(
        influence=influence,
        own=moved,
        noise=noise,
        alone=apart,
        scale=scale,
        half_precision=dtype in (torch.bfloat16, torch.float16),
    )


def _text_config(engine: Any) -> Any:
    config = engine.model_config.hf_config
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def _outputs(engine: Any, rows: list[Any], place: int) -> Any:
    """The outputs (log-probs or values) of one row of a packed micro-batch, without its last position.

    The label of the last position is the next sequence's first token.
    """
    import torch
    from verl.utils import tensordict_utils
    from verl.utils.device import get_device_id

    device = get_device_id()
    tensors = [torch.as_tensor(row, dtype=torch.long, device=device) for row in rows]
    positions = [torch.arange(len(row), device=device) for row in rows]
    micro_batch = tensordict_utils.get_tensordict(
        {
            "input_ids": torch.nested.as_nested_tensor(tensors, layout=torch.jagged),
            "position_ids": torch.nested.as_nested_tensor(positions, layout=torch.jagged),
        },
        non_tensor_dict={
            "use_remove_padding": True,
            "use_fused_kernels": bool(getattr(engine.engine_config, "use_fused_kernels", False)),
            "temperature": 1.0,
            "calculate_entropy": False,
        },
    )
    _, output = engine.forward_step(micro_batch, loss_function=None, forward_only=True)
    held = next(value for value in output["model_output"].values() if value is not None)
    return held.unbind()[place][:-1].float()


@dataclass(frozen=True, slots=True, kw_only=True)
class Opinion:
    """What `padless.verify.check_layouts` says about a small twin of the architecture, in words."""

    verdict: str
    words: str


def second_opinion(engine: Any) -> Opinion | None:
    """Check packing by position ids on a small float32 twin of the model's configuration.

    It names the module in which a leak enters, and sees leaks that half precision hides. Rank 0 runs
    it and tells the others; ``None`` where the architecture cannot be shrunk or run.
    """
    import torch.distributed as dist

    told: list[Opinion | None] = [None]
    if not dist.is_initialized() or dist.get_rank() == 0:
        told[0] = _check_twin(engine)
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.broadcast_object_list(told, src=0)
    return told[0]


def _check_twin(engine: Any) -> Opinion | None:
    import torch
    from transformers import AutoModelForCausalLM

    from padless.verify import check_layouts, shrink

    config = engine.model_config.hf_config
    layout = "packed-position-ids"
    try:
        attention = getattr(config, "_attn_implementation", None)
        flash = isinstance(attention, str) and "flash" in attention  # flash attention runs in half precision only
        with torch.random.fork_rng(devices=[]):
            twin = AutoModelForCausalLM.from_config(
                shrink(config), attn_implementation=attention, dtype=torch.bfloat16 if flash else torch.float32
            )
        from verl.utils.device import get_device_id

        result = check_layouts(twin.to(get_device_id()), layouts=[layout])[layout]
    except Exception as error:  # an architecture of the user's own may refuse anything; the probe has the say
        log.info("padless: no second opinion on %s: %s", type(config).__name__, error)
        return None
    return Opinion(verdict=result.verdict, words=result.explain())


class LeakGuard:
    """Checks each engine once, at start-up where padless sees it being made, else before its first batch."""

    def __init__(self, action: str) -> None:
        self.action = action
        self.leaking: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()

    def wrap_factory(self, raw: Any) -> Any:
        """``EngineRegistry.new`` whose engines are checked as soon as their model is loaded."""
        make = raw.__func__ if isinstance(raw, classmethod) else raw

        @functools.wraps(make)
        def new(*args: Any, **kwargs: Any) -> Any:
            engine = make(*args, **kwargs)
            self._check_after_loading(engine)
            return engine

        return classmethod(new) if isinstance(raw, classmethod) else new

    def _check_after_loading(self, engine: Any) -> None:
        load: Callable[..., Any] = engine.initialize

        @functools.wraps(load)
        def initialize(*args: Any, **kwargs: Any) -> Any:
            result = load(*args, **kwargs)
            self.leaking.pop(engine, None)
            if getattr(getattr(engine, "model_config", None), "use_remove_padding", False):
                self.check(engine)
            return result

        engine.initialize = initialize

    def before_batch(self, engine: Any, data: Any) -> None:
        """Check an engine that was made before padless came; send a leaking one down the padded path if asked."""
        if self.action == "ignore" or not setting(data, "use_remove_padding", True):
            return
        if engine not in self.leaking:
            self.check(engine)
        if self.leaking[engine] and self.action == "padded":
            from verl.utils import tensordict_utils

            tensordict_utils.assign_non_tensor_data(data, "use_remove_padding", False)

    def check(self, engine: Any) -> None:
        """Measure, and do what ``PADLESS_VERL_ON_LEAK`` says."""
        self.leaking[engine] = False
        if self.action == "ignore":
            return
        name = type(engine).__name__
        if not _can_probe(engine):
            warn_once(f"probe-{name}", f"the leak check does not know {name}: run `padless verify` on the model")
            return
        architecture = (getattr(engine.model_config, "architectures", None) or [name])[0]
        try:
            probe = probe_packed(engine)
        except Exception as error:  # a model that wants more than tokens and positions must still train
            warn_once(
                f"probe-{architecture}",
                f"the leak check of {architecture} could not run ({error!r}): run `padless verify` on the model",
            )
            return
        if probe.leaks:
            self.leaking[engine] = True
            self._act(engine, architecture, probe, second_opinion(engine))
        elif not probe.conclusive or probe.half_precision:
            opinion = second_opinion(engine)
            if opinion is not None and opinion.verdict != "exact":
                log.warning(
                    "padless: nothing foreign moved the outputs of %s at its precision (its own first token: %.1e), but"
                    " a small float32 model of its architecture is not exact. %s Compare a few steps with"
                    " use_remove_padding=False",
                    architecture,
                    probe.own,
                    opinion.words,
                )
            elif opinion is None and not probe.conclusive:
                log.warning(
                    "padless: the leak check of %s is inconclusive (its own tokens move its outputs by %.1e only): run"
                    " `padless verify` on the trained checkpoint",
                    architecture,
                    probe.own,
                )

    def _act(self, engine: Any, architecture: str, probe: PackedProbe, opinion: Opinion | None) -> None:
        found = (
            f"{architecture} leaks between packed sequences: with use_remove_padding=True, changing other sequences of"
            f" the row changes a sequence's outputs by up to {probe.influence:.2e} (its own first token:"
            f" {probe.own:.2e}; repetition: {probe.noise:.0e}), and they differ from the sequence alone by"
            f" {probe.alone:.2e}"
        )
        if opinion is not None and opinion.verdict == "leaks":
            found += f" (a small model of the architecture: {opinion.words.rstrip('.')})"
        remedy = (
            "set actor_rollout_ref.model.use_remove_padding=False (with use_dynamic_bsz=True padless keeps the padding"
            " small), or PADLESS_VERL_ON_LEAK=padded to have padless do it"
        )
        if self.action == "error":
            raise PadlessError(f"{found}: {remedy}")
        if self.action == "padded":
            if getattr(engine.engine_config, "ulysses_sequence_parallel_size", 1) > 1:
                raise PadlessError(
                    f"{found}, and the padded path has no sequence parallelism: set"
                    " ulysses_sequence_parallel_size=1 and use_remove_padding=False"
                )
            remedy = "the padded path is used instead (PADLESS_VERL_ON_LEAK=padded)"
        warn_once(f"leak-{architecture}", f"{found}: {remedy}")


def _can_probe(engine: Any) -> bool:
    """Engines with verl's FSDP forward step: (micro_batch, loss_function, forward_only) on jagged rows."""
    import inspect

    step = getattr(engine, "forward_step", None)
    if step is None or not hasattr(engine, "prepare_model_inputs"):
        return False
    return list(inspect.signature(step).parameters) == ["micro_batch", "loss_function", "forward_only"]
