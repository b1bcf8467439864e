"""Rows to token ids and labels: what `padless.data.measure` counts, kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from padless.data._rows import Columns, Counter, choose_fields
from padless.data._shards import IGNORED
from padless.data._spill import Documents
from padless.errors import PadlessError, choose

__all__ = ["LOSSES", "Encoder", "Loss", "encode_payload"]

Array = npt.NDArray[Any]
Loss = Literal["auto", "all", "completion", "assistant"]
LOSSES = ("auto", "all", "completion", "assistant")

_PROMPTS = ("prompt", "instruction", "question", "input")
_MASKS = ("completion_mask", "assistant_masks", "loss_mask")


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
            return _from_ids(columns, names[0], first_row, self.leave_out)
        if len(names) == 1 and _is_numbers(columns[names[0]]):
            raise PadlessError(f"column {names[0]!r} holds lengths; packing needs text with a tokenizer, or token ids")
        return self._from_text(columns, names, first_row)

    def _from_text(self, columns: Columns, names: Sequence[str], first_row: int) -> Documents:
        _refuse_odd_types(columns, names, first_row)
        counter = Counter(
            fields=(tuple(names),), tokenizer=self.tokenizer, chat_template=self.chat_template, join=self.join
        )
        texts, plain = counter.sequence_texts(columns)
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
        return _collect(ids, masks, first_row)

    def _prompt_sizes(self, columns: Columns, names: Sequence[str], plain: bool) -> list[int] | None:
        """Characters before the completion in each row, or ``None`` where all tokens are targets."""
        before = [name for name in names if name in _PROMPTS]
        apart = plain and 0 < len(before) < len(names) and tuple(names[: len(before)]) == tuple(before)
        if self.loss == "completion" and not apart:
            raise PadlessError(
                f"loss='completion' needs prompt columns ({', '.join(_PROMPTS)}) before the completion; the sequence is"
                f" {'+'.join(names)}: name both with fields=, or use loss='all'"
            )
        if self.loss not in ("auto", "completion") or not apart:
            return None
        parts = [[value or "" for value in _as_list(columns[name])] for name in before]
        return [len(self.join.join(row)) + len(self.join) for row in zip(*parts, strict=True)]

    def _assistant(self, columns: Columns, names: Sequence[str], first_row: int) -> tuple[list[Array], list[Array]]:
        apply = getattr(self.tokenizer, "apply_chat_template", None)
        if apply is None or len(names) != 1:
            raise PadlessError("loss='assistant' needs a column of messages and a tokenizer with a chat template")
        extra = {} if self.chat_template is None else {"chat_template": self.chat_template}
        ids: list[Array] = []
        masks: list[Array] = []
        for i, messages in enumerate(_as_list(columns[names[0]])):
            if not messages:
                ids.append(_int32(()))
                masks.append(np.empty(0, dtype=bool))
                continue
            out = apply(messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True, **extra)
            mask = np.array(out["assistant_masks"], dtype=bool)
            if not mask.any():
                raise PadlessError(
                    f"row {first_row + i}: the chat template marks no assistant token: it needs"
                    " {% generation %} ... {% endgeneration %} around the assistant's turns, or use loss='all'"
                )
            ids.append(_int32(out["input_ids"]))
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
    return _joined(parts)


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
                raise PadlessError(told if named else f"{what}, row {row}: {told}") from None
            failed += 1
            yield _nothing(bad=1)
    if not failed:  # rows that are fine one by one, and not together: columns of mixed kinds
        raise PadlessError(f"{what}, rows {first_row} to {first_row + len(singles) - 1}: {cause}") from None


def _singles(payload: Any) -> Iterator[Any]:
    """A payload's rows, each as a payload."""
    if isinstance(payload, tuple) and len(payload) == 2 and isinstance(payload[1], list):  # (file, numbered lines)
        for line in payload[1]:
            yield payload[0], [line]
    elif hasattr(payload, "slice"):  # Arrow
        for i in range(payload.num_rows):
            yield payload.slice(i, 1)
    else:
        for row in payload:
            yield [row]


# --- token ids that are there already


