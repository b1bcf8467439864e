"""What padless refuses, warns about and measures in a running engine."""

from __future__ import annotations

import functools
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from padless import PadlessError
from padless.integrations import verl_guards
from padless.integrations.verl_guards import check_batch, width_rule
from padless.integrations.verl_options import VerlOptions

Install = Callable[..., None]
BUDGET = 256
PROMPTS, RESPONSES = [5, 9, 4, 20, 6, 7], [30, 3, 60, 12, 25, 2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Two saved models, and a process group of one."""
    import torch.distributed as dist

    from support.verl_worker import make_model

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_PORT": port}.items():
            patch.setenv(name, value)
        patch.setenv("MASTER_ADDR", "127.0.0.1")
        path = tmp_path_factory.mktemp("models")
        for kind in ("qwen2", "jamba"):
            make_model(kind, path)
        yield path
        if dist.is_initialized():
            dist.destroy_process_group()


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Install padless with options; it is gone after the test, and so is the memory of warnings."""
    import padless.integrations.verl as integration

    integration.uninstall()
    monkeypatch.setattr(verl_guards, "_warned", set())
    yield lambda **options: integration.install(VerlOptions(**options))
    integration.uninstall()


def one_step(worker: Any, **kind: Any) -> dict[str, Any]:
    from support.verl_worker import make_batch, step

    return step(worker, make_batch(PROMPTS, RESPONSES, **kind))


def make(folder: Path, kind: str, **settings: Any) -> Any:
    from support.verl_worker import make_worker

    return make_worker(folder / kind, BUDGET, **settings)


def about_padless(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if record.name == "padless.verl"]


def test_a_leaking_model_is_found_at_start_up_with_the_measured_difference(
    folder: Path, install: Install, caplog: pytest.LogCaptureFixture
) -> None:
    install()
    worker = make(folder, "jamba", use_remove_padding=True)
    (warning,) = about_padless(caplog)
    assert "JambaForCausalLM leaks between packed sequences" in warning
    assert "changes a sequence's outputs by up to " in warning
    assert "It enters in model.layers.0.mamba (JambaMambaMixer)" in warning  # the twin names the module
    assert "PADLESS_VERL_ON_LEAK=padded" in warning
    one_step(worker)
    assert len(about_padless(caplog)) == 1, "once is enough"


def test_a_model_that_keeps_sequences_apart_is_left_packed_without_a_word(
    folder: Path, install: Install, caplog: pytest.LogCaptureFixture
) -> None:
    from padless.integrations.verl_leaks import probe_packed

    install()
    worker = make(folder, "qwen2", use_remove_padding=True)
    assert about_padless(caplog) == []
    probe = probe_packed(worker.engine)
    assert probe.influence == 0
    assert probe.conclusive
    assert probe.alone < 1e-4
    assert {rows for rows, _ in one_step(worker)["update_shapes"]} == {1}


def test_a_leaking_model_is_sent_down_the_padded_path_where_that_is_asked_for(
    folder: Path, install: Install, caplog: pytest.LogCaptureFixture
) -> None:
    padded = one_step(make(folder, "jamba", use_remove_padding=False))
    packed = one_step(make(folder, "jamba", use_remove_padding=True))
    install(on_leak="padded")
    ours = one_step(make(folder, "jamba", use_remove_padding=True))
    assert "the padded path is used instead" in about_padless(caplog)[0]
    assert max(rows for rows, _ in ours["update_shapes"]) > 1
    assert max(rows * width for rows, width in ours["update_shapes"]) <= BUDGET
    assert np.abs(ours["log_probs"] - padded["log_probs"]).max() < 1e-5
    assert np.abs(packed["log_probs"] - padded["log_probs"]).max() > 1e-4, "the leak is real"
    assert ours["metrics"]["grad_norm"][0] == pytest.approx(padded["metrics"]["grad_norm"][0], rel=1e-6)


def test_a_leaking_model_is_refused_where_that_is_asked_for(folder: Path, install: Install) -> None:
    install(on_leak="error")
    with pytest.raises(PadlessError, match=r"JambaForCausalLM leaks .* set actor_rollout_ref\.model\.use_remove"):
        make(folder, "jamba", use_remove_padding=True)


def test_an_engine_that_was_there_first_is_checked_before_its_first_batch(
    folder: Path, install: Install, caplog: pytest.LogCaptureFixture
) -> None:
    worker = make(folder, "jamba", use_remove_padding=True)
    install()
    assert about_padless(caplog) == []
    one_step(worker)
    assert "leaks between packed sequences" in about_padless(caplog)[0]


def test_the_check_leaves_the_model_as_it_was(folder: Path, install: Install) -> None:
    import torch

    from padless.integrations.verl_leaks import probe_packed

    worker = make(folder, "jamba", use_remove_padding=True)
    before = {name: value.clone() for name, value in worker.engine.module.state_dict().items()}
    training, state = worker.engine.module.training, torch.get_rng_state()
    probe_packed(worker.engine)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in worker.engine.module.state_dict().items())
    assert all(parameter.grad is None for parameter in worker.engine.module.parameters())
    worker.engine.module.train(training)


