"""Pack a corpus once, train on it many times: no padding, no document lost.

python examples/pack_corpus.py corpus.jsonl packs/
"""

import sys

from torch.utils.data import DataLoader, Dataset

from padless.data import PackedCollator
from padless.data.packing import pack_files


class Packs(Dataset):
    """The rows of all shards; `datasets.load_dataset("parquet", ...)` does as well."""

    def __init__(self, shards):
        import pyarrow.parquet as pq

        self.rows = [row for shard in shards for row in pq.read_table(shard).to_pylist()]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return self.rows[i]


def words(text):
    """Stands in for a tokenizer: pass a Hugging Face tokenizer, or the name of one."""
    return [sum(map(ord, word)) % 1000 for word in text.split()]


if __name__ == "__main__":
    result = pack_files(sys.argv[1], sys.argv[2], capacity=64, tokenizer=words, overlong="split", workers=2)
    totals = result.totals
    print(f"{totals['documents']} documents in {totals['packs']} packs, {totals['efficiency']:.1%} full")
    for batch in DataLoader(Packs(result.shards), batch_size=2, collate_fn=PackedCollator()):
        starts = int((batch["position_ids"] == 0).sum())
        print(tuple(batch["input_ids"].shape), "positions start again", starts, "times")
