"""A whole node of a Ray cluster killed in the middle of a run: every document is there once, none lost or doubled."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from padless.data.packing import pack_files

ray = pytest.importorskip("ray")
psutil = pytest.importorskip("psutil")  # comes with ray's test tools
from padless.integrations.ray import ray_runner  # noqa: E402 (needs ray)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


class Recorder:
    """One id for each word. On the doomed node it says that it works, and works until it is killed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, text: str) -> list[int]:
        if _node() == (self.folder / "doomed").read_text():
            (self.folder / f"working-{os.getpid()}").touch()
            time.sleep(120)  # killed long before
        return [int(word) for word in text.split()]


def _node() -> str:
    return str(ray.get_runtime_context().get_node_id())


def write_corpus(path: Path, rows: int = 900) -> Path:
    """Rows that are all different, in more than one chunk."""
    lines = [json.dumps({"text": " ".join(map(str, [i, *range(i % 37)])), "filler": "x" * 1500}) for i in range(rows)]
    path.write_text("\n".join(lines) + "\n")
    return path


def documents(shards: list[Path]) -> Counter[tuple[int, ...]]:
    found: Counter[tuple[int, ...]] = Counter()
    for shard in shards:
        for pack in pq.read_table(shard, columns=["input_ids", "seq_lengths"]).to_pylist():
            at = 0
            for length in pack["seq_lengths"]:
                found[tuple(pack["input_ids"][at : at + length])] += 1
                at += length
    return found


def test_a_killed_node_costs_time_and_no_document(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ray.cluster_utils import Cluster

    monkeypatch.delenv("RAY_ADDRESS", raising=False)  # a cluster of its own, whatever else runs here
    source = write_corpus(tmp_path / "rows.jsonl")
    before = set(psutil.Process().children(recursive=True))
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    born: list[Any] = []
    try:
        doomed, _ = (cluster.add_node(num_cpus=1, object_store_memory=100 << 20) for _ in range(2))
        ray.init(address=cluster.address, log_to_driver=False, include_dashboard=False)
        cluster.wait_for_nodes()
        born = [child for child in psutil.Process().children(recursive=True) if child not in before]
        (tmp_path / "doomed").write_text(doomed.node_id)
        killed: list[bool] = []

        def kill() -> None:
            until = time.monotonic() + 240
            while time.monotonic() < until:
                if any(tmp_path.glob("working-*")):  # in the middle of a task
                    cluster.remove_node(doomed, allow_graceful=False)
                    killed.append(True)
                    return
                time.sleep(0.05)

        thread = threading.Thread(target=kill, daemon=True)
        thread.start()
        result = pack_files(
            source, tmp_path / "out", capacity=64, tokenizer=Recorder(tmp_path), shard_tokens=2048, runner=ray_runner()
        )
        thread.join(timeout=10)
        assert killed, "the node was to be killed while it worked"
        alive = [node["NodeID"] for node in ray.nodes() if node["Alive"]]
        assert doomed.node_id not in alive
    finally:
        ray.shutdown()
        cluster.shutdown()
    rows = [json.loads(line)["text"] for line in source.read_text().splitlines()]
    assert documents(result.shards) == Counter(tuple(map(int, text.split())) for text in rows)
    assert result.totals["documents"] == len(rows)
    leave_nothing(born)


def leave_nothing(born: list[Any]) -> None:
    """Processes of the cluster are gone; what is left is ended, and the test fails."""
    _, left = psutil.wait_procs(born, timeout=20)
    left = [process for process in left if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]
    names = [process.name() for process in left]
    for process in left:
        process.send_signal(signal.SIGKILL)
    assert not names
