"""What the verl integration does without verl: options, hooks, and clear messages."""

from __future__ import annotations

import importlib
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from padless import CostModel, PadlessError
from padless.integrations import verl_hooks
from padless.integrations.verl_hooks import Hooks
from padless.integrations.verl_metrics import PhaseStats, Recorder, count
from padless.integrations.verl_options import VerlOptions, switched_off, switched_on

without_verl = pytest.mark.skipif(find_spec("verl") is not None, reason="verl is installed here")


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)


@without_verl
def test_without_verl_the_message_names_the_extra() -> None:
    done = run("import padless.integrations.verl")
    assert done.returncode != 0
    assert 'PadlessError: verl is not installed: pip install "padless[verl]"' in done.stderr


@without_verl
def test_the_plugin_does_nothing_unless_it_is_asked_for() -> None:
    code = "import padless.integrations.verl_plugin, sys; assert 'padless.integrations.verl' not in sys.modules"
    done = run(code + "; assert 'torch' not in sys.modules")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("OVERHEAD", "many", "PADLESS_VERL_OVERHEAD='many'; expected a number of tokens"),
        ("OVERHEAD", "-1", "expected a number of tokens, 0 or more"),
        ("OVERHEAD", "nan", "expected a number of tokens"),
        ("MULTIPLE_OF", "0", "PADLESS_VERL_MULTIPLE_OF=0; expected an integer of at least 1"),
        ("MULTIPLE_OF", "8.0", "expected an integer of at least 1"),
        ("MAX_SEQUENCES", "none", "expected an integer of at least 1"),
        ("OVERLONG", "drop", "choose one of 'error', 'alone'"),
        ("ORDER", "random", "choose one of 'auto', 'largest-first', 'small-ends'"),
        ("ON_LEAK", "hope", "choose one of 'warn', 'padded', 'error', 'ignore'"),
        ("METRICS", "maybe", "choose one of '1', 'on', 'true', 'yes', '0', 'off', 'false', 'no'"),
        ("COST", "/no/such/file.json", "cannot be read as a JSON file"),
        ("BUDGET", "4096", "PADLESS_VERL_BUDGET is not an option; known are PADLESS_VERL_OVERHEAD"),
    ],
)
def test_a_bad_option_is_named_with_what_it_takes(name: str, value: str, message: str) -> None:
    with pytest.raises(PadlessError, match=message.replace(".", r"\.")):
        VerlOptions.from_environment({f"PADLESS_VERL_{name}": value})


def test_options_are_read_and_described() -> None:
    given = {
        "PADLESS_VERL_MULTIPLE_OF": " 64 ",
        "PADLESS_VERL_ON_LEAK": "Padded",
        "PADLESS_VERL_METRICS": "off",
        "PADLESS_VERL": "1",
        "HOME": "/root",
    }
    options = VerlOptions.from_environment(given)
    assert (options.multiple_of, options.on_leak, options.metrics) == (64, "padded", False)
    assert options.describe() == "multiple_of=64, on_leak=padded, metrics=False"
    assert VerlOptions().describe() == "defaults"


def test_a_cost_model_is_read_from_its_file(tmp_path: Path) -> None:
    import json

    stored = CostModel(per_microbatch=0.02, per_token=1e-5, source="calibrated")
    for number, content in enumerate((stored.to_dict(), {"cost": stored.to_dict(), "token_budget": 8192})):
        file = tmp_path / f"{number}.json"
        file.write_text(json.dumps(content))
        assert VerlOptions.from_environment({"PADLESS_VERL_COST": str(file)}).cost == stored
    (tmp_path / "odd.json").write_text('{"slope": 3}')
    with pytest.raises(PadlessError, match="holds no cost model"):
        VerlOptions.from_environment({"PADLESS_VERL_COST": str(tmp_path / "odd.json")})
    with pytest.raises(PadlessError, match="exclude each other"):
        VerlOptions.from_environment({"PADLESS_VERL_COST": "a", "PADLESS_VERL_OVERHEAD": "1"})


