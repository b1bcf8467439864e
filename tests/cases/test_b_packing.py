"""Reported label faults, on packed files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from padless.data.packing import PackResult, pack_files


def packs_of(tmp_path: Path, rows: list[dict[str, Any]], **options: Any) -> tuple[PackResult, list[dict[str, Any]]]:
    source = tmp_path / "rows.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = pack_files(source, tmp_path / "out", **options)
    return result, [row for shard in result.shards for row in pq.read_table(shard).to_pylist()]


def test_b01_the_shift_never_crosses_documents(tmp_path: Path) -> None:
    """torchtune#2613."""
    _, [pack] = packs_of(tmp_path, [{"input_ids": [11, 12, 13]}, {"input_ids": [21, 22]}], capacity=8)
    assert pack["labels"] == [-100, 12, 13, -100, 22]


def test_b06_a_completion_mask_is_packed_and_decides_the_labels(tmp_path: Path) -> None:
    """trl#3728, trl#3749."""
    rows = [
        {"input_ids": [1, 2, 3], "completion_mask": [0, 1, 1]},
        {"input_ids": [4, 5], "completion_mask": [0, 1]},
    ]
    _, [pack] = packs_of(tmp_path, rows, capacity=8)
    assert pack["completion_mask"] == [0, 1, 1, 0, 1]
    assert pack["labels"] == [-100, 2, 3, -100, 5]


def test_b07_fields_come_from_their_own_columns_and_exact_fits_are_kept(tmp_path: Path) -> None:
    """neuronx-distributed-training#22."""
    row = {"input_ids": [10, 11], "attention_mask": [1, 1], "labels": [-100, 11]}
    result, [pack] = packs_of(tmp_path, [row], capacity=2)
    assert (pack["input_ids"], pack["labels"]) == ([10, 11], [-100, 11])
    # The mask has done its work (both tokens are real); beside packed positions an all-ones one would hide borders.
    assert result.totals["tokens"] == sum(row["attention_mask"])


def test_b07_documents_of_exactly_the_capacity_fill_a_pack_each(tmp_path: Path) -> None:
    """neuronx-distributed-training#22."""
    result, packs = packs_of(tmp_path, [{"input_ids": [1, 2, 3, 4]}] * 2, capacity=4)
    assert len(packs) == 2
    assert result.totals["dropped"] == 0


def test_b09_documents_left_without_a_target_are_counted(tmp_path: Path) -> None:
    """trl#6671."""
    row = {"input_ids": list(range(22)), "completion_mask": [0] * 20 + [1] * 2}
    result, _ = packs_of(tmp_path, [row] * 32, capacity=16, overlong="truncate")
    assert result.totals["targets"] == 0
    assert result.totals["without_targets"] == 32
