"""A Lightning module with padless takes the optimizer steps of the module alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from padless.errors import PadlessError
from padless.integrations.lightning import PadlessModuleMixin
from support.lightning_runs import HostModule, PadlessHost, both, run
from support.ranks import run_ranks
from support.trainers import MODELS, assert_same_run, collate, sft_rows


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean"])
@pytest.mark.parametrize("kind", MODELS)
def test_ten_steps_are_those_of_the_host(kind: str, mode: str, tmp_path: Path) -> None:
    host, ours = both(kind, str(tmp_path), 1, mode)
    assert_same_run(host, ours)
    assert ours.padded_tokens < host.padded_tokens


def test_a_validation_batch_has_the_loss_of_the_host(tmp_path: Path) -> None:
    import lightning

    module = PadlessHost("qwen2", token_budget=64)
    batch = collate(sft_rows(9, seed=3))
    loader = torch.utils.data.DataLoader(sft_rows(9, seed=3), batch_size=9, collate_fn=collate)
    lightning.Trainer(accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False).validate(
        module, loader, verbose=False
    )
    module.model.eval()
    with torch.no_grad():
        torch.testing.assert_close(module.regrouped_loss(batch), module.model(**batch).loss, rtol=1e-5, atol=1e-6)


def test_two_batches_of_the_loader_make_one_step(tmp_path: Path) -> None:
    import lightning

    module = PadlessHost("qwen2", token_budget=96, batches_per_step=2)
    loader = torch.utils.data.DataLoader(sft_rows(80), batch_size=4, collate_fn=collate)
    lightning.Trainer(
        accelerator="cpu",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=str(tmp_path),
    ).fit(module, loader)
    host = run("qwen2", tmp_path, padless=False)
    assert module.losses == pytest.approx(host.losses, rel=1e-5)


def test_the_mixin_stands_before_a_lightning_module_and_needs_token_losses() -> None:
    with pytest.raises(PadlessError, match="no LightningModule"):
        PadlessModuleMixin(token_budget=8)

    class Forgot(PadlessModuleMixin, HostModule):
        pass

    with pytest.raises(PadlessError, match="has no token_losses"):
        Forgot("qwen2", token_budget=64).token_losses({})


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_tensor_parallel_ranks_are_refused(tmp_path: Path) -> None:
    heard = run_ranks("support.lightning_runs", "tensor_parallel", 2, folder=str(tmp_path))
    assert all("tensor parallelism of 2 ranks" in text for text in heard), heard
