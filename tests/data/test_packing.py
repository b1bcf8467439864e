"""Packed files hold every document once, in its own tokens, within the capacity, however they were made."""

from __future__ import annotations

import gzip
import hashlib
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from padless.data._pack_plan import Packs, plan_windows
from padless.data.packing import PackResult, pack_files
from padless.errors import PadlessError


def words(text: str) -> list[int]:
    """A tokenizer that anyone can check: one id for each word, its length."""
    return [len(word) for word in text.split()]


def write_rows(path: Path, rows: Sequence[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read_packs(result: PackResult) -> list[dict[str, Any]]:
    return [row for shard in result.shards for row in pq.read_table(shard).to_pylist()]


def documents(result: PackResult, column: str = "input_ids") -> dict[int, list[Any]]:
    """Each document's values, by its row in the corpus; pieces are joined in order."""
    pieces: dict[int, list[tuple[int, list[Any]]]] = {}
    for pack in read_packs(result):
        at = 0
        starts = pack.get("source_starts") or [0] * len(pack["seq_lengths"])
        for length, name, start in zip(pack["seq_lengths"], pack["document_ids"], starts, strict=True):
            pieces.setdefault(name, []).append((start, pack[column][at : at + length]))
            at += length
        assert at == len(pack[column])
    return {name: [v for _, part in sorted(parts) for v in part] for name, parts in pieces.items()}


def digests(out: Path) -> dict[str, str]:
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(out.iterdir()) if path.is_file()
    }


def ids_of(count: int, seed: int = 0, longest: int = 60) -> list[dict[str, list[int]]]:
    rng = np.random.default_rng(seed)
    return [{"input_ids": rng.integers(0, 1000, size=n).tolist()} for n in rng.integers(1, longest, size=count)]


def test_every_document_is_in_one_pack_with_its_own_tokens(tmp_path: Path) -> None:
    rows = ids_of(300)
    result = pack_files(write_rows(tmp_path / "a.jsonl", rows), tmp_path / "out", capacity=128, shard_tokens=1024)
    assert documents(result) == {i: row["input_ids"] for i, row in enumerate(rows)}
    packs = read_packs(result)
    assert max(len(pack["input_ids"]) for pack in packs) <= 128
    assert len(result.shards) > 3
    assert result.totals["documents"] == 300
    assert result.totals["packs"] == len(packs)
    tokens = sum(len(row["input_ids"]) for row in rows)
    assert result.totals["tokens"] == tokens
    assert result.totals["efficiency"] == pytest.approx(tokens / (128 * len(packs)))


def test_labels_are_the_tokens_except_at_the_first_of_each_document(tmp_path: Path) -> None:
    source = write_rows(tmp_path / "a.jsonl", [{"input_ids": [11, 12, 13]}, {"input_ids": [21, 22]}])
    [pack] = read_packs(pack_files(source, tmp_path / "out", capacity=8, position_ids=True))
    assert pack["input_ids"] == [11, 12, 13, 21, 22]
    assert pack["labels"] == [-100, 12, 13, -100, 22]
    assert pack["position_ids"] == [0, 1, 2, 0, 1]
    assert pack["seq_lengths"] == [3, 2]
    assert pack["source_rows"] == [0, 1]


@pytest.mark.parametrize("workers", [1, 3])
def test_worker_processes_write_the_same_bytes(tmp_path: Path, workers: int) -> None:
    source = write_rows(tmp_path / "a.jsonl", [{"text": "word " * (i % 50)} for i in range(2_000)])
    alone = pack_files(source, tmp_path / "0", capacity=64, tokenizer=words, shard_tokens=2048)
    many = pack_files(source, tmp_path / str(workers), capacity=64, tokenizer=words, shard_tokens=2048, workers=workers)
    assert alone.totals == many.totals
    assert digests(tmp_path / "0") == digests(tmp_path / str(workers))


def as_json(path: Path, rows: list[dict[str, Any]]) -> Path:
    path = path.with_suffix(".json")
    path.write_text(json.dumps(rows))
    return path


def as_gzip(path: Path, rows: list[dict[str, Any]]) -> Path:
    path = path.with_suffix(".jsonl.gz")
    path.write_bytes(gzip.compress("\n\n".join(json.dumps(row) for row in rows).encode()))
    return path


def as_parquet(path: Path, rows: list[dict[str, Any]]) -> Path:
    path = path.with_suffix(".parquet")
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=7)
    return path


def as_dataset(path: Path, rows: list[dict[str, Any]]) -> Path:
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_list(rows).save_to_disk(str(path), num_shards=2)
    return path


