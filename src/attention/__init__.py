"""Attention mechanisms.  Importing this needs torch alone."""

from .base import Attention, Cache
from .mha import MHA
from .mla import MLA
from .mtla import MTLA

__all__ = ["MHA", "MLA", "MTLA", "Attention", "Cache"]
