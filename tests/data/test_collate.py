"""Collators: what reaches the model, by mask and never by token id."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from padless import PadlessError
from padless.data import PackedCollator, PaddedCollator, TokenBudgetSampler
from padless.tensors.fields import Field

rows_of_tokens = st.lists(
    st.lists(st.integers(0, 3), min_size=1, max_size=6).map(
        lambda ids: {
            "input_ids": ids,
            "completion_mask": [i % 2 for i in range(len(ids))],
            "weights": [0.5 * i for i in range(len(ids))],
        }
    ),
    min_size=1,
    max_size=5,
)
WEIGHTS = {"weights": Field()}


@settings(max_examples=50)
@given(rows_of_tokens, st.sampled_from([1, 4, (2, 3)]), st.integers(0, 3))
def test_padded_rows_hold_every_token_of_every_column_and_the_mask_says_where(
    rows: list[dict[str, Any]], multiple: Any, pad: int
) -> None:
    batch = PaddedCollator(multiple_of=multiple, pad_token_id=pad, fields=WEIGHTS)(rows)
    width = batch["input_ids"].shape[1]
    assert width % int(np.lcm.reduce(np.atleast_1d(multiple))) == 0
    for i, row in enumerate(rows):
        real = batch["attention_mask"][i].bool()
        assert int(real.sum()) == len(row["input_ids"])
        assert real[: len(row["input_ids"])].all(), "right padded"
        for key, values in row.items():
            assert batch[key][i][real].tolist() == values
        expected = [t if m else -100 for t, m in zip(row["input_ids"], row["completion_mask"], strict=True)]
        assert batch["labels"][i][real].tolist() == expected
        assert (batch["labels"][i][~real] == -100).all()


@settings(max_examples=50)
@given(rows_of_tokens, st.integers(0, 5))
def test_packed_rows_hold_every_token_once_in_order_and_mask_the_first_label(
    rows: list[dict[str, Any]], extra: int
) -> None:
    tokens = sum(len(row["input_ids"]) for row in rows)
    batch = PackedCollator(pad_to=tokens + extra, fields=WEIGHTS, layout="packed-cu-seqlens")(rows)
    for key in ("input_ids", "completion_mask", "weights"):
        assert batch[key][0, :tokens].tolist() == [value for row in rows for value in row[key]]
    labels = [
        -100 if i == 0 or not row["completion_mask"][i] else token
        for row in rows
        for i, token in enumerate(row["input_ids"])
    ]
    assert batch["labels"][0].tolist() == labels + [-100] * extra
    ends = np.cumsum([len(row["input_ids"]) for row in rows]).tolist()
    assert batch["cu_seq_lens_q"].tolist() == [0, *ends] + ([tokens + extra] if extra else [])
    assert "attention_mask" not in batch


def test_rows_that_come_padded_on_either_side_are_cut_by_their_mask() -> None:
    rows = [
        {"input_ids": [2, 2, 9, 2], "attention_mask": [0, 1, 1, 1]},
        {"input_ids": [8, 2, 2, 2], "attention_mask": [1, 1, 0, 0]},
    ]
    assert PaddedCollator()(rows)["input_ids"].tolist() == [[2, 9, 2], [8, 2, 0]]
    assert PackedCollator()(rows)["input_ids"].tolist() == [[2, 9, 2, 8, 2]]


def test_positions_of_several_axes_keep_their_axis() -> None:
    rows = [{"input_ids": [1] * n, "position_ids": torch.arange(3 * n).reshape(3, n)} for n in (2, 3)]
    padded = PaddedCollator(multiple_of=4)(rows)["position_ids"]
    assert padded.shape == (3, 2, 4)
    assert padded[:, 0, :2].equal(rows[0]["position_ids"])
    assert padded[:, 1, :3].equal(rows[1]["position_ids"])
    assert padded[1, 1].tolist() == [3, 4, 5, 6], "padding goes on counting"
    packed = PackedCollator(pad_to=6)(rows)["position_ids"]
    assert packed.shape == (3, 1, 6)
    assert packed[:, 0, :5].equal(torch.cat([row["position_ids"] for row in rows], dim=1))


def test_multimodal_columns_are_joined_row_by_row_and_rows_without_are_skipped() -> None:
    rows = [
        {"input_ids": [1, 2], "pixel_values": torch.ones(4, 6), "image_grid_thw": torch.tensor([[1, 2, 2]])},
        {"input_ids": [3], "pixel_values": None, "image_grid_thw": None},
        {"input_ids": [4], "pixel_values": torch.full((8, 6), 2.0), "image_grid_thw": torch.tensor([[1, 2, 4]])},
    ]
    for collator in (PaddedCollator(), PackedCollator()):
        batch = collator(rows)
        assert batch["pixel_values"].shape == (12, 6)
        assert batch["image_grid_thw"].tolist() == [[1, 2, 2], [1, 2, 4]]


def test_texts_are_left_out_unless_kept_and_unknown_columns_are_refused() -> None:
    rows = [{"input_ids": [1, 2], "text": "a", "score": 0.5}]
    assert set(PaddedCollator()(rows)) == {"input_ids", "labels", "attention_mask"}
    assert PaddedCollator(keep=["text"])(rows)["text"] == ["a"]
    with pytest.raises(PadlessError, match="keep names 'name'"):
        PaddedCollator(keep=["name"])(rows)
    with pytest.raises(PadlessError, match="role of 'token_scores' is unknown"):
        PackedCollator()([{"input_ids": [1, 2], "token_scores": [0.1, 0.2]}])


def test_columns_of_another_length_are_refused_by_row_and_name() -> None:
    with pytest.raises(PadlessError, match="row 1: 'labels' has 1 entries"):
        PaddedCollator()([{"input_ids": [1, 2], "labels": [1, 2]}, {"input_ids": [1, 2], "labels": [1]}])
    with pytest.raises(PadlessError, match="row 1 has no 'labels'"):
        PaddedCollator()([{"input_ids": [1, 2], "labels": [1, 2]}, {"input_ids": [1, 2]}])
    with pytest.raises(PadlessError, match="zeros between"):
        PaddedCollator()([{"input_ids": [1, 2, 3], "attention_mask": [1, 0, 1]}])
    with pytest.raises(PadlessError, match="no rows"):
        PaddedCollator()([])
    with pytest.raises(PadlessError, match="pad_to=2"):
        PackedCollator(pad_to=2)([[1, 2, 3]])


def test_widths_come_from_the_ladder() -> None:
    collator = PaddedCollator(ladder=[16, 4, 8])
    assert collator([[1] * 5, [1]])["input_ids"].shape == (2, 8)
    with pytest.raises(PadlessError, match="16"):
        collator([[1] * 17])


def test_the_sampler_s_zero_weight_rows_have_no_targets() -> None:
    data = [{"input_ids": [1] * n, "labels": [1] * n} for n in (3, 9)]
    sampler = TokenBudgetSampler([3, 9], token_budget=9, sequences_per_step=2, ranks=3, rank=0)
    targets = 0
    for rank in range(3):
        sampler = TokenBudgetSampler([3, 9], token_budget=9, sequences_per_step=2, ranks=3, rank=rank)
        loader = torch.utils.data.DataLoader(
            sampler.rows(data),
            batch_sampler=sampler,
            collate_fn=PaddedCollator(),  # type: ignore[arg-type]
        )
        for batch in loader:
            targets += int((batch["labels"] != -100).sum())
    assert targets == 12, "three ranks train on each row once"


@pytest.mark.parametrize("name", ["Qwen2", "Llama", "Mamba2"])
def test_models_of_transformers_take_batches_as_they_are(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    common = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 2}
    if name == "Mamba2":
        config = transformers.Mamba2Config(**common, num_heads=4, head_dim=16, state_size=8, n_groups=1, chunk_size=8)
    else:
        config = getattr(transformers, f"{name}Config")(
            **common, intermediate_size=64, num_attention_heads=2, num_key_value_heads=2
        )
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    rng = np.random.default_rng(0)
    rows = [{"input_ids": rng.integers(0, 50, n).tolist()} for n in (7, 3, 12)]

    def loss(batch: dict[str, Any]) -> torch.Tensor:
        with torch.no_grad():
            return model(**batch).loss

    single = [loss(PaddedCollator()([row])) * (len(row["input_ids"]) - 1) for row in rows]
    expected = sum(single) / sum(len(row["input_ids"]) - 1 for row in rows)
    assert torch.allclose(loss(PaddedCollator(multiple_of=8)(rows)), expected, atol=1e-5)
    if name != "Mamba2":  # recurrent layers do not keep packed sequences apart
        for layout in ("packed-position-ids", "packed-block-mask-additive"):
            assert torch.allclose(loss(PackedCollator(layout=layout)(rows)), expected, atol=1e-5)
