"""Benchmarks of mechanisms side by side, for mode=bench."""

from attnlab.bench.settings import Settings

__all__ = ["Settings"]
