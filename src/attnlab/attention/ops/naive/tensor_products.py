"""Queries, keys and values that are sums of outer products: TPA and its variants."""

import math

import torch
from torch import Tensor, nn

from ... import TPA, TPAKVOnly, TPANonContextualA, TPANonContextualB, TPASharedB
from .formulas import Turn, base, formula, half_split


@formula(TPA, TPAKVOnly, TPANonContextualA, TPANonContextualB, TPASharedB)
def tpa(a: TPA, x: Tensor, prefix: Tensor | None = None, turn: Turn = half_split) -> Tensor:
    """Q, K and V as sums of outer products (TPA paper, eq. 3.1 to 3.5, section 3.5); x (T, d), prefix (S, d)."""
    joint = x if prefix is None else torch.cat((prefix, x))
    qkv = [_tensor_products(a, v, t, turn) for t, v in enumerate(joint)]
    rows = []
    for i in range(len(joint) - len(x), len(joint)):
        heads = []
        for h in range(a.num_heads):
            logits = torch.stack([qkv[i][0][h] @ qkv[j][1][h] for j in range(i + 1)])
            p = torch.softmax(logits / math.sqrt(a.head_dim), 0)
            head = torch.stack([p[j] * qkv[j][2][h] for j in range(i + 1)]).sum(0)
            if isinstance(a.norm, nn.RMSNorm):
                head = a.norm.weight * head / torch.sqrt((head * head).mean() + 1e-5)
            heads.append(head)
        rows.append(a.out(torch.cat(heads)))
    return torch.stack(rows)


def _tensor_products(a: TPA, x: Tensor, position: int, turn: Turn) -> list[Tensor]:
    """Q_t, K_t and V_t, each (h, D), of x (d,)."""
    ranks = {"q": a.q_rank, "k": a.rank, "v": a.rank}
    projected, used = a.factors(x), 0

    def take(source: str, width: int) -> list[Tensor]:
        """The next factors, in the order of the projection's rows."""
        nonlocal used
        used += ranks[source] * width
        return [projected[used - (ranks[source] - r) * width :][:width] for r in range(ranks[source])]

    def learned(rows: Tensor) -> dict[str, list[Tensor]]:
        split = rows.split([ranks[source] for source in "qkv"])
        return {source: list(part) for source, part in zip("qkv", split, strict=True)}

    if isinstance(a, TPANonContextualA):
        head = learned(a.head_factors)
    else:
        head = {source: take(source, a.num_heads) for source in "qkv"}
    if a.nonlinearity == "sigmoid":
        head = {source: [1 / (1 + torch.exp(-v)) for v in factors] for source, factors in head.items()}
    elif a.nonlinearity == "softmax":
        head = {source: [torch.exp(v) / torch.exp(v).sum() for v in factors] for source, factors in head.items()}
    if isinstance(a, TPANonContextualB):
        token = learned(a.token_factors)
    else:
        sources = "qk" if isinstance(a, TPASharedB) else "qkv"
        token = {source: take(source, a.turned) for source in sources}
        third = {source: take(source, a.third_dim) for source in sources} if a.third_dim else {}
        if isinstance(a, TPASharedB):
            token["v"], third["v"] = token["k"], third.get("k", [])

    outputs = []
    for source in "qkv":
        total = torch.zeros(a.num_heads, a.head_dim, dtype=x.dtype)
        for r in range(ranks[source]):
            b = token[source][r] if source == "v" else turn(token[source][r], position, base(a))
            if a.third_dim:
                b = torch.cat([component * b for component in third[source][r]])  # vec of the outer product
            total = total + torch.outer(head[source][r], b) / ranks[source]
        if source == "q" and isinstance(a, TPAKVOnly):
            blocks = a.query(x).view(a.num_heads, -1, a.turned)
            total = turn(blocks, position, base(a)).flatten(1)
        outputs.append(total)
    return outputs