def _from_ids(columns: Columns, name: str, first_row: int, leave_out: Sequence[str]) -> Documents:
    if not isinstance(columns[name], list):
        found = _from_arrow(columns, name, first_row, leave_out)
        if found is not None:
            return found
    ids = [_int32(row, f"row {first_row + i}: {name}") for i, row in enumerate(_as_list(columns[name]))]
    keep: list[Array] | None = None
    mask_name = name.replace("input_ids", "attention_mask")
    if mask_name in columns:  # padding that the rows carry is not part of a document
        keep = [np.array(row or (), dtype=bool) for row in _as_list(columns[mask_name])]
        _same_lengths(keep, ids, mask_name, first_row)
    carried: dict[str, list[Array]] = {}
    left: list[str] = []
    for other, column in columns.items():
        if other in (name, mask_name, "position_ids", "seq_lengths"):
            continue
        if other in leave_out or not _is_lists(column):
            left.append(other)
            continue
        carried[other] = [_numbers(row, f"row {first_row + i}: {other}") for i, row in enumerate(_as_list(column))]
        _same_lengths(carried[other], ids, other, first_row)
    if keep is not None:
        ids = [row[kept] for row, kept in zip(ids, keep, strict=True)]
        carried = {k: [row[kept] for row, kept in zip(v, keep, strict=True)] for k, v in carried.items()}
    masks = None
    if "labels" not in carried:
        given = [carried[mask] for mask in _MASKS if mask in carried]
        if given:
            masks = [np.logical_and.reduce([m != 0 for m in rows]) for rows in zip(*given, strict=True)]
    return replace(_collect(ids, masks, first_row, carried), left=tuple(left))


def _from_arrow(columns: Columns, name: str, first_row: int, leave_out: Sequence[str]) -> Documents | None:
    """The same without a Python object for each token; ``None`` where a row asks for a closer look."""
    taken = (name, name.replace("input_ids", "attention_mask"), "position_ids", "seq_lengths")
    found = _arrow_rows(columns[name])
    if found is None or taken[1] in columns or any(mask in columns for mask in _MASKS):
        return None
    lengths, ids = found
    if len(ids) and (ids.dtype.kind not in "iu" or ids.min() < 0 or ids.max() > np.iinfo(np.int32).max):
        return None
    carried: dict[str, Array] = {"input_ids": ids.astype(np.int32, copy=False)}
    left: list[str] = []
    for other, column in columns.items():
        if other in taken:
            continue
        if other in leave_out or not hasattr(column.type, "value_type"):
            left.append(other)
            continue
        rows = _arrow_rows(column)
        if rows is None or not np.array_equal(rows[0], lengths):
            return None
        wide = np.int32 if other == "labels" else np.float64 if rows[1].dtype.kind == "f" else np.int64
        carried[other] = rows[1].astype(wide, copy=False)
    full = np.flatnonzero(lengths)
    return Documents(
        lengths=lengths[full].astype(np.int32),
        rows=(full + first_row).astype(np.int64),
        columns=carried,
        read=len(lengths),
        empty=len(lengths) - len(full),
        left=tuple(left),
    )


def _arrow_rows(column: Any) -> tuple[npt.NDArray[np.int64], Array] | None:
    """Lengths (B,) and values (T,) of an Arrow column of lists of numbers without nulls."""
    import pyarrow as pa
    import pyarrow.compute as pc

    kind = column.type
    lists = pa.types.is_list(kind) or pa.types.is_large_list(kind)
    if not lists or not (pa.types.is_integer(kind.value_type) or pa.types.is_floating(kind.value_type)):
        return None
    values = column.flatten()
    if column.null_count or values.null_count:
        return None
    return np.asarray(pc.list_value_length(column), dtype=np.int64), values.to_numpy(zero_copy_only=False)


def _same_lengths(rows: Sequence[Array], ids: Sequence[Array], name: str, first_row: int) -> None:
    for i, (row, tokens) in enumerate(zip(rows, ids, strict=True)):
        if len(row) != len(tokens):
            raise PadlessError(
                f"row {first_row + i}: {name} has {len(row)} entries for {len(tokens)} tokens; only per-token columns"
                f" can be packed: leave {name!r} out by name, or mend it"
            )


def _collect(
    ids: Sequence[Array],
    masks: Sequence[Array] | None,
    first_row: int,
    carried: Mapping[str, Sequence[Array]] | None = None,
) -> Documents:
    """Put rows end to end, leaving out empty ones."""
    lengths = np.array([len(row) for row in ids], dtype=np.int32)  # (B,)
    full = np.flatnonzero(lengths)
    flat = {"input_ids": _flat(ids, np.dtype(np.int32))}
    if masks is not None:
        marked = _flat(masks, np.dtype(np.bool_))
        flat["labels"] = np.where(marked, flat["input_ids"], np.int32(IGNORED))
    for name, rows in (carried or {}).items():
        flat[name] = _flat(rows, None)
    if "labels" in flat:
        flat["labels"] = flat["labels"].astype(np.int32)
    return Documents(
        lengths=lengths[full],
        rows=(full + first_row).astype(np.int64),
        columns=flat,
        read=len(ids),
        empty=len(ids) - len(full),
    )


def _flat(rows: Sequence[Array], dtype: np.dtype[Any] | None) -> Array:
    full = [row for row in rows if len(row)]
    if not full:
        return np.empty(0, dtype=dtype or np.int64)
    flat = np.concatenate(full)
    return flat if dtype is None else flat.astype(dtype, copy=False)