@pytest.mark.parametrize("write", [as_json, as_gzip, as_parquet, as_dataset], ids=lambda f: f.__name__)
def test_all_kinds_of_files_give_the_same_packs(tmp_path: Path, write: Callable[[Path, Any], Path]) -> None:
    rows = ids_of(90)
    plain = pack_files(write_rows(tmp_path / "plain.jsonl", rows), tmp_path / "plain", capacity=100)
    other = pack_files(write(tmp_path / "data", rows), tmp_path / "other", capacity=100)
    assert documents(plain) == documents(other)
    if write is not as_dataset:  # two files there, so rows are numbered in each
        assert [p["document_ids"] for p in read_packs(plain)] == [p["document_ids"] for p in read_packs(other)]


def test_rows_of_several_files_are_traced_to_their_file(tmp_path: Path) -> None:
    first, second = ids_of(20, seed=1), ids_of(30, seed=2)
    files = [write_rows(tmp_path / "b.jsonl", first), write_rows(tmp_path / "a.jsonl", second)]
    result = pack_files(files, tmp_path / "out", capacity=64)
    assert [file["first_row"] for file in result.manifest["files"]] == [0, 20]
    for pack in read_packs(result):
        at = 0
        for file, row, length in zip(pack["source_files"], pack["source_rows"], pack["seq_lengths"], strict=True):
            assert (first, second)[file][row]["input_ids"] == pack["input_ids"][at : at + length]
            at += length


def test_datasets_loads_the_shards(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    result = pack_files(write_rows(tmp_path / "a.jsonl", ids_of(50)), tmp_path / "out", capacity=64)
    loaded = datasets.load_dataset(
        "parquet", data_files=str(tmp_path / "out" / "*.parquet"), split="train", cache_dir=str(tmp_path / "cache")
    )
    assert loaded[:]["input_ids"] == [pack["input_ids"] for pack in read_packs(result)]


def test_the_completion_is_the_target_where_rows_have_a_prompt(tmp_path: Path) -> None:
    rows = [{"prompt": "a b ", "response": "ccc dd e"}, {"prompt": "aaaa ", "response": ""}]
    source = write_rows(tmp_path / "a.jsonl", rows)
    result = pack_files(source, tmp_path / "auto", capacity=16, tokenizer=words)
    labels = documents(result, "labels")
    assert labels == {0: [-100, -100, 3, 2, 1], 1: [-100]}
    assert result.totals["without_targets"] == 1
    everything = pack_files(source, tmp_path / "all", capacity=16, tokenizer=words, loss="all")
    assert documents(everything, "labels")[0] == [-100, 1, 3, 2, 1]


def fast_tokenizer() -> Any:
    tokenizers = pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers")
    characters = {c: i for i, c in enumerate("abcdefghijklmnopqrstuvwxyz ")} | {"<end>": 27, "ab": 28, "b ": 29}
    model = tokenizers.models.BPE(vocab=characters, merges=[("a", "b"), ("b", " ")])
    backend = tokenizers.Tokenizer(model)
    return transformers.PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>")


def test_a_fast_tokenizer_ends_documents_and_finds_the_completion_by_characters(tmp_path: Path) -> None:
    rows = [{"prompt": "ca", "completion": "bd"}, {"prompt": "cb", "completion": " d"}]
    result = pack_files(
        write_rows(tmp_path / "a.jsonl", rows), tmp_path / "out", capacity=16, tokenizer=fast_tokenizer()
    )
    # The token "ab" straddles the border, and is a target; every document ends with the end token.
    assert documents(result) == {0: [2, 28, 3, 27], 1: [2, 29, 3, 27]}
    assert documents(result, "labels") == {0: [-100, 28, 3, 27], 1: [-100, 29, 3, 27]}


def test_messages_are_rendered_with_the_chat_template_and_the_assistant_is_the_target(tmp_path: Path) -> None:
    tokenizer = fast_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}{% endgeneration %}"
        "{% else %}{{ m['content'] }}{% endif %}{% endfor %}"
    )
    rows = [{"messages": [{"role": "user", "content": "cd"}, {"role": "assistant", "content": "ef"}]}]
    source = write_rows(tmp_path / "a.jsonl", rows)
    result = pack_files(source, tmp_path / "a", capacity=8, tokenizer=tokenizer, loss="assistant")
    assert documents(result, "labels") == {0: [-100, -100, 4, 5]}
    assert documents(pack_files(source, tmp_path / "b", capacity=8, tokenizer=tokenizer), "labels") == {
        0: [-100, 3, 4, 5]
    }


