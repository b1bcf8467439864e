"""Rows to token counts: which columns make the sequence, how they are tokenised, what is supervised."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import numpy as np
import numpy.typing as npt

from padless.data._tokenizer import count_tokens
from padless.errors import PadlessError, shown

__all__ = [
    "PROMPTS",
    "Columns",
    "Counter",
    "as_columns",
    "as_list",
    "choose_fields",
    "prompt_columns",
    "refuse_odd_types",
    "template_options",
]

Columns = dict[str, Any]
"""A batch of rows by column: lists, or Arrow arrays (whose list lengths are read without unpacking)."""

Counts = npt.NDArray[np.int64]

PROMPTS = ("prompt", "instruction", "question")
_COMPLETIONS = ("completion", "response", "output", "answer")
_PADDED_APART = (("chosen", "rejected"),)
_IGNORED = -100


@dataclass(frozen=True, slots=True, kw_only=True)
class Counter:
    """Counts tokens of a batch of rows. Picklable, so that worker processes can run it.

    Attributes:
        fields: for each field that is padded apart, the columns that are joined in it.
        tokenizer: anything that `padless.data.measure` takes, or ``None`` for rows that are tokenised already.
        chat_template: passed to ``apply_chat_template``, or a function from one row's messages to text.
        length: a function of a row that replaces all of the above.
        add_special_tokens: whether the tokenizer adds its own to plain text (a chat template brings its own).
        add_tokens: tokens that the training code appends to each field later (an end token, a separator).
        join: what stands between joined text columns.
    """

    fields: tuple[tuple[str, ...], ...]
    tokenizer: Any = None
    chat_template: str | Callable[[Any], str] | None = None
    length: Callable[[Mapping[str, Any]], Any] | None = None
    add_special_tokens: bool = True
    add_tokens: int = 0
    join: str = ""

    def __call__(self, columns: Columns, first_row: int) -> Counts:
        """Token counts, (B, F), of rows ``first_row`` and following."""
        if self.length is not None:
            return _by_function(self.length, columns, first_row)
        count = _rows(columns)
        result = np.zeros((count, len(self.fields)), dtype=np.int64)  # (B, F)
        for f, names in enumerate(self.fields):
            result[:, f] = self.count(columns, names, first_row)
        return result

    def count(self, columns: Columns, names: Sequence[str], first_row: int) -> Counts:
        """Token counts, (B,), of the sequence that the columns ``names`` make together."""
        kinds = {name: _kind(columns[name], name) for name in names}
        joined = {kind for kind in kinds.values() if kind != "empty"}
        if joined <= {"ids", "number"}:
            total = np.zeros(_rows(columns), dtype=np.int64)
            for name in names:
                total += (
                    _numbers(columns[name], name, first_row) if kinds[name] == "number" else _id_counts(columns, name)
                )
            # Rows without a token stay empty: what is appended to nothing is not a sequence.
            return np.where(total > 0, total + self.add_tokens, 0)
        texts = self.texts(columns, names, kinds, first_row)
        return self.tokens(texts, special=joined == {"text"})

    def tokens(self, texts: list[str], *, special: bool) -> Counts:
        """Token counts of whole texts, (B,); an empty one has none, whatever is added to the others."""
        tokens = count_tokens(self.tokenizer, texts, special=self.add_special_tokens and special)
        counts = np.array(tokens, dtype=np.int64) + self.add_tokens
        if not all(texts):
            counts[[i for i, text in enumerate(texts) if not text]] = 0
        return counts

    def sequence_texts(self, columns: Columns, first_row: int = 0) -> tuple[list[str], bool]:
        """The text of each row's only field, and whether it is plain text (and not a rendered conversation)."""
        (names,) = self.fields
        kinds = {name: _kind(columns[name], name) for name in names}
        return self.texts(columns, names, kinds, first_row), set(kinds.values()) <= {"text", "empty"}

    def texts(self, columns: Columns, names: Sequence[str], kinds: Mapping[str, str], first_row: int) -> list[str]:
        """The text of each row, as the tokenizer gets it."""
        joined = {kind for kind in kinds.values() if kind != "empty"}
        if not joined:
            return [""] * _rows(columns)
        if self.tokenizer is None:
            raise PadlessError(
                f"columns {', '.join(names)} hold {' and '.join(sorted(joined))}, not token ids: pass tokenizer=,"
                " length= (a function of a row), or the name of a column of lengths as fields="
            )
        refuse_odd_types(columns, names, first_row)
        values = [[value or "" for value in as_list(columns[name])] for name in names]
        if joined == {"text"}:
            if len(values) == 1:
                return values[0]
            return [self.join.join(parts) for parts in zip(*values, strict=True)]
        if joined == {"messages"}:
            tools = as_list(columns["tools"]) if "tools" in columns else [None] * _rows(columns)
            rows = enumerate(zip(*values, strict=True), first_row)
            return [
                self.render([m for part in parts for m in part], tools[row - first_row], row) for row, parts in rows
            ]
        raise PadlessError(
            f"columns {', '.join(names)} hold different kinds ({', '.join(f'{n}: {k}' for n, k in kinds.items())});"
            " join columns of one kind, or pass length= (a function of a row)"
        )

    def render(self, messages: list[Any], tools: Any, row: int) -> str:
        """One conversation as text."""
        if not messages:
            return ""
        if callable(self.chat_template):
            return self.chat_template(messages)
        apply = getattr(self.tokenizer, "apply_chat_template", None)
        if apply is None:
            raise PadlessError(
                f"the rows hold messages, but {type(self.tokenizer).__name__} has no chat template:"
                " pass chat_template= (a function from messages to text)"
            )
        try:
            return str(apply(messages, tokenize=False, **template_options(self.chat_template, tools)))
        except Exception as error:  # templates raise what they like, Jinja's errors and others
            raise PadlessError(f"row {row}: the chat template cannot render the messages: {error}") from error

    def supervised(self, columns: Columns, kept: Counts, first_row: int) -> Counts:
        """Tokens that are targets after the label shift and truncation, (B,); ``kept`` (B,) counts what is left.

        Read from ``labels``, a loss mask or the prompt's length, whichever the rows have.
        """
        if "labels" in columns:
            rows = ([token != _IGNORED for token in row] for row in as_list(columns["labels"]))
            return _targets_of_masks(rows, kept)
        for name in ("completion_mask", "assistant_masks", "loss_mask"):
            if name in columns:
                return _targets_of_masks(as_list(columns[name]), kept)
        prompts = prompt_columns(self.fields[0]) if self.fields else []
        if prompts:
            # The prompt has no end token of its own; it loses the appended tokens again.
            before = np.maximum(self.count(columns, prompts, first_row) - self.add_tokens, 1)
        else:
            before = np.ones(len(kept), dtype=np.int64)
        return np.maximum(kept - before, 0)


