"""One decoding step against a cache whose prefix is shared by the beams of a sentence."""

import torch
from torch import Tensor
from torch.nn import functional as F

from .backends import Backend, choose

WIDE = (torch.float32, torch.float64)


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
    beam: int | None = None,
) -> Tensor:
    """(B, H, 1, Dv): one softmax over a row's prefix and text.

    Key heads are never repeated, prefixes never copied: the H/G query heads of a key head, and the beams of a prefix,
    are the rows of one matrix product.
    Buffers are passed uncut, with how many of their slots are used: a kernel then takes the same shapes at every step.

    Args:
        q: queries of the step, (B, H, 1, D).
        key: text keys, (B, G, K, D); G divides H.
        value: text values, (B, G, K, Dv); None: the first `value_dim` columns of the keys.
        prefix_key: keys of the prefixes, (N, G, P, D); N divides B. P = 0: there is no prefix.
        prefix_value: their values, (N, G, P, Dv); None as for the text.
        prefix_mask: (N, P) bool, true where a key exists; None: everywhere.
        text_mask: (B, K) bool, the same of the text; keys beyond its columns exist.
        used: the first so many text slots are read at most; None: K.
        counts: how many of these exist in each row, (B,) or one element, int64 or int32 on the device, in place of
            `text_mask`; None: all.
        prefix_used: the same of the prefixes as `used`; None: P.
        prefix_counts: how many of these exist, (N,), where `prefix_mask` is true for the first ones; a kernel reads it
            in place of the mask.
        beam: B / N, for a caller that is compiled: there it is a constant, and the quotient of two sizes is none.
    """
    q_bhd = q[:, :, 0].to(key.dtype)
    batch, heads, width = q_bhd.shape
    prefix_used = prefix_key.shape[2] if prefix_used is None else prefix_used
    narrow = width != (value_dim if value is None else value.shape[-1])
    masked = bool(prefix_used) or text_mask is not None or counts is not None or narrow
    backend = choose("step", q_bhd, masked=masked)
    if backend is Backend.TRITON:
        from .kernels.latent import CacheSegment, latent_decode  # needs triton

        segments = [CacheSegment(key, value, used if counts is None else counts, mask=text_mask)]
        if prefix_used:
            exist = prefix_used if prefix_counts is None else prefix_counts
            mask = prefix_mask if prefix_counts is None else None
            segments.insert(0, CacheSegment(prefix_key, prefix_value, exist, mask=mask))
        return latent_decode(q_bhd.contiguous(), segments, scale, value_dim=value_dim).unsqueeze(2)

    groups, used = key.shape[1], key.shape[2] if used is None else used
    if backend is Backend.SDPA:
        assert value is not None
        q_bgqd, key, value = q_bhd.reshape(batch, groups, -1, width), key[:, :, :used], value[:, :, :used]
        return F.scaled_dot_product_attention(q_bgqd, key, value, scale=scale).reshape(batch, heads, 1, -1)
    if counts is not None:
        text_mask = torch.arange(used, device=counts.device) < counts.reshape(-1, 1)
    if prefix_counts is not None and prefix_mask is None:
        prefix_mask = torch.arange(prefix_used, device=prefix_counts.device) < prefix_counts.reshape(-1, 1)
    text = _columns(key, value, used, value_dim)
    q_bgd = q_bhd if scale == 1.0 else q_bhd * scale
    if not prefix_used:
        return products(q_bgd, *text, groups, text_mask).unsqueeze(2)
    if beam is not None:
        share(batch, beam, len(prefix_key))
    prefix = _columns(prefix_key, prefix_value, prefix_used, value_dim)
    return products(q_bgd, *text, groups, text_mask, *prefix, prefix_mask, beam=beam).unsqueeze(2)


def share(rows: int, beam: int, prefixes: int) -> None:
    """Say to the compiler that `beam` rows read each prefix: views of sizes that it cannot relate take it minutes.

    Args:
        rows: B.
        prefixes: N.
    """
    if torch.compiler.is_compiling():
        torch._check(rows == beam * prefixes)


