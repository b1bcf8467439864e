"""Prompts and responses from files, and tokenizers from folders, files and packages."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from padless.data._tokenizer import PACKAGED, encode_texts
from padless.data._tokenizer import load_tokenizer as load
from padless.errors import PadlessError

__all__ = ["Encode", "Sample", "load_tokenizer", "read_samples"]

PROMPTS = ("prompt", "question", "instruction", "input")
RESPONSES = ("response", "completion", "answer", "output")
MESSAGES = ("messages", "conversations")
LENGTHS = ("prompt_length", "response_length")

Row = tuple[int, dict[str, Any]]
Render = Callable[[list[dict[str, str]]], str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Rows chosen from a file, with their place in it.

    Attributes:
        name: the file's name.
        rows: rows in the file.
        chosen: (place, row) of each.
        kind: ``"pair"``, ``"messages"``, ``"text"`` or ``"lengths"``.
        columns: the columns that hold them.
    """

    name: str
    rows: int
    chosen: list[Row]
    kind: str
    columns: tuple[str, ...]

    @property
    def lengths(self) -> tuple[list[int], list[int]] | None:
        """Prompt and response lengths, where the rows hold nothing else."""
        if self.kind != "lengths":
            return None
        for index, row in self.chosen:
            for column in self.columns:
                value = row.get(column)
                if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                    raise PadlessError(
                        f"{self.name}, row {index}: {column} is {value!r}; expected whole tokens, at least 1"
                    )
        first, second = self.columns
        return [row[first] for _, row in self.chosen], [row[second] for _, row in self.chosen]

    def texts(self, render: Render) -> Iterator[tuple[int, str | None, str]]:
        """(place, prompt, response) of each row; a plain text has no prompt."""
        for index, row in self.chosen:
            where = f"{self.name}, row {index}"
            if self.kind == "text":
                yield index, None, _text(row, self.columns[0], where)
            elif self.kind == "pair":
                prompt = _messages(row.get(self.columns[0]))
                response = _messages(row.get(self.columns[1]))
                asked = _text(row, self.columns[0], where) if prompt is None else render(prompt)
                for extra in self.columns[2:]:  # an instruction's input
                    asked += f"\n{row[extra]}" if row.get(extra) else ""
                yield index, asked, _text(row, self.columns[1], where) if response is None else response[-1]["content"]
            else:
                yield index, *_last_turn(row, self.columns[0], where, render)


def read_samples(path: str | Path, *, count: int, seed: int) -> Sample:
    """Choose ``count`` rows of a JSONL, JSONL.gz, JSON, Parquet or Arrow file (all if it has fewer), in random order.

    The file is read once and only the chosen rows are kept.
    """
    from padless.data._sources import open_source

    path = Path(path)
    if path.is_dir():
        raise PadlessError(f"{path} is a folder; name one file of rows")
    source = open_source(path)
    rng = np.random.default_rng(seed)
    chosen: list[Row] = []
    total, shape = 0, None
    for first, payload in source.payloads(1024):
        columns = {name: _values(column) for name, column in source.unpack(payload, first).items()}
        if shape is None:
            shape = _shape(list(columns), path.name)
        rows = len(next(iter(columns.values()), []))
        for offset in range(rows):
            place = first + offset
            row = {name: values[offset] for name, values in columns.items()}
            _require(row, shape[1][:2], f"{path.name}, row {place}")
            # Every row so far is equally likely to be among those kept.
            if len(chosen) < count:
                chosen.append((place, row))
            elif (slot := int(rng.integers(place + 1))) < count:
                chosen[slot] = (place, row)
        total = first + rows
    if shape is None or not total:
        raise PadlessError(f"{path.name} holds no row: there is nothing to train on")
    mixed = [chosen[i] for i in rng.permutation(len(chosen))]
    return Sample(name=path.name, rows=total, chosen=mixed, kind=shape[0], columns=shape[1])


def _values(column: Any) -> list[Any]:
    return column if isinstance(column, list) else list(column.to_pylist())


