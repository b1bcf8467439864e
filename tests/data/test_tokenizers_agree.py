"""Measuring and packing see the same tokens, whatever tokenizes and whatever state it was left in."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from padless.data import measure
from padless.data._rows import prompt_columns
from padless.data._tokenizer import count_tokens, describe_tokenizer, encode_texts
from padless.data._tokens import Encoder
from padless.data.packing import pack_files
from padless.errors import PadlessError

TEXTS = ["one two three", "", "four", "five six " * 12]


def plain_tokenizer() -> Any:
    """A ``tokenizers.Tokenizer`` that puts <s> before every text."""
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<s>": 0, "<e>": 1, "<p>": 2, "?": 3}, unk_token="?"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    made.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return made


def hugging_face_tokenizer() -> Any:
    """The same, as transformers wraps it."""
    transformers = pytest.importorskip("transformers")
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=plain_tokenizer(), bos_token="<s>", eos_token="<e>", pad_token="<p>", unk_token="?"
    )


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("make", [plain_tokenizer, hugging_face_tokenizer])
def test_padding_and_truncation_that_an_earlier_call_left_on_reach_neither_measuring_nor_packing(
    make: Any, tmp_path: Path
) -> None:
    source = write(tmp_path / "rows.jsonl", [{"text": text} for text in TEXTS])
    fresh = pack_files(source, tmp_path / "fresh", capacity=64, tokenizer=make(), end_token=False).totals["tokens"]
    used = make()
    backend = getattr(used, "backend_tokenizer", used)
    backend.enable_padding(length=40, pad_id=2, pad_token="<p>")
    backend.enable_truncation(5)
    before = (backend.padding, backend.truncation)
    assert pack_files(source, tmp_path / "used", capacity=64, tokenizer=used, end_token=False).totals["tokens"] == fresh
    assert measure(source, tokenizer=used, cache=False).real_tokens == fresh == 4 + 2 + 25
    if used is backend:  # and the user's own object is as it was
        assert (backend.padding, backend.truncation) == before


@pytest.mark.parametrize("threads", ["true", "false", None])
@pytest.mark.parametrize("make", [plain_tokenizer, hugging_face_tokenizer])
def test_many_texts_have_the_same_tokens_in_workers_in_threads_and_through_the_class_around(
    make: Any, threads: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TOKENIZERS_PARALLELISM", raising=False)
    if threads is not None:
        monkeypatch.setenv("TOKENIZERS_PARALLELISM", threads)
    rng = np.random.default_rng(0)
    texts = ["<e> two " * int(n) for n in rng.integers(0, 9, size=300)]
    slow = hugging_face_tokenizer()(texts, add_special_tokens=True)["input_ids"]
    one_by_one = [make().encode(text) for text in texts]
    one_by_one = [getattr(found, "ids", found) for found in one_by_one]
    ids, encodings = encode_texts(make(), texts, special=True, offsets=True)
    assert ids == encode_texts(make(), texts, special=True)[0] == slow == one_by_one
    assert encodings is not None
    assert [encoding.ids for encoding in encodings] == slow
    assert count_tokens(make(), texts, special=True) == [len(row) for row in slow]
    source = write(tmp_path / "rows.jsonl", [{"text": text} for text in texts])
    shared = measure(source, tokenizer=make(), workers=2, batch_size=200, cache=False, empty="keep")
    assert shared.lengths.tolist() == [len(row) if text else 0 for text, row in zip(texts, slow, strict=True)]


def test_one_thread_gets_texts_in_small_batches_and_many_threads_get_all_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sizes: list[int] = []

    class Backend:
        get_vocab_size = None

        def encode_batch(self, texts: list[str], *, add_special_tokens: bool) -> list[str]:
            sizes.append(len(texts))
            return texts

    texts = ["x" * (i % 7) for i in range(300)]
    for told, expected in (("false", [128, 128, 44]), ("0", [128, 128, 44]), ("true", [300])):
        monkeypatch.setenv("TOKENIZERS_PARALLELISM", told)
        sizes.clear()
        assert count_tokens(Backend(), texts, special=False) == [i % 7 for i in range(300)]
        assert sizes == expected


class Slow:
    """Like sentencepiece's wrappers: one text at a time, with the usual option."""

    eos_token_id = None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [0] * add_special_tokens + [len(word) for word in text.split()]


def test_an_encode_that_knows_special_tokens_is_told_whether_they_are_wanted() -> None:
    assert measure(TEXTS, tokenizer=Slow()).lengths.tolist() == [4, 2, 25]
    assert measure(TEXTS, tokenizer=Slow(), add_special_tokens=False).lengths.tolist() == [3, 1, 24]