def _columns(key: Tensor, value: Tensor | None, used: int, value_dim: int | None) -> tuple[Tensor, Tensor]:
    """The first slots of buffers (B, G, K, .), as `products` has them: cut last, so that K may be a variable."""
    key = key.flatten(0, 1).narrow(1, 0, used)
    return key, key[..., :value_dim] if value is None else value.flatten(0, 1).narrow(1, 0, used)


def products(
    q: Tensor,
    key: Tensor,
    value: Tensor,
    groups: int,
    mask: Tensor | None = None,
    prefix_key: Tensor | None = None,
    prefix_value: Tensor | None = None,
    prefix_mask: Tensor | None = None,
    beam: int | None = None,
) -> Tensor:
    """`attend_cached` by batched matrix products, whose matrices are the queries of a row that read one key head.

    Args:
        q: queries, scaled, (B, H, D).
        key, value: of the text, (B G, K, D) and (B G, K, Dv).
        groups: G.
        mask: which keys exist, (B, K' <= K) bool; those beyond K' do.
        prefix_key, prefix_value: (N G, P, .), P > 0; None: there is no prefix.
        prefix_mask: which of these exist, (N, P).
        beam: rows that share a prefix; None: as the shapes say.

    Returns:
        (B, H, Dv).
    """
    batch, heads, width = q.shape
    if groups > 1:
        q = q.reshape(batch * groups, heads // groups, width)
    logits = torch.bmm(q, key.mT)
    if mask is not None:
        _exclude(logits, mask)
    if prefix_key is None or prefix_value is None:
        out = torch.bmm(_softmax(logits), value)
        return out if groups == 1 else out.view(batch, heads, -1)
    size, queries, prefixes = prefix_key.shape[1], heads // groups, prefix_key.shape[0] // groups
    beam = batch // prefixes if beam is None else beam
    apart = groups > 1 and beam > 1  # the queries that read a key head of a prefix do not lie together

    def fold(x: Tensor) -> Tensor:  # (B G, Q, D) -> (N G, beam Q, D)
        if apart:
            x = x.view(prefixes, beam, groups, *x.shape[1:]).transpose(1, 2)
        return x if beam == 1 else x.reshape(prefixes * groups, beam * queries, x.shape[-1])

    def unfold(x: Tensor) -> Tensor:
        if apart:
            x = x.view(prefixes, groups, beam, queries, x.shape[-1]).transpose(1, 2)
        return x if beam == 1 else x.reshape(batch * groups, queries, x.shape[-1])

    before = torch.bmm(fold(q), prefix_key.mT)
    if prefix_mask is not None:
        _exclude(before, prefix_mask)
    p = _softmax(torch.cat((unfold(before), logits), -1))
    out = torch.bmm(p[..., size:], value)
    weights = fold(p[..., :size])
    if apart or not out.dtype == weights.dtype == prefix_value.dtype:  # of different types under autocast
        out += unfold(torch.bmm(weights, prefix_value))
    else:
        out = torch.baddbmm(fold(out), weights, prefix_value)  # in place it would not be counted by FlopCounterMode
        out = out if beam == 1 else out.view(batch * groups, queries, out.shape[-1])
    return out if groups == 1 else out.view(batch, heads, -1)


def _exclude(logits: Tensor, mask: Tensor) -> None:
    """Write -inf into logits (rows G, Q, K) where the mask (rows, K' <= K) is false."""
    rows = logits.view(len(mask), -1, logits.shape[-1])
    rows[..., : mask.shape[-1]].masked_fill_(~mask[:, None], float("-inf"))


def _softmax(logits: Tensor) -> Tensor:
    if logits.dtype in WIDE:
        return logits.softmax(-1)
    return logits.softmax(-1, dtype=torch.float32).to(logits.dtype)
