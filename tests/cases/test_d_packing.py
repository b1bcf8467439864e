"""Reported faults of long documents, on packed files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from padless.data.packing import PackResult, pack_files
from padless.errors import PadlessError


def pack_lengths(tmp_path: Path, lengths: list[int], **options: Any) -> tuple[PackResult, list[dict[str, Any]]]:
    source = tmp_path / "rows.jsonl"
    source.write_text("".join(json.dumps({"input_ids": list(range(n))}) + "\n" for n in lengths))
    result = pack_files(source, tmp_path / "out", **options)
    return result, [row for shard in result.shards for row in pq.read_table(shard).to_pylist()]


def test_d05_a_document_over_the_limit_is_named_up_front(tmp_path: Path) -> None:
    """fairseq#2063 and others."""
    with pytest.raises(PadlessError, match="row 1: 513 tokens exceed the capacity 512"):
        pack_lengths(tmp_path, [10, 513, 20], capacity=512)


def test_d13_documents_longer_than_a_pack_are_split(tmp_path: Path) -> None:
    """torchtune#1697."""
    result, packs = pack_lengths(tmp_path, [30] * 10 + [61], capacity=60, overlong="split")
    # 60 + 1 and five pairs: the one token left over has a pack of its own.
    assert sorted(len(pack["input_ids"]) for pack in packs) == [1, 60, 60, 60, 60, 60, 60]
    assert result.totals["tokens"] == 361
    assert all(sum(pack["seq_lengths"]) == len(pack["input_ids"]) for pack in packs)


def test_d13_more_than_twice_the_capacity_makes_three_pieces(tmp_path: Path) -> None:
    """torchtune#1697."""
    _, packs = pack_lengths(tmp_path, [150], capacity=60, overlong="split", seed=None)
    assert [pack["seq_lengths"] for pack in packs] == [[60], [60], [30]]
    assert [pack["source_starts"] for pack in packs] == [[0], [60], [120]]
