"""Second moments of an attention layer's queries, keys and values on calibration texts.

Batches are streamed through the layer, sums are float64, and no activation is stored. Notation: G key-value heads, H
query heads, D width of a head, F = D / 2 rotary frequencies; a head's pair of components f and f + F is the complex
number z[f], which a rotary embedding multiplies by e^(i position theta_f).
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from attnlab.attention import MHA, MLA, SlidingWindow

QUERIES = 64  # rows of attention weights computed at a time
BLOCKS = 4  # blocks of columns of a Gram matrix, for its upper triangle


@dataclass
class Statistics:
    """Sums over calibration tokens, or their means.

    Args:
        heads: H.
        groups: G.
        width: D.
        pairs: F, rotary pairs of a head; 0: no rotation.

    Attributes:
        tokens: number of positions.
        attended: number of positions with queries and attention weights.
        moment: E [k; v] [k; v]^T, keys before rotation, (2 G D, 2 G D).
        mean: E [k; v], (2 G D,).
        of_query: E w q q^T of each head, (H, D, D), with the weights w of `weighted`.
        energy: E |q[f]|^2 of each head, (H, F).
        weighted: E w |q[f]|^2 of each head, (H, F), from the diagonals of `of_query`; w = sum_j P_tj^2
            |W_o (v_j - o_t)|^2, the sensitivity of the output to the logits of position t.
        spread: E sum_j P_tj^2 of each head, (H,).
        turn: attention-weighted mean of e^(i theta_f (j - t)), complex, (H, F).
    """

    heads: int
    groups: int
    width: int
    pairs: int
    tokens: int = 0
    attended: int = 0
    moment: Tensor = field(init=False)
    mean: Tensor = field(init=False)
    of_query: Tensor = field(init=False)
    energy: Tensor = field(init=False)
    spread: Tensor = field(init=False)
    turn: Tensor = field(init=False)

    def __post_init__(self) -> None:
        both = 2 * self.groups * self.width
        self.moment, self.mean = torch.zeros(both, both, dtype=torch.float64), torch.zeros(both, dtype=torch.float64)
        self.of_query = torch.zeros(self.heads, self.width, self.width, dtype=torch.float64)
        self.energy = torch.zeros(self.heads, self.pairs, dtype=torch.float64)
        self.spread = torch.zeros(self.heads, dtype=torch.float64)
        self.turn = torch.zeros(self.heads, self.pairs, dtype=torch.complex128)

    def finished(self) -> Statistics:
        """The means."""
        means = replace(self)
        means.moment, means.mean = symmetric(self.moment) / self.tokens, self.mean / self.tokens
        for name in ("of_query", "energy", "spread", "turn"):
            setattr(means, name, getattr(self, name) / self.attended)
        return means

    @property
    def weighted(self) -> Tensor:
        """See the attributes."""
        squares = self.of_query.diagonal(dim1=1, dim2=2)
        return squares[:, : self.pairs] + squares[:, self.pairs : 2 * self.pairs]


def frequencies_of(attention: MHA | MLA) -> Tensor:
    """theta_f in radians per position, float64, (F,)."""
    if attention.rope_theta is None:
        return attention.frequencies.to(torch.float64)
    pairs = torch.arange(0, attention.turned, 2, dtype=torch.float64)
    theta = attention.rope_theta ** (-pairs / max(attention.turned, 1))
    return theta if attention.rope_scaling is None else attention.rope_scaling(theta)


def add_products(sums: Tensor, x: Tensor) -> None:
    """Add x^T x of x (tokens, n) to `sums` (n, n), without blocks below the diagonal: see :func:`symmetric`."""
    size = len(sums)
    bounds = [size * i // BLOCKS for i in range(BLOCKS + 1)]
    for first, last in zip(bounds[:-1], bounds[1:], strict=True):
        sums[first:last, first:].addmm_(x[:, first:last].mT, x[:, first:])


def symmetric(sums: Tensor) -> Tensor:
    """The symmetric matrix (n, n) of the upper triangle of `sums` (n, n), from :func:`add_products`."""
    return sums.triu() + sums.triu(1).mT


@torch.no_grad()
def collect(
    attention: MHA,
    inputs: Iterable[Tensor],
    attended: Container[int] | None = None,
    seen: Callable[[int, Tensor], None] | None = None,
) -> Statistics:
    """The statistics of an attention layer, as means over all positions.

    Args:
        inputs: batches (B, T, d) of its inputs; each row is a separate text.
        attended: numbers of the batches for queries and attention weights, which take longest; None: all.
        seen: called with the number of each such batch and the output projection's input, (B, T, H D).
    """
    pairs = attention.turned // 2
    sums = Statistics(attention.num_heads, attention.num_kv_heads, attention.head_dim, pairs)
    theta = frequencies_of(attention)
    output = attention.out.weight.double().unflatten(1, (attention.num_heads, -1)).movedim(1, 0)  # (H, d, D)
    metric = output.mT @ output  # W_o^T W_o of each head, (H, D, D)
    for number, x in enumerate(inputs):
        heads = _add(sums, attention, x, theta, metric, attended is None or number in attended)
        if seen is not None and heads is not None:
            seen(number, heads)
    return sums.finished()


def _add(statistics: Statistics, a: MHA, x: Tensor, theta: Tensor, metric: Tensor, attended: bool) -> Tensor | None:
    """Add a batch -> the output projection's input, (B, T, H D); None unless `attended`."""
    key, value = a.key_norm(a._heads(x, a.key)), a._heads(x, a.value)  # (B, G, T, D), not rotated
    statistics.tokens += x.shape[0] * x.shape[1]
    both = torch.cat((key, value), 1).transpose(1, 2).flatten(2).flatten(0, 1).double()
    add_products(statistics.moment, both)
    statistics.mean += both.sum(0)
    if not attended:
        return None
    statistics.attended += x.shape[0] * x.shape[1]
    query = a.query_norm(a._heads(x, a.query))  # (B, H, T, D)
    cos, sin = a.rotary_table(x.shape[1], x)
    angles = cos[None], sin[None]
    weight, total, lags, heads = _attended(a, a._rotated(query, angles), a._rotated(key, angles), value, metric)
    statistics.spread += total
    for rows, moved in zip(query, weight, strict=True):  # of one text, (H, T, D) and (H, T): float64 is twice as large
        raw = rows.double()
        statistics.of_query += (raw * moved.unsqueeze(-1)).mT @ raw
        squares = raw[..., : a.turned].square().sum(1)  # |q[f]|^2 is a sum of two of them
        statistics.energy += squares[:, : statistics.pairs] + squares[:, statistics.pairs :]
    if statistics.pairs:
        turns = -torch.arange(x.shape[1], dtype=torch.float64, device=x.device)[:, None] * theta
        statistics.turn += torch.complex(lags @ turns.cos(), lags @ turns.sin())
    return heads.to(x.dtype)


