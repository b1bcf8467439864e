"""Packing on Ray gives the bytes of a local run, and loses nothing when a worker dies."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from padless.data.packing import pack_files
from padless.errors import PadlessError
from padless.planning.pack import pack as plan

ray = pytest.importorskip("ray")
from padless.integrations.ray import pack, ray_runner  # noqa: E402 (needs ray)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Two worker nodes of one processor each beside a head that runs no task."""
    from ray.cluster_utils import Cluster

    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    nodes = [made.add_node(num_cpus=1, object_store_memory=100 << 20) for _ in range(2)]
    ray.init(address=made.address, log_to_driver=False, include_dashboard=False)
    assert len(nodes) == 2
    yield made
    ray.shutdown()
    made.shutdown()


def digests(out: Path) -> dict[str, str]:
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(out.iterdir()) if path.is_file()
    }


def write_corpus(path: Path, rows: int = 900) -> Path:
    rng = np.random.default_rng(0)
    lines = [json.dumps({"text": "ab " * int(n), "filler": "x" * 1500}) for n in rng.integers(0, 40, size=rows)]
    path.write_text("\n".join(lines) + "\n")
    return path


class SlowWords:
    """One id for each word; where a marker file is missing, it waits there long enough to be killed."""

    def __init__(self, told: Path) -> None:
        self.told = told

    def __call__(self, text: str) -> list[int]:
        if text.startswith("ab") and not self.told.exists():
            self.told.write_text(str(os.getpid()))
            time.sleep(60)
        return [len(word) for word in text.split()]


def words(text: str) -> list[int]:
    return [len(word) for word in text.split()]


def test_a_cluster_writes_the_bytes_of_a_local_run(cluster: Any, tmp_path: Path) -> None:
    source = write_corpus(tmp_path / "a.jsonl")
    local = pack_files(source, tmp_path / "local", capacity=64, tokenizer=words, shard_tokens=512)
    there = pack_files(source, tmp_path / "ray", capacity=64, tokenizer=words, shard_tokens=512, runner=ray_runner())
    assert there.totals == local.totals
    assert digests(tmp_path / "ray") == digests(tmp_path / "local")
    assert len(there.shards) > 10


def test_a_killed_worker_costs_time_and_nothing_else(cluster: Any, tmp_path: Path) -> None:
    source = write_corpus(tmp_path / "a.jsonl")
    slow = SlowWords(tmp_path / "told")
    killed: list[int] = []

    def kill() -> None:
        until = time.monotonic() + 120
        while time.monotonic() < until and not killed:
            if slow.told.exists() and (text := slow.told.read_text()):
                os.kill(int(text), signal.SIGKILL)
                killed.append(int(text))
            time.sleep(0.05)

    thread = threading.Thread(target=kill, daemon=True)
    thread.start()
    result = pack_files(source, tmp_path / "ray", capacity=64, tokenizer=slow, runner=ray_runner())
    thread.join(timeout=5)
    assert killed, "the worker was to be killed while it worked"
    local = pack_files(source, tmp_path / "local", capacity=64, tokenizer=words)
    assert result.totals == local.totals
    assert [shard["sha256"] for shard in result.manifest["shards"]] == [s["sha256"] for s in local.manifest["shards"]]


def test_messages_come_back_from_the_cluster(cluster: Any, tmp_path: Path) -> None:
    source = tmp_path / "a.jsonl"
    source.write_text('{"input_ids": [1]}\n{"input_ids": [-4]}\n')
    with pytest.raises(PadlessError, match=r"a.jsonl, row 1: .*is -4"):
        pack_files(source, tmp_path / "out", capacity=8, runner=ray_runner())


def documents_of(packs: list[dict[str, Any]]) -> Counter[tuple[int, ...]]:
    found: Counter[tuple[int, ...]] = Counter()
    for row in packs:
        ends = np.cumsum(row["seq_lengths"]).tolist()
        ids = [int(i) for i in row["input_ids"]]
        for start, end in zip([0, *ends], ends, strict=False):
            found[tuple(ids[start:end])] += 1
            assert row["labels"][start] == -100
    return found


def test_a_dataset_in_a_pipeline_keeps_every_document_and_each_windows_packs(cluster: Any) -> None:
    rng = np.random.default_rng(0)
    rows = [{"input_ids": rng.integers(0, 9, size=n).tolist()} for n in rng.integers(1, 40, size=500)]
    made = pack(ray.data.from_items(rows, override_num_blocks=4), capacity=64, window=100, seed=None).take_all()
    assert documents_of(made) == Counter(tuple(row["input_ids"]) for row in rows)
    assert max(len(row["input_ids"]) for row in made) <= 64
    lengths = [len(row["input_ids"]) for row in rows]
    by_window = Counter(
        tuple(sorted(lengths[start + i] for i in group.tolist()))
        for start in range(0, 500, 100)
        for group in plan(lengths[start : start + 100], 64, method="auto")
    )
    assert Counter(tuple(sorted(int(n) for n in row["seq_lengths"])) for row in made) == by_window


def test_text_is_tokenised_on_the_cluster_and_long_documents_are_split(cluster: Any) -> None:
    rows = [{"text": "ab " * n, "id": n} for n in (3, 0, 150)]
    made = pack(ray.data.from_items(rows), capacity=60, tokenizer=words, overlong="split").take_all()
    assert sorted(int(n) for row in made for n in row["seq_lengths"]) == [3, 30, 60, 60]


def test_what_is_no_dataset_is_refused() -> None:
    with pytest.raises(PadlessError, match=r"expected a ray.data.Dataset"):
        pack([{"input_ids": [1]}], capacity=8)
    with pytest.raises(PadlessError, match="overlong='alone' is unknown"):
        pack(ray.data.from_items([{"input_ids": [1]}]), capacity=8, overlong="alone")
