"""What each key of a batch is aligned to: the sequence, the response, the row, or nothing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import cache
from typing import Any, Literal, TypeAlias

from padless.errors import PadlessError, choose, shown

__all__ = [
    "MROPE",
    "WELL_KNOWN",
    "Field",
    "Fields",
    "Pad",
    "Span",
    "causal_lm",
    "check_fields",
    "field_for",
    "preference",
    "rlhf",
    "seq2seq",
    "vision",
]

Span: TypeAlias = Literal["sequence", "response", "row", "flat", "batch"]
_SPANS = ("sequence", "response", "row", "flat", "batch")
Pad: TypeAlias = int | float | Literal["count"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """The role of one key of a batch.

    Attributes:
        span: ``"sequence"``: one entry per column of the mask. ``"response"``: one entry per column of the
            response, the last columns of the sequence. ``"row"``: one entry per row (a tensor, or a list of any
            objects). ``"flat"``: entries of all rows behind one another along axis 0, ``counts`` of them per
            row (image patches). ``"batch"``: the same for every micro-batch.
        axis: the axis of the columns (spans ``"sequence"`` and ``"response"``).
        pad: what padding holds; ``"count"`` goes on counting from the last real value (position ids).
        batch_axis: the axis of the rows.
        mask: the key of the mask that says which columns are real. Fields that name another mask are padded apart
            (chosen and rejected, encoder and decoder).
        first: what a sequence's first token holds in a packed row; None keeps its own value. Labels take -100 there:
            the model's shift must not make it the target of the sequence before.
        counts: for ``"flat"``: the key of the row field that holds the number of entries per row.

    >>> Field(span="response", pad=0.0).span
    'response'
    >>> Field(axis=2, batch_axis=1, pad="count") == MROPE
    True
    """

    span: Span = "sequence"
    axis: int = 1
    pad: Pad = 0
    batch_axis: int = 0
    mask: str = "attention_mask"
    first: int | float | None = None
    counts: str | None = None

    def __post_init__(self) -> None:
        choose("span", self.span, _SPANS)
        if self.span in ("sequence", "response") and self.axis == self.batch_axis:
            raise PadlessError(f"axis={self.axis} is also the batch axis; a field of tokens has one axis for each")
        if (self.span == "flat") != (self.counts is not None):
            raise PadlessError(f"span={self.span!r} with counts={self.counts!r}; counts belong to span='flat', always")
        if self.pad != "count" and not isinstance(self.pad, int | float):
            raise PadlessError(f"pad={shown(self.pad)}; expected a number or 'count'")


Fields: TypeAlias = Mapping[str, Field]

MROPE = Field(axis=2, batch_axis=1, pad="count")
"""Position ids of shape (axes, rows, columns), as the Qwen-VL models take them."""

_SEQUENCE = Field()
_ROW = Field(span="row")
_BATCH = Field(span="batch")
_RESPONSE = Field(span="response")
_LABELS = Field(pad=-100, first=-100)

WELL_KNOWN: dict[str, Field] = {
    **dict.fromkeys(
        (
            "input_ids",
            "attention_mask",
            "token_type_ids",
            "mm_token_type_ids",
            "inputs_embeds",
            "special_tokens_mask",
            "loss_mask",
            "completion_mask",
            "assistant_masks",
            "assistant_mask",
        ),
        _SEQUENCE,
    ),
    "position_ids": Field(pad="count"),
    "labels": _LABELS,
    **dict.fromkeys(
        (
            "responses",
            "response_mask",
            "response_ids",
            "old_log_probs",
            "old_log_prob",
            "rollout_log_probs",
            "ref_log_prob",
            "ref_log_probs",
            "advantages",
            "returns",
            "values",
            "token_level_rewards",
            "token_level_scores",
        ),
        _RESPONSE,
    ),
    **dict.fromkeys(("rewards", "scores", "uid", "index", "num_images", "num_videos", "sample_weight"), _ROW),
    **dict.fromkeys(("use_cache", "return_dict", "num_items_in_batch"), _BATCH),
}
"""Names whose role the field agrees on. A response tensor as wide as the sequence is aligned to the sequence."""


def causal_lm() -> dict[str, Field]:
    """Fields of supervised fine-tuning and pre-training: everything is aligned to the sequence.

    >>> causal_lm()["labels"].pad
    -100
    """
    return {name: role for name, role in WELL_KNOWN.items() if role.span in ("sequence", "batch", "row")}


def rlhf() -> dict[str, Field]:
    """Fields of online RL: prompts left padded, responses right padded, in one ``input_ids`` of both.

    A response field has one column per response column; its columns are the last ones of ``input_ids``.

    >>> rlhf()["old_log_probs"].span, rlhf()["completion_mask"].span
    ('response', 'response')
    """
    completions = ("completion_ids", "completion_mask", "old_per_token_logps", "ref_per_token_logps")
    return {**WELL_KNOWN, **dict.fromkeys((*completions, "sampling_per_token_logps"), _RESPONSE)}


def preference() -> dict[str, Field]:
    """Fields of preference pairs: chosen and rejected sequences padded apart, one of each per row.

    >>> preference()["rejected_labels"].mask
    'rejected_attention_mask'
    """
    pairs = {
        f"{side}_{name}": replace(role, mask=f"{side}_attention_mask")
        for side in ("chosen", "rejected")
        for name, role in WELL_KNOWN.items()
        if role.span == "sequence"
    }
    return {**WELL_KNOWN, **pairs, **dict.fromkeys(("ref_chosen_logps", "ref_rejected_logps", "margin"), _ROW)}


def seq2seq() -> dict[str, Field]:
    """Fields of encoder-decoder models: labels are padded apart and ``decoder_attention_mask`` says where.

    >>> seq2seq()["labels"].mask
    'decoder_attention_mask'
    """
    decoder = {
        name: Field(pad=-100 if name == "labels" else 0, mask="decoder_attention_mask")
        for name in ("labels", "decoder_input_ids", "decoder_attention_mask", "decoder_inputs_embeds")
    }
    return {**WELL_KNOWN, **decoder}


def vision(*, images: str = "num_images", patches: str = "num_patches") -> dict[str, Field]:
    """Fields of vision-language models: patches and grids lie flat, with a count per row under the keys named.

    >>> vision()["pixel_values"].counts
    'num_patches'
    """
    flat = {
        "pixel_values": Field(span="flat", counts=patches),
        "image_grid_thw": Field(span="flat", counts=images),
        images: _ROW,
        patches: _ROW,
    }
    return {**WELL_KNOWN, **flat, "position_ids": MROPE}


def check_fields(fields: Any, keys: Iterable[str] | None = None) -> None:
    """Refuse ``fields`` that are not a mapping of keys to `Field`, or that miss a key of the batch by a typo.

    Roles of keys that this batch lacks are legal: presets name many, and batches of evaluation may have fewer columns.

    >>> check_fields({"weights": "row"})
    Traceback (most recent call last):
    ...
    padless.errors.PadlessError: fields['weights'] is 'row'; expected a Field: fields={'weights': Field(span='row')}, \
