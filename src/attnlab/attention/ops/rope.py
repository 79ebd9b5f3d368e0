"""Rotary position embedding with half-split pairs and Llama's sign, the only convention in this package.

Component m of the first half is rotated with component m of the second half by position * theta^(-2m/D):
    (u, v) -> (u cos - v sin, v cos + u sin).
The MTLA code pairs adjacent components (2m, 2m+1): permuting its rotated components by `adjacent_to_half_split` gives
this form. T6 rotates in the opposite direction, which is the same as swapping the two halves.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .backends import kernels_run, memoized


@dataclass(frozen=True)
class Llama3Scaling:
    """Frequency scaling of Llama 3.1, for texts longer than those of pretraining.

    With w the wavelength of a frequency f and L = `original_max_position_embeddings`: f stays where w < L /
    `high_freq_factor`, becomes f / `factor` where w > L / `low_freq_factor`, and is interpolated linearly in L / w
    between. The names and the formula are those of Llama's released configuration (`rope_type: llama3`).

    Args:
        factor: divisor of low frequencies, at least 1.
        low_freq_factor: number of rotations within L positions below which a frequency is divided by `factor`.
        high_freq_factor: number above which a frequency is unchanged; more than `low_freq_factor`.
        original_max_position_embeddings: length L of texts in pretraining.

    ValueError: a value is out of these bounds.
    """

    factor: float = 8.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192

    def __post_init__(self) -> None:
        if self.factor < 1 or self.original_max_position_embeddings < 1:
            raise ValueError(
                f"factor={self.factor}, original_max_position_embeddings={self.original_max_position_embeddings}: "
                "expected at least 1"
            )
        if not 0 < self.low_freq_factor < self.high_freq_factor:
            raise ValueError(
                f"low_freq_factor={self.low_freq_factor}, high_freq_factor={self.high_freq_factor}: "
                "expected 0 < low_freq_factor < high_freq_factor"
            )

    def __call__(self, frequencies: Tensor) -> Tensor:
        """Frequencies in radians per position, (D/2,) -> (D/2,)."""
        turns = self.original_max_position_embeddings * frequencies / (2 * math.pi)  # L / w
        share = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        return torch.lerp(frequencies / self.factor, frequencies, share.clamp(0, 1))


@memoized
def _table(
    dim: int, theta: float, length: int, dtype: torch.dtype, device: torch.device, scaling: Llama3Scaling | None
) -> tuple[Tensor, Tensor]:
    frequencies = theta ** (-torch.arange(0, dim, 2, dtype=torch.float64, device="cpu") / dim)
    if scaling is not None:
        frequencies = scaling(frequencies)
    angles = torch.arange(length, dtype=torch.float64, device="cpu")[:, None] * frequencies
    return angles.cos().to(device, dtype), angles.sin().to(device, dtype)


def rotary_table(
    dim: int,
    theta: float,
    length: int,
    dtype: torch.dtype,
    device: torch.device,
    scaling: Llama3Scaling | None = None,
) -> tuple[Tensor, Tensor]:
    """cos and sin of positions 0 ... length-1, each (length, dim/2), in `dtype`, or float32 if that is wider.

    ValueError: `dim`, the number of rotated components, is odd.
    """
    if dim % 2:
        raise ValueError(f"rotary embedding rotates pairs: the width must be even, not {dim}")
    rounded = 1 << max(length - 1, 1).bit_length()  # few distinct sizes to memoize
    cos, sin = _table(dim, theta, rounded, torch.promote_types(dtype, torch.float32), device, scaling)
    return cos[:length], sin[:length]


def table_of(frequencies: Tensor, length: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin of positions 0 ... length-1, each (length, pairs), in float32 or wider.

    frequencies (pairs,): radians per position.
    """
    wide = torch.promote_types(dtype, torch.float32)
    positions = torch.arange(length, dtype=torch.float64, device=frequencies.device)
    angles = positions[:, None] * frequencies.to(torch.float64)
    return angles.cos().to(wide), angles.sin().to(wide)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the last 2 P columns of x (..., D) by cos, sin (..., P), which broadcast, in their precision."""
    width = x.shape[-1] - 2 * cos.shape[-1]
    fused = kernels_run(x) and x.dim() == 4 and cos.shape[-1] > 0 and not cos.requires_grad
    if fused and torch.broadcast_shapes(x.shape[:3], cos.shape[:-1]) == x.shape[:3]:
        return _Rotated.apply(x, cos.expand(*x.shape[:3], -1), sin.expand(*x.shape[:3], -1))
    rest, x = x.tensor_split([width], -1)
    u, v = x.chunk(2, dim=-1)
    turned = torch.cat((u * cos - v * sin, v * cos + u * sin), dim=-1).to(x.dtype)
    return torch.cat((rest, turned), -1) if width else turned


class _Rotated(torch.autograd.Function):
    """`rotate` of x (B, T, H, D) by cos, sin (B, T, H, P), in one kernel each way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        from .kernels.rotary import rotated  # needs triton

        ctx.save_for_backward(cos, sin)
        return rotated(x, cos, sin)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        from .kernels.rotary import rotated

        cos, sin = ctx.saved_tensors
        return rotated(grad, cos, sin, -1), None, None


Turn = tuple[Tensor, Tensor]  # cos (..., D/2), and [-sin, sin] (..., 2, D/2), of one position of each row


def turn(x: Tensor, angles: Turn, out: Tensor) -> None:
    """`rotate` for x (..., 2, D/2) with separate halves, written into `out` of its shape and dtype.

    `angles` broadcast and have the dtype of x. `out` may be a view of a larger tensor, but must not overlap x.
    """
    cos, signed = angles
    torch.mul(x, cos, out=out)
    out.addcmul_(x.flip(-2), signed)


def adjacent_to_half_split(dim: int) -> Tensor:
    """(dim,) permutation p from adjacent pairs (0, 1), (2, 3), ... to half-split pairs: x[..., p]."""
    return torch.cat((torch.arange(0, dim, 2), torch.arange(1, dim, 2)))