def choose_fields(names: Sequence[str], fields: Any, *, tokenizer: Any) -> tuple[tuple[str, ...], ...]:
    """The columns that make the sequence: the given ones, or those that the row's names make plain.

    ``"text"`` or ``["prompt", "response"]`` are joined into one sequence; a list of lists,
    ``[["source"], ["target"]]``, makes fields that are padded apart.
    """
    if fields is not None:
        groups = _grouped(fields)
        for name in (name for group in groups for name in group):
            if name not in names:
                raise PadlessError(f"fields names column {name!r}; the rows have {', '.join(map(repr, names))}")
        return groups
    if "input_ids" in names:
        return (("input_ids",),)
    for pair in _PADDED_APART:
        if all(f"{name}_input_ids" in names for name in pair):
            return tuple((f"{name}_input_ids",) for name in pair)
    for name in ("length", "lengths", "num_tokens"):
        if name in names:
            return ((name,),)
    if tokenizer is not None:
        chosen = _text_fields(names)
        if chosen is not None:
            return chosen
    raise PadlessError(
        f"no column of {', '.join(map(repr, names))} says what a sequence is"
        + ("" if tokenizer is not None else " (without a tokenizer, ids or lengths are needed)")
        + ": name columns with fields= (--fields), or pass tokenizer= (--tokenizer), or length= (a function of a row)"
    )


