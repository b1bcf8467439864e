"""The benchmark: what padding costs a policy-update step on a real model, and what taking it out brings back."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from padless.bench.models import build as build
    from padless.bench.policy_update import BenchOptions as BenchOptions
    from padless.bench.policy_update import run as run
    from padless.bench.report import write_html as write_html
    from padless.bench.results import BenchReport as BenchReport
    from padless.bench.workloads import Workload as Workload
    from padless.bench.workloads import built_in as built_in
    from padless.bench.workloads import from_data as from_data

_LAZY = {
    "BenchOptions": "policy_update",
    "BenchReport": "results",
    "Workload": "workloads",
    "build": "models",
    "built_in": "workloads",
    "from_data": "workloads",
    "run": "policy_update",
    "write_html": "report",
}

__all__ = ["BenchOptions", "BenchReport", "Workload", "build", "built_in", "from_data", "run", "write_html"]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'padless.bench' has no attribute {name!r}")
    value = getattr(import_module(f"padless.bench.{_LAZY[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
