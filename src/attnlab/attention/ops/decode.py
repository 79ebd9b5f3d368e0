"""Attention of one decoding step to a cache whose prefixes are shared by the hypotheses of a sentence."""

import torch
from torch import Tensor
from torch.nn import functional as F

from .backends import Backend, choose
from .quantised import Codes, Older, attend

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
    older: Codes | None = None,
) -> Tensor:
    """One softmax over the prefix and the text of each row, (B, H, 1, Dv).

    Key heads are not repeated and prefixes are not copied: the H/G query heads of a key head, and the rows that share a
    prefix, become the rows of one matrix product. Buffers are passed in full, together with the number of used slots,
    so that a kernel gets the same shapes at every step.

    Args:
        q: queries of the step, (B, H, 1, D).
        key: text keys, (B, G, K, D); G divides H.
        value: text values, (B, G, K, Dv); None: the first `value_dim` columns of the keys.
        prefix_key: keys of the prefixes, (N, G, P, D); N divides B. P = 0: no prefix.
        prefix_value: values of the prefixes, (N, G, P, Dv); None: as for the text.
        prefix_mask: (N, P) bool, true where a key exists; None: all keys exist.
        text_mask: (B, K' <= K) bool, true where a key exists; keys beyond its columns exist.
        used: number of text slots to read, at most; None: K.
        counts: number of slots that exist in each row, (B,) or one element, int64 or int32 on the device, in place of
            `text_mask`; None: all.
        prefix_used: number of prefix slots to read, at most; None: P.
        prefix_counts: number of slots that exist in each prefix, (N,), if these are the first ones; a kernel reads it
            in place of `prefix_mask`.
        beam: B / N, as a constant for torch.compile, to which the quotient of two sizes is not one.
        older: codes of further slots of each row.
    """
    q_bhd = q[:, :, 0].to(key.dtype)
    batch, heads, width = q_bhd.shape
    prefix_used = prefix_key.shape[2] if prefix_used is None else prefix_used
    narrow = width != (value_dim if value is None else value.shape[-1])
    masked = bool(prefix_used) or narrow or any(given is not None for given in (text_mask, counts, older))
    backend = choose("step", q_bhd, masked=masked)
    if backend is Backend.TRITON:
        from .kernels.latent import CacheSegment, latent_decode  # needs triton

        segments = [CacheSegment(key, value, used if counts is None else counts, mask=text_mask)]
        if prefix_used:
            exist = prefix_used if prefix_counts is None else prefix_counts
            mask = prefix_mask if prefix_counts is None else None
            segments.insert(0, CacheSegment(prefix_key, prefix_value, exist, mask=mask))
        if older is not None:
            segments.append(CacheSegment(*older))
        return latent_decode(q_bhd.contiguous(), segments, scale, value_dim=value_dim).unsqueeze(2)

    groups, used = key.shape[1], key.shape[2] if used is None else used
    if backend is Backend.SDPA:
        value = key if value is None else value  # latents without rotary keys
        q_bgqd, key, value = q_bhd.reshape(batch, groups, -1, width), key[:, :, :used], value[:, :, :used]
        return F.scaled_dot_product_attention(q_bgqd, key, value, scale=scale).reshape(batch, heads, 1, -1)
    if counts is not None:
        text_mask = torch.arange(used, device=counts.device) < counts.reshape(-1, 1)
    if prefix_counts is not None and prefix_mask is None:
        prefix_mask = torch.arange(prefix_used, device=prefix_counts.device) < prefix_counts.reshape(-1, 1)
    text = _columns(key, value, used, value_dim)
    q_bgd = q_bhd if scale == 1.0 else q_bhd * scale
    read = None if older is None else attend(q[:, :, 0] * scale, *older, value_dim)
    if not prefix_used:
        return products(q_bgd, *text, groups, text_mask, older=read).unsqueeze(2)
    if beam is not None:
        share(batch, beam, len(prefix_key))
    prefix = _columns(prefix_key, prefix_value, prefix_used, value_dim)
    return products(q_bgd, *text, groups, text_mask, *prefix, prefix_mask, beam=beam, older=read).unsqueeze(2)


