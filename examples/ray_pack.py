"""Pack inside a Ray Data pipeline, on a cluster or on this machine.

python examples/ray_pack.py corpus.jsonl
"""

import sys

import ray

from padless.integrations.ray import pack


def words(text):
    """Stands in for a tokenizer: pass a Hugging Face tokenizer, or the name of one."""
    return [sum(map(ord, word)) % 1000 for word in text.split()]


if __name__ == "__main__":
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    rows = ray.data.read_json(sys.argv[1], lines=True)
    packs = pack(rows, capacity=64, tokenizer=words, overlong="split", window=1000)
    # Goes on as any dataset does: packs.write_parquet(...), packs.iter_torch_batches(...), packs.streaming_split(...)
    lengths = [len(row["input_ids"]) for row in packs.iter_rows()]
    print(f"{len(lengths)} packs, {sum(lengths) / (64 * len(lengths)):.1%} full")
