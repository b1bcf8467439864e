"""verl: the planner for the padded path, its checks and its figures, switched on by one line.

``actor_rollout_ref.model.external_lib=padless.integrations.verl`` makes verl import this module in every
actor and reference worker; importing it installs. Options are the environment variables of
`VerlOptions`. docs/recipes/verl.md has the other two ways and the measurements.
"""

from __future__ import annotations

import inspect
import os
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType
from typing import Any

from padless.errors import PadlessError
from padless.integrations.verl_hooks import Hooks, log
from padless.integrations.verl_options import VerlOptions, switched_off

__all__ = ["TESTED", "VerlOptions", "install", "installed", "last_step", "uninstall"]

TESTED = "0.9.1"
"""The verl release whose engines padless is tested with; 0.7.1 for the fixed padding of 0.5 to 0.7."""

_HOOKS = Hooks()
_OPTIONS: VerlOptions | None = None

_NEEDED = (
    "batch",
    "max_token_len",
    "dp_group",
    "num_batches_divided_by",
    "same_micro_num_in_dp",
    "min_num_micro_batch",
    "use_dynamic_bsz_balance",
)
_KNOWN = (*_NEEDED, "force_group_size")


def install(options: VerlOptions | None = None) -> VerlOptions:
    """Put padless behind verl's micro-batches, in this process; a second call changes nothing.

    verl's modules are not imported: what is not loaded yet is hooked when verl loads it.

    Args:
        options: how to plan; read from the environment (``PADLESS_VERL_...``) when not given.

    Returns:
        The options in use.

    Raises:
        PadlessError: verl is not installed or is older than 0.5, an option is unknown or has a bad
            value, or padless is installed already with other options.
    """
    global _OPTIONS
    wanted = VerlOptions.from_environment() if options is None else options
    if _OPTIONS is not None:
        if options is not None and options != _OPTIONS:
            raise PadlessError(f"padless is installed in verl with {_OPTIONS.describe()}: uninstall() first")
        return _OPTIONS
    found = _verl_version()
    _OPTIONS = wanted
    _HOOKS.when_imported("verl.workers.engine.utils", _hook_planner)
    _HOOKS.when_imported("verl.workers.engine.base", _hook_engines)
    if wanted.balance:
        for name in ("verl.trainer.ppo.ray_trainer", "verl.trainer.ppo.v1.trainer_base"):
            _HOOKS.when_imported(name, _hook_trainer)
    if wanted.truncate:
        for name in ("verl.workers.actor.dp_actor", "verl.workers.critic.dp_critic"):
            _HOOKS.when_imported(name, _hook_fixed_padding)
    if os.environ.get("RANK", "0") == "0":
        import padless

        print(f"padless {padless.__version__} in verl {found} (pid {os.getpid()}): {wanted.describe()}", flush=True)
    return wanted


def uninstall() -> None:
    """Put verl's own objects back, every one the object it was; nothing happens when padless is not installed."""
    global _OPTIONS
    _HOOKS.remove()
    _OPTIONS = None


def installed() -> bool:
    """Whether padless is installed in this process."""
    return _OPTIONS is not None


def last_step() -> dict[str, Any]:
    """The latest figures of each phase in this process (``update``, ``old_log_prob``, ...), as `PhaseStats`."""
    from padless.integrations.verl_engine import RECORDER

    return dict(RECORDER.last)


def _verl_version() -> str:
    try:
        found = version("verl")
    except PackageNotFoundError:
        raise PadlessError('verl is not installed: pip install "padless[verl]"') from None
    line = tuple(int(part) for part in found.split(".")[:2] if part.isdigit())
    if line < (0, 5):
        raise PadlessError(f"verl {found} is installed; padless works with 0.5 and later: upgrade verl")
    if line not in ((0, 7), (0, 9)):
        log.warning(
            "padless: verl %s is installed; padless is tested with %s and 0.7.1. Where a function of verl has changed,"
            " padless leaves it alone and says so; compare a step with PADLESS_VERL=0 first",
            found,
            TESTED,
        )
    return found


def _hook_planner(module: ModuleType) -> None:
    from padless.integrations.verl_engine import rearranger

    assert _OPTIONS is not None
    stock = vars(module).get("rearrange_micro_batches")
    problem = _changed(stock)
    if problem:
        log.warning(
            "padless: verl %s plans its own micro-batches: verl.workers.engine.utils.rearrange_micro_batches %s."
            " padless is tested with verl %s",
            version("verl"),
            problem,
            TESTED,
        )
        return
    _HOOKS.replace(module, "rearrange_micro_batches", rearranger(stock, _OPTIONS))  # type: ignore[arg-type]


def _changed(function: Any) -> str | None:
    """What is different about verl's planner, in words; None where its signature is the one padless knows."""
    if not callable(function):
        return "is gone"
    names = tuple(inspect.signature(function).parameters)
    missing = [name for name in _NEEDED if name not in names]
    new = [name for name in names if name not in _KNOWN]
    parts = [f"lost {', '.join(missing)}"] if missing else []
    parts += [f"has new parameters {', '.join(new)}"] if new else []
    return " and ".join(parts) or None


def _hook_engines(module: ModuleType) -> None:
    from padless.integrations.verl_engine import wrap_batch
    from padless.integrations.verl_leaks import LeakGuard

    assert _OPTIONS is not None
    guard = LeakGuard(_OPTIONS.on_leak)
    engine = vars(module).get("BaseEngine")
    for name, training in (("train_batch", True), ("infer_batch", False)):
        stock = vars(engine).get(name) if engine is not None else None
        if stock is None or list(inspect.signature(stock).parameters)[:3] != ["self", "data", "loss_function"]:
            log.warning("padless: verl's BaseEngine.%s has changed: no checks and no figures for it", name)
            continue
        _HOOKS.replace(engine, name, wrap_batch(stock, _OPTIONS, training=training, leak_guard=guard.before_batch))
    registry = vars(module).get("EngineRegistry")
    if registry is not None and "new" in vars(registry):
        _HOOKS.replace(registry, "new", guard.wrap_factory(vars(registry)["new"]))


def _hook_trainer(module: ModuleType) -> None:
    from padless.integrations.verl_balance import hook_trainer

    assert _OPTIONS is not None
    hook_trainer(module, _HOOKS, _OPTIONS.cost)


def _hook_fixed_padding(module: ModuleType) -> None:
    from padless.integrations.verl_truncate import hook_fixed_padding

    hook_fixed_padding(module, _HOOKS)


if not switched_off():
    install()
