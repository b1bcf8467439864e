"""Look before you train: what lengths cost under each batching strategy, and what to do about it."""

from __future__ import annotations

from padless.analysis.analyze import Analysis, analyze_lengths
from padless.analysis.facts import DataFacts, LengthFacts, Notice
from padless.analysis.figures import Figures
from padless.analysis.model import ModelFacts, read_model
from padless.analysis.recommend import NOTHING, Recommendation
from padless.analysis.schedule import STRATEGIES, Schedule, Setup, make_schedule

__all__ = [
    "NOTHING",
    "STRATEGIES",
    "Analysis",
    "DataFacts",
    "Figures",
    "LengthFacts",
    "ModelFacts",
    "Notice",
    "Recommendation",
    "Schedule",
    "Setup",
    "analyze_lengths",
    "make_schedule",
    "read_model",
]
