"""Rows to token ids and labels: what `padless.data.measure` counts, kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from padless.data._documents import Array, collect, int32, is_numbers, joined, nothing
from padless.data._ids import documents_from_ids
from padless.data._lines import Lines
from padless.data._rows import PROMPTS, Columns, Counter, as_list, choose_fields, prompt_columns, template_options
from padless.data._spill import Documents
from padless.data._tokenizer import encode_texts
from padless.errors import PadlessError, choose

__all__ = ["LOSSES", "Encoder", "Loss", "encode_payload"]

Loss = Literal["auto", "all", "completion", "assistant"]
LOSSES = ("auto", "all", "completion", "assistant")


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoder:
    """Tokenises batches of rows. Holds options only, so that worker processes can have it.

    Attributes:
        tokenizer: anything that `padless.data.measure` takes; ``None`` for rows of token ids.
        fields: columns of the sequence; a row that lacks them is empty.
        chat_template, add_special_tokens, join: as there.
        end: the id appended to plain text that does not end with it, or ``None``.
        loss: which tokens are targets: all, those of the completion, or of the assistant's turns. ``"auto"`` is the
            completion where rows have a prompt apart, all elsewhere. Rows with ``labels`` or a mask bring their own.
        leave_out: columns of lists that are not per token, and may be lost.
    """

    tokenizer: Any = None
    fields: tuple[str, ...] = ()
    chat_template: str | Callable[[Any], str] | None = None
    add_special_tokens: bool = True
    join: str = ""
    end: int | None = None
    loss: Loss = "auto"
    leave_out: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        choose("loss", self.loss, LOSSES)

    def with_fields(self, names: Sequence[str]) -> Encoder:
        """The same encoder for rows of these columns: what makes a sequence is decided once, for a whole run."""
        groups = choose_fields(names, self.fields or None, tokenizer=self.tokenizer)
        if len(groups) != 1:
            raise PadlessError(
                f"the rows make {len(groups)} sequences each ({' and '.join('+'.join(g) for g in groups)});"
                " a pack holds one: name its columns with fields="
            )
        return replace(self, fields=groups[0])

    def __call__(self, columns: Columns, first_row: int) -> Documents:
        """The documents of rows ``first_row`` and following; columns of (B,) values each."""
        names = self.fields
        if not names:
            raise PadlessError("the encoder has no fields: call with_fields first")
        if any(name not in columns for name in names):
            rows = len(next(iter(columns.values()), []))
            columns = {**columns, **{name: [None] * rows for name in names if name not in columns}}
        if len(names) == 1 and names[0].endswith("input_ids"):
            return documents_from_ids(columns, names[0], first_row, self.leave_out)
        if len(names) == 1 and is_numbers(columns[names[0]]):
            raise PadlessError(f"column {names[0]!r} holds lengths; packing needs text with a tokenizer, or token ids")
        return self._from_text(columns, names, first_row)

    def _from_text(self, columns: Columns, names: Sequence[str], first_row: int) -> Documents:
        counter = Counter(
            fields=(tuple(names),), tokenizer=self.tokenizer, chat_template=self.chat_template, join=self.join
        )
        texts, plain = counter.sequence_texts(columns, first_row)
        prompts = self._prompt_sizes(columns, names, plain)
        masks: list[Array] | None
        if self.loss == "assistant":
            ids, masks = self._assistant(columns, names, first_row)
        else:
            ids, masks = _encode(self.tokenizer, texts, self.add_special_tokens and plain, prompts)
        if self.end is not None and plain:
            ids, masks = _append(ids, masks, self.end)
        for i, text in enumerate(texts):
            if not text:  # whatever a tokenizer adds to nothing is not a document
                ids[i] = ids[i][:0]
                if masks is not None:
                    masks[i] = masks[i][:0]
        return collect(ids, masks, first_row)

    def _prompt_sizes(self, columns: Columns, names: Sequence[str], plain: bool) -> list[int] | None:
        """Characters before the completion in each row, or ``None`` where all tokens are targets."""
        before = prompt_columns(names)
        apart = plain and len(before) > 0
        if self.loss == "completion" and not apart:
            raise PadlessError(
                f"loss='completion' needs prompt columns ({', '.join(PROMPTS)}) before the completion; the sequence is"
                f" {'+'.join(names)}: name both with fields=, or use loss='all'"
            )
        if self.loss not in ("auto", "completion") or not apart:
            return None
        parts = [[value or "" for value in as_list(columns[name])] for name in before]
        return [len(self.join.join(row)) + len(self.join) for row in zip(*parts, strict=True)]

    def _assistant(self, columns: Columns, names: Sequence[str], first_row: int) -> tuple[list[Array], list[Array]]:
        apply = getattr(self.tokenizer, "apply_chat_template", None)
        if apply is None or len(names) != 1:
            raise PadlessError("loss='assistant' needs a column of messages and a tokenizer with a chat template")
        if callable(self.chat_template):
            raise PadlessError("loss='assistant' needs a Jinja chat template that marks the turns, not a function")
        conversations = as_list(columns[names[0]])
        tools = as_list(columns["tools"]) if "tools" in columns else [None] * len(conversations)
        ids: list[Array] = []
        masks: list[Array] = []
        for i, messages in enumerate(conversations):
            if not messages:
                ids.append(int32(()))
                masks.append(np.empty(0, dtype=bool))
                continue
            extra = template_options(self.chat_template, tools[i])
            out = apply(messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True, **extra)
            mask = np.array(out["assistant_masks"], dtype=bool)
            if not mask.any():
                raise PadlessError(
                    f"row {first_row + i}: the chat template marks no assistant token: it needs"
                    " {% generation %} ... {% endgeneration %} around the assistant's turns, or use loss='all'"
                )
            ids.append(int32(out["input_ids"]))
            masks.append(mask)
        return ids, masks


def encode_payload(
    encoder: Encoder,
    unpack: Callable[[Any, int], Columns],
    payloads: Sequence[tuple[int, Any]],
    *,
    what: str,
    skip_bad: bool,
) -> Documents:
    """Tokenise payloads of one file; with ``skip_bad`` rows that cannot be read are counted, not raised.

    Raises:
        PadlessError: a bad row, named by file and row.
    """
    parts = []
    for first_row, payload in payloads:
        try:
            parts.append(encoder(unpack(payload, first_row), first_row))
        except (PadlessError, TypeError, ValueError, KeyError, AttributeError) as error:
            parts.extend(_row_by_row(encoder, unpack, first_row, payload, what, skip_bad, error))
    return joined(parts)


def _row_by_row(
    encoder: Encoder,
    unpack: Callable[[Any, int], Columns],
    first_row: int,
    payload: Any,
    what: str,
    skip_bad: bool,
    cause: Exception,
) -> Iterator[Documents]:
    singles = list(_singles(payload))
    failed = 0
    for i, single in enumerate(singles):
        row = first_row + i
        try:
            yield encoder(unpack(single, row), row)
        except (PadlessError, TypeError, ValueError, KeyError, AttributeError) as error:
            if not skip_bad:
                told = str(error)
                named = what in told or "line " in told
                raise PadlessError(
                    told if named else f"{what}, row {row}: {told.removeprefix(f'row {row}: ')}"
                ) from None
            failed += 1
            yield nothing(bad=1)
    if not failed:  # rows that are fine one by one, and not together: columns of mixed kinds
        raise PadlessError(f"{what}, rows {first_row} to {first_row + len(singles) - 1}: {cause}") from None


def _singles(payload: Any) -> Iterator[Any]:
    """A payload's rows, each as a payload."""
    if isinstance(payload, Lines):
        yield from payload.singles()
    elif hasattr(payload, "slice"):  # Arrow
        for i in range(payload.num_rows):
            yield payload.slice(i, 1)
    else:
        for row in payload:
            yield [row]


