"""A whole run on tiny models: arms agree, leaks are found, and the result has the documented keys."""

from __future__ import annotations

import copy
import json
import statistics

import numpy as np
import pytest
import torch

from padless import CostModel, PadlessError
from padless.bench import BenchOptions, built_in, policy_update, run
from padless.bench.arms import ALONE, Setting, group
from padless.bench.batch import add_rollout, make_batch
from padless.bench.equality import LIMITS, alone_log_probs, distance
from padless.bench.measure import Clock, PeakMemory
from padless.bench.models import build
from padless.bench.results import middle
from padless.bench.step import OPTIMIZER, Trajectory, policy_loss, run_step
from padless.bench.workloads import from_lengths
from padless.loss import denominators
from support.tiny_models import QWEN2, RECURRENT_GEMMA, config_file

ARM_KEYS = {
    "seconds", "seconds_all", "reference_seconds", "train_seconds", "overhead_seconds", "real_tokens", "padded_tokens",
    "occupancy", "real_tokens_per_second", "peak_memory_bytes", "microbatches", "valid", "max_logprob_difference",
    "loss_difference", "gradient_difference", "update_difference",
}  # fmt: skip


def test_the_json_has_the_documented_keys_and_nothing_else(small_report):
    told = json.loads(json.dumps(small_report.to_dict()))
    assert set(told) == {"padless", "machine", "versions", "workload", "token_budget", "models"}
    assert set(told["models"]) == {"qwen.json", "jamba.json"}
    for model in told["models"].values():
        assert set(model) == {"arms", "ratio_to_packed", "ratio_to_fixed", "gain_recovered", "leaks"}
        assert list(model["arms"]) == ["fixed", "truncate", "greedy", "balanced", "packed"]
        for arm in model["arms"].values():
            assert set(arm) == ARM_KEYS
            assert len(arm["seconds_all"]) >= 3


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([3.0], 3.0),
        ([1.0, 2.0], 1.5),
        ([9.0, 1.0, 2.0], 2.0),
        ([9.0, 1.0, 3.0, 2.0], 2.5),
        ([1, 2, 3, 0, 99, 4, 5, 6], 3.5),
    ],
)
def test_middle_leaves_out_the_smallest_and_the_largest_quarter(values, expected):
    assert middle(values) == expected


def test_figures_of_an_arm_fit_together(small_report, small_workload):
    for model in small_report.to_dict()["models"].values():
        for name, arm in model["arms"].items():
            assert arm["real_tokens"] == int(small_workload.lengths.sum())
            assert arm["occupancy"] == pytest.approx(arm["real_tokens"] / arm["padded_tokens"])
            assert arm["seconds"] == statistics.median(arm["seconds_all"])
            assert arm["real_tokens_per_second"] == pytest.approx(arm["real_tokens"] / arm["seconds"])
            parts = arm["reference_seconds"] + arm["train_seconds"] + arm["overhead_seconds"]
            assert parts == pytest.approx(arm["seconds"], rel=0.8)  # medians of parts, not parts of the median
            rounds = zip(arm["seconds_all"], model["arms"]["packed"]["seconds_all"], strict=False)
            ratios = np.sort([a / b for a, b in rounds])
            assert ratios[0] <= model["ratio_to_packed"][name] <= ratios[-1]
            if len(ratios) in (3, 4):
                assert model["ratio_to_packed"][name] == pytest.approx(np.median(ratios))
        by_packed, by_fixed = model["ratio_to_packed"], model["ratio_to_fixed"]
        assert by_fixed["fixed"] == 1.0
        assert sorted(by_fixed, key=by_fixed.get) == sorted(by_packed, key=by_packed.get)
        assert 1 / by_fixed["packed"] == pytest.approx(by_packed["fixed"])
        assert model["arms"]["fixed"]["padded_tokens"] == 6 * small_workload.width
        assert model["arms"]["packed"]["occupancy"] == 1.0
        assert model["gain_recovered"]["packed"] == 1.0
        assert model["gain_recovered"]["fixed"] == 0.0


