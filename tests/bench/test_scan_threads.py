"""Shares of the scan run in torch's own OpenMP threads, or in a pool, each once, and errors come out."""

from __future__ import annotations

import sys
import threading
import time

import pytest
import torch

from padless.bench import scan_threads
from padless.bench.scan_threads import run_shares

HAS_TEAM = scan_threads._team() is not None


@pytest.fixture(params=["team", "pool"])
def way(request, monkeypatch) -> str:
    if request.param == "pool":
        monkeypatch.setattr(scan_threads, "_team", lambda: None)
    elif not HAS_TEAM:
        pytest.skip("torch brings no GNU OpenMP here")
    return request.param


@pytest.mark.skipif(sys.platform != "linux", reason="torch for Linux brings OpenMP along")
def test_torchs_own_openmp_is_found() -> None:
    assert HAS_TEAM


@pytest.mark.parametrize("shares", [1, 2, 3, 7])
def test_every_share_runs_once(way: str, shares: int) -> None:
    for _ in range(50):
        done: list[int] = []
        run_shares(done.append, shares)
        assert sorted(done) == list(range(shares))


def test_shares_run_side_by_side(way: str) -> None:
    """Each waits for the other: one after the other they would never end."""
    meeting, threads = threading.Barrier(2, timeout=30), set()

    def run(share: int) -> None:
        meeting.wait()
        threads.add(threading.get_ident())

    run_shares(run, 2)
    assert len(threads) == 2


@pytest.mark.parametrize("odd", [0, 1])
def test_an_error_in_any_share_is_raised_after_the_others_have_ended(way: str, odd: int) -> None:
    ended = []

    def run(share: int) -> None:
        if share == odd:
            raise ValueError("odd share")
        time.sleep(0.05)
        ended.append(share)

    with pytest.raises(ValueError, match="odd share"):
        run_shares(run, 2)
    assert ended == [1 - odd]


def test_torch_computes_the_same_before_and_after(way: str) -> None:
    given = torch.randn(300, 300)
    before = given @ given
    run_shares(lambda share: None, 2)
    assert torch.equal(given @ given, before)


def test_another_thread_than_the_main_one_may_call(way: str) -> None:
    done: list[int] = []
    thread = threading.Thread(target=run_shares, args=(done.append, 3))
    thread.start()
    thread.join(timeout=30)
    assert sorted(done) == [0, 1, 2]
