"""Reported failures of labels and masks, as tests."""

from __future__ import annotations

import pytest
import torch

import padless
from padless import PadlessError, compact, flatten, regroup
from padless.loss import denominators, shift_labels, target_mask
from padless.tensors import Field


def test_b01_a_samples_last_token_does_not_predict_the_next_sample() -> None:
    """torchtune#2613."""
    segments = [[11, 12, 13], [21, 22]]
    packed = flatten([{"input_ids": s, "labels": s} for s in segments])
    assert packed.inputs["labels"].tolist() == [[-100, 12, 13, -100, 22]]
    raw = torch.tensor([segments[0] + segments[1]])
    assert shift_labels(raw, document_ids=packed.document_ids).tolist() == [[12, 13, -100, 22, -100]]
    assert denominators(target_mask(raw, document_ids=packed.document_ids)).targets == 3


def test_b02_log_probs_of_predicted_tokens_get_a_filler_in_front() -> None:
    """prime-rl#605."""
    rows = [{"input_ids": [1, 2, 3], "logprobs": [-0.1, -0.2]}, {"input_ids": [4, 5], "logprobs": [-0.3]}]
    packed = flatten(rows, fields={"logprobs": Field(span="response", pad=0.0)})
    assert packed.inputs["logprobs"].tolist() == [pytest.approx([0.0, -0.1, -0.2, 0.0, -0.3])]


def test_b03_a_true_end_token_stays_a_target_where_padding_has_its_id() -> None:
    """transformers#23530, trl#976, transformers#22794."""
    ids, mask = torch.tensor([[5, 6, 2], [7, 2, 2]]), torch.tensor([[1, 1, 1], [1, 1, 0]])
    small = compact({"input_ids": ids, "attention_mask": mask, "labels": ids})
    assert small.batch["labels"].tolist() == [[5, 6, 2], [7, 2, -100]]
    assert small.lengths.tolist() == [3, 2]


def test_b04_a_real_token_with_the_padding_id_survives_the_trim() -> None:
    """trl#6357, trl#4970."""
    batch = {
        "input_ids": torch.tensor([[2, 2, 9, 2], [8, 2, 9, 2]]),
        "attention_mask": torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1]]),
    }
    step = regroup(batch, 4, plan=padless.microbatch([3, 4], 4, method="fixed", max_sequences=1))
    assert [m.inputs["input_ids"].tolist() for m in step] == [[[2, 9, 2]], [[8, 2, 9, 2]]]
    assert [m.inputs["input_ids"].shape[1] for m in step] == [3, 4]


def test_b05_a_loss_mask_is_carried_through_unchanged() -> None:
    """Megatron-Bridge#5213."""
    row = {"input_ids": [1, 5, 2, 6, 7], "loss_mask": [1, 1, 1, 1, 0]}
    assert flatten([row]).inputs["loss_mask"].tolist() == [[1, 1, 1, 1, 0]]
    batch = {key: torch.tensor([value]) for key, value in row.items()} | {"attention_mask": torch.ones(1, 5)}
    assert int(compact(batch).batch["loss_mask"].sum()) == 4


def test_b06_every_column_of_tokens_is_packed_or_refused_by_name() -> None:
    """trl#3728, trl#3749."""
    rows = [
        {"input_ids": [1, 2, 3], "completion_mask": [0, 1, 1], "labels": [-100, 2, 3]},
        {"input_ids": [4, 5], "completion_mask": [0, 1], "labels": [-100, 5]},
    ]
    packed = flatten(rows)
    assert packed.inputs["completion_mask"].tolist() == [[0, 1, 1, 0, 1]]
    assert packed.inputs["labels"].tolist() == [[-100, 2, 3, -100, 5]]
    with pytest.raises(PadlessError, match="'assistant_spans'"):
        flatten([{"input_ids": [1, 2], "assistant_spans": [0, 1]}])


def test_b07_each_field_comes_from_its_own_column_and_an_exact_fit_is_kept() -> None:
    """neuronx-distributed-training#22."""
    sample = {"input_ids": [10, 11], "attention_mask": [1, 1], "labels": [-100, 11]}
    packed = flatten([sample], layout="packed-position-ids")
    assert packed.inputs["labels"].tolist() == [[-100, 11]]
    (micro,) = regroup([sample], 2)
    assert micro.inputs["attention_mask"].tolist() == [[1, 1]]
    assert micro.inputs["labels"].tolist() == [[-100, 11]]
    plan = padless.pack([4, 4], 4)
    assert len(plan) == 2
    assert len(plan.dropped) == 0


def test_b09_rows_that_keep_no_target_are_counted() -> None:
    """trl#6671: the step's denominators say how many rows and tokens have a target after the cut."""
    ids = torch.arange(22).expand(32, 22)
    labels = ids.clone()
    labels[:, :20] = -100
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}
    cut = compact(batch, max_length=16)
    assert cut.truncated.tolist() == list(range(32))
    after = denominators(target_mask(cut.batch["labels"], cut.batch["attention_mask"]))
    assert after.targets == 0
    assert 32 - after.sequences == 32
    before = denominators(target_mask(labels, batch["attention_mask"]))
    assert (before.targets, before.sequences) == (64, 32)
