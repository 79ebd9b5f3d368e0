"""The rank-constrained fusion of IrrAtt, section 3.3, as a penalty on training."""

import torch
from torch import Tensor


def fusion_penalty(fusion: Tensor) -> Tensor:
    """|S S' - I|^2 + |min(S, 0)|^2, divided by H: zero if and only if both constraints of eq. 7 hold.

    Rows that are orthonormal and have no negative entry do not overlap: each column then belongs to one head.

    Args:
        fusion: S, (H, R).
    """
    heads = fusion.shape[-2]
    identity = torch.eye(heads, dtype=fusion.dtype, device=fusion.device)
    return (fusion @ fusion.mT - identity).square().sum() / heads + fusion.clamp_max(0).square().sum() / heads
