"""Which formula belongs to which class."""

from collections.abc import Callable
from typing import TypeVar

from torch import Tensor

from ... import Attention
from ...multilinear import MultiLinear
from .turns import Turn, half_split

Formula = Callable[..., Tensor]
F = TypeVar("F", bound=Formula)
FORMULAS: dict[type[Attention], Formula] = {}


def formula(*mechanisms: type[Attention]) -> Callable[[F], F]:
    """Decorator: this is the naive form of these classes, and of none that inherits from them.

    Args:
        mechanisms: the classes that compute what the decorated function does.
    """

    def register(function: F) -> F:
        FORMULAS.update(dict.fromkeys(mechanisms, function))
        return function

    return register


def attend(a: Attention, x: Tensor, prefix: Tensor | None = None, turn: Turn = half_split) -> Tensor:
    """The naive form of a mechanism, (T, d).

    Args:
        x: the text of one row, (T, d).
        prefix: what stands before it, (S, d), or None.

    Raises:
        LookupError: the class of `a` has no formula of its own.
    """
    kind = type(a)
    if kind not in FORMULAS:
        inherited = [base.__name__ for base in kind.__mro__ if base in FORMULAS]
        hint = f" (that of {inherited[0]} is not inherited)" if inherited else ""
        raise LookupError(f"{kind.__name__} has no naive form{hint}: write its formula in attention/ops/naive/")
    if isinstance(a, MultiLinear):
        return FORMULAS[kind](a, x, prefix)
    return FORMULAS[kind](a, x, prefix, turn)
