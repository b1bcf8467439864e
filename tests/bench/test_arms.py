"""Every arm computes each sequence as if alone; only how it is cut into micro-batches differs."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from padless import CostModel, PadlessError
from padless.bench.arms import ALL_ARMS, ALONE, ARMS, Setting, group, pick_arms
from padless.bench.batch import add_rollout, make_batch
from padless.bench.equality import alone_log_probs, probe_layouts
from padless.bench.models import build
from padless.bench.workloads import from_lengths
from support.tiny_models import BAMBA, QWEN2, config_file

PROMPTS, RESPONSES = [3, 1, 5, 2, 4, 6, 2], [9, 2, 12, 4, 1, 7, 3]
COST = CostModel(per_microbatch=5.0)


@pytest.fixture(scope="module")
def work():
    return from_lengths(PROMPTS, RESPONSES, prompt_max=8, response_max=16, vocabulary=96)


@pytest.fixture(scope="module")
def batch(work):
    return make_batch(work)


def setting(**changes) -> Setting:
    return Setting(rows=3, token_budget=40, cost=COST, **changes)


def test_the_batch_is_padded_as_the_published_method_pads(batch, work):
    assert batch["input_ids"].shape == (7, 24)
    for row, (prompt, response) in enumerate(zip(work.prompts, work.responses, strict=True)):
        real = batch["attention_mask"][row].bool()
        assert real.nonzero()[:, 0].tolist() == list(range(8 - len(prompt), 8 + len(response)))
        assert batch["input_ids"][row][real].tolist() == [*prompt, *response]
        assert batch["position_ids"][row][real].tolist() == list(range(len(prompt) + len(response)))
        assert batch["response_mask"][row].sum() == len(response)
        assert len(batch["advantages"][row].unique()) <= 2  # one value, and 0 on padding


def test_the_rollout_is_somewhat_off_the_policy_and_clips_some_tokens(batch):
    policy = torch.full((7, 16), -2.0)
    old = add_rollout(batch, policy, seed=0)["old_log_probs"]
    mask = batch["response_mask"].bool()
    assert (old[~mask] == 0).all()
    assert 0.05 < (old - policy)[mask].std() < 0.2
    assert torch.equal(old, add_rollout(batch, policy, seed=0)["old_log_probs"])


@pytest.mark.parametrize("no_mask", [False, True])
@pytest.mark.parametrize("arm", [*ARMS, ALONE])
def test_every_token_appears_once_with_its_fields_and_comes_back_to_its_place(batch, arm, no_mask):
    groups = group(arm, batch, setting(no_mask=no_mask))
    total, values = 0, []
    for index in range(len(groups)):
        micro = groups.micro(index)
        assert micro.rows * micro.width >= sum(micro.lengths)
        assert set(micro.inputs) <= {"input_ids", "attention_mask", "position_ids"}
        total += sum(micro.lengths)
        ids = micro.inputs["input_ids"]
        ids = ids if micro.columns is None else ids[:, -micro.columns :]
        assert micro.fields["response_mask"].shape == ids.shape
        values.append(ids.float())
    assert total == int(batch["attention_mask"].sum())
    mask = batch["response_mask"].bool()
    assert torch.equal(groups.restore(values)[mask], batch["input_ids"][:, 8:].float()[mask])
    marked = {**batch, "ref_log_probs": torch.arange(7 * 16.0).view(7, 16) * batch["response_mask"]}
    again = group(arm, marked, setting(no_mask=no_mask))
    back = again.restore([again.micro(i).fields["ref_log_probs"] for i in range(len(again))])
    assert torch.equal(back[mask], marked["ref_log_probs"][mask])


def test_fixed_and_truncate_take_the_same_rows_and_only_truncate_is_narrower(batch):
    fixed, cut = (group(arm, batch, setting()) for arm in ("fixed", "truncate"))
    shapes = [[(g.micro(i).rows, g.micro(i).width) for i in range(len(g))] for g in (fixed, cut)]
    assert shapes[0] == [(3, 24), (3, 24), (1, 24)]
    assert shapes[1] == [(3, 17), (3, 13), (1, 5)]


def test_greedy_and_balanced_keep_the_token_budget_and_packed_has_no_padding(batch):
    for arm in ("greedy", "balanced", "packed"):
        groups = group(arm, batch, setting())
        micros = [groups.micro(i) for i in range(len(groups))]
        assert all(micro.rows * micro.width <= 40 for micro in micros), arm
    assert sum(micro.width for micro in micros) == int(batch["attention_mask"].sum())


def test_twins_differ_by_the_attention_mask_alone(batch):
    for arm in ("truncate", "greedy", "balanced"):
        bare, masked = (group(name, batch, setting(no_mask=True)).micro(0) for name in (arm, f"{arm}-mask"))
        assert set(masked.inputs) - set(bare.inputs) == {"attention_mask"}
        assert torch.equal(bare.inputs["input_ids"], masked.inputs["input_ids"])


def test_arms_are_checked_by_name():
    assert pick_arms(["packed", "fixed"]) == ("packed", "fixed")
    with pytest.raises(PadlessError, match=", ".join(map(repr, ALL_ARMS))):
        pick_arms(["padded"])
    with pytest.raises(PadlessError, match="more than once"):
        pick_arms(["fixed", "fixed"])
    with pytest.raises(PadlessError, match="no arm"):
        pick_arms([])


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    return build(config_file(tmp_path_factory.mktemp("m"), "qwen", QWEN2)).model.eval()


@pytest.mark.parametrize("arm", [*ARMS, "packed-position-ids"])
def test_log_probabilities_equal_those_of_each_sequence_alone(batch, qwen, arm):
    how = setting(no_mask=True, segments=arm != "packed-position-ids")
    alone = alone_log_probs(qwen, batch, how)
    groups = group(arm.removesuffix("-position-ids"), batch, how)
    with torch.no_grad():
        found = groups.restore([groups.micro(i).log_probs(qwen) for i in range(len(groups))])
    mask = batch["response_mask"].bool()
    assert (found - alone)[mask].abs().max() < 1e-5
    assert qwen.config._attn_implementation == "sdpa"


def test_alone_is_what_the_model_says_about_a_plain_sequence(batch, work, qwen):
    found = alone_log_probs(qwen, batch, setting())
    for row in (0, 4):
        ids = torch.from_numpy(np.concatenate([work.prompts[row], work.responses[row]]))[None]
        with torch.no_grad():
            plain = qwen(input_ids=ids).logits.log_softmax(-1)[0, :-1].gather(1, ids[0, 1:, None])[:, 0]
        count = len(work.responses[row])
        assert torch.allclose(found[row, :count], plain[-count:], atol=1e-6)
        assert (found[row, count:] == 0).all()


def test_a_transformer_is_exact_in_every_layout_and_a_recurrent_model_leaks_when_packed(batch, qwen, tmp_path):
    alone = alone_log_probs(qwen, batch, setting())
    found = probe_layouts(qwen, batch, setting(), alone, arms=ARMS)
    assert list(found) == ["right-padded-no-mask", "right-padded", "packed"]
    assert all(probe.exact and probe.foreign_influence == 0 for probe in found.values())
    bamba = build(config_file(tmp_path, "bamba", BAMBA)).model.eval()
    found = probe_layouts(bamba, batch, setting(), alone_log_probs(bamba, batch, setting()), arms=ARMS)
    assert found["right-padded-no-mask"].exact
    assert found["right-padded"].exact
    assert not found["packed"].exact
    assert not found["packed-position-ids"].exact
    assert found["packed"].foreign_influence > 1e-4
