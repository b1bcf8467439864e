"""Settings for the whole suite."""

from __future__ import annotations

import os
import signal

# One thread per test process: the suite itself runs in parallel, and figures must not depend on the load.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Nothing in the suite may wait for a hub.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("WANDB_MODE", "disabled")

from hypothesis import HealthCheck, settings

settings.register_profile(
    "padless",
    deadline=None,  # the first call compiles kernels, and CI machines are slow
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
    derandomize=bool(os.environ.get("CI")),
    print_blob=True,
)
settings.load_profile("padless")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # run in the background of a script: tests interrupt commands
    signal.signal(signal.SIGINT, signal.default_int_handler)
