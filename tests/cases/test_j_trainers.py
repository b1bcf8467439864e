"""Alignment and shapes that a model sees in a trainer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from padless.errors import PadlessError
from padless.integrations.transformers import PadlessOptions
from padless.tensors.masks import cu_seqlens
from support.trainers import plain_trainer, sft_rows


def widths(folder: Path, options: PadlessOptions, **more: object) -> set[int]:
    """All widths that a training run shows to its model."""
    trainer, counter = plain_trainer(folder, "qwen2", padless=options, max_steps=4, more=dict(more))
    trainer.train()
    return {width for _, width in counter.shapes}


def test_j04_several_multiples_combine_by_their_least_common_multiple(tmp_path: Path) -> None:
    """RL#971, SkyRL#1828: 3, 4 and 16 make 48."""
    assert widths(tmp_path, PadlessOptions(token_budget=384, multiple_of=(3, 4, 16))) == {48}


def test_j05_a_compiled_model_sees_few_widths(tmp_path: Path) -> None:
    """pytorch#188150, open-instruct#1445: lengths up to 512 in at most eight widths, given or found."""
    rows = sft_rows(64, high=512, low=60)
    longest = max(len(row["input_ids"]) for row in rows)
    assert longest == 512
    rounded = widths(tmp_path, PadlessOptions(token_budget=4096, multiple_of=64), train_dataset=rows)
    assert rounded <= {64, 128, 192, 256, 320, 384, 448, 512}
    given = widths(tmp_path, PadlessOptions(token_budget=4096, ladder=(128, 256, 512)), train_dataset=rows)
    assert given <= {128, 256, 512}
    assert len(given) > 1


def test_j07_offsets_keep_their_number_of_entries() -> None:
    """xtuner#1081, VeOmni#746: 0 3 5 in six entries is 0 3 5 5 5 5."""
    assert cu_seqlens([3, 2], entries=6).tolist() == [0, 3, 5, 5, 5, 5]
    assert cu_seqlens([3, 2], entries=6).dtype == torch.int32
    with pytest.raises(PadlessError, match="entries=2"):
        cu_seqlens([3, 2], entries=2)
