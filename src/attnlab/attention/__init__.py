"""Attention mechanisms. Importing this needs torch alone."""

from .base import Attention, Cache
from .gla import GLA
from .gta import GTA
from .mfa import MFA
from .mha import MHA
from .mla import MLA, MLAQueryLatent
from .mla_window import MLAWindow
from .mlra import MLRA
from .mtla import MTLA
from .mtla_window import MTLAWindow
from .multilinear import (
    AbsoluteMultiLinear,
    RelativeMultiLinear,
    SummedMultiLinear,
    TiedMultiLinear,
)
from .ops.rope import Llama3Scaling
from .sliding_window import SlidingWindow
from .tpa import TPA, TPAKVOnly, TPANonContextualA, TPANonContextualB, TPASharedB

__all__ = [
    "AbsoluteMultiLinear",
    "Attention",
    "Cache",
    "GLA",
    "GTA",
    "Llama3Scaling",
    "MFA",
    "MHA",
    "MLA",
    "MLAQueryLatent",
    "MLAWindow",
    "MLRA",
    "MTLA",
    "MTLAWindow",
    "RelativeMultiLinear",
    "SlidingWindow",
    "SummedMultiLinear",
    "TPA",
    "TPAKVOnly",
    "TPANonContextualA",
    "TPANonContextualB",
    "TPASharedB",
    "TiedMultiLinear",
]
