"""These tests run in verl's own environment (``make test-verl``); elsewhere they are not collected."""

from __future__ import annotations

from importlib.util import find_spec

if find_spec("verl") is None:
    collect_ignore_glob = ["test_*.py"]
else:
    from support.verl_env import use_environment

    use_environment()
