"""Decoding: knows caches only through their interface."""

from .beam import BeamSearch, Decodable, Hypothesis

__all__ = ["BeamSearch", "Decodable", "Hypothesis"]