def test_a_class_that_encodes_in_its_own_way_is_called_and_not_passed_over() -> None:
    transformers = pytest.importorskip("transformers")

    class Louder(transformers.PreTrainedTokenizerFast):  # type: ignore[misc, name-defined]
        def __call__(self, texts: list[str], **options: Any) -> Any:
            return super().__call__([text + " !" for text in texts], **options)

    tokenizer = Louder(tokenizer_object=plain_tokenizer(), bos_token="<s>", eos_token="<e>", unk_token="?")
    assert measure(TEXTS, tokenizer=tokenizer).lengths.tolist() == [5, 3, 26]
    ids, _ = encode_texts(tokenizer, TEXTS, special=False, offsets=True)
    assert [len(row) for row in ids] == [4, 1, 2, 25]


class AroundTiktoken:
    """A class around an encoding, as packages ship them: it has the ranks, and no name."""

    def __init__(self, ranks: dict[bytes, int]) -> None:
        self._mergeable_ranks = ranks

    def encode(self, text: str) -> list[int]:
        return list(text.encode())


def test_a_class_around_tiktoken_is_known_by_its_ranks_and_cached(tmp_path: Path) -> None:
    source = write(tmp_path / "rows.jsonl", [{"text": text} for text in TEXTS])
    one, other = AroundTiktoken({b"a": 0}), AroundTiktoken({b"a": 0, b"b": 1})
    assert describe_tokenizer(one) == describe_tokenizer(AroundTiktoken({b"a": 0})) != describe_tokenizer(other)
    assert not measure(source, tokenizer=one).cached
    assert measure(source, tokenizer=one).cached
    assert not measure(source, tokenizer=other).cached


def test_what_is_no_tokenizer_is_refused() -> None:
    with pytest.raises(PadlessError, match="tokenizer=7; expected a tokenizer"):
        measure(TEXTS, tokenizer=7)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.text(alphabet="ab \n<s>", max_size=30), min_size=1, max_size=6))
def test_the_count_is_the_number_of_ids_that_packing_writes(texts: list[str]) -> None:
    for tokenizer in (plain_tokenizer(), hugging_face_tokenizer(), Slow(), str.split):
        for special in (True, False):
            ids, _ = encode_texts(tokenizer, texts, special=special)
            assert count_tokens(tokenizer, texts, special=special) == [len(row) for row in ids]
        if tokenizer is str.split:
            continue
        found = Encoder(tokenizer=tokenizer).with_fields(["text"])({"text": texts}, 0)
        counted = np.zeros(len(texts), dtype=np.int64)
        counted[found.rows] = found.lengths
        if any(texts):
            assert counted.tolist() == [
                n if t else 0 for t, n in zip(texts, count_tokens(tokenizer, texts, special=True), strict=True)
            ]


def test_the_input_of_an_instruction_is_no_target_in_either() -> None:
    row = {"instruction": "add these", "input": " 1 2 3", "output": " six"}
    columns = {name: [value] for name, value in row.items()}
    measured = measure([row], tokenizer=str.split, targets=True)
    assert (measured.lengths.tolist(), measured.targets) == ([6], np.array([1]))
    ids = Encoder(tokenizer=lambda text: [len(word) for word in text.split()]).with_fields(list(row))(columns, 0)
    assert ids.columns["labels"].tolist() == [-100] * 5 + [3]
    assert prompt_columns(["answer", "prompt"]) == []


def test_tools_reach_the_template_when_only_the_assistant_is_trained() -> None:
    pytest.importorskip("jinja2")
    tokenizer = hugging_face_tokenizer()
    tokenizer.chat_template = (
        "{% for tool in tools or [] %}{{ tool.name }} {% endfor %}{% for m in messages %}"
        "{% if m.role == 'assistant' %}{% generation %}{{ m.content }} {% endgeneration %}"
        "{% else %}{{ m.content }} {% endif %}{% endfor %}"
    )
    messages = [{"role": "user", "content": "a b"}, {"role": "assistant", "content": "c"}]
    columns = {"messages": [messages, messages], "tools": [[{"name": "x"}, {"name": "y"}], None]}
    encoder = Encoder(tokenizer=tokenizer, loss="assistant").with_fields(list(columns))
    found = encoder(columns, 0)
    measured = measure([{"messages": messages, "tools": t} for t in columns["tools"]], tokenizer=tokenizer)
    assert found.lengths.tolist() == measured.lengths.tolist() == [5, 3]
    assert (found.columns["labels"] != -100).tolist() == [False] * 4 + [True] + [False] * 2 + [True]
    with pytest.raises(PadlessError, match="not a function"):
        Encoder(tokenizer=tokenizer, loss="assistant", chat_template=str).with_fields(list(columns))(columns, 0)


def test_a_conversation_that_the_template_cannot_render_is_named_by_its_row() -> None:
    pytest.importorskip("jinja2")
    tokenizer = hugging_face_tokenizer()
    tokenizer.chat_template = "{% if messages[0].role != 'user' %}{{ raise_exception('user first') }}{% endif %}x"
    good, bad = [{"role": "user", "content": "a"}], [{"role": "assistant", "content": "a"}]
    with pytest.raises(PadlessError, match=r"row 2: the chat template cannot render the messages: user first"):
        measure([{"messages": m} for m in (good, good, bad)], tokenizer=tokenizer)