def test_padding_that_rows_carry_is_left_out(tmp_path: Path) -> None:
    rows = [{"input_ids": [0, 0, 7, 8], "attention_mask": [0, 0, 1, 1], "labels": [-100, -100, -100, 8]}]
    result = pack_files(write_rows(tmp_path / "a.jsonl", rows), tmp_path / "out", capacity=4)
    [pack] = read_packs(result)
    assert pack["input_ids"] == [7, 8]
    assert pack["labels"] == [-100, 8]
    assert "attention_mask" not in pack


def test_floats_and_whole_numbers_of_a_column_become_floats(tmp_path: Path) -> None:
    rows = [{"input_ids": [1, 2], "weights": [1, 0]}] * 200 + [{"input_ids": [3], "weights": [0.5]}] * 200
    result = pack_files(write_rows(tmp_path / "a.jsonl", rows), tmp_path / "out", capacity=64)
    weights = documents(result, "weights")
    assert weights[0] == [1.0, 0.0]
    assert weights[399] == [0.5]


# --- windows


lengths_strategy = st.lists(st.integers(1, 30), min_size=1, max_size=120)


@settings(deadline=None, max_examples=60)
@given(
    lengths=lengths_strategy,
    capacity=st.integers(8, 40),
    window=st.integers(2, 50),
    overlong=st.sampled_from(["split", "truncate", "drop"]),
    cuts=st.integers(1, 17),
)
def test_windows_lose_and_repeat_nothing(
    lengths: list[int], capacity: int, window: int, overlong: Any, cuts: int
) -> None:
    array = np.array(lengths, dtype=np.int32)
    made = list(
        plan_windows(
            [array[i : i + cuts] for i in range(0, len(array), cuts)], capacity, overlong=overlong, window=window
        )
    )
    held: dict[int, list[tuple[int, int]]] = {}
    for packs in made:
        assert_full_packs_within(packs, capacity)
        for document, start, length in zip(
            packs.pieces.document.tolist(), packs.pieces.start.tolist(), packs.pieces.length.tolist(), strict=True
        ):
            held.setdefault(document, []).append((start, length))
    for i, length in enumerate(lengths):
        pieces = sorted(held.get(i, []))
        if length > capacity and overlong == "drop":
            assert not pieces
            continue
        kept = min(length, capacity) if overlong == "truncate" else length
        assert [start for start, _ in pieces] == [capacity * k for k in range(len(pieces))]
        assert sum(n for _, n in pieces) == kept
    fate = [packs.fate for packs in made]
    over = [n for n in lengths if n > capacity]
    counted = {
        "split": [f.split for f in fate],
        "truncate": [f.truncated for f in fate],
        "drop": [f.dropped for f in fate],
    }
    assert sum(counted[overlong]) == len(over)
    assert not len(made[-1].waiting)


def assert_full_packs_within(packs: Packs, capacity: int) -> None:
    if len(packs):
        assert (np.diff(packs.offsets) > 0).all()
        assert np.add.reduceat(packs.pieces.length, packs.offsets[:-1]).max() <= capacity


def test_the_plan_does_not_depend_on_how_lengths_arrive() -> None:
    array = np.random.default_rng(0).integers(1, 100, size=1000).astype(np.int32)
    whole = list(plan_windows([array], 128, window=300))
    parts = list(plan_windows([array[i : i + 7] for i in range(0, 1000, 7)], 128, window=300))
    for a, b in zip(whole, parts, strict=True):
        assert np.array_equal(a.pieces.document, b.pieces.document)
        assert np.array_equal(a.offsets, b.offsets)


def test_documents_carried_over_make_small_windows_nearly_as_good_as_one() -> None:
    array = np.random.default_rng(0).lognormal(5.5, 0.8, size=4000).clip(8, 2048).astype(np.int32)
    one = sum(len(packs) for packs in plan_windows([array], 2048))
    many = sum(len(packs) for packs in plan_windows([array], 2048, window=200))
    assert many <= 1.01 * one


def test_a_windowed_corpus_is_packed_whole(tmp_path: Path) -> None:
    rows = ids_of(400, longest=90)
    source = write_rows(tmp_path / "a.jsonl", rows)
    result = pack_files(source, tmp_path / "out", capacity=64, window=50, overlong="split", shard_tokens=512)
    assert documents(result) == {i: row["input_ids"] for i, row in enumerate(rows)}
    assert result.totals["split"] == sum(len(row["input_ids"]) > 64 for row in rows)


# --- bad input


def expect(message: str, *args: Any, **kwargs: Any) -> None:
    with pytest.raises(PadlessError, match=message) as caught:
        pack_files(*args, **kwargs)
    assert "\n" not in str(caught.value)


