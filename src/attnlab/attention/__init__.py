"""Attention mechanisms.  Importing this needs torch alone."""

from .base import Attention, Cache
from .mha import MHA
from .mla import MLA, MLAQueryLatent
from .mtla import MTLA
from .multilinear import (
    AbsoluteMultiLinear,
    MultiLinearEncoder,
    RelativeMultiLinear,
    SummedMultiLinear,
    TiedMultiLinear,
)
from .tpa import TPA, TPAKVOnly, TPANonContextualA, TPANonContextualB, TPASharedB

__all__ = [
    "AbsoluteMultiLinear",
    "Attention",
    "Cache",
    "MHA",
    "MLA",
    "MLAQueryLatent",
    "MTLA",
    "MultiLinearEncoder",
    "RelativeMultiLinear",
    "SummedMultiLinear",
    "TPA",
    "TPAKVOnly",
    "TPANonContextualA",
    "TPANonContextualB",
    "TPASharedB",
    "TiedMultiLinear",
]