def _text_fields(names: Sequence[str]) -> tuple[tuple[str, ...], ...] | None:
    for name in ("messages", "conversations"):
        if name in names:
            return ((name,),)
    prompt = next((name for name in PROMPTS if name in names), None)
    for pair in _PADDED_APART:
        if all(name in names for name in pair):
            return tuple((prompt, name) if prompt else (name,) for name in pair)
    completion = next((name for name in _COMPLETIONS if name in names), None)
    if prompt and completion:
        middle = ("input",) if prompt == "instruction" and "input" in names else ()
        return ((prompt, *middle, completion),)
    return (("text",),) if "text" in names else None


def prompt_columns(names: Sequence[str]) -> list[str]:
    """The columns of a sequence that stand before its completion; none where there is no completion behind them.

    >>> prompt_columns(["instruction", "input", "output"]), prompt_columns(["text"]), prompt_columns(["prompt"])
    (['instruction', 'input'], [], [])
    """
    leading = list(takewhile(lambda name: name == "input" or name.startswith(PROMPTS), names))
    return leading if len(leading) < len(names) else []


def template_options(chat_template: Any, tools: Any) -> dict[str, Any]:
    """What ``apply_chat_template`` gets beside a row's messages."""
    extra = {} if chat_template is None else {"chat_template": chat_template}
    return {**extra, "tools": tools} if isinstance(tools, list) else extra


def as_columns(rows: Sequence[Any], first_row: int) -> Columns:
    """Rows (mappings, or bare values) as columns; a key that a row lacks is ``None`` there.

    >>> as_columns([{"a": 1}, {"a": 2, "b": 3}], 0)
    {'a': [1, 2], 'b': [None, 3]}
    """
    if rows and not isinstance(rows[0], Mapping):
        if isinstance(rows[0], str):
            return {"text": list(rows)}
        if isinstance(rows[0], int | np.integer) and not isinstance(rows[0], bool):
            return {"length": list(rows)}
        if hasattr(rows[0], "__len__"):
            return {"input_ids": list(rows)}
    if rows and type(rows[0]) is dict:  # the common case: every row a plain dict with the same keys
        keys = rows[0].keys()
        if all(type(row) is dict and row.keys() == keys for row in rows):
            return {name: [row[name] for row in rows] for name in keys}
    names: dict[str, None] = {}
    for i, row in enumerate(rows):
        if not isinstance(row, Mapping):
            raise PadlessError(
                f"row {first_row + i} is a {type(row).__name__}; expected a mapping of column names, text, token ids"
                " or a length"
            )
        names.update(dict.fromkeys(row))
    return {name: [row.get(name) for row in rows] for name in names}


def _grouped(fields: Any) -> tuple[tuple[str, ...], ...]:
    if isinstance(fields, str):
        return ((fields,),)
    groups = tuple(fields) if isinstance(fields, Iterable) else ()
    if groups and all(isinstance(name, str) for name in groups):
        return (groups,)
    nested = tuple(_grouped(group)[0] for group in groups if isinstance(group, str | list | tuple))
    if not groups or len(nested) != len(groups):
        raise PadlessError(f"fields={shown(fields)}; expected a column name, a list of names, or a list of such lists")
    return nested


def _rows(columns: Columns) -> int:
    return len(next(iter(columns.values()))) if columns else 0


def refuse_odd_types(columns: Columns, names: Sequence[str], first_row: int) -> None:
    """Text in one row and something else in another: the row is named.

    Raises:
        PadlessError: the first value whose type is not that of the first.
    """
    for name in names:
        column = columns[name]
        if not isinstance(column, list):
            continue  # Arrow columns are of one type
        kind = type(next((value for value in column if value is not None), None))
        for i, value in enumerate(column):
            if value is not None and not isinstance(value, kind):
                raise PadlessError(
                    f"row {first_row + i}: {name} is a {type(value).__name__}, where other rows have {kind.__name__}"
                )


