"""JSON lines are read in blocks: rows, their places and what is wrong with them are as if read line by line."""

from __future__ import annotations

import gzip
import json
import os
import pickle
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from padless.data import measure
from padless.data._lines import Lines, Stretch, _row, columns_of_lines, read_lines
from padless.errors import PadlessError

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
LINES = st.sampled_from([b'{"text": "a b"}', b'{"text": "\\n\\r"}\r', b" 7\t", b"", b"  ", b"\t\r", "\ufeff7".encode()])


@settings(max_examples=60, deadline=None)
@given(st.lists(LINES, max_size=14), st.integers(1, 5), st.booleans(), st.booleans())
def test_blocks_hold_every_line_that_is_not_blank_with_its_number(
    tmp_path_factory: pytest.TempPathFactory, lines: list[bytes], size: int, ended: bool, zipped: bool
) -> None:
    text = b"\n".join(lines) + (b"\n" if ended else b"")
    path = tmp_path_factory.mktemp("lines") / ("a.jsonl.gz" if zipped else "a.jsonl")
    path.write_bytes(gzip.compress(text) if zipped else text)
    expected = [(number, line) for number, line in enumerate(text.split(b"\n"), 1) if line.strip()]
    blocks = [pickle.loads(pickle.dumps(block)) for block in read_lines(path, size)]
    assert [item for block in blocks for item in zip(block.numbers, block.split(), strict=True)] == expected
    assert [len(block) for block in blocks[:-1]] == [size] * (len(blocks) - 1), "a resumed pass counts on it"
    assert all(1 <= len(block) <= size for block in blocks)
    places = [pickle.loads(pickle.dumps(block)) for block in read_lines(path, size, in_place=True)]
    assert all(isinstance(place, Lines if zipped else Stretch) for place in places)
    loaded = [place.load() if isinstance(place, Stretch) else place for place in places]
    assert [(list(block.numbers), block.split()) for block in loaded] == [
        (list(block.numbers), block.split()) for block in blocks
    ]
    for block in blocks:
        apart = list(block.singles())
        assert [(one.numbers[0], one.data) for one in apart] == list(zip(block.numbers, block.split(), strict=True))
        assert Lines("x", block.numbers, block.data.removesuffix(b"\n") + b"\n").split() == block.split()


@settings(max_examples=150, deadline=None)
@given(
    VALUES, st.text(" \t\r\n", max_size=2), st.text(" \t\r\n", max_size=2), st.sampled_from(["", ",", "}", "x", "1"])
)
def test_a_row_is_what_json_makes_of_it_and_so_is_the_error(value: Any, before: str, after: str, more: str) -> None:
    for given_text in (before + json.dumps(value) + after + more, before + json.dumps(value)[:-1] + after, before):
        assert told(_row, given_text) == told(json.loads, given_text)


def told(parse: Any, text: str) -> str:
    try:
        return repr(parse(text))
    except ValueError as error:
        return f"error: {error}"


def test_a_file_that_changes_while_it_is_read_is_told_and_a_pipe_is_read_once(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "a"}\n' * 5)
    places = list(read_lines(path, 2, in_place=True))
    path.write_text('{"text": "a much longer row"}\n' * 2)
    with pytest.raises(PadlessError, match=r"rows\.jsonl was changed while it was read"):
        columns_of_lines(places[2], 4)
    pipe = tmp_path / "pipe.jsonl"
    os.mkfifo(pipe)
    writer = threading.Thread(target=lambda: pipe.write_text('{"text": "a b"}\n' * 5), daemon=True)
    writer.start()
    assert measure(pipe, tokenizer=str.split, batch_size=2, cache=False).lengths.tolist() == [2] * 5


def test_an_array_and_lines_under_the_name_json_are_numbered_too(tmp_path: Path) -> None:
    (tmp_path / "array.json").write_text(json.dumps([{"text": "a\nb"}, {"text": "é"}, {"text": ""}], indent=2))
    (tmp_path / "lines.json").write_text('\n{"text": "a\\nb"}\r\r{"text": "é"}\n\n{"text": ""}')
    for name, numbers in (("array.json", [1, 2, 3]), ("lines.json", [2, 4, 6])):
        blocks = list(read_lines(tmp_path / name, 2))
        assert [number for block in blocks for number in block.numbers] == numbers
        rows = [text for block in blocks for text in columns_of_lines(block, 0)["text"]]
        assert rows == ["a\nb", "é", ""]


def test_a_byte_order_mark_and_lone_surrogates_are_let_through(tmp_path: Path) -> None:
    path = tmp_path / "odd.jsonl"
    path.write_bytes('\ufeff{"text": "a"}\n'.encode() + b'{"text": "\xed\xa0\x80"}\n{"text": "\\ud800"}\n')
    (block,) = read_lines(path, 10)
    assert columns_of_lines(block, 0) == {"text": ["a", "\ud800", "\ud800"]}


@pytest.mark.parametrize("workers", [0, 2])
def test_what_is_wrong_with_a_row_is_told_by_its_line_or_place_wherever_it_is_found(
    tmp_path: Path, workers: int
) -> None:
    rows = [json.dumps({"text": "one " * (i % 5 + 1)}) for i in range(100)]
    options: dict[str, Any] = {"tokenizer": str.split, "workers": workers, "batch_size": 16, "cache": False}
    broken = tmp_path / "broken.jsonl"
    broken.write_text("\n".join([*rows[:50], "", " ", *rows[50:70], '{"text": "a"} {"text": "b"}', *rows[70:]]))
    with pytest.raises(PadlessError, match=r"^broken\.jsonl, line 73: not JSON: Extra data"):
        measure(broken, **options)
    mixed = tmp_path / "mixed.jsonl"
    mixed.write_text("\n\n".join([*rows[:70], '{"text": 5}', *rows[70:]]))
    with pytest.raises(PadlessError, match=r"^row 70: text is a int, where other rows have str"):
        measure(mixed, **options)
    bare = tmp_path / "bare.jsonl"
    bare.write_text("\n".join([*rows[:70], "[1, 2]", *rows[70:]]))
    with pytest.raises(PadlessError, match=r"^row 70 is a list; expected a mapping"):
        measure(bare, **options)
