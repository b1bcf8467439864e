"""Packed rows: flatten, unflatten, boundaries in every form, attention masks, context-parallel shards."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from padless import PadlessError, flatten, unflatten
from padless.tensors import (
    PACKED_LAYOUTS,
    Field,
    block_mask,
    cu_seqlens,
    document_ids,
    flex_block_mask,
    lengths_from_mask,
    mask_mod,
    position_ids,
    positions_from_mask,
    segment_lengths,
    seq_idx,
)
from support.batches import FIELDS, random_mask, span_of, token_batch

seeds = st.integers(0, 1 << 30)
lengths_lists = st.lists(st.integers(0, 9), min_size=1, max_size=8).filter(any)


def rows_of(lengths: list[int]) -> list[dict[str, Any]]:
    return [{"input_ids": torch.arange(n) + 10 * i, "labels": torch.arange(n) + 10 * i} for i, n in enumerate(lengths)]


@given(lengths_lists, st.sampled_from([1, 3, 4]), st.sampled_from([1, 2]))
def test_rows_come_back_in_their_slots_empty_ones_too(lengths: list[int], multiple: int, each: int) -> None:
    rows = rows_of(lengths)
    packed = flatten(rows, multiple_of=multiple, sequence_multiple_of=each)
    assert packed.inputs["input_ids"].shape[1] % multiple == 0
    back = unflatten(packed.inputs["input_ids"], packed)
    assert [row.tolist() for row in back] == [row["input_ids"].tolist() for row in rows]
    hidden = torch.randn(*packed.inputs["input_ids"].shape, 3)
    assert [tuple(row.shape) for row in unflatten(hidden, packed)] == [(n, 3) for n in lengths]


@given(seeds, st.sampled_from(PACKED_LAYOUTS))
@settings(max_examples=40)
def test_a_padded_batch_comes_back_from_several_packed_rows(seed: int, layout: str) -> None:
    rng = np.random.default_rng(seed)
    batch = token_batch(rng, random_mask(rng, 6, 8, holes="mask" in layout))
    groups = np.array_split(rng.permutation(6), 3)
    packed = flatten(batch, fields=FIELDS, layout=layout, groups=groups)
    inside = span_of(batch["attention_mask"])
    assert packed.inputs["input_ids"].shape[0] == 3
    assert torch.equal(unflatten(packed.inputs["input_ids"], packed), batch["input_ids"] * inside)
    assert torch.equal(
        unflatten(packed.inputs["advantages"], packed, fill=9.0)[~inside], torch.full((int((~inside).sum()),), 9.0)
    )
    for row, group in enumerate(groups):
        ids = packed.document_ids[row]
        assert ids[ids >= 0].unique_consecutive().tolist() == group.tolist()


@given(lengths_lists, st.integers(0, 5), st.sampled_from([1, 2, 4]))
def test_every_form_of_boundary_data_tells_the_same_story(lengths: list[int], slack: int, each: int) -> None:
    held = [-(-n // each) * each for n in lengths]
    packed = flatten(rows_of(lengths), pad_to=sum(held) + slack, sequence_multiple_of=each)
    edges = packed.boundaries
    offsets = edges.cu_seqlens
    assert offsets.dtype == torch.int32
    assert offsets[0] == 0
    assert offsets[-1] == edges.width == packed.inputs["input_ids"].numel()  # no slack that a kernel leaves unwritten
    segments = edges.segment_ids[0]
    assert torch.equal(segments, torch.repeat_interleave(torch.arange(len(offsets) - 1), offsets.diff().long()))
    assert torch.equal(edges.seq_idx[0].long(), segments - segments[0])
    starts = offsets[:-1].long()[segments]
    assert torch.equal(edges.position_ids[0], torch.arange(edges.width) - starts)
    assert edges.max_length == int(offsets.diff().max())
    assert int((edges.document_ids < 0).sum()) == slack
    assert edges.sequences == len(lengths)
    params = edges.packed_seq_params()
    assert params["cu_seqlens_q"].diff().tolist()[: len(lengths)] == lengths
    assert params["cu_seqlens_q_padded"].tolist() == offsets.tolist()
    flash = edges.flash_kwargs()
    assert set(flash) == {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"}
    if each == 1:
        assert position_ids(lengths, pad_to=edges.width).tolist() == edges.position_ids.tolist()
        assert document_ids(lengths, pad_to=edges.width).tolist() == edges.document_ids.tolist()
        assert cu_seqlens(lengths, pad_to=edges.width).tolist() == offsets.tolist()
        assert seq_idx(lengths).numel() == sum(lengths)


@given(lengths_lists, st.integers(0, 200), st.sampled_from([None, 3, 20]), st.booleans())
@settings(max_examples=40)
def test_flex_block_masks_equal_those_that_torch_builds_from_all_pairs(
    lengths: list[int], slack: int, window: int | None, causal: bool
) -> None:
    from torch.nn.attention.flex_attention import create_block_mask

    lengths = [n * 9 for n in lengths]
    ids = document_ids(lengths, pad_to=sum(lengths) + slack)
    width = ids.shape[1]
    rule = mask_mod(ids, causal=causal, window=window)
    reference = create_block_mask(rule, 1, None, width, width, device="cpu", BLOCK_SIZE=16)
    made = flex_block_mask(ids, causal=causal, window=window, block_size=16)
    assert torch.equal(made.to_dense(), reference.to_dense())
    assert torch.equal(made.full_kv_num_blocks, reference.full_kv_num_blocks)
    assert torch.equal(made.kv_num_blocks, reference.kv_num_blocks)


def test_flex_attention_with_block_masks_equals_each_sequence_alone() -> None:
    from torch.nn.attention.flex_attention import flex_attention

    torch.manual_seed(0)
    lengths = [40, 7, 33]
    ids = document_ids(lengths, pad_to=96)
    q, k, v = (torch.randn(1, 2, 96, 8, dtype=torch.float64) for _ in range(3))
    packed = flex_attention(q, k, v, block_mask=flex_block_mask(ids, block_size=32))
    start = 0
    for n in lengths:
        own = slice(start, start + n)
        alone = torch.nn.functional.scaled_dot_product_attention(
            q[:, :, own], k[:, :, own], v[:, :, own], is_causal=True
        )
        torch.testing.assert_close(packed[:, :, own], alone, atol=1e-9, rtol=1e-9)
        start += n


def test_masks_with_a_window_or_without_causality() -> None:
    ids = document_ids([3, 2])
    assert block_mask(ids, causal=False).sum() == 9 + 4
    assert block_mask(ids, window=1).sum() == 5
    additive = block_mask(ids, kind="additive", dtype=torch.bfloat16)
    assert additive.dtype == torch.bfloat16
    assert torch.equal(additive == 0, block_mask(ids))
    assert torch.isfinite(additive).all()
    with pytest.raises(PadlessError, match="kind='float' is unknown"):
        block_mask(ids, kind="float")  # type: ignore[arg-type]
    with pytest.raises(PadlessError, match="expected"):
        block_mask(ids[0])


@given(st.lists(st.integers(1, 9), min_size=1, max_size=5), st.sampled_from([2, 3]))
def test_context_parallel_shards_cover_every_cell_once_with_equal_causal_work(lengths: list[int], size: int) -> None:
    packed = flatten(rows_of(lengths), sequence_multiple_of=2 * size)
    shards = [packed.boundaries.context_parallel(size, rank) for rank in range(size)]
    assert sorted(torch.cat([s.index for s in shards]).tolist()) == list(range(packed.boundaries.width))
    work = [int((s.position_ids + 1).sum()) for s in shards]  # keys that each rank's queries see
    assert len(set(work)) == 1
    for shard in shards:
        assert torch.equal(shard.cu_seqlens * size, packed.boundaries.cu_seqlens)
    with pytest.raises(PadlessError, match="rank="):
        packed.boundaries.context_parallel(size, size)
    with pytest.raises(PadlessError, match=f"sequence_multiple_of={2 * size}"):
        flatten(rows_of([1]), sequence_multiple_of=1).boundaries.context_parallel(size, 0)


def test_offsets_can_have_a_constant_number_of_entries() -> None:
    assert cu_seqlens([3, 2], entries=6).tolist() == [0, 3, 5, 5, 5, 5]
    with pytest.raises(PadlessError, match="need 3 offsets"):
        cu_seqlens([3, 2], entries=2)


def test_lengths_and_positions_read_from_masks() -> None:
    mask = torch.tensor([[0, 1, 0, 1, 0], [1, 1, 0, 0, 0], [0, 0, 0, 0, 0]])
    assert lengths_from_mask(mask).tolist() == [3, 2, 0]
    assert positions_from_mask(mask, start=2).tolist()[:2] == [[2, 2, 3, 4, 5], [2, 3, 4, 5, 6]]
    assert segment_lengths(mask) == [[2], [2], []]


@pytest.mark.parametrize(
    ("rows", "options", "named"),
    [
        ([], {}, "no rows"),
        ([{"labels": [1]}], {}, "no input_ids"),
        ([{"input_ids": [1], "labels": [1]}, {"input_ids": [1]}], {}, "row 1 has the keys"),
        ([{"input_ids": [1, 2], "labels": [1]}], {}, "row 0: 'labels' has 1 entries"),
        ([{"input_ids": [1, 2], "odd": [1, 2]}], {}, "role of 'odd' is unknown"),
        ([{"input_ids": [1, 2], "attention_mask": [1, 0]}], {}, "zeros"),
        ([[1, 2, 3]], {"pad_to": 2}, "too short"),
        ([[1, 2, 3]], {"layout": "padded"}, "layout='padded' is unknown"),
        ([[1, 2, 3]], {"groups": [[0], [0]]}, "more than once"),
        ([[1, 2, 3]], {"groups": [[1]]}, "names? row 1"),
    ],
)
def test_rows_that_cannot_be_flattened_are_refused(rows: Any, options: dict[str, Any], named: str) -> None:
    with pytest.raises(PadlessError, match=named):
        flatten(rows, **options)


def test_a_segment_numbered_mask_is_packed_already() -> None:
    batch = {"input_ids": torch.ones(1, 6, dtype=torch.long), "attention_mask": torch.tensor([[1, 1, 2, 2, 2, 0]])}
    with pytest.raises(PadlessError, match="numbers segments"):
        flatten(batch)


def test_row_fields_and_responses_of_rows_without_padding() -> None:
    rows = [
        {"input_ids": [1, 2, 3], "rewards": torch.tensor(1.0), "note": "a", "old_log_probs": [-0.1, -0.2]},
        {"input_ids": [4, 5], "rewards": torch.tensor(2.0), "note": "b", "old_log_probs": [-0.3]},
    ]
    packed = flatten(rows, fields={"old_log_probs": Field(span="response", pad=0.0)})
    assert packed.inputs["rewards"].tolist() == [1.0, 2.0]
    assert packed.inputs["note"] == ["a", "b"]
    back = unflatten(packed.inputs["old_log_probs"], packed, span="response")
    assert [len(row) for row in back] == [2, 1]
