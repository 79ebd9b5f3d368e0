"""Block-term decomposition in terms of rank (L, L, 1), whose ranks come from a CP decomposition's fusion factor.

IrrAtt, algorithms 1 to 3, with three differences from the printed ones. The maxima of algorithm 1 are over heads and
with sign, columns are sorted by the head that owns them, and each head gets at least one. Algorithm 2 uses orthonormal
factors in its least-squares step. Algorithm 3 continues from the current fusion instead of restarting each term, so
that the error does not rise and the terms stay in the order of the heads.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from .cp import ROUNDING, Factors, Watch
from .slices import TINY, Slices
from .svd import BlockTerms, truncated_svd


def fusion_ranks(fusion: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Algorithm 1: the head that owns each column of a fusion factor, and the largest entry of the column.

    Each head gets at least one column and at most `most`. Columns move from heads with too many to the head with the
    next-largest entry, or to heads without a column; those with the smallest loss move first.

    Args:
        fusion: (H, R).

    Returns:
        The owner of each column, (R,) int64, and the owner's entry with its sign, (R,).

    Raises:
        ValueError: R below H or above H * most.
    """
    heads, rank = fusion.shape
    if not heads <= rank <= heads * most:
        raise ValueError(f"total rank {rank}: expected {heads} (one for each head) to {heads * most}")
    share = fusion.abs() / fusion.abs().amax(0).clamp_min(TINY)
    owner = share.argmax(0)
    counts = torch.bincount(owner, minlength=heads)
    while (counts == 0).any() or (counts > most).any():
        needy = counts == 0 if (counts == 0).any() else counts < most
        giving = counts > most if (counts > most).any() else counts > 1
        offers = torch.where(needy[:, None] & giving[owner][None, :], share, -1.0)
        best = int(offers.flatten().argmax())
        owner[best % rank] = best // rank
        counts = torch.bincount(owner, minlength=heads)
    return owner, fusion[owner, torch.arange(rank, device=fusion.device)]


def terms_from_cp(tensor: Slices, factors: Factors) -> BlockTerms:
    """Algorithm 1: each head gets the columns that it owns, and the fusion becomes the identity.

    Args:
        factors: of a CP decomposition of `tensor`: (I, R), (J, R), (H, R).
    """
    a, b, c = factors
    owner, largest = fusion_ranks(c, min(a.shape[-2], b.shape[-2], tensor.left.shape[-1]))
    root = largest.abs().sqrt()
    a, b = a * root * largest.sign(), b * root
    columns = [owner == head for head in range(len(c))]
    left, right = [a[:, places] for places in columns], [b[:, places] for places in columns]
    terms = BlockTerms(left, right, torch.eye(len(c)).to(a), [])
    return replace(terms, history=[float(tensor.error(*terms.columns()))])


def btd(
    tensor: Slices,
    start: BlockTerms | list[int],
    *,
    sweeps: int = 50,
    inner: int = 2,
    tolerance: float = 1e-4,
    watch: Watch | None = None,
) -> BlockTerms:
    """Algorithm 3: the H terms in turn, each fitted by algorithm 2 to the others' residual. The error never rises.

    Args:
        start: terms, or ranks, which then start from truncated SVDs.
        inner: steps of algorithm 2 for each term of a sweep.
        tolerance: a sweep that lowers the relative error by less than this times the error is the last one.

    Returns:
        Terms scaled so that the largest entry of each term's fusion column is 1.
    """
    terms = start if isinstance(start, BlockTerms) else truncated_svd(tensor, start)
    left, right, fusion = list(terms.left), list(terms.right), terms.fusion.clone()
    history = [float(tensor.error(*terms.columns()))]
    for sweep in range(sweeps):
        if history[-1] < ROUNDING:
            break
        for h in range(len(left)):
            rest = [k for k in range(len(left)) if k != h]
            # the empty slices are for a single head
            a, b = (torch.cat([side[h][:, :0], *(side[k] for k in rest)], -1) for side in (left, right))
            repeats = torch.tensor([left[k].shape[-1] for k in rest], dtype=torch.int64, device=fusion.device)
            columns = fusion[:, rest].repeat_interleave(repeats, -1)
            left[h], right[h], fusion[:, h] = _fit_term(tensor, (a, b, columns), fusion[:, h], left[h].shape[-1], inner)
        terms = BlockTerms(left, right, fusion, history)
        history.append(float(tensor.error(*terms.columns())))
        if watch:
            watch(sweep + 1, sweeps)
        if history[-2] - history[-1] <= tolerance * history[-1]:
            break
    for h in range(len(left)):
        peak = fusion[int(fusion[:, h].abs().argmax()), h].clone()
        fusion[:, h] /= peak
        root = peak.abs().sqrt()
        left[h], right[h] = left[h] * root * peak.sign(), right[h] * root
    return BlockTerms(left, right, fusion, history)


def _fit_term(tensor: Slices, others: Factors, c: Tensor, rank: int, steps: int) -> tuple[Tensor, Tensor, Tensor]:
    """Algorithm 2, for the tensor minus `others` (in columns), from the current fusion column c (H)."""
    a, b, columns = others
    c = c / c.norm()
    for _ in range(steps):
        matrix = tensor.combine(c) - (a * (c @ columns)) @ b.mT
        u, _, vh = torch.linalg.svd(matrix, full_matrices=False)
        u, v = u[:, :rank], vh[:rank].mT
        values = ((tensor.left.mT @ u) * (tensor.right.mT @ v)).sum(-2)  # (H, L): u_l' Y_h v_l
        core = values - columns @ ((a.mT @ u) * (b.mT @ v))
        p, values, qh = torch.linalg.svd(core, full_matrices=False)
        sign = 1.0 if float(p[:, 0] @ c) >= 0 else -1.0
        c, weights = p[:, 0] * sign, values[0] * qh[0] * sign
    root = weights.abs().sqrt()
    return u * root * weights.sign(), v * root, c
