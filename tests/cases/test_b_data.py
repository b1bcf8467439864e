"""Labels and masks that packing got wrong: reports from public trackers, each with its input and what was expected."""

from __future__ import annotations

import torch

from padless.data import PackedCollator, PaddedCollator, measure


def test_b01_the_first_label_of_every_sequence_is_masked() -> None:
    """meta-pytorch/torchtune#2613: the last token of a sample is not trained to predict the next sample."""
    batch = PackedCollator()([{"input_ids": [11, 12, 13]}, {"input_ids": [21, 22]}])
    assert batch["labels"].tolist() == [[-100, 12, 13, -100, 22]]
    shifted = torch.cat([batch["labels"][0, 1:], torch.tensor([-100])])
    assert shifted.tolist() == [12, 13, -100, 22, -100]
    assert int((shifted != -100).sum()) == 3


def test_b02_log_probs_of_n_minus_1_tokens_stay_aligned() -> None:
    """PrimeIntellect-ai/prime-rl#605: one filler a sample keeps them beside their tokens."""
    rows = [
        {"input_ids": [1, 2, 3], "old_log_probs": [-0.1, -0.2]},
        {"input_ids": [4, 5], "old_log_probs": [-0.3]},
    ]
    packed = PackedCollator()(rows)["old_log_probs"]
    assert torch.allclose(packed, torch.tensor([[0.0, -0.1, -0.2, 0.0, -0.3]], dtype=packed.dtype))
    padded = PaddedCollator()(rows)["old_log_probs"]
    assert torch.allclose(padded, torch.tensor([[0.0, -0.1, -0.2], [0.0, -0.3, 0.0]], dtype=padded.dtype))


def test_b03_an_end_token_with_the_pad_id_stays_a_target() -> None:
    """huggingface/transformers#23530: padding is what the mask says."""
    rows = [
        {"input_ids": [5, 6, 2], "attention_mask": [1, 1, 1]},
        {"input_ids": [7, 2, 2], "attention_mask": [1, 1, 0]},
    ]
    batch = PaddedCollator(pad_token_id=2)(rows)
    assert batch["labels"].tolist() == [[5, 6, 2], [7, 2, -100]]
    assert batch["attention_mask"].sum(1).tolist() == [3, 2]


def test_b04_a_real_first_token_with_the_pad_id_is_kept() -> None:
    """huggingface/trl#6357: only columns whose mask is 0 go."""
    rows = [
        {"input_ids": [2, 2, 9, 2], "attention_mask": [0, 1, 1, 1]},
        {"input_ids": [8, 2, 9, 2], "attention_mask": [1, 1, 1, 1]},
    ]
    batches = [PaddedCollator(pad_token_id=2)([row]) for row in rows]
    assert [batch["input_ids"].tolist() for batch in batches] == [[[2, 9, 2]], [[8, 2, 9, 2]]]


def test_b05_a_loss_mask_is_carried_unchanged() -> None:
    """NVIDIA-NeMo/Megatron-Bridge#5213: no second filter by token value."""
    row = {"input_ids": [1, 5, 2, 6, 7], "loss_mask": [1, 1, 1, 1, 0]}
    for collator in (PackedCollator(), PaddedCollator(pad_token_id=2)):
        batch = collator([row])
        assert batch["loss_mask"].tolist() == [[1, 1, 1, 1, 0]]
        assert int(batch["loss_mask"].sum()) == 4


def test_b06_completion_masks_are_packed_and_obeyed() -> None:
    """huggingface/trl#3728: the mask column is not dropped."""
    rows = [
        {"input_ids": [1, 2, 3], "completion_mask": [0, 1, 1]},
        {"input_ids": [4, 5], "completion_mask": [0, 1]},
    ]
    batch = PackedCollator()(rows)
    assert batch["completion_mask"].tolist() == [[0, 1, 1, 0, 1]]
    assert batch["labels"].tolist() == [[-100, 2, 3, -100, 5]]


def test_b07_each_field_comes_from_its_own_column_and_exact_fits_are_kept() -> None:
    """aws-neuron/neuronx-distributed-training#22."""
    batch = PaddedCollator()([{"input_ids": [10, 11], "attention_mask": [1, 1], "labels": [-100, 11]}])
    assert batch["attention_mask"].tolist() == [[1, 1]]
    assert batch["labels"].tolist() == [[-100, 11]]
    assert measure([4, 4], max_length=4).counts["kept"] == 2
    packs = [PackedCollator(pad_to=4)([[1] * n]) for n in (4, 4)]
    assert all(pack["input_ids"].shape == (1, 4) for pack in packs)


def test_b09_rows_that_keep_no_target_after_cutting_are_counted() -> None:
    """huggingface/trl#6671: prompts of 20 with completions of 2, cut at 16."""
    rows = [{"input_ids": [1] * 22, "completion_mask": [0] * 20 + [1] * 2}] * 32
    found = measure(rows, max_length=16, overlong="truncate", targets=True)
    assert found.counts["without_targets"] == 32
    assert int(found.targets.sum()) == 0
    assert "32 without_targets" in repr(found)