def _joined(parts: Sequence[Documents]) -> Documents:
    parts = [part for part in parts if part.read]
    if not parts:
        return _nothing()
    if len(parts) == 1:
        return parts[0]
    names = {name: None for part in parts for name in part.columns if len(part.lengths)}
    for part in parts:
        if len(part.lengths) and part.columns.keys() != names.keys():
            missing = ", ".join(sorted(names.keys() - part.columns.keys()))
            raise PadlessError(f"row {int(part.rows[0])} and following lack {missing}, which rows before or after have")
    full = [part for part in parts if len(part.lengths)] or parts[:1]
    return Documents(
        lengths=np.concatenate([part.lengths for part in full]),
        rows=np.concatenate([part.rows for part in full]),
        columns={name: np.concatenate([part.columns[name] for part in full]) for name in full[0].columns},
        read=sum(part.read for part in parts),
        empty=sum(part.empty for part in parts),
        bad=sum(part.bad for part in parts),
        left=tuple(sorted({name for part in parts for name in part.left})),
    )


def _nothing(*, bad: int = 0) -> Documents:
    return Documents(
        lengths=np.empty(0, dtype=np.int32),
        rows=np.empty(0, dtype=np.int64),
        columns={"input_ids": np.empty(0, dtype=np.int32)},
        read=bad,
        bad=bad,
    )


# --- text


def _encode(
    tokenizer: Any, texts: list[str], special: bool, prompts: list[int] | None
) -> tuple[list[Array], list[Array] | None]:
    """Token ids of each text, and which of them belong to the completion (behind ``prompts`` characters)."""
    backend = getattr(tokenizer, "backend_tokenizer", None) or tokenizer
    if hasattr(backend, "encode_batch") and hasattr(backend, "get_vocab_size"):
        fast = getattr(backend, "encode_batch_fast", None) if prompts is None else None
        encodings = (fast or backend.encode_batch)(texts, add_special_tokens=special)
        ids = [_int32(encoding.ids) for encoding in encodings]
        if prompts is None:
            return ids, None
        return ids, [_behind(e, size, len(e.ids)) for e, size in zip(encodings, prompts, strict=True)]
    if hasattr(tokenizer, "convert_tokens_to_ids") and callable(tokenizer):

        def encode(text: str) -> Any:
            return tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"]
    else:
        encode = getattr(tokenizer, "encode", None) or tokenizer
    ids = [_int32(encode(text)) for text in texts]
    if prompts is None:
        return ids, None
    # Without character offsets the completion starts where the prompt's own tokens and the row's part.
    before = [_int32(encode(text[:size])) for text, size in zip(texts, prompts, strict=True)]
    return ids, [np.arange(len(row)) >= _common(head, row) for head, row in zip(before, ids, strict=True)]


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


# --- values


def _as_list(column: Any) -> list[Any]:
    return column if isinstance(column, list) else list(column.to_pylist())


def _first_value(column: Any) -> Any:
    return next((value for value in _as_list(column) if value is not None), None)


def _is_lists(column: Any) -> bool:
    value = _first_value(column)
    return isinstance(value, list | tuple | np.ndarray) and (len(value) == 0 or not isinstance(value[0], str | Mapping))


def _is_numbers(column: Any) -> bool:
    value = _first_value(column)
    return isinstance(value, int | float | np.number) and not isinstance(value, bool)


def _int32(row: Any, what: str = "token ids") -> Array:
    values = np.asarray(() if row is None else row)
    if values.size == 0:
        return np.empty(0, dtype=np.int32)
    if values.dtype.kind not in "iu" or values.ndim != 1:
        raise PadlessError(f"{what} holds {values.dtype} of shape {values.shape}; expected one list of whole numbers")
    if values.min() < 0 or values.max() > np.iinfo(np.int32).max:
        bad = int(np.flatnonzero((values < 0) | (values > np.iinfo(np.int32).max))[0])
        raise PadlessError(f"{what}[{bad}] is {values[bad]}; a token id is between 0 and 2**31 - 1")
    return values.astype(np.int32, copy=False)


def _numbers(row: Any, what: str) -> Array:
    values = np.asarray(() if row is None else row)
    if values.size == 0:
        return np.empty(0, dtype=np.int64)
    if values.dtype.kind not in "iufb" or values.ndim != 1:
        raise PadlessError(
            f"{what} holds {values.dtype} of shape {values.shape}; per-token columns hold one number for each token:"
            " leave the column out by name"
        )
    return values.astype(np.float64 if values.dtype.kind == "f" else np.int64)


def _refuse_odd_types(columns: Columns, names: Sequence[str], first_row: int) -> None:
    for name in names:
        column = columns[name]
        if not isinstance(column, list):
            continue  # Arrow columns are of one type
        kind = type(_first_value(column))
        for i, value in enumerate(column):
            if value is not None and not isinstance(value, kind):
                raise PadlessError(
                    f"row {first_row + i}: {name} is a {type(value).__name__}, where other rows have {kind.__name__}"
                )
