"""One decoding step against a cache whose prefix is shared by the beams of a sentence."""

import torch
from torch import Tensor
from torch.nn import functional as F

from .backends import Backend, choose


def attend_cached(
    q: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    prefix_key: Tensor,
    prefix_value: Tensor,
    prefix_mask: Tensor | None = None,
    text_mask: Tensor | None = None,
) -> Tensor:
    """(B, H, 1, Dv): one softmax over a row's prefix and its own text.

    q (B, H, 1, D); text keys and values (B, G, K, .), G dividing H; prefixes (N, G, P, .), N dividing B.
    Masks (N, P) and (B, K), bool, true where a key exists. Key heads are never repeated, prefixes never copied:
    the H/G query heads of a key head, and the beams of a prefix, are the rows of one matrix product.

    Args:
        q: queries of the step, (B, H, 1, D).
        key: text keys, (B, G, K, D); G divides H.
        value: text values, (B, G, K, Dv).
        scale: factor of the logits.
        prefix_key: keys of the prefixes, (N, G, P, D); N divides B. P = 0: there is no prefix.
        prefix_value: their values, (N, G, P, Dv).
        prefix_mask: (N, P) bool, true where a key exists; None: everywhere.
        text_mask: (B, K) bool, the same of the text; keys beyond its columns exist.
    """
    batch, heads, _, width = q.shape
    groups, prefixes, size = key.shape[1], prefix_key.shape[0], prefix_key.shape[2]
    q_bgqd = q.to(key.dtype).reshape(batch, groups, heads // groups, width)
    masked = bool(size) or text_mask is not None or key.shape[-1] != value.shape[-1]
    if choose("step", q, masked=masked) is Backend.SDPA:
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


def _logits(q: Tensor, key: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    logits = (q if scale == 1.0 else q * scale) @ key.mT
    if mask is not None and mask.shape[-1] < logits.shape[-1]:
        logits[..., : mask.shape[-1]].masked_fill_(~mask[:, None, None], float("-inf"))
    elif mask is not None:
        logits = logits.masked_fill(~mask[:, None, None], float("-inf"))
    return logits


def _softmax(logits: Tensor, dtype: torch.dtype) -> Tensor:
    return logits.softmax(-1, dtype=torch.promote_types(dtype, torch.float32)).to(dtype)