from padless.tensors import Field
    """
    if fields is None:
        return
    if not isinstance(fields, Mapping):
        raise PadlessError(
            f"fields is a {type(fields).__name__}; expected a mapping of keys to Field, such as"
            " {'weights': Field(span='row')}, or a preset such as padless.tensors.rlhf()"
        )
    for key, role in fields.items():
        if not isinstance(role, Field):
            span = role if isinstance(role, str) and role in _SPANS else "sequence"
            raise PadlessError(
                f"fields[{key!r}] is {shown(role)}; expected a Field: fields={{{key!r}: Field(span={span!r})}},"
                " from padless.tensors import Field"
            )
    held = set(keys or ())
    known = held | {name.rpartition(".")[2] for name in held}
    unclaimed = sorted(known - set(fields))
    for key in fields:
        if key in known or key in _preset_names():
            continue
        near = get_close_matches(str(key), unclaimed, n=1, cutoff=0.75)
        if near:
            raise PadlessError(
                f"fields names {key!r}, which is not in the batch; it has {near[0]!r}: name that, or leave the key out"
            )


@cache
def _preset_names() -> frozenset[str]:
    return frozenset().union(*(WELL_KNOWN, rlhf(), preference(), seq2seq(), vision()))


def field_for(key: str, fields: Fields | None) -> Field | None:
    """The role of ``key`` (dotted for nested keys): a given field first, then the well-known names; else None."""
    leaf = key.rpartition(".")[2]
    for table in (fields or {}, WELL_KNOWN):
        for name in (key, leaf):
            if name in table:
                return table[name]
    return None
