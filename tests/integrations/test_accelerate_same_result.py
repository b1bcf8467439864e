"""A loop with Accelerate takes the same optimizer steps with padless as without."""

from __future__ import annotations

import pytest

from support.accelerate_runs import both, run
from support.trainers import MODELS, assert_same_run


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean"])
@pytest.mark.parametrize("kind", MODELS)
def test_ten_steps_are_those_of_the_host(kind: str, mode: str) -> None:
    host, ours = both(kind, mode)
    assert_same_run(host, ours)
    assert ours.padded_tokens < host.padded_tokens


def test_bf16_steps_stay_within_its_rounding_of_the_host() -> None:
    host = run("qwen2", regrouped=False, mode="token-mean", mixed_precision="bf16")
    ours = run("qwen2", regrouped=True, mode="token-mean", mixed_precision="bf16")
    assert_same_run(host, ours, rtol=0.05, atol=0.02)
