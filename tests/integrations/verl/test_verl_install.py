"""Switching padless on and off in verl, and what happens where verl is not what padless knows."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

from padless import PadlessError
from support.verl_env import run_code

LIGHT = """
import sys, verl
from verl.plugin.platform import platform_manager
assert platform_manager._current_platform is None, "the platform was fixed"
assert not [name for name in sys.modules if name.startswith("verl.workers")], "engines were imported"
"""
REPLACED = """
import verl.workers.engine.utils as utils, verl.utils.seqlen_balancing as stock, verl.workers.engine.base as base
assert utils.rearrange_micro_batches is not stock.rearrange_micro_batches
assert utils.rearrange_micro_batches.__wrapped__ is stock.rearrange_micro_batches
assert base.BaseEngine.train_batch.__wrapped__.__module__ == "verl.workers.engine.base"
"""
RESTORED = """
from padless.integrations.verl import installed, uninstall
assert installed()
train, new = base.BaseEngine.train_batch.__wrapped__, vars(base.EngineRegistry)["new"]
uninstall(); uninstall()
assert not installed()
assert utils.rearrange_micro_batches is stock.rearrange_micro_batches
assert vars(base.BaseEngine)["train_batch"] is train
assert vars(base.EngineRegistry)["new"] is not new
"""


@pytest.mark.parametrize(
    "environment",
    [
        {"VERL_USE_EXTERNAL_MODULES": "support.verl_cpu,padless.integrations.verl"},
        {"VERL_USE_EXTERNAL_PLUGINS": "padless"},
    ],
    ids=["external-modules", "plugin"],
)
def test_padless_is_behind_verl_and_importing_verl_stays_light(environment: dict[str, str]) -> None:
    done = run_code(LIGHT + REPLACED + RESTORED, **environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("padless 0.1.0 in verl 0.9.1") == 1, done.stdout


def test_the_plugin_leaves_verl_alone_unless_it_is_asked_for() -> None:
    code = LIGHT + REPLACED.replace("is not stock", "is stock").split("assert utils.rearrange_micro_batches.__wr")[0]
    done = run_code(code)
    assert done.returncode == 0, done.stderr
    assert "padless" not in done.stdout


def test_a_bad_option_stops_the_plugin_where_it_cannot_be_missed() -> None:
    code = "import verl; print('verl is there'); import verl.workers.engine.utils"
    done = run_code(code, PADLESS_VERL="1", PADLESS_VERL_ON_LEAK="hope")
    assert "verl is there" in done.stdout
    assert done.returncode != 0
    assert "PADLESS_VERL_ON_LEAK='hope' is unknown; choose one of" in done.stderr


@pytest.fixture
def integration(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The integration, not installed."""
    import padless.integrations.verl as integration

    integration.uninstall()
    yield integration
    monkeypatch.undo()
    integration.uninstall()


def test_installing_twice_is_installing_once(integration: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    import verl.workers.engine.utils as utils

    stock = utils.rearrange_micro_batches
    first = integration.install()
    ours = utils.rearrange_micro_batches
    assert integration.install() == first
    assert utils.rearrange_micro_batches is ours
    assert ours is not stock
    assert capsys.readouterr().out.count("padless") == 1
    with pytest.raises(PadlessError, match=r"installed in verl with defaults: uninstall\(\) first"):
        integration.install(integration.VerlOptions(multiple_of=8))
    integration.uninstall()
    assert utils.rearrange_micro_batches is stock


@pytest.mark.parametrize(
    ("changed", "what"),
    [
        (lambda batch, max_token_len, dp_group=None, planner=None: None, "lost num_batches_divided_by"),
        (None, "is gone"),
    ],
)
def test_a_planner_with_another_signature_is_left_alone_with_one_warning(
    integration: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    changed: Any,
    what: str,
) -> None:
    import verl.workers.engine.utils as utils

    monkeypatch.setattr(utils, "rearrange_micro_batches", changed)
    integration.install()
    assert utils.rearrange_micro_batches is changed
    warnings = [record.message for record in caplog.records if "plans its own micro-batches" in record.message]
    assert len(warnings) == 1
    assert what in warnings[0]


def test_another_verl_is_named(
    integration: ModuleType, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(integration, "version", lambda _: "0.12.3")
    integration.install()
    assert "verl 0.12.3 is installed; padless is tested with 0.9.1" in caplog.text
    integration.uninstall()
    monkeypatch.setattr(integration, "version", lambda _: "0.4.1")
    with pytest.raises(PadlessError, match=r"verl 0\.4\.1 is installed; padless works with 0\.5 and later"):
        integration.install()
    assert not integration.installed()


def test_the_one_line_is_imported_by_the_model_configuration(integration: ModuleType, tmp_path: Any) -> None:
    """``actor_rollout_ref.model.external_lib`` reaches `HFModelConfig`, which imports it in every worker."""
    from verl.workers.config import HFModelConfig

    from support.verl_worker import make_model

    sys.modules.pop("padless.integrations.verl")
    path = make_model("qwen2", tmp_path)
    HFModelConfig(path=str(path), load_tokenizer=False, external_lib="padless.integrations.verl")
    import padless.integrations.verl as again

    assert again.installed()
    again.uninstall()
    sys.modules["padless.integrations.verl"] = integration
