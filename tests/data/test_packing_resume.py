"""A packing run that is killed, refused or starved continues where it stopped, and ends in the same bytes."""

from __future__ import annotations

import hashlib
import json
import os
import random
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from padless.data import packing
from padless.data._spill import Spill
from padless.data.packing import pack_files
from padless.errors import PadlessError

RUN = """
import sys, time
from padless.data.packing import pack_files

def words(text):
    time.sleep(0.0004)
    return [len(word) for word in text.split()]

source, out, workers = sys.argv[1:]
pack_files(source, out, capacity=64, tokenizer=words, shard_tokens=256, workers=int(workers), window=700)
"""


def write_corpus(path: Path, rows: int = 1500) -> Path:
    rng = random.Random(0)
    lines = [json.dumps({"text": "ab " * rng.randint(0, 40), "filler": "x" * 900}) for _ in range(rows)]
    path.write_text("\n".join(lines) + "\n")
    return path


def digests(out: Path) -> dict[str, str]:
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(out.iterdir()) if path.is_file()
    }


def start(source: Path, out: Path, workers: int, script: Path) -> subprocess.Popen[bytes]:
    script.write_text(RUN)
    return subprocess.Popen(
        [sys.executable, str(script), str(source), str(out), str(workers)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stderr=subprocess.PIPE,
    )


def finish(process: subprocess.Popen[bytes]) -> None:
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors.decode()


def wait_for(out: Path, pattern: str, count: int, process: subprocess.Popen[bytes]) -> None:
    until = time.monotonic() + 60
    while time.monotonic() < until and process.poll() is None:
        if len(list(out.glob(pattern))) >= count:
            return
        time.sleep(0.005)


def test_killed_anywhere_it_resumes_to_the_same_bytes(tmp_path: Path) -> None:
    source = write_corpus(tmp_path / "a.jsonl")
    script = tmp_path / "run.py"
    finish(start(source, tmp_path / "whole", 0, script))
    wanted = digests(tmp_path / "whole")
    assert len(wanted) > 20
    out = tmp_path / "killed"
    # While tokenising, at the border, and while writing: with other workers each time.
    for workers, pattern, count in [
        (2, ".padless/*.npz", 2),
        (0, ".padless/*.npz", 4),
        (1, "packs-*", 3),
        (2, "packs-*", 9),
    ]:
        process = start(source, out, workers, script)
        wait_for(out, pattern, count, process)
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
        process.wait(timeout=30)
        assert not (out / "manifest.json").exists()
    finish(start(source, out, 2, script))
    assert digests(out) == wanted
    assert not (out / ".padless").exists()


def test_workers_do_not_outlive_a_killed_run(tmp_path: Path) -> None:
    psutil = pytest.importorskip("psutil")
    source = write_corpus(tmp_path / "a.jsonl")
    process = start(source, tmp_path / "out", 2, tmp_path / "run.py")
    wait_for(tmp_path / "out", ".padless/*.npz", 1, process)
    children = psutil.Process(process.pid).children()
    process.send_signal(signal.SIGKILL)
    process.wait(timeout=30)
    gone, alive = psutil.wait_procs(children, timeout=15)
    assert len(gone) == 2
    assert not alive


def numbers(text: str) -> list[int]:
    return [len(word) for word in text.split()]


def characters(text: str) -> list[int]:
    return [ord(c) for c in text]


def stop_after(chunks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the run fail as if its machine died, after so many chunks."""
    write = Spill.write
    count = 0

    def dies(self: Spill, *args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        if count > chunks:
            raise KeyboardInterrupt
        return write(self, *args, **kwargs)

    monkeypatch.setattr(Spill, "write", dies)


@pytest.fixture
def interrupted(tmp_path: Path) -> tuple[Path, Path]:
    """A corpus and a folder with an unfinished run over it."""
    source = write_corpus(tmp_path / "a.jsonl", rows=900)
    with pytest.MonkeyPatch.context() as patch:
        stop_after(2, patch)
        with pytest.raises(KeyboardInterrupt):
            pack_files(source, tmp_path / "out", capacity=64, tokenizer=numbers)
    return source, tmp_path / "out"


def test_another_tokenizer_is_refused(interrupted: tuple[Path, Path]) -> None:
    source, out = interrupted
    with pytest.raises(PadlessError, match=r"the tokenizer is not the one that the run in .* began with"):
        pack_files(source, out, capacity=64, tokenizer=characters)
    result = pack_files(source, out, capacity=4096, tokenizer=characters, restart=True)
    assert result.totals["tokens"] > 0
    assert not result.resumed


def test_other_options_and_other_data_are_refused_by_name(interrupted: tuple[Path, Path]) -> None:
    source, out = interrupted
    with pytest.raises(PadlessError, match="began with capacity=64, not 128"):
        pack_files(source, out, capacity=128, tokenizer=numbers)
    with pytest.raises(PadlessError, match="began with 1 files, not 2"):
        pack_files([source, source], out, capacity=64, tokenizer=numbers)
    with open(source, "a") as file:
        file.write('{"text": "more"}\n')
    with pytest.raises(PadlessError, match=r"a.jsonl is not as the run in .* read it"):
        pack_files(source, out, capacity=64, tokenizer=numbers)


def test_a_finished_run_is_recognised_and_a_lost_shard_noticed(tmp_path: Path) -> None:
    source = write_corpus(tmp_path / "a.jsonl", rows=60)
    first = pack_files(source, tmp_path / "out", capacity=64, tokenizer=numbers)
    again = pack_files(source, tmp_path / "out", capacity=64, tokenizer=numbers)
    assert again.resumed
    assert again.manifest == first.manifest
    first.shards[0].unlink()
    with pytest.raises(PadlessError, match=r"lists packs-00000.parquet, which is not there"):
        pack_files(source, tmp_path / "out", capacity=64, tokenizer=numbers)


def test_a_damaged_chunk_is_made_again(interrupted: tuple[Path, Path], tmp_path: Path) -> None:
    source, out = interrupted
    chunk = Spill(out / ".padless").tokens_path(0)
    data = bytearray(chunk.read_bytes())
    data[7] ^= 1
    chunk.write_bytes(data)
    pack_files(source, out, capacity=64, tokenizer=numbers)
    pack_files(source, tmp_path / "fresh", capacity=64, tokenizer=numbers)
    assert digests(out) == digests(tmp_path / "fresh")


def test_a_damaged_shard_is_written_again(tmp_path: Path) -> None:
    source = write_corpus(tmp_path / "a.jsonl", rows=400)
    pack_files(source, tmp_path / "fresh", capacity=64, tokenizer=numbers, shard_tokens=256)
    out = tmp_path / "out"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "_manifest", _dies)
        with pytest.raises(KeyboardInterrupt):
            pack_files(source, out, capacity=64, tokenizer=numbers, shard_tokens=256)
    with open(out / "packs-00001.parquet", "r+b") as file:
        file.seek(30)
        file.write(b"????")
    assert pack_files(source, out, capacity=64, tokenizer=numbers, shard_tokens=256).resumed
    assert digests(out) == digests(tmp_path / "fresh")


def _dies(*args: Any) -> Any:
    raise KeyboardInterrupt


def test_two_runs_into_one_folder_are_kept_apart(tmp_path: Path) -> None:
    source = write_corpus(tmp_path / "a.jsonl")
    process = start(source, tmp_path / "out", 0, tmp_path / "run.py")
    wait_for(tmp_path / "out", ".padless/*.npz", 1, process)
    try:
        with pytest.raises(PadlessError, match="another run is packing into"):
            pack_files(source, tmp_path / "out", capacity=64, tokenizer=numbers)
    finally:
        process.kill()
        process.wait(timeout=30)


def test_foreign_packs_are_not_mixed_in(tmp_path: Path) -> None:
    source = write_corpus(tmp_path / "a.jsonl", rows=20)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "packs-00000.parquet").write_bytes(b"of someone")
    with pytest.raises(PadlessError, match="holds packs of an unknown run"):
        pack_files(source, tmp_path / "out", capacity=64, tokenizer=numbers)


LIMITED = (
    """
import resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[4]), int(sys.argv[4])))
"""
    + RUN.replace("source, out, workers = sys.argv[1:]", "source, out, workers = sys.argv[1:4]")
    .replace("pack_files(source", "from padless.errors import PadlessError\ntry:\n    pack_files(source")
    .rstrip()
    + "\nexcept PadlessError as error:\n    sys.exit(str(error))\n"
)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_full_disk_is_said_and_the_run_continues_when_there_is_room(tmp_path: Path, workers: int) -> None:
    """A limit on the size of files stands in for the disk: the same call fails, with a sibling of the same error."""
    source = write_corpus(tmp_path / "a.jsonl", rows=600)
    script = tmp_path / "limited.py"
    script.write_text(LIMITED)
    command = [sys.executable, str(script), str(source), str(tmp_path / "out"), str(workers)]
    limited = subprocess.run([*command, "2000"], capture_output=True, text=True, timeout=120, check=False)
    assert limited.returncode == 1
    assert "no space left to write" in limited.stderr
    assert "it continues where it stopped" in limited.stderr
    assert not list((tmp_path / "out").rglob("*.tmp"))
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    room = 1 << 40 if unlimited == resource.RLIM_INFINITY else unlimited
    after = subprocess.run([*command, str(room)], capture_output=True, text=True, timeout=120, check=False)
    assert after.returncode == 0, after.stderr
    assert (tmp_path / "out" / "manifest.json").exists()


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    source = write_corpus(tmp_path / "a.jsonl", rows=5)
    (tmp_path / "file").write_text("")
    with pytest.raises(PadlessError, match=r"cannot write in .*file"):
        pack_files(source, tmp_path / "file" / "out", capacity=64, tokenizer=numbers)


def test_a_kill_in_the_middle_of_a_file_leaves_no_trace(tmp_path: Path) -> None:
    source = write_corpus(tmp_path / "a.jsonl", rows=300)
    pack_files(source, tmp_path / "fresh", capacity=64, tokenizer=numbers, shard_tokens=256)
    script = tmp_path / "dies.py"
    script.write_text(
        "import os, signal, pyarrow.parquet as pq\n"
        "write = pq.write_table\n"
        "def dies(table, sink, **options):\n"
        "    sink.write(b'half a file')\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "pq.write_table = dies\n" + RUN.replace("window=700", "window=16_000_000").replace("time.sleep(0.0004)", "pass")
    )
    dead = subprocess.run(
        [sys.executable, str(script), str(source), str(tmp_path / "out"), "0"], timeout=60, check=False
    )
    assert dead.returncode == -signal.SIGKILL
    assert list((tmp_path / "out" / ".padless").glob(".packs-*.tmp"))
    script.write_text(RUN.replace("window=700", "window=16_000_000").replace("time.sleep(0.0004)", "pass"))
    subprocess.run([sys.executable, str(script), str(source), str(tmp_path / "out"), "0"], timeout=60, check=True)
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {path.name for path in (tmp_path / "fresh").iterdir()}
