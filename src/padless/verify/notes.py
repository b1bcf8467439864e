"""What a user should know beside the verdicts: router losses, long-context RoPE, caches."""

from __future__ import annotations

from typing import Any

from padless.verify.runs import Runner
from padless.verify.subject import Subject

__all__ = ["notes_about", "rope_kinds"]


def notes_about(subject: Subject, runner: Runner) -> list[str]:
    """Sentences about this model that no verdict covers."""
    notes: list[str] = []
    config, text = subject.config, subject.text_config
    if getattr(text, "output_router_logits", None) is not None and _has_experts(text):
        notes.append(
            "Its router loss (output_router_logits=True) is a product of batch means: it changes with any regrouping,"
            " and counts padding where no mask is given. Outputs are not affected."
        )
    if runner.position_start:
        notes.append(f"Its first position is {runner.position_start}; the layouts with position_ids were fed so.")
    kinds = rope_kinds(getattr(text, "rope_parameters", None))
    for kind in sorted(kinds & {"dynamic", "longrope"}):
        limit = _original_positions(text)
        notes.append(
            f"Its {kind} RoPE chooses frequencies by the largest position in the micro-batch: a sequence over {limit}"
            " positions changes every other one that shares its micro-batch. Keep such sequences apart."
        )
    if runner.takes("use_cache") and runner.extra.get("use_cache") is False and config is not None:
        notes.append("The verdicts hold with use_cache=False, as it was called here.")
    return notes


def _has_experts(text: Any) -> bool:
    names = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    return any((getattr(text, name, None) or 0) > 1 for name in names)


def rope_kinds(parameters: Any) -> set[str]:
    """The kinds of RoPE in a configuration's ``rope_parameters``, of all kinds of layers."""
    if not isinstance(parameters, dict):
        return set()
    own = {str(parameters["rope_type"])} if "rope_type" in parameters else set()
    return own.union(*(rope_kinds(value) for value in parameters.values() if isinstance(value, dict)))


def _original_positions(text: Any) -> Any:
    parameters = getattr(text, "rope_parameters", None) or {}
    known = parameters.get("original_max_position_embeddings")
    return known or getattr(text, "original_max_position_embeddings", None) or text.max_position_embeddings
