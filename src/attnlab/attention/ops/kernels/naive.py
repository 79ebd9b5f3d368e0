"""What the kernels compute, straight from the equations: one row and one head at a time, in float64, without triton."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def latent_decode(q: Tensor, segments: Sequence[Any], scale: float = 1.0, *, value_dim: int | None = None) -> Tensor:
    """The naive form of `latent.latent_decode`: (B, H, D) -> (B, H, Dv), float64.

    Args:
        q: (B, H, D).
        segments: `latent.Segment`s, with their key, value, end, start and mask.
        scale: factor of the logits.
        value_dim: Dv where a value is the first columns of its key.
    """
    batch, heads, _ = q.shape
    rows = []
    for b in range(batch):
        outs = []
        for h in range(heads):
            keys, values = [], []
            for key, value, end, start, mask in segments:
                n, g = b * len(key) // batch, h * key.shape[1] // heads
                for slot in range(_number(start, n, 0), min(_number(end, n, key.shape[2]), key.shape[2])):
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
        stride: positions of a slot.
        first: number of slot 0, in the same form.
    """
    found = slots.double().clone()
    for b in range(len(slots)):
        position, r = _number(at, b, 0), latent.shape[1]
        slot = position // stride
        gate = torch.sigmoid(hidden[b].double() @ gates[_number(first, b, 0) + slot].double())
        held = found[b, slot, :r] if position % stride else 0.0
        found[b, slot, :r] = held + gate * latent[b].double()
        found[b, slot, r:] = rotary[b].double()
    return found


def _attend(q: Tensor, keys: list[Tensor], values: list[Tensor], scale: float, width: int) -> Tensor:
    if not keys:
        return q.new_zeros(width)
    weights = torch.softmax(torch.stack([q @ key for key in keys]) * scale, 0)
    return torch.stack([weight * value.double() for weight, value in zip(weights, values, strict=True)]).sum(0)


def _number(given: int | Tensor | None, row: int, otherwise: int) -> int:
    if given is None:
        return otherwise
    return int(given.flatten()[row if given.numel() > 1 else 0]) if isinstance(given, Tensor) else given


def _width(segments: Sequence[Any], value_dim: int | None) -> int:
    widths = {value_dim if segment.value is None else segment.value.shape[3] for segment in segments}
    (width,) = widths
    return int(width or 0)