def _attended(a: MHA, q: Tensor, k: Tensor, v: Tensor, metric: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Sums of attention weights, from rotated queries (B, H, T, D), rotated keys and values (B, G, T, D).

    -> w of each position, (B, H, T) float64; sum of P_tj^2 of each head, (H,) float64; the attention weights summed by
    the distance t - j, (H, T) float64; and the heads' outputs, (B, T, H D). The heads of a group are rows of one matrix
    product; QUERIES rows are computed at a time, against the keys that any of them sees.
    """
    groups, steps, heads = k.shape[1], k.shape[2], q.shape[1]
    wide = torch.promote_types(q.dtype, torch.float32)
    q, k, v = q.unflatten(1, (groups, -1)), k * a.scale, v.to(wide)
    of_head = metric.to(wide).unflatten(0, (groups, -1))  # (G, H / G, D, D)
    of_values = ((v[:, :, None] @ of_head) * v[:, :, None]).sum(-1).mT  # |W_o v_j|^2, (B, G, T, H / G)
    read = torch.cat((v, of_values), -1)
    width, places = v.shape[-1], torch.arange(steps, device=q.device)
    moved, total = [], q.new_zeros(heads, dtype=torch.float64)
    outputs = v.new_empty(len(q), steps, groups, heads // groups, width)
    lags = q.new_zeros(heads, steps, dtype=torch.float64)
    for first in range(0, steps, QUERIES):
        last = min(first + QUERIES, steps)
        rows, begin = last - first, max(0, first + 1 - a.window) if isinstance(a, SlidingWindow) else 0
        sinks = min(a.sinks, begin) if isinstance(a, SlidingWindow) else 0
        keys, both, before = (
            torch.cat((every.narrow(axis, 0, sinks), every.narrow(axis, begin, last - begin)), axis)
            for every, axis in ((k, 2), (read, 2), (places, 0))
        )
        logits = (q[:, :, :, first:last].flatten(2, 3) @ keys.mT).to(wide)
        logits = logits.unflatten(2, (-1, rows))  # (B, G, H / G, rows, keys)
        at, newest = places[first:last, None], sinks + first - begin
        logits[..., newest:].masked_fill_(before[newest:] > at, float("-inf"))
        if isinstance(a, SlidingWindow):
            logits.masked_fill_((before <= at - a.window) & (before >= a.sinks), float("-inf"))
        p = logits.softmax(-1)
        square = torch.square(p, out=logits)  # fresh memory takes as long as the squares
        flat = p.flatten(2, 3)
        out = (flat @ both[..., :width]).unflatten(2, (-1, rows))
        outputs[:, first:last] = out.movedim(3, 1)
        squared = (square.flatten(2, 3) @ both).unflatten(2, (-1, rows))
        share = square.sum(-1)
        sizes = squared[..., width:].diagonal(dim1=2, dim2=4).mT  # |W_o v|^2 of each head
        turned = out @ of_head
        cross = (squared[..., :width] * turned).sum(-1)
        moved.append((sizes - 2 * cross + share * (out * turned).sum(-1)).flatten(1, 2))
        total += share.double().sum((0, 3)).flatten()
        summed = p.sum(0).flatten(0, 1)
        for place in range(sinks):
            lags[:, first - place : last - place] += summed[..., place]
        # each row is one place further to the left than the one above: a column has one distance
        columns = last - begin + rows - 1
        shifted = q.new_zeros(heads, rows * columns, dtype=torch.float64)
        placed = shifted.as_strided((heads, rows, last - begin), (rows * columns, columns - 1, 1), rows - 1)
        placed.copy_(summed[..., sinks:])
        lags[:, : last - begin] += shifted.view(heads, rows, columns)[..., : last - begin].sum(1).flip(1)
    return torch.cat(moved, 2).clamp(min=0).double(), total, lags, outputs.flatten(2)