def attend_parts(
    q: Tensor,
    slots: Tensor,
    prefix_slots: Tensor,
    parts: int,
    width: int,
    prefix_mask: Tensor | None = None,
    *,
    used: int,
    counts: Tensor | None = None,
    prefix_used: int,
    prefix_counts: Tensor | None = None,
    beam: int | None = None,
    older: Codes | None = None,
) -> Tensor:
    """`attend_cached` to slots that consist of L parts and of a key that all heads share, (B, H, 1, w).

    Each H / L heads read their own part: its first k columns are their keys, and all w columns their values. The
    logits of a head are q . [key of its part | shared key]. The kernel reads a slot once for all heads, so it gets
    queries that are zero at other parts; matrix products skip these.

    Args:
        q: scaled queries, (B, H, 1, k + d_r).
        slots: text, [part 0 | ... | part L - 1 | shared key], (B, K, L w + d_r).
        prefix_slots: the same of the prefixes, (N, P, L w + d_r).
        parts: number of parts L, which divides H.
        width: width w of a part, at least k.
        prefix_mask, used, counts, prefix_used, prefix_counts, beam, older: as for `attend_cached`.
    """
    shared = slots.shape[-1] - parts * width
    own, common = q[:, :, 0].to(slots.dtype).split([q.shape[-1] - shared, shared], -1)
    own, batch, heads = own.unflatten(1, (parts, -1)), q.shape[0], q.shape[1] // parts  # (B, L, H / L, k)
    on_kernel = choose("step", common, masked=True, value_dim=width) is Backend.TRITON
    read = None
    if on_kernel or older is not None:
        apart = torch.eye(parts, dtype=own.dtype, device=own.device)[:, None, :, None]
        spread = (F.pad(own, (0, width - own.shape[-1])).unsqueeze(3) * apart).flatten(3).flatten(1, 2)
        spread = torch.cat((spread, common), -1)  # (B, H, L w + d_r)
        if on_kernel:
            out = attend_cached(
                spread.unsqueeze(2), slots.unsqueeze(1), None, 1.0, prefix_slots.unsqueeze(1), None, prefix_mask,
                value_dim=parts * width, used=used, counts=counts, prefix_used=prefix_used,
                prefix_counts=prefix_counts, beam=beam, older=older,
            )  # fmt: skip
            return _own_parts(out[:, :, 0], parts).flatten(1, 2).unsqueeze(2)
        assert older is not None
        codes, total = attend(spread, *older, parts * width)
        read = _own_parts(codes, parts), total.unflatten(1, (parts, -1))
    mask = None if counts is None else torch.arange(used, device=q.device) < counts.reshape(-1, 1)
    text, before, prefix_bias = slots.narrow(1, 0, used), None, None
    bias = torch.bmm(common, text[..., parts * width :].mT).unflatten(1, (parts, -1))
    if prefix_used:
        if prefix_counts is not None and prefix_mask is None:
            prefix_mask = torch.arange(prefix_used, device=q.device) < prefix_counts.reshape(-1, 1)
        beam = batch // len(prefix_slots) if beam is None else beam
        share(batch, beam, len(prefix_slots))
        before = prefix_slots.narrow(1, 0, prefix_used)
        prefix_bias = _unfold(torch.bmm(_fold(common, beam, 1), before[..., parts * width :].mT), beam, 1)
    outs = []
    for part in range(parts):
        keys, values = (slice(part * width, part * width + columns) for columns in (own.shape[-1], width))
        rows = slice(part * heads, (part + 1) * heads)
        key, value = (None, None) if before is None else (before[..., keys], before[..., values])
        out = products(
            own[:, part], text[..., keys], text[..., values], 1, mask, key, value, prefix_mask, beam,
            older=None if read is None else (read[0][:, part], read[1][:, part]),
            bias=bias[:, part], prefix_bias=None if prefix_bias is None else prefix_bias[:, rows],
        )  # fmt: skip
        outs.append(out)
    return torch.cat(outs, 1).unsqueeze(2)


def _own_parts(read: Tensor, parts: int) -> Tensor:
    """The part that each head reads: (B, H, L w) -> (B, L, H / L, w)."""
    return read.unflatten(2, (parts, -1)).unflatten(1, (parts, -1)).diagonal(0, 1, 3).permute(0, 3, 1, 2)


def share(rows: int, beam: int, prefixes: int) -> None:
    """Tell torch.compile that rows = beam * prefixes: views of sizes that it cannot relate take minutes to compile."""
    if torch.compiler.is_compiling():
        torch._check(rows == beam * prefixes)