# --- text


def _encode(
    tokenizer: Any, texts: list[str], special: bool, prompts: list[int] | None
) -> tuple[list[Array], list[Array] | None]:
    """Token ids of each text, and which of them belong to the completion (behind ``prompts`` characters)."""
    found, encodings = encode_texts(tokenizer, texts, special=special, offsets=prompts is not None)
    ids = [int32(row) for row in found]
    if prompts is None:
        return ids, None
    if encodings is not None:
        return ids, [_behind(e, size, len(row)) for e, size, row in zip(encodings, prompts, ids, strict=True)]
    # Without character offsets the completion starts where the prompt's own tokens and the row's part.
    heads, _ = encode_texts(
        tokenizer, [text[:size] for text, size in zip(texts, prompts, strict=True)], special=special
    )
    return ids, [np.arange(len(row)) >= _common(int32(head), row) for head, row in zip(heads, ids, strict=True)]


def _behind(encoding: Any, size: int, count: int) -> Array:
    """Tokens from the one that holds character ``size`` on; one that straddles the border belongs to the completion."""
    first = encoding.char_to_token(size)
    if first is None:  # no completion, or it begins with what the tokenizer drops
        ends = np.array([stop for _, stop in encoding.offsets], dtype=np.int64)
        return np.asarray(ends > size)
    return np.asarray(np.arange(count) >= first)


def _common(a: Array, b: Array) -> int:
    n = min(len(a), len(b))
    differ = np.flatnonzero(a[:n] != b[:n])
    return int(differ[0]) if len(differ) else n


def _append(ids: list[Array], masks: list[Array] | None, end: int) -> tuple[list[Array], list[Array] | None]:
    longer, wider = [], []
    for i, row in enumerate(ids):
        ends = len(row) > 0 and row[-1] == end
        longer.append(row if ends else np.append(row, np.int32(end)))
        if masks is not None:
            wider.append(masks[i] if ends else np.append(masks[i], True))
    return longer, wider if masks is not None else None
