"""What the kernels compute, straight from the equations: one row and one head at a time, in float64, without triton."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def latent_decode(q: Tensor, segments: Sequence[Any], scale: float = 1.0, *, value_dim: int | None = None) -> Tensor:
    """The naive form of `latent.latent_decode`: (B, H, D) -> (B, H, Dv), float64.

    Args:
        q: (B, H, D).
        segments: `latent.CacheSegment`s, with their key, value, end and mask.
        value_dim: Dv where a value is the first columns of its key.
    """
    batch, heads, _ = q.shape
    rows = []
    for b in range(batch):
        outs = []
        for h in range(heads):
            keys, values = [], []
            for key, value, end, mask in segments:
                n, g = b * len(key) // batch, h * key.shape[1] // heads
                for slot in range(min(_number(end, n, key.shape[2]), key.shape[2])):
                    if mask is None or slot >= mask.shape[1] or bool(mask.expand(len(key), -1)[n, slot]):
                        keys.append(key[n, g, slot].double())
                        values.append(key[n, g, slot, :value_dim].double() if value is None else value[n, g, slot])
            outs.append(_attend(q[b, h].double(), keys, values, scale, _width(segments, value_dim)))
        rows.append(torch.stack(outs))
    return torch.stack(rows)


def merge_slot(
    slots: Tensor,
    latent: Tensor,
    rotary: Tensor,
    hidden: Tensor,
    gates: Tensor,
    at: int | Tensor,
    stride: int,
    first: int | Tensor = 0,
) -> Tensor:
    """The naive form of `merge.merge_slot`, which writes in place: the slots after it, (B, K, r + d_r), float64.

    Args:
        slots: (B, K, r + d_r).
        latent: of the new position, (B, r).
        rotary: its rotary key, (B, d_r).
        hidden: fc_p(latent), (B, g).
        gates: fc_c(pe(k)) of every slot, (A, g).
        at: the position, counted from where slot 0 begins: an int, (B,) or one element.
        first: number of slot 0, in the same form.
    """
    result = slots.double().clone()
    for b in range(len(slots)):
        position, r = _number(at, b, 0), latent.shape[1]
        slot = position // stride
        gate = torch.sigmoid(hidden[b].double() @ gates[_number(first, b, 0) + slot].double())
        before = result[b, slot, :r] if position % stride else 0.0
        result[b, slot, :r] = before + gate * latent[b].double()
        result[b, slot, r:] = rotary[b].double()
    return result


def factor_decode(
    query: Tensor, parts: Sequence[Any], scale: float, *, query_head: Tensor | None = None, third_dim: int | None = None
) -> Tensor:
    """The naive form of `factor.factor_decode`, which builds every query, key and value: (B, h, D), float64.

    Args:
        query: (B, h, D), or token factors (B, R_Q, D).
        parts: `factor.FactorPart`s.
        query_head: head factors of the queries, (B, R_Q, h), or None.
        third_dim: d_c of factors of third order; None: they are vectors.
    """
    rows = []
    for b in range(len(query)):
        tokens = query[b].double()
        q = tokens if query_head is None else _products(query_head[b].double(), tokens)
        keys, values = [], []
        for part in parts:
            n, size = b * len(part.key_token) // len(query), part.key_token.shape[2]
            for k in range(min(_number(part.used, n, size), size)):
                keys.append(_built(part.key_head, part.key_token, n, k, third_dim))
                values.append(_built(part.value_head, part.value_token, n, k, third_dim) / part.key_token.shape[1])
        width = q.shape[1]
        heads = [([k[h] for k in keys], [v[h] for v in values]) for h in range(len(q))]
        rows.append(torch.stack([_attend(q[h], *heads[h], scale, width) for h in range(len(q))]))
    return torch.stack(rows)


def _attend(q: Tensor, keys: list[Tensor], values: list[Tensor], scale: float, width: int) -> Tensor:
    if not keys:
        return q.new_zeros(width)
    weights = torch.softmax(torch.stack([q @ key for key in keys]) * scale, 0)
    return torch.stack([weight * value.double() for weight, value in zip(weights, values, strict=True)]).sum(0)


def _number(value: int | Tensor | None, row: int, otherwise: int) -> int:
    if value is None:
        return otherwise
    return int(value.flatten()[row if value.numel() > 1 else 0]) if isinstance(value, Tensor) else value


def _width(segments: Sequence[Any], value_dim: int | None) -> int:
    widths = {value_dim if segment.value is None else segment.value.shape[3] for segment in segments}
    (width,) = widths
    return int(width or 0)


def _built(head: Tensor, token: Tensor, row: int, position: int, third_dim: int | None) -> Tensor:
    """The key or value (h, D) of a position."""
    vectors = token[row, :, position].double()
    if third_dim is not None:
        pairs = [(v[:-third_dim], v[-third_dim:]) for v in vectors]
        vectors = torch.stack([torch.cat([component * turned for component in third]) for turned, third in pairs])
    fixed = head.shape[0] == head.shape[3] == 1
    return _products(head[0 if fixed else row, :, :, 0 if fixed else position].double(), vectors)


def _products(heads: Tensor, tokens: Tensor) -> Tensor:
    return torch.stack([torch.outer(a, b) for a, b in zip(heads, tokens, strict=True)]).sum(0)
