"""Packed files go into `PackedCollator` as they are, and a model reads each document for itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from padless.data._packs import split_packs
from padless.data.packing import pack_files
from padless.errors import PadlessError

torch = pytest.importorskip("torch")
from padless.data import PackedCollator, PaddedCollator  # noqa: E402 (needs torch)


@pytest.fixture
def packs(tmp_path: Path) -> list[dict[str, Any]]:
    rng = np.random.default_rng(0)
    rows = [{"input_ids": rng.integers(1, 90, size=n).tolist()} for n in rng.integers(1, 20, size=30)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = pack_files(tmp_path / "a.jsonl", tmp_path / "out", capacity=48, position_ids=True)
    return [row for shard in result.shards for row in pq.read_table(shard).to_pylist()]


def test_positions_restart_and_labels_stay(packs: list[dict[str, Any]]) -> None:
    batch = PackedCollator()(packs[:2])
    assert batch["input_ids"].tolist() == [packs[0]["input_ids"] + packs[1]["input_ids"]]
    assert batch["labels"].tolist() == [packs[0]["labels"] + packs[1]["labels"]]
    assert batch["position_ids"].tolist() == [packs[0]["position_ids"] + packs[1]["position_ids"]]
    assert "attention_mask" not in batch


def test_a_packed_batch_has_the_logits_of_single_documents(packs: list[dict[str, Any]]) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.Qwen2Config(
        vocab_size=96, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, use_cache=False, attn_implementation="sdpa",
    )  # fmt: skip
    model = transformers.Qwen2ForCausalLM(config).eval()
    batch = PackedCollator()(packs[:1])
    with torch.no_grad():
        together = model(input_ids=batch["input_ids"], position_ids=batch["position_ids"]).logits[0]
        for document, stop in zip(split_packs(packs[:1]), np.cumsum(packs[0]["seq_lengths"]).tolist(), strict=True):
            alone = model(input_ids=torch.as_tensor(document["input_ids"])[None]).logits[0]
            torch.testing.assert_close(together[stop - len(alone) : stop], alone, rtol=1e-4, atol=1e-5)


def test_packed_rows_are_not_padded_as_if_they_were_one_sequence(packs: list[dict[str, Any]]) -> None:
    with pytest.raises(PadlessError, match="seq_lengths"):
        PaddedCollator()(packs[:2])


def test_lengths_that_do_not_add_up_are_refused() -> None:
    with pytest.raises(PadlessError, match=r"row 0: 'input_ids' has 3 entries; seq_lengths names 2 documents with 4"):
        PackedCollator()([{"input_ids": [1, 2, 3], "seq_lengths": [2, 2]}])
