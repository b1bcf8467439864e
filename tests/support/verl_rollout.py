"""A rollout without an inference engine: random responses, so that verl's trainer runs on a CPU.

Everything else of the trainer is verl's own: agent loops, rewards, replay buffer, workers, engines.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import ray
from verl.workers.rollout.base import BaseRollout
from verl.workers.rollout.replica import RolloutReplica, TokenOutput


class RandomAdapter(BaseRollout):
    """The worker's side: takes the weights and forgets them."""

    async def resume(self, tags: list[str]) -> None:
        return None

    async def update_weights(self, weights: Any, wire_format: str = "named_tensors", **_: Any) -> None:
        for _name, _tensor in weights:
            pass

    async def release(self) -> None:
        return None


@ray.remote(num_cpus=0)
class RandomServer:
    """Answers with random tokens; lengths are log-normal, as those of a reasoning model roughly are."""

    def __init__(self, vocabulary: int, longest: int, seed: int) -> None:
        self.vocabulary = vocabulary
        self.longest = longest
        self.rng = np.random.default_rng(seed)

    def generate(self, request_id: str, *, prompt_ids: list[int], **_: Any) -> TokenOutput:
        length = int(np.clip(self.rng.lognormal(np.log(self.longest / 8), 0.9), 2, self.longest))
        tokens = self.rng.integers(5, self.vocabulary, length)
        log_probs = [-float(np.log(self.vocabulary))] * length
        return TokenOutput(
            token_ids=tokens.tolist(),
            log_probs=log_probs,
            stop_reason="completed",
            num_preempted=0,
            extra_fields={"global_steps": 0, "min_global_steps": 0, "max_global_steps": 0},
        )

    def call(self, *_: Any, **__: Any) -> None:
        return None

    wake_up = sleep = clear_kv_cache = release_kv_cache = resume_kv_cache = call
    abort_all_requests = resume_generation = start_profile = stop_profile = set_global_steps = call


class RandomReplica(RolloutReplica):
    """One `RandomServer`."""

    async def launch_servers(self) -> None:
        server = RandomServer.remote(
            int(os.environ["VERL_TEST_VOCABULARY"]), self.config.response_length, self.replica_rank
        )
        self.servers = [server]
        self._server_handle = server
        self._server_address = f"random-{self.replica_rank}"
