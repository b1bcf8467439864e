"""A platform that verl selects with ``VERL_PLATFORM=cpu``; verl imports this module, see `support.verl_env`.

Only what FSDP2 training over gloo needs is here, and the name of a rollout without an inference engine.
"""

from __future__ import annotations

import functools
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch.distributed
from verl.plugin.platform import PlatformBase, PlatformRegistry

from padless.integrations.verl_hooks import Hooks


def _zero(*_: Any, **__: Any) -> int:
    return 0


def _nothing(*_: Any, **__: Any) -> None:
    return None


def _device_module() -> ModuleType:
    """What verl asks of ``torch.cuda``: memory figures that are 0, and calls that do nothing."""
    module = ModuleType("torch_cpu_device")
    for name in ("max_memory_allocated", "max_memory_reserved", "memory_allocated", "memory_reserved"):
        setattr(module, name, _zero)
    for name in ("empty_cache", "synchronize", "set_device", "reset_peak_memory_stats", "ipc_collect"):
        setattr(module, name, _nothing)
    module.mem_get_info = lambda *_: (1 << 34, 1 << 34)  # type: ignore[attr-defined]
    module.get_device_name = lambda *_: "cpu"  # type: ignore[attr-defined]
    module.current_device = lambda: "cpu"  # type: ignore[attr-defined]
    module.is_available = lambda: False  # type: ignore[attr-defined]
    return module


@PlatformRegistry.register(platform="cpu")
class PlatformCPU(PlatformBase):
    """One CPU device; tensors move to ``"cpu"``, ranks talk over gloo."""

    _module = _device_module()
    device_name = property(lambda self: "cpu")  # type: ignore[assignment]
    vendor_name = property(lambda self: "generic")  # type: ignore[assignment]
    device_module = property(lambda self: self._module)  # type: ignore[assignment]

    def is_available(self) -> bool:
        return True

    def current_device(self) -> Any:
        return "cpu"

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None:
        return None

    def synchronize(self, device_index: int | None = None) -> None:
        return None

    def manual_seed(self, seed: int) -> None:
        return None

    def manual_seed_all(self, seed: int) -> None:
        return None

    def set_allocator_settings(self, settings: str) -> None:
        return None

    def empty_cache(self) -> None:
        return None

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CPU_VISIBLE_DEVICES"

    @contextmanager
    def nvtx_range(self, msg: str) -> Any:
        yield

    def profiler_start(self) -> None:
        return None

    def profiler_stop(self) -> None:
        return None

    def ray_resource_name(self) -> str:
        return "GPU"  # verl's trainer counts GPUs; Ray takes the number it is told

    def ray_resource_options(self, num_gpus: float) -> dict[str, Any]:
        return {"num_gpus": num_gpus}

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        return False

    def cudart(self) -> Any:
        return None


def _one_backend(stock: Any) -> Any:
    """verl asks for ``cpu:gloo`` beside its device's backend, which PyTorch refuses when the device is the CPU."""

    @functools.wraps(stock)
    def init_process_group(backend: Any = None, *args: Any, **kwargs: Any) -> Any:
        return stock("gloo" if backend == "cpu:gloo,cpu:gloo" else backend, *args, **kwargs)

    return init_process_group


torch.distributed.init_process_group = _one_backend(torch.distributed.init_process_group)


def _name_rollout(module: ModuleType) -> None:
    def load() -> Any:
        from support.verl_rollout import RandomReplica

        return RandomReplica

    if hasattr(module, "RolloutReplicaRegistry"):
        module.RolloutReplicaRegistry.register("random", load)
    else:
        module._ROLLOUT_REGISTRY["random", "async"] = "support.verl_rollout.RandomAdapter"


_hooks = Hooks()
_hooks.when_imported("verl.workers.rollout.replica", _name_rollout)
_hooks.when_imported("verl.workers.rollout.base", _name_rollout)


def _no_pinned_memory(module: ModuleType) -> None:
    """verl keeps a reference model in pinned memory, which needs an accelerator."""
    stock = module.CPUOffloadPolicy
    module.CPUOffloadPolicy = lambda pin_memory=True: stock(pin_memory=False)


_hooks.when_imported("verl.workers.engine.fsdp.transformer_impl", _no_pinned_memory)