def _shape(names: list[str], file: str) -> tuple[str, tuple[str, ...]]:
    """What rows with these columns hold."""
    if all(name in names for name in LENGTHS):
        return "lengths", LENGTHS
    prompt = next((name for name in PROMPTS if name in names), None)
    response = next((name for name in RESPONSES if name in names), None)
    if prompt and response:
        more = ("input",) if prompt == "instruction" and "input" in names else ()
        return "pair", (prompt, response, *more)
    for name in MESSAGES:
        if name in names:
            return "messages", (name,)
    if "text" in names:
        return "text", ("text",)
    missing = f"{prompt!r} but no response" if prompt else f"{response!r} but no prompt" if response else "neither"
    raise PadlessError(
        f"{file} has {missing} among its fields {', '.join(map(repr, names)) or '(none)'}; expected prompt and"
        " response, messages, or text: rename the fields"
    )


def _require(row: Mapping[str, Any], columns: tuple[str, ...], where: str) -> None:
    for column in columns:
        if row.get(column) is None:
            raise PadlessError(f"{where}: field {column!r} is missing: add it, or remove the row")


def _text(row: Mapping[str, Any], column: str, where: str) -> str:
    value = row[column]
    if not isinstance(value, str):
        raise PadlessError(f"{where}: {column!r} is a {type(value).__name__}; expected text or messages")
    return value


def _messages(value: Any) -> list[dict[str, str]] | None:
    """A conversation in one shape, from ``role``/``content`` or ``from``/``value``; None for anything else."""
    if not isinstance(value, list) or not value or not all(isinstance(item, Mapping) for item in value):
        return None
    roles = {"human": "user", "gpt": "assistant", "function_call": "assistant", "observation": "tool"}
    result = []
    for item in value:
        role = str(item.get("role") or item.get("from") or "user")
        content = item.get("content", item.get("value"))
        if isinstance(content, list):  # parts: only the text ones are tokens
            content = "".join(str(part.get("text") or "") for part in content if isinstance(part, Mapping))
        result.append({"role": roles.get(role, role), "content": str(content or "")})
    return result


def _last_turn(row: Mapping[str, Any], column: str, where: str, render: Render) -> tuple[str, str]:
    """The conversation up to the assistant's last turn, and that turn."""
    messages = _messages(row[column])
    if messages is None:
        raise PadlessError(f"{where}: {column!r} is not a list of messages with role and content")
    answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    if not answers or answers[-1] == 0:
        raise PadlessError(f"{where}: {column!r} has no assistant's turn after a prompt: remove the row")
    return render(messages[: answers[-1]]), messages[answers[-1]]["content"]


# --- tokenizers


class Encode:
    """Text to ids, (tokens,) int64, without special tokens; and a conversation to text."""

    def __init__(self, encode: Callable[[str], Any], render: Render | None = None) -> None:
        self._encode = encode
        self.render: Render = render or _chatml

    def __call__(self, text: str) -> npt.NDArray[np.int64]:
        """Ids of a text."""
        return np.asarray(self._encode(text), dtype=np.int64)


def _chatml(messages: list[dict[str, str]]) -> str:
    """Used where the tokenizer brings no chat template of its own."""
    turns = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages)
    return turns + "<|im_start|>assistant\n"


def load_tokenizer(name: str) -> Encode:
    """A tokenizer by folder, ``tokenizer.json``, packaged name (``qwen``, ``deepseek``), or name on a model hub.

    Raises:
        PadlessError: nothing of that name, or what is there is no tokenizer.
    """
    known = name.removesuffix("-tokenizer") in PACKAGED or "/" in name or name.endswith(".json")
    if not known and not Path(name).exists():
        raise PadlessError(
            f"tokenizer {name!r} is unknown; name a folder, a tokenizer.json, 'qwen', 'deepseek', or OWNER/NAME on a"
            " hub"
        )
    tokenizer = load(name)

    def render(messages: list[dict[str, str]]) -> str:
        return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))

    return Encode(
        lambda text: encode_texts(tokenizer, [text], special=False)[0][0],
        render if getattr(tokenizer, "chat_template", None) else None,
    )
