"""Tensor product attention (TPA paper): contextual factors, learned ones, and shared ones."""

from .cache import FactorCache
from .contextual import TPA
from .factors import Factors
from .keys_values import TPAKVOnly
from .noncontextual import TPANonContextualA, TPANonContextualB
from .shared import TPASharedB

__all__ = ["FactorCache", "Factors", "TPA", "TPAKVOnly", "TPANonContextualA", "TPANonContextualB", "TPASharedB"]
