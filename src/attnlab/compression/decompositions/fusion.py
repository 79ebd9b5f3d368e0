"""The rank-constrained fusion of IrrAtt, section 3.3: eq. 7 as a penalty on training, and as a constraint."""

import torch
from torch import Tensor

FLOOR = 1e-6  # the smallest weight of a column in its head, so that no head's row is zero


def fusion_penalty(fusion: Tensor) -> Tensor:
    """|S S' - I|^2 + |min(S, 0)|^2, divided by H: zero if and only if both constraints of eq. 7 hold.

    Rows that are orthonormal and have no negative entry do not overlap: each column then belongs to one head.

    Args:
        fusion: S, (H, R).
    """
    heads = fusion.shape[-2]
    identity = torch.eye(heads, dtype=fusion.dtype, device=fusion.device)
    return (fusion @ fusion.mT - identity).square().sum() / heads + fusion.clamp_max(0).square().sum() / heads


def constrained_fusion(free: Tensor) -> Tensor:
    """A fusion S under eq. 7, S >= 0 and S S' = I, from unconstrained weights.

    The largest weight of each column stays and the others become zero; each row is then divided by its norm. A head
    without a column gets the one with its largest weight that is not the strongest of another head. Weights set to zero
    receive the gradient of their entry (straight-through), so that in training a column can move to another head.

    Args:
        free: (H, R), R >= H. One that satisfies eq. 7 with a positive weight in each column is returned unchanged.
    """
    owned = _owned(free.detach())
    weights = torch.where(owned, free.clamp_min(FLOOR), 0.0)
    norm = weights.norm(dim=-1, keepdim=True)
    through = torch.where(owned & (free > FLOOR), 0.0, free - free.detach())  # zero, with a gradient
    return weights / norm + through / norm.detach()


def _owned(free: Tensor) -> Tensor:
    """(H, R), bool: the head of each column; every head has one. Without synchronisation with the host."""
    heads, rank = free.shape
    columns = torch.arange(rank, device=free.device)
    owner = free.argmax(0)
    owned = owner == torch.arange(heads, device=free.device)[:, None]
    strongest = free.masked_fill(~owned, -torch.inf).argmax(1)
    taken = ((columns == strongest[:, None]) & owned.any(1, keepdim=True)).any(0)
    for head in range(heads):
        best = columns == free[head].masked_fill(taken, -torch.inf).argmax()
        moved = best & ~(owner == head).any()
        owner = torch.where(moved, head, owner)
        taken = taken | moved
    return owner == torch.arange(heads, device=free.device)[:, None]
