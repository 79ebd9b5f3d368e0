"""Tasks: what is trained, on what loss, and scored how."""

from .schedule import InverseSquareRoot, WarmupCosine
from .sequence_to_text import SequenceToText

__all__ = ["InverseSquareRoot", "SequenceToText", "WarmupCosine"]
