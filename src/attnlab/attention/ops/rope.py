"""Rotary position embedding, in one convention for the whole house: half-split pairs with Llama's sign.

Component m of the first half turns with component m of the second half by position * theta^(-2m/D):
    (u, v) -> (u cos - v sin, v cos + u sin).
The MTLA code pairs neighbours (2m, 2m+1) instead: with its rotated components permuted by
`adjacent_to_half_split` it is this model.  T6 turns the other way: swapping the halves gives that.
"""

from functools import lru_cache

import torch
from torch import Tensor


@lru_cache(maxsize=64)
def _table(dim: int, theta: float, length: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    # Kept across calls, so it must stay usable in training even if inference asked first.
    with torch.inference_mode(False), torch.no_grad():
        frequencies = theta ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
        angles = torch.arange(length, dtype=torch.float64)[:, None] * frequencies
        return angles.cos().to(device, dtype), angles.sin().to(device, dtype)


def rotary_table(
    dim: int, theta: float, length: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """cos and sin of positions 0 ... length-1, each (length, dim/2), in float32 or wider."""
    if dim % 2:
        raise ValueError(f"rotary embedding turns pairs: the width must be even, not {dim}")
    rounded = 1 << max(length - 1, 1).bit_length()  # few distinct sizes to keep
    cos, sin = _table(dim, theta, rounded, torch.promote_types(dtype, torch.float32), device)
    return cos[:length], sin[:length]


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x (..., D) turned by cos, sin (..., D/2), which broadcast; computed in the tables' precision."""
    u, v = x.chunk(2, dim=-1)
    return torch.cat((u * cos - v * sin, v * cos + u * sin), dim=-1).to(x.dtype)


def adjacent_to_half_split(dim: int) -> Tensor:
    """(dim,) permutation p: x[..., p] in half-split order is x in adjacent-pair order (0, 1), (2, 3), ..."""
    return torch.cat((torch.arange(0, dim, 2), torch.arange(1, dim, 2)))