def _columns(key: Tensor, value: Tensor | None, used: int, value_dim: int | None) -> tuple[Tensor, Tensor]:
    """The first slots of buffers (B, G, K, .), as `products` takes them. Slicing last allows K to be symbolic."""
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
    older: Older | None = None,
    bias: Tensor | None = None,
    prefix_bias: Tensor | None = None,
) -> Tensor:
    """`attend_cached` by batched matrix products: a matrix consists of the queries of a row that read one key head.

    Args:
        q: scaled queries, (B, H, D).
        key, value: text, (B G, K, D) and (B G, K, Dv).
        groups: number of key heads G.
        mask: (B, K' <= K) bool, true where a key exists; keys beyond K' exist.
        prefix_key, prefix_value: (N G, P, .), P > 0; None: no prefix.
        prefix_mask: (N, P) bool, true where a key exists.
        beam: number of rows that share a prefix; None: B / N.
        older: outputs (B G, Q, Dv) of attention to further slots, and their log-sum-exp (B G, Q, 1).
        bias, prefix_bias: added to the logits of the text (B G, Q, K) and of the prefix (B G, Q, P); None: zero.

    Returns:
        (B, H, Dv).
    """
    batch, heads, width = q.shape
    if groups > 1:
        q = q.reshape(batch * groups, heads // groups, width)
    logits = torch.bmm(q, key.mT) if bias is None else torch.baddbmm(bias, q, key.mT)
    if mask is not None:
        _exclude(logits, mask)
    count = logits.shape[-1]
    if older is not None:  # together they are one more slot
        logits = torch.cat((logits, older[1]), -1)
    if prefix_key is None or prefix_value is None:
        p = _softmax(logits)
        if older is None:
            out = torch.bmm(p, value)
        else:
            out = torch.bmm(p[..., :count].to(value.dtype), value).add_(p[..., count:] * older[0])
        return out if groups == 1 else out.view(batch, heads, -1)
    size, beam = prefix_key.shape[1], batch // (prefix_key.shape[0] // groups) if beam is None else beam
    before = torch.bmm(_fold(q, beam, groups), prefix_key.mT)
    if prefix_mask is not None:
        _exclude(before, prefix_mask)
    before = _unfold(before, beam, groups)
    p = _softmax(torch.cat((before if prefix_bias is None else before + prefix_bias, logits), -1))
    if older is not None:
        older_out, p = p[..., size + count :] * older[0], p.to(value.dtype)
    out = torch.bmm(p[..., size : size + count], value)
    if older is not None:
        out += older_out
    weights = _fold(p[..., :size], beam, groups)
    if (groups > 1 and beam > 1) or not out.dtype == weights.dtype == prefix_value.dtype:  # dtypes: under autocast
        out += _unfold(torch.bmm(weights, prefix_value), beam, groups)
    else:  # not in place, which FlopCounterMode does not count
        out = _unfold(torch.baddbmm(_fold(out, beam, groups), weights, prefix_value), beam, groups)
    return out if groups == 1 else out.view(batch, heads, -1)


def _fold(x: Tensor, beam: int, groups: int) -> Tensor:
    """(B G, Q, D) -> (N G, beam Q, D): the queries that read the same key head of a prefix."""
    if beam == 1:
        return x
    count, queries, width = x.shape
    if groups > 1:  # they are not adjacent
        x = x.view(-1, beam, groups, queries, width).transpose(1, 2)
    return x.reshape(count // beam, beam * queries, width)


def _unfold(x: Tensor, beam: int, groups: int) -> Tensor:
    """The inverse of `_fold`."""
    if beam == 1:
        return x
    count, rows, width = x.shape
    if groups > 1:
        x = x.view(-1, groups, beam, rows // beam, width).transpose(1, 2)
    return x.reshape(count * beam, rows // beam, width)


def _exclude(logits: Tensor, mask: Tensor) -> None:
    """Write -inf into logits (rows * G, Q, K) where the mask (rows, K' <= K) is false."""
    rows = logits.view(len(mask), -1, logits.shape[-1])
    rows[..., : mask.shape[-1]].masked_fill_(~mask[:, None], float("-inf"))


def _softmax(logits: Tensor) -> Tensor:
    if logits.dtype in WIDE:
        return logits.softmax(-1)
    return logits.softmax(-1, dtype=torch.float32).to(logits.dtype)
