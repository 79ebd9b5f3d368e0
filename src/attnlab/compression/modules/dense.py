"""From factored heads back to dense ones."""

from __future__ import annotations

import torch
from torch import Tensor

from attnlab.compression.modules.base import Dense


@torch.no_grad()
def dense_heads(
    query: Tensor,
    key: Tensor,
    values: list[Tensor],
    outputs: list[Tensor],
    mixing: Tensor,
    heads: list[int],
    width: int,
    bias: Tensor | None,
) -> tuple[Dense, float]:
    """Query, key, value and output matrices of a dense attention layer, and what they lose.

    A head whose effective query-key matrix has a higher rank than `width` (a free fusion, CP SlimAtt) cannot be written
    exactly: the nearest matrix of that rank is taken (Eckart and Young).

    Args:
        query: (R, F + 1): a row for each column of the factors; the last entry is its bias.
        key: (R, F).
        values, outputs: of each head, (P_h, F) and (F', P_h).
        mixing: (H, R): the weight of each column in each head's logits.
        heads: the number of each head in the dense layer.
        bias: of the output, (F').

    Returns:
        q, k, v, o as (out, in) with their biases, in the order of the dense layer's heads, in float64; and the
        relative error of the query-key tensor, Frobenius norm.
    """
    lost, square = 0.0, 0.0
    parts: dict[int, tuple[Tensor, ...]] = {}
    for g, head in enumerate(heads):
        mine = mixing[g].nonzero()[:, 0]
        left, right = (query[mine] * mixing[g, mine][:, None]).T, key[mine].T
        if len(mine) > width:
            (q, r), (p, s) = torch.linalg.qr(left), torch.linalg.qr(right)
            u, singular, vh = torch.linalg.svd(r @ s.T)
            root = singular[:width].sqrt()
            left, right = q @ (u[:, :width] * root), p @ (vh[:width].T * root)
            lost, square = lost + float(singular[width:].square().sum()), square + float(singular.square().sum())
        else:
            square += float(((left.T @ left) * (right.T @ right)).sum())
        sides = (left, right, values[g].T, outputs[g])
        parts[head] = tuple(torch.nn.functional.pad(side, (0, width - side.shape[-1])) for side in sides)
    q, k, v, o = (torch.cat([parts[h][i] for h in sorted(parts)], -1) for i in range(4))
    zero = q.new_zeros(q.shape[-1])
    found: Dense = {"q": (q[:-1].T, q[-1]), "k": (k.T, zero), "v": (v.T, zero), "o": (o, bias)}
    return found, (lost / square) ** 0.5 if square else 0.0
