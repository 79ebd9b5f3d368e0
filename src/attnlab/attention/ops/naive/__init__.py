"""Attention straight from the equations: one row, one query, one head at a time, no shortcut. Slow on purpose.

`attend(module, x, prefix)`: the module for its weights, x (T, d) of one row, its prefix (S, d) or None -> (T, d).
Every mechanism has its formula here, written from the paper, not from the fast code. A formula belongs to exactly the
classes that it is registered for: a subclass computes something else, and needs another. Each family has its file.
"""

from . import heads, latents, multilinear, tensor_products  # registers their formulas
from .formulas import FORMULAS, Turn, adjacent, attend, formula, half_split, opposite

__all__ = [
    "FORMULAS",
    "Turn",
    "adjacent",
    "attend",
    "formula",
    "half_split",
    "heads",
    "latents",
    "multilinear",
    "opposite",
    "tensor_products",
]
