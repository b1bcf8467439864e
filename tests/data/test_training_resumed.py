"""Training on ranks, killed with SIGKILL and resumed on others, against one process that nothing interrupted."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch

from support.data_training import rows, train
from support.forked import run_forked

HERE = "support.data_training"


def kill(ranks: int, folder: Path, grouping: str, die_after: int) -> dict[str, list[int]]:
    with pytest.raises(RuntimeError, match="killed"):
        run_forked(HERE, "train", ranks, folder=str(folder), grouping=grouping, die_after=die_after)
    return torch.load(folder / "checkpoint.pt", weights_only=False)["sampler"]["position"]


@pytest.mark.slow
def test_training_killed_on_four_ranks_and_on_two_ends_on_three_as_if_one_process_had_run_it_all(
    tmp_path: Path,
) -> None:
    for name in ("alone", "killed"):
        (tmp_path / name).mkdir()
    alone = train(str(tmp_path / "alone"), "step")
    first = kill(4, tmp_path / "killed", "step", 4)
    assert first["parts"], "the kill falls within a step"
    second = kill(2, tmp_path / "killed", "step", 5)
    assert (second["epoch"], second["step"]) > (first["epoch"], first["step"])
    assert second["parts"]
    results = run_forked(HERE, "train", 3, folder=str(tmp_path / "killed"), grouping="step")
    for name, value in alone["model"].items():
        for result in results:
            torch.testing.assert_close(result["model"][name], value, rtol=1e-4, atol=1e-6)
    last = Counter(pair for result in results for pair in result["seen"] if pair[0] == 1)
    assert last == Counter((1, i) for i in range(len(rows())))


@pytest.mark.slow
def test_ranks_built_with_other_seeds_are_refused_and_equal_ones_share_the_data() -> None:
    refused = run_forked(HERE, "build_unlike", 2, seeds=[0, 1])
    assert all("seeds 1 and 0" in said for said in refused)
    shared = run_forked(HERE, "build_unlike", 2, seeds=[3, 3])
    assert sorted(" ".join(shared).split()) == ["0", "1", "2", "3"]
