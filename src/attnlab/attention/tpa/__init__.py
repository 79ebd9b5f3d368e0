"""Tensor product attention (TPA paper): contextual factors, learned ones, and shared ones."""

from .contextual import TPA
from .factors import FactorCache, Factors
from .variants import TPAKVOnly, TPANonContextualA, TPANonContextualB, TPASharedB
