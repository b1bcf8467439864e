"""Reported faults of scale, on packed files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from padless.data._pack_plan import plan_windows
from padless.data.packing import PackResult, pack_files
from padless.errors import PadlessError


def pack_lengths(tmp_path: Path, lengths: list[int], **options: Any) -> tuple[PackResult, list[dict[str, Any]]]:
    source = tmp_path / "rows.jsonl"
    source.write_text("".join(json.dumps({"input_ids": list(range(n))}) + "\n" for n in lengths))
    result = pack_files(source, tmp_path / f"out{len(list(tmp_path.iterdir()))}", **options)
    return result, [row for shard in result.shards for row in pq.read_table(shard).to_pylist()]


def test_l02_a_pack_stores_no_mask(tmp_path: Path) -> None:
    """torchtune#1051, torchtune#1109: a 4096 x 4096 mask for each pack filled the memory."""
    result, packs = pack_lengths(tmp_path, [64] * 512, capacity=4096)
    assert len(packs) == 8
    assert sum(shard.stat().st_size for shard in result.shards) < 16_777_216 / 8
    assert set(packs[0]) == {"input_ids", "labels", "seq_lengths", "document_ids", "source_files", "source_rows"}


def test_l02_a_plan_takes_at_most_32_bytes_a_document() -> None:
    """torchtune#1051."""
    lengths = np.random.default_rng(0).integers(1, 2048, size=50_000).astype(np.int32)
    [packs] = plan_windows([lengths], 4096)
    arrays = (packs.pieces.document, packs.pieces.start, packs.pieces.length, packs.offsets)
    assert sum(array.nbytes for array in arrays) <= 32 * len(lengths)


def test_l05_no_rows_is_a_clear_message(tmp_path: Path) -> None:
    """axolotl#3100 and others."""
    with pytest.raises(PadlessError, match="no rows in"):
        pack_lengths(tmp_path, [], capacity=8)


def test_l06_data_too_small_for_one_pack_make_one(tmp_path: Path) -> None:
    """trl#1337."""
    result, packs = pack_lengths(tmp_path, [3, 2], capacity=2048)
    assert len(packs) == 1
    assert result.totals["tokens"] == 5


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_l07_the_number_of_workers_changes_nothing(tmp_path: Path, workers: int) -> None:
    """ArcticTraining#155."""
    _, alone = pack_lengths(tmp_path, [5] * 12, capacity=10)
    _, packs = pack_lengths(tmp_path, [5] * 12, capacity=10, workers=workers)
    assert len(packs) == 6
    assert packs == alone


def test_l09_one_option_says_what_happens_to_long_documents(tmp_path: Path) -> None:
    """trl#1832, LlamaFactory#8487, axolotl#2211, torchtune#1059, ms-swift#2745."""
    lengths = [4, 9, 5]
    dropped, packs = pack_lengths(tmp_path, lengths, capacity=8, overlong="drop")
    assert sorted(d for pack in packs for d in pack["document_ids"]) == [0, 2]
    assert (dropped.totals["dropped"], dropped.totals["dropped_tokens"]) == (1, 9)
    cut, packs = pack_lengths(tmp_path, lengths, capacity=8, overlong="truncate")
    assert sorted(n for pack in packs for n in pack["seq_lengths"]) == [4, 5, 8]
    assert (cut.totals["truncated"], cut.totals["truncated_tokens"]) == (1, 1)
    split, packs = pack_lengths(tmp_path, lengths, capacity=8, overlong="split")
    assert sorted(n for pack in packs for n in pack["seq_lengths"]) == [1, 4, 5, 8]
    assert split.totals["split"] == 1
    with pytest.raises(PadlessError, match="row 1: 9 tokens exceed the capacity 8"):
        pack_lengths(tmp_path, lengths, capacity=8)