def as_list(column: Any) -> list[Any]:
    """A column as Python values."""
    return column if isinstance(column, list) else list(column.to_pylist())


def _kind(column: Any, name: str) -> str:
    """What a column holds: ``number``, ``ids``, ``text`` or ``messages``; ``empty`` where every value is null."""
    if not isinstance(column, list):
        kind = _arrow_kind(column)
        if kind is not None:
            return kind
    for value in as_list(column):
        if value is None or (isinstance(value, list | tuple) and not value):
            continue
        if isinstance(value, str):
            return "text"
        if isinstance(value, int | np.integer) and not isinstance(value, bool):
            return "number"
        first = value[0] if hasattr(value, "__getitem__") and not isinstance(value, Mapping) else None
        if isinstance(first, Mapping):
            return "messages"
        if isinstance(first, str):
            raise PadlessError(f"column {name!r} holds lists of text; expected text, token ids, messages or a length")
        if hasattr(value, "__len__") and not isinstance(value, Mapping):
            return "ids"
        raise PadlessError(
            f"column {name!r} holds {type(value).__name__}; expected text, token ids, messages or a length"
        )
    return "empty"


def _arrow_kind(column: Any) -> str | None:
    import pyarrow as pa

    kind = column.type
    if pa.types.is_integer(kind):
        return "number"
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return "text"
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        return "ids" if pa.types.is_integer(kind.value_type) else None
    return None


def _id_counts(columns: Columns, name: str) -> Counts:
    """Tokens in each row of an id column; where an attention mask stands beside ``input_ids``, its ones."""
    mask = name.replace("input_ids", "attention_mask")
    if mask != name and mask in columns:
        return np.array([0 if row is None else int(np.sum(np.asarray(row) != 0)) for row in as_list(columns[mask])])
    column = columns[name]
    if isinstance(column, list):
        return _lens(column)
    import pyarrow.compute as pc

    lengths = pc.fill_null(pc.list_value_length(column), 0)
    return np.asarray(lengths.to_numpy(zero_copy_only=False), dtype=np.int64)


def _numbers(column: Any, name: str, first_row: int) -> Counts:
    values = as_list(column) if isinstance(column, list) else column.to_pylist()
    for i, value in enumerate(values):
        if not isinstance(value, int | np.integer) or isinstance(value, bool) or value < 0:
            raise PadlessError(
                f"row {first_row + i}: {name} is {shown(value)}; expected a length, a whole number of at least 0"
            )
    return np.array(values, dtype=np.int64)


def _lens(rows: Iterable[Any]) -> Counts:
    return np.array([0 if row is None else len(row) for row in rows], dtype=np.int64)


def _by_function(length: Callable[[Mapping[str, Any]], Any], columns: Columns, first_row: int) -> Counts:
    names = list(columns)
    lists = [as_list(columns[name]) for name in names]
    found: list[tuple[int, ...]] = []
    for i, values in enumerate(zip(*lists, strict=True)):
        answer = length(dict(zip(names, values, strict=True)))
        try:
            given = tuple(int(n) for n in (answer if isinstance(answer, tuple | list) else (answer,)))
        except (TypeError, ValueError):
            given = (-1,)
        if min(given, default=-1) < 0 or (found and len(given) != len(found[0])):
            raise PadlessError(
                f"row {first_row + i}: length() gave {shown(answer)}; expected a whole number of at least 0"
                " (or one for each field, as many in every row)"
            )
        found.append(given)
    return np.array(found, dtype=np.int64).reshape(len(found), -1)


def _targets_of_masks(masks: Iterable[Any], kept: Counts) -> Counts:
    """Targets under loss masks: the first token of a sequence is never predicted, nor is what truncation cut."""
    counts = (sum(1 for m in list(mask or ())[1 : int(k)] if m) for mask, k in zip(masks, kept, strict=True))
    return np.fromiter(counts, dtype=np.int64, count=len(kept))