def test_a_loss_that_depends_on_the_split_is_refused(folder: Path, install: Install) -> None:
    install()
    worker = make(folder, "qwen2", loss_agg_mode="seq-mean-token-sum-norm")
    with pytest.raises(PadlessError, match="divides by the widest response of each micro-batch"):
        one_step(worker, jagged=True)
    one_step(worker)  # dense responses have one width: nothing moves
    one_step(make(folder, "qwen2", loss_agg_mode="seq-mean-token-sum-norm", loss_scale_factor=64), jagged=True)


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"])
def test_jagged_fields_give_the_loss_of_verl_in_every_other_mode(folder: Path, install: Install, mode: str) -> None:
    stock = one_step(make(folder, "qwen2", loss_agg_mode=mode), jagged=True)
    install()
    ours = one_step(make(folder, "qwen2", loss_agg_mode=mode), jagged=True)
    assert len(ours["update_shapes"]) != len(stock["update_shapes"])
    for name in ("loss", "grad_norm"):
        assert ours["metrics"][name][0] == pytest.approx(stock["metrics"][name][0], rel=1e-6)


def test_static_micro_batches_are_named_once(folder: Path, install: Install, caplog: pytest.LogCaptureFixture) -> None:
    install()
    settings = {"use_dynamic_bsz": False, "micro_batch_size_per_gpu": 2, "infer_micro_batch_size_per_gpu": 2}
    worker = make(folder, "qwen2", **settings)
    shapes = one_step(worker)["update_shapes"]
    assert [rows for rows, _ in shapes] == [2, 2, 2]
    (warning,) = about_padless(caplog)
    assert "use_dynamic_bsz=False" in warning


def test_figures_can_be_left_out_or_printed(folder: Path, install: Install, capsys: pytest.CaptureFixture[str]) -> None:
    install(metrics=False, log=True)
    metrics = one_step(make(folder, "qwen2"))["metrics"]
    assert not any(name.startswith("padless") for name in metrics)
    printed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("padless ")]
    assert any(line.startswith("padless old_log_prob: ") and "occupancy" in line for line in printed)
    assert sum(line.startswith("padless update: ") for line in printed) == 1


def megatron(**settings: Any) -> Any:
    """What padless reads of Megatron's engine, which needs GPUs."""
    config = {"tensor_model_parallel_size": 1, "context_parallel_size": 1, "pipeline_model_parallel_size": 1}
    config |= {"pad_bshd_to_minibatch_max": False} | settings
    fp8 = config.pop("fp8", None)
    return SimpleNamespace(engine_config=SimpleNamespace(**config), tf_config=SimpleNamespace(fp8=fp8))


@pytest.mark.parametrize(
    ("settings", "multiple"),
    [
        ({}, 1),
        ({"tensor_model_parallel_size": 4}, 4),
        ({"tensor_model_parallel_size": 4, "context_parallel_size": 2}, 16),
        ({"tensor_model_parallel_size": 2, "fp8": "e4m3"}, 256),
    ],
)
def test_megatron_widths_are_planned_with_their_alignment(settings: dict[str, Any], multiple: int) -> None:
    assert width_rule(megatron(**settings)).multiple_of == multiple
    assert width_rule(SimpleNamespace(engine_config=SimpleNamespace(strategy="fsdp2"))).multiple_of == 1


def test_megatron_padding_to_the_widest_row_is_named_and_planned_for(
    install: Install, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from verl.utils.seqlen_balancing import rearrange_micro_batches

    from padless.integrations import verl_engine
    from support.verl_worker import make_batch

    engine = megatron(pad_bshd_to_minibatch_max=True, pipeline_model_parallel_size=2)
    from verl.utils import tensordict_utils as tu

    batch = make_batch(PROMPTS, RESPONSES)
    tu.assign_non_tensor(batch, use_remove_padding=False)
    check_batch(engine, batch, functools.partial(print), training=True)
    check_batch(engine, batch, functools.partial(print), training=True)
    (warning,) = about_padless(caplog)
    assert "pad_bshd_to_minibatch_max=True pads every micro-batch" in warning
    planner = verl_engine.rearranger(rearrange_micro_batches, VerlOptions())
    with verl_engine._running(engine) as call:
        _, groups = planner(batch, BUDGET)
    widest = max(p + r for p, r in zip(PROMPTS, RESPONSES, strict=True))
    assert all(len(group) * widest <= BUDGET for group in groups)
    assert call.stats is not None
    assert call.stats.computed_tokens == len(PROMPTS) * widest
    assert call.stats.real_tokens == sum(PROMPTS) + sum(RESPONSES)
