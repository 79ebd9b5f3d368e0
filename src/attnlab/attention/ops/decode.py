"""One decoding step against a cache whose prefix is shared by the beams of a sentence."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .backends import Backend, choose


def attend_cached(
    q: Tensor,
    key: Tensor,
    value: Tensor | None,
    scale: float,
    prefix_key: Tensor,
    prefix_value: Tensor | None,
    prefix_mask: Tensor | None = None,
    text_mask: Tensor | None = None,
    *,
    value_dim: int | None = None,
    used: int | None = None,
    counts: Tensor | None = None,
    prefix_used: int | None = None,
    prefix_counts: Tensor | None = None,
) -> Tensor:
    """(B, H, 1, Dv): one softmax over a row's prefix and its own text.

    q (B, H, 1, D); text keys and values (B, G, K, .), G dividing H; prefixes (N, G, P, .), N dividing B.
    Masks (N, P) and (B, K), bool, true where a key exists. Key heads are never repeated, prefixes never copied:
    the H/G query heads of a key head, and the beams of a prefix, are the rows of one matrix product.
    Buffers are given whole, with how many of their slots are used: a kernel then takes the same shapes at every step.

    Args:
        q: queries of the step, (B, H, 1, D).
        key: text keys, (B, G, K, D); G divides H.
        value: text values, (B, G, K, Dv); None: the first `value_dim` columns of the keys.
        scale: factor of the logits.
        prefix_key: keys of the prefixes, (N, G, P, D); N divides B. P = 0: there is no prefix.
        prefix_value: their values, (N, G, P, Dv); None as for the text.
        prefix_mask: (N, P) bool, true where a key exists; None: everywhere.
        text_mask: (B, K) bool, the same of the text; keys beyond its columns exist.
        value_dim: Dv, where keys are values too.
        used: the first so many text slots are read at most; None: K.
        counts: how many of these exist in each row, (B,) or one element, int64 or int32 on the device, in place of
            `text_mask`; None: all.
        prefix_used: the same of the prefixes as `used`; None: P.
        prefix_counts: how many of these exist, (N,), where `prefix_mask` is true for the first ones; a kernel reads it
            in place of the mask.
    """
    q_bhd = q[:, :, 0].to(key.dtype)
    batch, heads, width = q_bhd.shape
    prefix_used = prefix_key.shape[2] if prefix_used is None else prefix_used
    narrow = width != (value_dim if value is None else value.shape[-1])
    masked = bool(prefix_used) or text_mask is not None or counts is not None or narrow
    backend = choose("step", q_bhd, masked=masked)
    if backend is Backend.TRITON:
        from .kernels.latent import Segment, latent_decode  # needs triton

        segments = [Segment(key, value, used if counts is None else counts, mask=text_mask)]
        if prefix_used:
            held = prefix_used if prefix_counts is None else prefix_counts
            mask = prefix_mask if prefix_counts is None else None
            segments.insert(0, Segment(prefix_key, prefix_value, held, mask=mask))
        return latent_decode(q_bhd.contiguous(), segments, scale, value_dim=value_dim).unsqueeze(2)

    key, prefix_key = key[:, :, :used], prefix_key[:, :, :prefix_used]
    value = key[..., :value_dim] if value is None else value[:, :, :used]
    prefix_value = prefix_key[..., :value_dim] if prefix_value is None else prefix_value[:, :, :prefix_used]
    if counts is not None:
        text_mask = torch.arange(key.shape[2], device=counts.device) < counts.reshape(-1, 1)
    groups, prefixes, size = key.shape[1], prefix_key.shape[0], prefix_used
    if prefix_counts is not None and prefix_mask is None:
        prefix_mask = torch.arange(size, device=prefix_counts.device) < prefix_counts.reshape(-1, 1)
    q_bgqd = q_bhd.reshape(batch, groups, heads // groups, width)
    if backend is Backend.SDPA:
        return F.scaled_dot_product_attention(q_bgqd, key, value, scale=scale).reshape(batch, heads, 1, -1)
    if not size:
        p = _softmax(_logits(q_bgqd, key, text_mask, scale), key.dtype)
        return (p @ value).reshape(batch, heads, 1, -1)

    def fold(x: Tensor) -> Tensor:  # (B, G, Q, D) -> (N, G, beam Q, D)
        return x.unflatten(0, (prefixes, -1)).transpose(1, 2).flatten(2, 3)

    def unfold(x: Tensor) -> Tensor:
        return x.unflatten(2, (batch // prefixes, -1)).transpose(1, 2).flatten(0, 1)

    prefix_logits = unfold(_logits(fold(q_bgqd), prefix_key, prefix_mask, scale))
    p = _softmax(torch.cat((prefix_logits, _logits(q_bgqd, key, text_mask, scale)), dim=-1), key.dtype)
    out = unfold(fold(p[..., :size]) @ prefix_value) + p[..., size:] @ value
    return out.reshape(batch, heads, 1, -1)


def room(used: int | Tensor) -> dict[str, Any]:
    """Arguments of `attend_cached` for the text slots that are used.

    Args:
        used: how many, on the host; or on the device, (1,) or (B,).
    """
    return {"counts": used} if isinstance(used, Tensor) else {"used": used}


def _logits(q: Tensor, key: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    logits = (q if scale == 1.0 else q * scale) @ key.mT
    if mask is not None and mask.shape[-1] < logits.shape[-1]:
        logits[..., : mask.shape[-1]].masked_fill_(~mask[:, None, None], float("-inf"))
    elif mask is not None:
        logits = logits.masked_fill(~mask[:, None, None], float("-inf"))
    return logits


def _softmax(logits: Tensor, dtype: torch.dtype) -> Tensor:
    return logits.softmax(-1, dtype=torch.promote_types(dtype, torch.float32)).to(dtype)
