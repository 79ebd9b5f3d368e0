"""Measuring mechanisms side by side: what mode=bench is made of."""

from .settings import Settings

__all__ = ["Settings"]