def test_every_arm_of_a_transformer_agrees_with_each_sequence_alone(small_report):
    for name, arm in small_report.models["qwen.json"].arms.items():
        assert arm.valid, name
        assert arm.differences["max_logprob_difference"] < LIMITS.logprob
        assert arm.differences["gradient_difference"] < LIMITS.gradient
        assert arm.differences["update_difference"] < LIMITS.update


def test_packing_is_timing_only_in_the_hybrid_and_its_leak_is_measured(small_report):
    jamba = small_report.models["jamba.json"]
    assert [name for name, arm in jamba.arms.items() if not arm.valid] == ["packed"]
    leak = jamba.to_dict()["leaks"]["packed"]
    assert not leak["exact"]
    assert leak["foreign_influence"] > 1e-5
    assert jamba.arms["packed"].differences["gradient_difference"] > 1e-4
    assert jamba.failed == []
    assert jamba.described["linear_scan"]


def test_times_with_and_without_the_mask_are_both_told(small_report):
    bare = small_report.models["qwen.json"].leaks["right-padded-no-mask"]
    assert bare["used"]
    assert set(bare["seconds"]) == {"truncate", "greedy", "balanced"}
    assert all(set(pair) == {"with_mask", "without_mask"} for pair in bare["seconds"].values())


def test_a_model_that_left_padding_breaks_is_judged_by_each_sequence_alone(tmp_path):
    """RecurrentGemma's gradients are wrong under left padding; padless's arms are right all the same."""
    work = built_in("gsm8k-rl", sequences=4, scale=0.01, seed=1)
    options = BenchOptions(
        models=(config_file(tmp_path, "gemma", RECURRENT_GEMMA),), arms=("fixed", "truncate"), repeats=1, masks=False
    )
    found = run(work, options).models["gemma.json"]
    assert not found.arms["fixed"].valid
    assert found.arms["truncate"].valid
    assert found.failed == []


def test_a_broken_arm_is_found(tmp_path, monkeypatch, small_workload):
    """A fault put into the compaction, one token lost at each row's end, makes the arm invalid."""
    stock = policy_update.group.__globals__["compact"]

    def broken(batch):
        made = stock(batch)
        last = made.batch["attention_mask"].sum(1) - 1
        made.batch["input_ids"][torch.arange(len(last)), last] = 1
        return made

    monkeypatch.setitem(policy_update.group.__globals__, "compact", broken)
    options = BenchOptions(
        models=(config_file(tmp_path, "qwen", QWEN2),), arms=("fixed", "truncate"), repeats=1, masks=False
    )
    found = run(small_workload, options).models["qwen.json"]
    assert found.arms["fixed"].valid
    assert found.failed == ["truncate"]


def make_step(model, prompts, responses):
    work = from_lengths(prompts, responses, prompt_max=8, response_max=16, vocabulary=96)
    setting = Setting(rows=2, token_budget=48, cost=CostModel())
    batch = make_batch(work)
    return add_rollout(batch, alone_log_probs(model, batch, setting), seed=0), setting


def test_one_step_is_plain_torch_on_the_whole_batch(tmp_path):
    """Loss, gradient and update of a step equal those of hand-written code that pads nothing and regroups nothing."""
    model = build(config_file(tmp_path, "qwen", QWEN2)).model.eval().requires_grad_(False)
    batch, setting = make_step(model, [3, 2, 6], [9, 4, 2])
    trajectory = Trajectory(model)
    step = run_step("balanced", trajectory, batch, setting, keep=True)
    by_hand = copy.deepcopy(model).train().requires_grad_(True)
    groups = group(ALONE, batch, setting)
    terms = []
    for index in range(3):
        micro = groups.micro(index)
        now = by_hand(**micro.inputs).logits.log_softmax(-1)[:, :-1]
        now = now.gather(2, micro.inputs["input_ids"][:, 1:, None])[..., 0]
        fields = {name: value[:, 1:] for name, value in micro.fields.items()}
        ratio = (now - fields["old_log_probs"]).exp()
        advantage = fields["advantages"]
        gain = torch.minimum(advantage * ratio, advantage * ratio.clamp(0.8, 1.2))
        terms.append(-gain[fields["response_mask"] > 0])  # the reference is the policy: no divergence yet
    loss = torch.cat(terms).mean()
    loss.backward()
    assert step.loss == pytest.approx(loss.item(), rel=1e-5)
    assert distance(step.evidence.gradient, [p.grad.flatten() for p in by_hand.parameters()]) < 1e-5
    options = dict(OPTIMIZER)
    optimizer = torch.optim.AdamW(by_hand.parameters(), **options)
    optimizer.step()
    assert distance(list(trajectory.policy.parameters()), list(by_hand.parameters())) < 1e-7
    assert step.peak_memory_bytes is None or step.peak_memory_bytes >= 0


