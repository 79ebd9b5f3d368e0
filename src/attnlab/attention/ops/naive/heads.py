"""Keys and values of every head: MHA, MQA, GQA, and a window of them."""

import math

import torch
from torch import Tensor, nn

from ... import MHA, MLAWindow, SlidingWindow
from .formulas import Turn, base, formula, half_split


@formula(MHA)
def mha(a: MHA, x: Tensor, prefix: Tensor | None = None, turn: Turn = half_split) -> Tensor:
    """Softmax of x (T, d) over every position up to the query's, prefix (S, d) first (MTLA paper, section 3)."""
    start = 0 if prefix is None else len(prefix)
    return _read_keys(a, x, prefix, turn, [list(range(i + 1)) for i in range(start + len(x))])


@formula(SlidingWindow)
def sliding_window(a: SlidingWindow, x: Tensor, prefix: Tensor | None = None, turn: Turn = half_split) -> Tensor:
    """MHA whose query i sees the prefix, and the `window` newest positions of the text; x (T, d), prefix (S, d)."""
    return _read_keys(a, x, prefix, turn, window(a, x, prefix))


def window(a: SlidingWindow | MLAWindow, x: Tensor, prefix: Tensor | None) -> list[list[int]]:
    """The positions that each position sees, of prefix and text together; x (T, d), prefix (S, d)."""
    start = 0 if prefix is None else len(prefix)
    return [[j for j in range(i + 1) if j < start or i - j < a.window] for i in range(start + len(x))]


def _read_keys(a: MHA, x: Tensor, prefix: Tensor | None, turn: Turn, visible: list[list[int]]) -> Tensor:
    """Each text position's softmax over the positions visible to it, of prefix and text together."""

    def normed(v: Tensor, norm: nn.Module) -> Tensor:
        if not isinstance(norm, nn.RMSNorm):
            return v
        assert norm.eps is not None
        return norm.weight * v / torch.sqrt((v * v).mean(-1, keepdim=True) + norm.eps)

    def turned(v: Tensor, norm: nn.Module, heads: int, position: int) -> Tensor:
        scaled = {} if a.rope_scaling is None else {"scaling": a.rope_scaling}
        vector = normed(v.view(heads, a.head_dim), norm)
        return torch.cat((turn(vector[:, : a.turned], position, base(a), **scaled), vector[:, a.turned :]), -1)

    joint = x if prefix is None else torch.cat((prefix, x))
    q = [turned(a.query(v), a.query_norm, a.num_heads, i) for i, v in enumerate(joint)]
    k = [turned(a.key(v), a.key_norm, a.num_kv_heads, i) for i, v in enumerate(joint)]
    v = [a.value(v).view(a.num_kv_heads, a.head_dim) for v in joint]
    rows = []
    for i in range(len(joint) - len(x), len(joint)):
        heads = []
        for h in range(a.num_heads):
            g = h * a.num_kv_heads // a.num_heads
            logits = torch.stack([q[i][h] @ k[j][g] for j in visible[i]])
            p = torch.softmax(logits / math.sqrt(a.head_dim), 0)
            heads.append(torch.stack([p[n] * v[j][g] for n, j in enumerate(visible[i])]).sum(0))
        rows.append(a.out(torch.cat(heads)))
    return torch.stack(rows)
