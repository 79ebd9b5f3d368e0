"""Decoding, which uses caches only through their interface."""

from attnlab.decoding.beam import BeamSearch, Decodable, Hypothesis, Steps
from attnlab.decoding.sampling import Continuable, Sampling

__all__ = ["BeamSearch", "Continuable", "Decodable", "Hypothesis", "Sampling", "Steps"]
