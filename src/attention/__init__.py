"""Attention mechanisms.  Importing this needs torch alone."""

from .base import Attention, Cache
from .mha import MHA
from .mla import MLA
from .mtla import MTLA
from .multilinear import (
    AbsoluteMultiLinear,
    MultiLinearEncoder,
    RelativeMultiLinear,
    SummedMultiLinear,
    TiedMultiLinear,
)

__all__ = [
    "MHA",
    "MLA",
    "MTLA",
    "AbsoluteMultiLinear",
    "Attention",
    "Cache",
    "MultiLinearEncoder",
    "RelativeMultiLinear",
    "SummedMultiLinear",
    "TiedMultiLinear",
]
