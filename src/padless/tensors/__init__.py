"""Plans applied to batches of tensors: fields, compaction, micro-batches, packed rows, and the way back."""

from __future__ import annotations

from padless.tensors.attention import block_mask, flex_block_mask, mask_mod
from padless.tensors.boundaries import Boundaries, ContextShard
from padless.tensors.compact import Compacted, compact
from padless.tensors.fields import MROPE, WELL_KNOWN, Field, causal_lm, preference, rlhf, seq2seq, vision
from padless.tensors.flatten import Flattened, flatten, unflatten
from padless.tensors.layouts import LAYOUTS, PACKED_LAYOUTS
from padless.tensors.masks import (
    cu_seqlens,
    document_ids,
    lengths_from_mask,
    position_ids,
    positions_from_mask,
    segment_lengths,
    seq_idx,
)
from padless.tensors.microbatches import MicroBatch, Regrouped
from padless.tensors.regroup import regroup

__all__ = [
    "LAYOUTS",
    "MROPE",
    "PACKED_LAYOUTS",
    "WELL_KNOWN",
    "Boundaries",
    "Compacted",
    "ContextShard",
    "Field",
    "Flattened",
    "MicroBatch",
    "Regrouped",
    "block_mask",
    "causal_lm",
    "compact",
    "cu_seqlens",
    "document_ids",
    "flatten",
    "flex_block_mask",
    "lengths_from_mask",
    "mask_mod",
    "position_ids",
    "positions_from_mask",
    "preference",
    "regroup",
    "rlhf",
    "segment_lengths",
    "seq2seq",
    "seq_idx",
    "unflatten",
    "vision",
]
