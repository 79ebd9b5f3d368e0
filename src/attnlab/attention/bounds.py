"""Types with bounds for the signatures of this package, which imports torch alone.

The configuration's check reads bounds by name (`Ge` is `>=`), so a value outside them is refused before anything is
built. annotated-types has classes of the same names; the rest of attnlab uses those.
"""

from typing import Annotated, NamedTuple


class Ge(NamedTuple):
    """x >= ge."""

    ge: float


class Gt(NamedTuple):
    """x > gt."""

    gt: float


class Le(NamedTuple):
    """x <= le."""

    le: float


class Lt(NamedTuple):
    """x < lt."""

    lt: float


class MultipleOf(NamedTuple):
    """x is a multiple of `multiple_of`."""

    multiple_of: int


Size = Annotated[int, Ge(1), Le(1_048_576)]  # of a width, rank, window, vocabulary: a typing error asks for more
SizeOrZero = Annotated[int, Ge(0), Le(1_048_576)]
Rank = Annotated[int, Ge(1), Le(65536)]
Rotary = Annotated[int, Ge(0), Le(1_048_576), MultipleOf(2)]  # components of a head that are rotated, in pairs
Layers = Annotated[int, Ge(1), Le(1024)]  # a module each: more take minutes to build
PositiveFloat = Annotated[float, Gt(0)]
Rate = Annotated[float, Ge(0), Lt(1)]  # of dropout
