"""The tensor to decompose: H matrices of one size, each as a product of two, so that none is ever formed."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Slices:
    """Y of size I x J x H, as Y[:, :, h] = left[h] @ right[h].T; all in float64.

    For the query-key tensor of an attention layer these are W_Q and W_K of each head (IrrAtt, section 2.3).

    Args:
        left, right: (H, I, D) and (H, J, D).

    Raises:
        ValueError: the shapes do not match.
    """

    left: Tensor
    right: Tensor

    def __post_init__(self) -> None:
        heads, _, width = self.left.shape
        if self.right.dim() != 3 or (heads, width) != (len(self.right), self.right.shape[-1]):
            raise ValueError(f"left {tuple(self.left.shape)} and right {tuple(self.right.shape)} do not match")
        object.__setattr__(self, "left", self.left.detach().double())
        object.__setattr__(self, "right", self.right.detach().double())

    @classmethod
    def of(cls, dense: Tensor) -> Slices:
        """The slices of a dense tensor (I, J, H)."""
        left = dense.movedim(-1, 0)
        size = dense.shape[1]
        return cls(left, torch.eye(size, dtype=left.dtype, device=left.device).expand(len(left), size, size))

    @property
    def sizes(self) -> tuple[int, int, int]:
        """I, J, H."""
        return self.left.shape[1], self.right.shape[1], len(self.left)

    def dense(self) -> Tensor:
        """Y, (I, J, H); for small tensors."""
        return (self.left @ self.right.mT).movedim(0, -1)

    def square(self) -> Tensor:
        """|Y|^2."""
        return ((self.left.mT @ self.left) * (self.right.mT @ self.right)).sum()

    def combine(self, weights: Tensor) -> Tensor:
        """sum_h weights[h] Y[:, :, h]: (H) -> (I, J)."""
        return _flat(self.left * weights[:, None, None]) @ _flat(self.right).mT

    def mttkrp(self, mode: int, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        """Y unfolded along `mode`, times the Khatri-Rao product of the two other factors.

        a: (I, R), b: (J, R), c: (H, R). Takes I D H R multiplications twice, instead of I J H R.
        """
        if mode == 0:
            return _flat(self.left) @ ((self.right.mT @ b[None]) * c[:, None]).flatten(0, 1)
        if mode == 1:
            return _flat(self.right) @ ((self.left.mT @ a[None]) * c[:, None]).flatten(0, 1)
        return ((self.left.mT @ a[None]) * (self.right.mT @ b[None])).sum(-2)

    def error(self, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        """|Y - sum_r a_r o b_r o c_r| / |Y|.

        Without cancellation: the norm of each slice's difference is that of its sides' triangular factors.
        """
        a, b = (x.expand(len(self.left), -1, -1) for x in (a, b))
        left = torch.linalg.qr(torch.cat([self.left, -a * c[:, None]], -1))[1]
        right = torch.linalg.qr(torch.cat([self.right, b], -1))[1]
        return (left @ right.mT).square().sum().sqrt() / self.square().sqrt().clamp_min(TINY)


TINY = torch.finfo(torch.float64).tiny


def _flat(heads: Tensor) -> Tensor:
    """(H, I, D) -> (I, H D)."""
    return heads.movedim(0, 1).flatten(1)
