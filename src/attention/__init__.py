"""Attention mechanisms.  Importing this needs torch alone."""

from .base import Attention, Cache
from .mha import MHA
from .mla import MLA, MLAQueryLatent
from .mtla import MTLA
from .tpa import TPA, TPAKVOnly, TPANonContextualA, TPANonContextualB, TPASharedB

__all__ = [
    "MHA",
    "MLA",
    "MTLA",
    "TPA",
    "Attention",
    "Cache",
    "MLAQueryLatent",
    "TPAKVOnly",
    "TPANonContextualA",
    "TPANonContextualB",
    "TPASharedB",
]
