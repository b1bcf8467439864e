"""Reported failures of packing boundaries, as tests."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from padless import flatten, unflatten
from padless.logits import token_losses
from padless.loss import aggregate, target_mask
from padless.tensors import block_mask, cu_seqlens, document_ids, position_ids, seq_idx
from support.trainers import tiny_model


def test_a01_several_packed_rows_keep_their_boundaries() -> None:
    """axolotl#1375."""
    positions = torch.tensor([[0, 1, 2, 0, 1], [0, 1, 0, 1, 2]])
    offsets = cu_seqlens(positions)
    assert offsets.tolist() == [0, 3, 5, 7, 10]
    assert int(offsets.diff().max()) == 3
    packed = flatten([[1] * 3, [2] * 2, [3] * 2, [4] * 3], groups=[[0, 1], [2, 3]])
    assert packed.boundaries.cu_seqlens.tolist() == [0, 3, 5, 7, 10]
    assert packed.inputs["position_ids"].tolist() == positions.tolist()
    mask = block_mask(packed.boundaries.segment_ids)
    assert int(mask.sum()) == 18
    ids = packed.inputs["input_ids"]
    assert int((mask[:, 0] & (ids[:, :, None] != ids[:, None, :])).sum()) == 0


def test_a02_a_continued_sequence_is_one_segment() -> None:
    """transformers#32487."""
    assert cu_seqlens(torch.tensor([[5, 6, 7, 8]])).tolist() == [0, 4]


def test_a03_positions_may_begin_elsewhere_than_at_zero() -> None:
    """transformers#47496, transformers#47525."""
    positions = position_ids([3, 2], start=2)
    assert positions.tolist() == [[2, 3, 4, 2, 3]]
    assert cu_seqlens(positions).tolist() == [0, 3, 5]
    packed = flatten([[1, 2, 3], [4, 5]], position_start=2)
    assert packed.inputs["position_ids"].tolist() == [[2, 3, 4, 2, 3]]


def test_a05_the_padding_tail_is_one_segment_without_targets() -> None:
    """LLaMA-Factory#10452, VeOmni#746."""
    rows = [{"input_ids": [1, 2, 3], "labels": [1, 2, 3]}, {"input_ids": [4, 5], "labels": [4, 5]}]
    packed = flatten(rows, pad_to=8)
    assert packed.boundaries.cu_seqlens.tolist() == [0, 3, 5, 8]
    assert packed.inputs["position_ids"].tolist() == [[0, 1, 2, 0, 1, 0, 1, 2]]
    assert packed.inputs["labels"][0, 5:].tolist() == [-100] * 3
    assert packed.boundaries.sequences == 2
    assert int((packed.document_ids >= 0).sum()) == 5


def test_a06_later_samples_do_not_see_earlier_ones() -> None:
    """nanoVLM#201, nanoVLM#204."""
    model = tiny_model("qwen2").eval()
    second = [9, 8, 7]
    with torch.no_grad():
        runs = []
        for first in ([3, 4, 5, 6], [30, 31, 32, 33]):
            packed = flatten([first, second])
            assert packed.inputs["position_ids"].tolist() == [[0, 1, 2, 3, 0, 1, 2]]
            runs.append(unflatten(model(input_ids=packed.inputs["input_ids"], **boundary(packed)).logits, packed)[1])
        alone = model(input_ids=torch.tensor([second])).logits[0]
    assert torch.equal(runs[0], runs[1])
    torch.testing.assert_close(runs[0], alone, atol=1e-5, rtol=1e-5)


def boundary(packed: object) -> dict[str, object]:
    inputs = packed.inputs  # type: ignore[attr-defined]
    return {key: inputs[key] for key in ("position_ids", "use_cache")}


def test_a07_a_sequence_index_for_recurrent_layers_also_in_context_parallel_shards() -> None:
    """prime-rl#3000, SkyRL#2056, transformers#44836."""
    assert seq_idx([2, 2]).tolist() == [[0, 0, 1, 1]]
    edges = flatten([[1] * 3, [2] * 5]).boundaries
    shards = [edges.context_parallel(2, rank, contiguous=True).seq_idx[0].tolist() for rank in range(2)]
    assert shards == [[0, 0, 0, 1], [1, 1, 1, 1]]


def test_a08_a_packed_row_has_no_mask_of_ones_beside_its_positions() -> None:
    """trl#3673, trl#3067."""
    rows = [[1, 2], [3, 4, 5]]
    assert "attention_mask" not in flatten(rows).inputs
    mask = flatten(rows, layout="packed-block-mask-bool").inputs["attention_mask"]
    assert mask.shape == (1, 1, 5, 5)
    assert int(mask.sum()) == 9


