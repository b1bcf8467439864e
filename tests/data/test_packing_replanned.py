"""Another version of a planner may plan a resumed run in another way: shards of the old plan are not kept."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from padless.data import _pack_plan
from padless.data.packing import pack_files


class Interrupted(Exception):
    """The run stops here."""


def stop_after(shards: int) -> Any:
    written = 0

    def progress(stage: str, done: int, total: int | None, tokens: int) -> None:
        nonlocal written
        written += stage == "writing"
        if written == shards:
            raise Interrupted

    return progress


def documents(out: Path) -> Counter[int]:
    found: Counter[int] = Counter()
    for shard in out.glob("packs-*.parquet"):
        for row in pq.read_table(shard, columns=["document_ids"]).to_pylist():
            found.update(row["document_ids"])
    return found


@pytest.mark.parametrize("first", ["next-fit", "best-fit-decreasing"])
def test_no_document_is_lost_or_doubled_when_the_plan_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: str
) -> None:
    source = tmp_path / "rows.jsonl"
    rows = [{"input_ids": [i] * (1 + 7 * i % 41)} for i in range(300)]
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    real = _pack_plan.pack
    then = {"next-fit": "best-fit-decreasing", "best-fit-decreasing": "next-fit"}[first]
    options: dict[str, Any] = {"capacity": 64, "method": "optimal", "shard_tokens": 512}
    monkeypatch.setattr(_pack_plan, "pack", lambda lengths, capacity, **_: real(lengths, capacity, method=first))
    with pytest.raises(Interrupted):
        pack_files(source, tmp_path / "out", progress=stop_after(6), **options)
    assert len(list((tmp_path / "out").glob("packs-*"))) >= 6
    monkeypatch.setattr(_pack_plan, "pack", lambda lengths, capacity, **_: real(lengths, capacity, method=then))
    result = pack_files(source, tmp_path / "out", **options)
    assert result.resumed
    assert documents(tmp_path / "out") == Counter(range(300))
    assert sorted(path.name for path in result.shards) == sorted(p.name for p in (tmp_path / "out").glob("packs-*"))


def test_packs_by_patterns_are_found_again_when_a_run_is_resumed(tmp_path: Path) -> None:
    source = tmp_path / "rows.jsonl"
    sizes = np.random.default_rng(0).normal(113, 17, 1500).clip(20, 512).astype(int).tolist()
    source.write_text("".join(json.dumps({"input_ids": [i] * size}) + "\n" for i, size in enumerate(sizes)))
    options: dict[str, Any] = {"capacity": 512, "shard_tokens": 8192}
    whole = pack_files(source, tmp_path / "whole", **options)
    best_fit = pack_files(source, tmp_path / "best", method="best-fit-decreasing", **options)
    assert whole.totals["packs"] < 0.98 * best_fit.totals["packs"]
    with pytest.raises(Interrupted):
        pack_files(source, tmp_path / "out", progress=stop_after(6), **options)
    kept = {shard.name: shard.stat().st_mtime_ns for shard in (tmp_path / "out").glob("packs-*")}
    result = pack_files(source, tmp_path / "out", workers=2, **options)
    assert result.resumed
    assert result.manifest["shards"] == whole.manifest["shards"]
    assert len(kept) >= 6
    assert all((tmp_path / "out" / name).stat().st_mtime_ns == written for name, written in kept.items())
