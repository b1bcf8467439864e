"""Plans applied to batches of tensors: fields, compaction, micro-batches, packed rows, and the way back."""

from __future__ import annotations

from padless.tensors.compact import Compacted, compact
from padless.tensors.fields import MROPE, WELL_KNOWN, Field, causal_lm, preference, rlhf, seq2seq, vision
from padless.tensors.microbatches import MicroBatch, Regrouped
from padless.tensors.regroup import regroup

__all__ = [
    "MROPE",
    "WELL_KNOWN",
    "Compacted",
    "Field",
    "MicroBatch",
    "Regrouped",
    "causal_lm",
    "compact",
    "preference",
    "regroup",
    "rlhf",
    "seq2seq",
    "vision",
]
