"""Decoding: knows caches only through their interface."""

from .beam import BeamSearch, Decodable, Hypothesis
from .sampling import Continuable, Sampling

__all__ = ["BeamSearch", "Continuable", "Decodable", "Hypothesis", "Sampling"]
