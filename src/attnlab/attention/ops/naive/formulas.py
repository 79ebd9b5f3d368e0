"""Which formula belongs to which class, and what turns a pair of components by each published rotary convention."""

import math
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from ... import MHA, MLA, TPA, Attention, Llama3Scaling
from ...multilinear import MultiLinear

Turn = Callable[..., Tensor]  # (x, position, theta) -> x turned
Formula = Callable[..., Tensor]
F = TypeVar("F", bound=Formula)
FORMULAS: dict[type[Attention], Formula] = {}


def half_split(x: Tensor, position: int, theta: float | Tensor, scaling: Llama3Scaling | None = None) -> Tensor:
    """(..., D): component m and m + D/2 turn by position * theta^(-2m/D), Llama's sign.

    `x`: (..., D); `position`: of the token, from 0; `theta`: base of the frequencies, or the frequencies, (D/2,);
    `scaling`: Llama 3.1's rule for them, or None.
    """
    u, v = x.chunk(2, dim=-1)
    cos, sin = _circle(x, position, theta, scaling)
    return torch.cat((u * cos - v * sin, u * sin + v * cos), -1)


def adjacent(x: Tensor, position: int, theta: float) -> Tensor:
    """The MTLA code's pairs: components 2m and 2m + 1.

    `x`: (..., D); `position`: of the token, from 0; `theta`: base of the frequencies.
    """
    even, odd = x[..., 0::2], x[..., 1::2]
    cos, sin = _circle(x, position, theta)
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2)


def opposite(x: Tensor, position: int, theta: float) -> Tensor:
    """T6's sign: half-split pairs that turn the other way.

    `x`: (..., D); `position`: of the token, from 0; `theta`: base of the frequencies.
    """
    return half_split(x, -position, theta)


def _circle(
    x: Tensor, position: int, theta: float | Tensor, scaling: Llama3Scaling | None = None
) -> tuple[Tensor, Tensor]:
    width = x.shape[-1]
    frequencies = (
        theta.tolist() if isinstance(theta, Tensor) else [theta ** (-2 * m / width) for m in range(width // 2)]
    )
    angles = [position * _scaled(frequency, scaling) for frequency in frequencies]
    return tuple(torch.tensor([f(a) for a in angles], dtype=x.dtype) for f in (math.cos, math.sin))  # type: ignore[return-value]


def _scaled(frequency: float, scaling: Llama3Scaling | None) -> float:
    """Llama 3.1's rule, by wavelength: long waves are stretched, short ones stay, and those between are mixed."""
    if scaling is None:
        return frequency
    wavelength, length = 2 * math.pi / frequency, scaling.original_max_position_embeddings
    if wavelength < length / scaling.high_freq_factor:
        return frequency
    if wavelength > length / scaling.low_freq_factor:
        return frequency / scaling.factor
    smooth = length / wavelength - scaling.low_freq_factor
    smooth /= scaling.high_freq_factor - scaling.low_freq_factor
    return (1 - smooth) * frequency / scaling.factor + smooth * frequency


def base(a: MHA | MLA | TPA) -> float | Tensor:
    """What a mechanism gives to a :data:`Turn`: the base of its frequencies, or the frequencies, (D/2,)."""
    return a.frequencies if a.rope_theta is None else a.rope_theta


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
        LookupError: the class of `a` has no formula.
    """
    kind = type(a)
    if kind not in FORMULAS:
        inherited = [base.__name__ for base in kind.__mro__ if base in FORMULAS]
        hint = f" (that of {inherited[0]} is not inherited)" if inherited else ""
        raise LookupError(f"{kind.__name__} has no naive form{hint}: write its formula in attention/ops/naive/")
    if isinstance(a, MultiLinear):
        return FORMULAS[kind](a, x, prefix)
    return FORMULAS[kind](a, x, prefix, turn)