def test_the_divergence_penalty_is_zero_at_the_reference_and_positive_away_from_it():
    fields = {"response_mask": torch.ones(1, 3), "advantages": torch.zeros(1, 3)}
    log_probs = torch.tensor([[-1.0, -2.0, -3.0]])
    fields |= {"old_log_probs": log_probs, "ref_log_probs": log_probs}
    count = denominators(fields["response_mask"])
    assert policy_loss(log_probs, fields, count) == 0
    assert policy_loss(log_probs + 0.5, fields, count) > 0


def test_a_shared_policy_is_set_back_before_each_step(tmp_path):
    model = build(config_file(tmp_path, "qwen", QWEN2)).model.eval().requires_grad_(False)
    batch, setting = make_step(model, [3, 2], [5, 4])
    policy = copy.deepcopy(model).requires_grad_(True)
    losses = []
    for _ in range(2):
        trajectory = Trajectory(model, policy=policy)
        trajectory.begin()
        losses.append(run_step("fixed", trajectory, batch, setting).loss)
    assert losses[0] == losses[1]
    assert any(bool(change.any()) for change in trajectory.update())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"token_budget": 3}, "sequence .* over the token budget 3"),
        ({"token_budget": -1}, "token_budget=-1"),
        ({"rows": 0}, "rows=0"),
        ({"repeats": 0}, "repeats=0"),
        ({"models": ()}, "no model"),
        ({"arms": ("nonsense",)}, "nonsense"),
    ],
)
def test_options_are_checked_before_a_model_is_built(options, message, small_workload):
    with pytest.raises(PadlessError, match=message):
        run(small_workload, BenchOptions(**options))


def test_a_sequence_beyond_the_models_positions_is_refused(tmp_path):
    config = {**QWEN2, "max_position_embeddings": 16}
    work = from_lengths([4], [20], prompt_max=8, response_max=24)
    with pytest.raises(PadlessError, match=r"24 tokens; model tiny\.json has 16 positions"):
        run(work, BenchOptions(models=(config_file(tmp_path, "tiny", config),)))


def test_a_model_that_cannot_run_says_so(tmp_path):
    config = {**QWEN2, "num_key_value_heads": 3, "num_attention_heads": 4}
    work = from_lengths([4], [20], prompt_max=8, response_max=24)
    with pytest.raises(PadlessError, match=r"cannot (run|be built)"):
        run(work, BenchOptions(models=(config_file(tmp_path, "tiny", config),)))


def test_peak_memory_sees_what_was_allocated_and_freed_again():
    with PeakMemory("cpu") as memory:
        block = torch.ones(40 << 20, dtype=torch.uint8)
        del block
    if memory.peak is None:
        pytest.skip("needs /proc")
    assert 38 << 20 <= memory.peak <= 120 << 20
    with PeakMemory("cpu") as memory:
        pass
    assert memory.peak < 20 << 20


def test_the_clock_adds_up_the_parts_of_a_step():
    clock = Clock("cpu")
    for _ in range(2):
        with clock("a"):
            sum(range(10_000))
    with clock("b"):
        pass
    assert clock.parts["a"] > clock.parts["b"] >= 0