def test_the_switch_has_three_positions() -> None:
    assert switched_on({"PADLESS_VERL": "on"})
    assert switched_off({"PADLESS_VERL": "0"})
    assert not switched_on({})
    assert not switched_off({})
    with pytest.raises(PadlessError, match="PADLESS_VERL='perhaps' is unknown"):
        switched_on({"PADLESS_VERL": "perhaps"})


@pytest.mark.parametrize(
    ("environment", "wanted"),
    [
        ({}, False),
        ({"VERL_USE_EXTERNAL_PLUGINS": "auto"}, False),
        ({"PADLESS_VERL": "1"}, True),
        ({"VERL_USE_EXTERNAL_PLUGINS": "other, padless"}, True),
        ({"VERL_USE_EXTERNAL_PLUGINS": "padless", "PADLESS_VERL": "0"}, False),
    ],
)
def test_the_plugin_is_asked_for_by_switch_or_by_name(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], wanted: bool
) -> None:
    from padless.integrations.verl_plugin import asked_for

    for name in ("PADLESS_VERL", "VERL_USE_EXTERNAL_PLUGINS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert asked_for() is wanted


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A package with a module that counts how often it runs."""
    (tmp_path / "hooked_package").mkdir()
    (tmp_path / "hooked_package" / "__init__.py").write_text("")
    (tmp_path / "hooked_package" / "inner.py").write_text("def f():\n    return 'stock'\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "hooked_package.inner"
    for name in [name for name in sys.modules if name.startswith("hooked_package")]:
        del sys.modules[name]


def test_a_hook_waits_for_the_import_and_puts_the_original_back(package: str) -> None:
    hooks = Hooks()
    hooks.when_imported(package, lambda module: hooks.replace(module, "f", lambda: "ours"))
    assert package not in sys.modules
    module = importlib.import_module(package)
    stock = hooks.replaced[0][2]
    assert module.f() == "ours"
    assert type(module.__spec__.loader).__module__.startswith("_frozen_importlib")  # the module's own loader
    hooks.remove()
    assert module.f is stock
    assert module.f() == "stock"
    assert hooks.finder is None
    assert not any(type(finder).__module__ == verl_hooks.__name__ for finder in sys.meta_path)


def test_a_hook_on_an_imported_module_acts_at_once(package: str) -> None:
    module = importlib.import_module(package)
    hooks = Hooks()
    hooks.when_imported(package, lambda module: hooks.replace(module, "f", lambda: "ours"))
    assert module.f() == "ours"
    hooks.remove()
    assert module.f() == "stock"


def test_what_someone_else_replaced_later_is_left_alone(package: str, caplog: pytest.LogCaptureFixture) -> None:
    module = importlib.import_module(package)
    hooks = Hooks()
    hooks.replace(module, "f", lambda: "ours")
    module.f = lambda: "theirs"
    hooks.remove()
    assert module.f() == "theirs"
    assert "f was replaced again by someone else" in caplog.text


def test_figures_count_what_is_computed() -> None:
    import numpy as np

    lengths = np.array([10, 4, 7])
    padded = count(lengths, [[0], [1, 2]], 16, padded=True, multiple_of=4)
    assert (padded.real_tokens, padded.computed_tokens, padded.micro_batches) == (21, 12 + 2 * 8, 2)
    assert padded.peak == 1.0
    packed = count(lengths, [[0], [1, 2]], 16, padded=False)
    assert packed.computed_tokens == packed.real_tokens


def test_figures_of_forward_passes_wait_for_the_next_update() -> None:
    recorder = Recorder()
    stats = PhaseStats(real_tokens=8, computed_tokens=10, micro_batches=2, peak=0.5)
    recorder.add("ref", stats)
    recorder.add("ref", stats)
    taken = recorder.flush()
    assert taken["ref"].computed_tokens == 20
    assert taken["ref"].calls == 2
    assert recorder.flush() == {}
    assert recorder.last["ref"] == stats