def test_a_bad_row_is_named_or_counted(tmp_path: Path) -> None:
    source = tmp_path / "a.jsonl"
    source.write_text('{"input_ids": [1, 2]}\n{"input_ids": [1, \n{"input_ids": ["x"]}\n{"input_ids": []}\n')
    expect("a.jsonl, line 2: not JSON", source, tmp_path / "out", capacity=8)
    result = pack_files(source, tmp_path / "out2", capacity=8, bad_rows="skip")
    assert documents(result) == {0: [1, 2]}
    assert (result.totals["bad_rows"], result.totals["empty"], result.totals["rows"]) == (2, 1, 4)


def test_a_bad_id_names_its_row(tmp_path: Path) -> None:
    source = write_rows(tmp_path / "a.jsonl", [{"input_ids": [1]}, {"input_ids": [3, -1]}])
    expect(r"a.jsonl, row 1: .*input_ids\[1\] is -1", source, tmp_path / "out", capacity=8)


def test_a_document_over_the_capacity_names_file_row_and_limit(tmp_path: Path) -> None:
    source = write_rows(tmp_path / "a.jsonl", [{"input_ids": [1] * 4}, {"input_ids": [1] * 9}])
    expect("a.jsonl, row 1: 9 tokens exceed the capacity 8", source, tmp_path / "out", capacity=8)


def test_unreadable_files_are_named(tmp_path: Path) -> None:
    expect("nothing.jsonl does not exist", tmp_path / "nothing.jsonl", tmp_path / "out", capacity=8)
    broken = tmp_path / "b.jsonl.gz"
    broken.write_bytes(gzip.compress(b'{"input_ids": [1]}\n' * 5000)[:40])
    expect("cannot read .*b.jsonl.gz", broken, tmp_path / "out", capacity=8)
    table = tmp_path / "c.parquet"
    table.write_bytes(b"PAR1 no")
    expect("c.parquet", table, tmp_path / "out", capacity=8)
    empty = tmp_path / "d.jsonl"
    empty.write_text("\n\n")
    expect("no rows in", empty, tmp_path / "out", capacity=8)


def test_rows_without_any_document_are_refused_with_counts(tmp_path: Path) -> None:
    source = write_rows(tmp_path / "a.jsonl", [{"input_ids": []}] * 3)
    expect("no document in 3 rows: 3 are empty", source, tmp_path / "out", capacity=8)
    source = write_rows(tmp_path / "b.jsonl", [{"input_ids": [1] * 9}] * 3)
    expect("all 3 documents are over the capacity 8", source, tmp_path / "out2", capacity=8, overlong="drop")


def test_options_are_checked(tmp_path: Path) -> None:
    source = write_rows(tmp_path / "a.jsonl", [{"input_ids": [1]}])
    expect("overlong='alone' is unknown", source, tmp_path / "o", capacity=8, overlong="alone")
    expect("capacity=0", source, tmp_path / "o", capacity=0)
    expect("loss='some' is unknown", source, tmp_path / "o", capacity=8, loss="some")
    expect(
        "loss='completion' needs prompt columns",
        write_rows(tmp_path / "t.jsonl", [{"text": "a b"}]),
        tmp_path / "o",
        capacity=8,
        tokenizer=words,
        loss="completion",
    )
    lengths = write_rows(tmp_path / "l.jsonl", [{"length": 3}])
    expect("holds lengths; packing needs text", lengths, tmp_path / "o", capacity=8)
    expect("names no end token", source, tmp_path / "o", capacity=8, tokenizer=words, end_token=True)


def test_a_column_of_other_length_is_refused_by_name(tmp_path: Path) -> None:
    source = write_rows(tmp_path / "a.jsonl", [{"input_ids": [1, 2], "advantages": [0.5]}])
    expect("row 0: advantages has 1 entries for 2 tokens.*leave 'advantages' out", source, tmp_path / "o", capacity=8)
    result = pack_files(source, tmp_path / "o2", capacity=8, leave_out=["advantages"])
    assert result.manifest["columns_left_out"] == ["advantages"]


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=st.lists(st.lists(st.integers(0, 9), max_size=40), min_size=1, max_size=40), capacity=st.integers(5, 50))
def test_any_rows_are_packed_whole_or_counted(tmp_path_factory: Any, rows: list[list[int]], capacity: int) -> None:
    folder = tmp_path_factory.mktemp("any")
    source = write_rows(folder / "a.jsonl", [{"input_ids": row} for row in rows])
    if not any(rows):
        expect("are empty", source, folder / "out", capacity=capacity)
        return
    result = pack_files(source, folder / "out", capacity=capacity, overlong="split", shard_tokens=capacity * 2)
    assert documents(result) == {i: row for i, row in enumerate(rows) if row}
    assert result.totals["empty"] == sum(not row for row in rows)


