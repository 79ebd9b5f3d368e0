"""Tasks: what is trained, on what loss, and scored how."""

from .language_modelling import LanguageModelling
from .language_score import LanguageScore
from .schedule import InverseSquareRoot, WarmupCosine
from .sequence_to_text import SequenceToText

__all__ = ["InverseSquareRoot", "LanguageModelling", "LanguageScore", "SequenceToText", "WarmupCosine"]
