"""Measuring mechanisms side by side: what mode=bench is made of."""

from attnlab.bench.settings import Settings

__all__ = ["Settings"]
