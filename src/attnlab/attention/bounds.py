"""Types with bounds for the signatures of this package, which imports torch alone.

The configuration's check reads bounds by name (`Ge` is `>=`), so a value outside them is refused before anything is
built. annotated-types has classes of the same names; the rest of attnlab uses those.
"""

from typing import Annotated, NamedTuple


class Ge(NamedTuple):
    """A lower bound that is itself allowed.

    Args:
        ge: the value must be at least this.
    """

    ge: float


class Gt(NamedTuple):
    """A lower bound that is not allowed itself.

    Args:
        gt: the value must be greater than this.
    """

    gt: float


class Le(NamedTuple):
    """An upper bound that is itself allowed.

    Args:
        le: the value must be at most this.
    """

    le: float


class Lt(NamedTuple):
    """An upper bound that is not allowed itself.

    Args:
        lt: the value must be less than this.
    """

    lt: float


class MultipleOf(NamedTuple):
    """The value must be a multiple of a number.

    Args:
        multiple_of: this number.
    """

    multiple_of: int


Size = Annotated[int, Ge(1), Le(1_048_576)]  # of a width, rank, window, vocabulary: a typing error asks for more
SizeOrZero = Annotated[int, Ge(0), Le(1_048_576)]
Rank = Annotated[int, Ge(1), Le(65536)]
Rotary = Annotated[int, Ge(0), Le(1_048_576), MultipleOf(2)]  # components of a head that are rotated, in pairs
Layers = Annotated[int, Ge(1), Le(1024)]  # a module each: more take minutes to build
PositiveFloat = Annotated[float, Gt(0)]
Rate = Annotated[float, Ge(0), Lt(1)]  # of dropout
