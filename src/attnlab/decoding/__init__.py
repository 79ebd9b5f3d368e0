"""Decoding, which uses caches only through their interface."""

from attnlab.decoding.beam import BeamSearch, Decodable, Hypothesis
from attnlab.decoding.sampling import Continuable, Sampling
from attnlab.decoding.steps import Steps

__all__ = ["BeamSearch", "Continuable", "Decodable", "Hypothesis", "Sampling", "Steps"]