def test_a09_positions_restart_beside_a_block_mask_too() -> None:
    """LLaMA-Factory#7318."""
    rows = [[5, 6, 7, 8], [9, 10, 11]]
    packed = flatten(rows, layout="packed-block-mask-additive")
    assert packed.inputs["position_ids"].tolist() == [[0, 1, 2, 3, 0, 1, 2]]
    model = tiny_model("qwen2").eval()
    with torch.no_grad():
        got = unflatten(model(**packed.inputs).logits, packed)
        for row, logits in zip(rows, got, strict=True):
            alone = model(input_ids=torch.tensor([row])).logits[0]
            torch.testing.assert_close(logits, alone, atol=1e-5, rtol=1e-5)


def test_a10_empty_sequences_keep_their_slot() -> None:
    """flash-attention#1537, flash-attention#2562."""
    rows = [[], [1], [], [2, 3]]
    packed = flatten(rows)
    assert packed.boundaries.cu_seqlens.tolist() == [0, 0, 1, 1, 3]
    assert packed.boundaries.max_length == 2
    assert cu_seqlens([0, 1, 0, 2], empty=False).tolist() == [0, 1, 3]
    back = unflatten(packed.inputs["input_ids"], packed)
    assert [len(row) for row in back] == [0, 1, 0, 2]
    assert [row.tolist() for row in back] == rows


def test_a11_offsets_cover_the_whole_buffer() -> None:
    """flash-linear-attention#892, flash-attention#2324."""
    assert cu_seqlens([3, 2], pad_to=8)[-1] == 8
    packed = flatten([[1, 2, 3], [4, 5]], pad_to=8)
    assert packed.boundaries.cu_seqlens[-1] == packed.inputs["input_ids"].numel() == 8
    hidden = torch.full((1, 8, 2), float("nan"))
    hidden[:, :5] = 1.0
    hidden.requires_grad_()
    rows = unflatten(hidden, packed)
    sum(row.sum() for row in rows).backward()
    assert hidden.grad[0, :5].eq(1).all()
    assert hidden.grad[0, 5:].eq(0).all()  # what lies in the slack reaches nothing


def test_a12_the_summed_loss_of_a_packed_row_is_the_sum_over_its_samples() -> None:
    """functionary#265."""
    samples = [[1, 2, 3], [4, 5, 6, 7, 8]]
    model = tiny_model("qwen2").eval()
    packed = flatten([{"input_ids": s, "labels": s} for s in samples])
    labels = packed.inputs["labels"]
    assert int((labels != -100).sum()) == 6
    naive = target_mask(torch.tensor([samples[0] + samples[1]]))
    assert int(naive.sum()) == 7
    with torch.no_grad():
        together = model(input_ids=packed.inputs["input_ids"], labels=labels, **boundary(packed)).loss * 6
        apart = sum(model(input_ids=torch.tensor([s]), labels=torch.tensor([s])).loss * (len(s) - 1) for s in samples)
        values = token_losses(model(input_ids=packed.inputs["input_ids"], **boundary(packed)).logits, labels)
    assert float(together) == pytest.approx(float(apart), rel=1e-4)
    assert float(aggregate(values, labels != -100)) * 6 == pytest.approx(float(apart), rel=1e-4)


@pytest.mark.parametrize("lengths", [[3, 9, 4, 6, 10], [32]])
def test_a14_context_parallel_shards_attend_within_global_boundaries(lengths: list[int]) -> None:
    """axolotl#3608: each shard's queries over all keys, by the boundaries of the whole row."""
    packed = flatten([[1] * n for n in lengths], sequence_multiple_of=4)
    edges = packed.boundaries
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, edges.width, 8, dtype=torch.float64) for _ in range(3))
    whole = scaled_dot_product_attention(q, k, v, attn_mask=block_mask(edges.segment_ids))
    sharded = torch.empty_like(whole)
    for rank in range(2):
        shard = edges.context_parallel(2, rank)
        place = torch.arange(edges.width)
        allowed = (shard.seq_idx[0][:, None] == edges.segment_ids[0]) & (shard.index[:, None] >= place)
        sharded[:, :, shard.index] = scaled_dot_product_attention(q[:, :, shard.index], k, v, attn_mask=allowed)
        assert torch.equal(shard.position_ids[0], edges.position_ids[0, shard.index])
    real = packed.document_ids[0] >= 0
    assert float(sharded[:, :, real].square().sum() / whole[:, :, real].square().sum()) == pytest.approx(1.0, abs=1e-12)
    params = edges.packed_seq_params()
    assert params["cu_seqlens_q"].diff().tolist() == lengths
    assert (params["cu_seqlens_q_padded"].diff() % 4 == 0).all()
    assert document_ids(lengths).max() == len(lengths) - 1
