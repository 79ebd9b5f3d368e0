"""What calibration texts say of one attention layer: second moments of its queries, keys and values.

Everything is streamed: windows of text pass through the layer one batch at a time, sums are float64, and no activation
is kept. Notation: G key-value heads, H query heads, D width of a head, F = D / 2 rotary frequencies; a head's pair of
components f and f + F is the complex number z[f], which a rotary embedding multiplies by e^(i position theta_f).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from attnlab.attention import MHA, SlidingWindow

QUERIES = 64  # rows of attention weights computed at a time


@dataclass
class Statistics:
    """Sums over calibration tokens, each a mean once `tokens` divides it.

    Args:
        heads: H.
        groups: G.
        width: D.
        pairs: F, rotary pairs of a head; 0: nothing is rotated.
        inputs: d.

    Attributes:
        tokens: how many positions were seen.
        moment: E [k; v] [k; v]^T, keys before rotation, (2 G D, 2 G D).
        mean: E [k; v], (2 G D,).
        of_query: E w q q^T of each head, (H, D, D), with the weights w of `weighted`.
        energy: E |q[f]|^2 of each head, (H, F).
        weighted: E w |q[f]|^2 of each head, (H, F); w = sum_j P_tj^2 |W_o (v_j - o_t)|^2, how much the output moves
            when the logits of position t move.
        spread: E sum_j P_tj^2 of each head, (H,).
        turn: attention-weighted mean of e^(i theta_f (j - t)), complex, (H, F).
    """

    heads: int
    groups: int
    width: int
    pairs: int
    tokens: int = 0
    moment: Tensor = field(init=False)
    mean: Tensor = field(init=False)
    of_query: Tensor = field(init=False)
    energy: Tensor = field(init=False)
    weighted: Tensor = field(init=False)
    spread: Tensor = field(init=False)
    turn: Tensor = field(init=False)

    def __post_init__(self) -> None:
        both = 2 * self.groups * self.width
        self.moment, self.mean = torch.zeros(both, both, dtype=torch.float64), torch.zeros(both, dtype=torch.float64)
        self.of_query = torch.zeros(self.heads, self.width, self.width, dtype=torch.float64)
        self.energy, self.weighted = (torch.zeros(self.heads, self.pairs, dtype=torch.float64) for _ in range(2))
        self.spread = torch.zeros(self.heads, dtype=torch.float64)
        self.turn = torch.zeros(self.heads, self.pairs, dtype=torch.complex128)

    def finished(self) -> Statistics:
        """The same as means."""
        found = Statistics(self.heads, self.groups, self.width, self.pairs, self.tokens)
        for name in ("moment", "mean", "of_query", "energy", "weighted", "spread", "turn"):
            setattr(found, name, getattr(self, name) / self.tokens)
        return found

    def covariance(self) -> Tensor:
        """Of [k; v] around their mean, of finished statistics, (2 G D, 2 G D)."""
        return self.moment - torch.outer(self.mean, self.mean)


def frequencies_of(attention: MHA) -> Tensor:
    """theta_f in radians per position, float64, (F,).

    Args:
        attention: with rotary positions.
    """
    if attention.rope_theta is None:
        return attention.frequencies.to(torch.float64)
    pairs = torch.arange(0, attention.turned, 2, dtype=torch.float64)
    found = attention.rope_theta ** (-pairs / max(attention.turned, 1))
    return found if attention.rope_scaling is None else attention.rope_scaling(found)


def complex_pairs(x: Tensor) -> Tensor:
    """Vectors whose halves are real and imaginary parts, (..., D) -> (..., F).

    Args:
        x: half-split, as rotary embeddings pair components.
    """
    real, imaginary = x.chunk(2, -1)
    return torch.complex(real, imaginary)


@torch.no_grad()
def collect(attention: MHA, inputs: Iterable[Tensor]) -> Statistics:
    """The statistics of an attention layer.

    Args:
        attention: multi-head or grouped-query attention, as it was trained.
        inputs: what enters it, batches (B, T, d); each row is a text of its own.

    Returns:
        Means over all positions.
    """
    pairs = attention.turned // 2
    found = Statistics(attention.num_heads, attention.num_kv_heads, attention.head_dim, pairs)
    theta = frequencies_of(attention)
    output = attention.out.weight.double().unflatten(1, (attention.num_heads, -1)).movedim(1, 0)  # (H, d, D)
    metric = output.mT @ output  # W_o^T W_o of each head, (H, D, D)
    for x in inputs:
        _add(found, attention, x, theta, metric)
    return found.finished()


def _add(found: Statistics, a: MHA, x: Tensor, theta: Tensor, metric: Tensor) -> None:
    group = a.num_heads // a.num_kv_heads
    query, key = a.query_norm(a._heads(x, a.query)), a.key_norm(a._heads(x, a.key))  # (B, H or G, T, D), not rotated
    value = a._heads(x, a.value)
    steps = x.shape[1]
    found.tokens += x.shape[0] * steps
    both = torch.cat((key, value), 1).transpose(1, 2).flatten(2).flatten(0, 1).double()
    found.moment += both.mT @ both
    found.mean += both.sum(0)
    cos, sin = a.rotary_table(steps, x)
    angles = cos[None], sin[None]
    q, k = a._rotated(query, angles), a._rotated(key, angles)
    k, v = k.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    wide = torch.promote_types(x.dtype, torch.float32)
    of_values = torch.einsum("bhtd,hde,bhte->bht", v.to(wide), metric.to(wide), v.to(wide))  # |W_o v_j|^2
    place = torch.arange(steps, device=x.device)
    for first in range(0, steps, QUERIES):
        last = min(first + QUERIES, steps)
        at, before = place[first:last, None], place[:last]
        hidden = before > at
        if isinstance(a, SlidingWindow):
            hidden |= before <= at - a.window
        logits = (q[:, :, first:last] @ k[:, :, :last].mT * a.scale).to(wide).masked_fill(hidden, float("-inf"))
        p = logits.softmax(-1)
        out = p @ v[:, :, :last].to(wide)
        turned = torch.einsum("hde,bhte->bhtd", metric.to(wide), out)
        square = p.square()
        total = square.sum(-1)
        moved = (square @ of_values[:, :, :last, None])[..., 0]
        moved = moved - 2 * ((square @ v[:, :, :last].to(wide)) * turned).sum(-1) + total * (out * turned).sum(-1)
        weight = moved.clamp(min=0).double()
        raw = query[:, :, first:last].double()
        found.of_query += torch.einsum("bht,bhtd,bhte->hde", weight, raw, raw)
        found.spread += total.double().sum((0, 2))
        if found.pairs:
            size = complex_pairs(raw[..., : a.turned]).abs().square()
            found.energy += size.sum((0, 2))
            found.weighted += (weight.unsqueeze(-1) * size).sum((0, 2))
            lag = torch.polar(torch.ones((), dtype=torch.float64), (before - at)[..., None] * theta).to(
                torch.complex128
            )
            found.turn += torch.einsum("htj,tjf->hf", p.double().sum(0).to(torch.complex128), lag)