def test_arrow_columns_are_read_as_their_rows_would_be(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    rows = [
        {
            "input_ids": rng.integers(0, 99, size=n).tolist(),
            "labels": [-100] * n,
            "weights": rng.random(n).tolist(),
            "n": n,
        }
        for n in rng.integers(0, 20, size=300).tolist()
    ]
    lines = pack_files(write_rows(tmp_path / "a.jsonl", rows), tmp_path / "lines", capacity=32, leave_out=["n"])
    table = pack_files(as_parquet(tmp_path / "a", rows), tmp_path / "table", capacity=32)
    for name in ("input_ids", "labels", "weights"):
        assert documents(lines, name) == documents(table, name)
    assert lines.totals == table.totals
    assert lines.manifest["columns_left_out"] == table.manifest["columns_left_out"] == ["n"]


@pytest.mark.parametrize(
    ("column", "values", "message"),
    [
        ("input_ids", [[1], [3, -1]], r"row 1: .*input_ids\[1\] is -1"),
        ("labels", [[1], [3]], "row 1: labels has 1 entries for 2 tokens"),
    ],
)
def test_a_bad_arrow_row_is_named(tmp_path: Path, column: str, values: list[list[int]], message: str) -> None:
    rows = pa.table({"input_ids": [[1], [2, 3]], "labels": [[1], [2, 3]]} | {column: values})
    pq.write_table(rows, tmp_path / "a.parquet")
    expect(message, tmp_path / "a.parquet", tmp_path / "out", capacity=8)


def test_progress_tells_rows_and_tokens_of_every_stage(tmp_path: Path) -> None:
    source = write_rows(tmp_path / "a.jsonl", [{"text": "ab " * (i % 40) + "c" * 800} for i in range(900)])
    seen: dict[str, list[tuple[int, int | None, int]]] = {}
    result = pack_files(
        source,
        tmp_path / "out",
        capacity=64,
        tokenizer=words,
        shard_tokens=1024,
        progress=lambda stage, *told: seen.setdefault(stage, []).append(told),
    )
    assert list(seen) == ["reading", "tokenizing", "planning", "writing"]
    for stage in ("tokenizing", "writing"):
        done = [told[0] for told in seen[stage]]
        assert done == sorted(done)
        assert len(done) > 2
        assert seen[stage][-1][0] == seen[stage][-1][1]
    assert seen["tokenizing"][0][1] == 900
    assert seen["writing"][-1][2] == result.totals["tokens"]


@pytest.mark.parametrize("kind", ["code", "articles"])
def test_packs_of_text_like_lengths_are_full_at_8k(kind: str) -> None:
    rng = np.random.default_rng(0)
    if kind == "code":
        array = rng.lognormal(np.log(700), 1.4, size=8_000).clip(10, 200_000)
    else:  # encyclopaedia articles, half of them longer than a third of a pack
        array = rng.lognormal(np.log(3500), 0.7, size=8_000).clip(100, 60_000)
    array = array.astype(np.int32)
    made = list(plan_windows([array], 8192, overlong="split", window=3_000))
    assert array.sum() / (8192 * sum(map(len, made))) >= 0.995


SMALL_MEMORY = """
import resource, sys
import numpy as np, pyarrow.parquet as pq
from padless.data.packing import pack_files
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
result = pack_files(sys.argv[1], sys.argv[2], capacity=2048, window=20_000, shard_tokens=1 << 20)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before, result.totals["tokens"], result.totals["efficiency"])
"""


@pytest.mark.slow
def test_memory_does_not_grow_with_the_corpus(tmp_path: Path) -> None:
    used = []
    for count in (100_000, 400_000):
        lengths = np.random.default_rng(0).integers(4, 120, size=count).astype(np.int32)
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        ids = pa.array(np.zeros(int(offsets[-1]), dtype=np.int32))
        path = tmp_path / f"{count}.parquet"
        pq.write_table(pa.table({"input_ids": pa.ListArray.from_arrays(offsets, ids)}), path, row_group_size=50_000)
        told = subprocess.run(
            [sys.executable, "-c", SMALL_MEMORY, str(path), str(tmp_path / f"out{count}")],
            capture_output=True, text=True, timeout=200, check=True,
        )  # fmt: skip
        kilobytes, tokens, full = told.stdout.split()
        assert int(tokens) == lengths.sum()
        assert float(full) > 0.995
        used.append(int(kilobytes) / 1024)
    assert used[1] < 1.5 * used[0] + 30, "four times the corpus, about the same memory (MiB)"
