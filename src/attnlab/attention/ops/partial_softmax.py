"""Exact softmax attention for patterns that fused kernels lack, composed of calls to them.

A fused kernel returns its output and the log-sum-exp of its logits. With those, parts of a softmax merge exactly:
    L = log sum_p exp(L_p),   o = sum_p exp(L_p - L) o_p.
Its backward needs only the output and the log-sum-exp of each row: called with the merged o and L it computes
P_ij = exp(s_ij - L_i) and dS_ij = P_ij (dO_i . v_j - dO_i . o_i), the probabilities and gradients of the full softmax
restricted to its part. No T x T tensor is formed, and only the inputs, o and L are saved. On a CPU in float32
`merged.cpp` computes the text as one part.

Shapes: q (B, T, H, D). Keys and values come packed, [value | key] on the last axis: (B, T, H, Dv + D), Dv <= D.
"""

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from .backends import Backend, choose
from .pattern import MergedPattern, SavedForBackward
from .pattern import Past as Past  # part of this module's interface
from .sdpa import Kernel, additive, wide

SMALL = 2**18  # numbers for which a CPU builds the keys and values of all heads at once
REBUILT_HEADS = 9  # heads that are built at a time on a CPU, at most


Share = Callable[..., tuple[Tensor, ...]]
Build = Callable[..., tuple[Tensor, Tensor]]


def merged_attention(
    q: Tensor,
    packed: Tensor,
    value_dim: int,
    scale: float,
    *,
    stride: int = 1,
    past: list[Past] | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Query i sees the keys j <= i with (j + 1) mod stride = 0, key i itself, and all of `past` -> (B, T, H, Dv).

    T must be a multiple of `stride`. Stride 1 is plain causal attention.

    Args:
        q: queries, (B, T, H, D).
        packed: [value | key] of the text, (B, T, H, Dv + D).
        stride: s; every s-th key is read by all later queries, the other keys only by the query at their position.
    """
    past = [Past(p.packed.to(q.dtype), p.mask) for p in past or []]
    packed = packed.to(q.dtype)
    if q.shape[1] % stride:
        raise ValueError(f"{q.shape[1]} positions are not a multiple of the stride {stride}")
    backend = choose("merged", q, dropout=dropout, value_dim=value_dim)
    if backend is Backend.PLAIN:
        return _plain(q, packed, value_dim, scale, stride, past, dropout)
    pattern = MergedPattern(Kernel(value_dim, scale, dropout, backend), stride)
    return _Merged.apply(q, packed, pattern, *(t for p in past for t in p))


def expanded_attention(
    q: Tensor,
    latent: Tensor,
    rotary: Tensor,
    up: Tensor,
    value_dim: int,
    scale: float,
    *,
    stride: int = 1,
    past: list[Past] | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """`merged_attention` over `expand(latent, rotary, up)`, which backward computes again instead of saving it.

    Args:
        q: queries, (B, T, H, D).
        latent: (B, T, r).
        rotary: keys that all heads share, (B, T, d_r).
        up: [U^v | U^k], (H, Dv + d_n, r), with d_n + d_r = D.
    """
    latent, rotary, up = (t.to(q.dtype) for t in (latent, rotary, up))
    past = [Past(p.packed.to(q.dtype), p.mask) for p in past or []]
    backend = choose("merged", q, dropout=dropout, value_dim=value_dim)
    if backend is Backend.PLAIN:
        return _plain(q, expand(latent, rotary, up).to(q.dtype), value_dim, scale, stride, past, dropout)
    pattern = MergedPattern(Kernel(value_dim, scale, dropout, backend), stride)
    if not torch.is_grad_enabled() and (q.is_cuda or torch.compiler.is_compiling()):
        return pattern.forward(q, expand(latent, rotary, up).to(q.dtype), past)[0]
    return _Expanded.apply(q, latent, rotary, up, pattern, *(t for p in past for t in p))


def rebuilt_attention(
    share: Share,
    build: Build,
    tensors: tuple[Tensor, ...],
    num_heads: int,
    value_dim: int,
    scale: float,
    *,
    past: list[Past] | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Causal `merged_attention` over queries, keys and values that backward builds again instead of saving them.

    Args:
        share: computes from `tensors` the tensors that all heads are built from.
        build: called with a slice of the heads and the results of `share`, returns their q (B, T, h, D) and packed
            (B, T, h, Dv + D). Backward calls it for a few heads at a time.
        tensors: arguments of `share`; whatever needs a gradient must be among them.
    """
    example = tensors[0].new_empty(1, 1, 1, value_dim)
    direct = not torch.is_grad_enabled() or torch.compiler.is_compiling()  # autograd inside backward cannot be captured
    if direct or choose("merged", example, dropout=dropout, noted=False) is Backend.PLAIN:
        q, packed = build(slice(0, num_heads), *share(*tensors))
        return merged_attention(q, packed, value_dim, scale, past=past, dropout=dropout)
    flat = [t for p in past or [] for t in (p.packed.to(example.dtype), p.mask)]
    return _Rebuilt.apply(share, build, num_heads, (value_dim, scale, dropout), len(tensors), *tensors, *flat)


def tiled_attention(q: Tensor, packed: Tensor, value_dim: int, scale: float, past: Iterable[Past]) -> Tensor:
    """Causal `merged_attention`, without gradients, whose pasts are created one at a time, as they are read.

    Args:
        q: queries, (B, T, H, D).
        packed: [value | key] of the text, (B, T, H, Dv + D).
        past: iterated once.
    """
    backend = choose("merged", q, value_dim=value_dim)
    if backend is Backend.PLAIN:
        return merged_attention(q, packed, value_dim, scale, past=list(past))
    return MergedPattern(Kernel(value_dim, scale, 0.0, backend)).forward(q, packed.to(q.dtype), past)[0]


def _plain(
    q: Tensor, packed: Tensor, value_dim: int, scale: float, stride: int, past: list[Past], dropout: float
) -> Tensor:
    """`merged_attention` by matrix products: T x T / stride logits, for one place in the chunk at a time."""
    kind = wide(q.dtype)
    value, key = (t.transpose(1, 2) for t in packed.split([value_dim, packed.shape[-1] - value_dim], -1))
    slot_key, slot_value = key[:, :, stride - 1 :: stride], value[:, :, stride - 1 :: stride]
    size = slot_key.shape[2]
    before = torch.ones(size, size, dtype=torch.bool, device=q.device)
    outs = []
    for r in range(stride):
        queries = q.transpose(1, 2)[:, :, r::stride]
        key_here, value_here = key[:, :, r::stride], value[:, :, r::stride]
        logits = [((queries @ slot_key.mT).to(kind) * scale).masked_fill(before.triu(), float("-inf"))]
        logits.append((queries * key_here).sum(-1, keepdim=True, dtype=kind) * scale)
        values = [slot_value]
        for p in past:
            beam = q.shape[0] // p.packed.shape[0]
            past_value, past_key = (
                t.transpose(1, 2).repeat_interleave(beam, 0) for t in p.packed.split([value_dim, key.shape[-1]], -1)
            )
            bias = additive(p.mask, kind)
            extra = (queries @ past_key.mT).to(kind) * scale
            logits.append(extra if bias is None else extra + bias.repeat_interleave(beam, 0))
            values.append(past_value)
        p_all = F.dropout(torch.cat(logits, -1).softmax(-1), dropout).to(q.dtype)
        p_slots, p_here, *p_past = p_all.split([size, 1, *[v.shape[2] for v in values[1:]]], -1)
        out = p_here * value_here
        for weights, seen in zip((p_slots, *p_past), values, strict=True):
            out = out + weights @ seen
        outs.append(out.transpose(1, 2))
    return torch.stack(outs, 2).flatten(1, 2)


class _Merged(torch.autograd.Function):
    """Saves q, the packed keys and values, the output and its log-sum-exp."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, packed: Tensor, run: MergedPattern, *rest: Tensor | None) -> Tensor:
        out, state = run.forward(q, packed, _pairs(rest))
        ctx.save_for_backward(q, packed, out, *rest, *state.flat())
        ctx.run, ctx.count = run, len(rest)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        q, packed, out, *rest = ctx.saved_tensors
        past, state = _pairs(rest[: ctx.count]), SavedForBackward.of(rest[ctx.count :])
        dq = q.new_empty(q.shape)
        dpacked, more = ctx.run.backward(grad, q, packed, past, out, state, dq)
        return dq, dpacked, None, *(g for dpast in more for g in (dpast, None))


class _Expanded(torch.autograd.Function):
    """Saves the latents instead of keys and values, which forward and backward compute for a few heads at a time."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, latent: Tensor, rotary: Tensor, up: Tensor, run: MergedPattern, *rest: Tensor | None
    ) -> Tensor:
        past, out, parts = _pairs(rest), q.new_empty(*q.shape[:3], run.kernel.value_dim), []
        for heads in _groups(q):
            packed = _expanded(latent, rotary, up[heads])
            parts.append(run.fill(q[:, :, heads], packed, _of_heads(past, heads), out[:, :, heads]))
        state = SavedForBackward.joined(parts)
        ctx.save_for_backward(q, latent, rotary, up, out, *rest, *state.flat())
        ctx.run, ctx.count = run, len(rest)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        q, latent, rotary, up, out, *rest = ctx.saved_tensors
        past, state = _pairs(rest[: ctx.count]), SavedForBackward.of(rest[ctx.count :])
        dq, dup = q.new_empty(q.shape), torch.empty_like(up)
        dlatent, drotary = torch.zeros_like(latent), torch.zeros_like(rotary)
        dpast = [torch.empty_like(p.packed) for p in past]
        for heads in _groups(q):
            dpacked, more = ctx.run.backward(
                grad[:, :, heads], q[:, :, heads], _expanded(latent, rotary, up[heads]), _of_heads(past, heads),
                out[:, :, heads], state.heads(heads), dq[:, :, heads],
            )  # fmt: skip
            if _at_once(q):  # all heads: two products
                flat, joined = dpacked.flatten(2).flatten(0, 1), torch.cat((latent, rotary), -1)
                djoined = (flat @ _joined(up, rotary)).view_as(joined)
                dlatent, drotary = djoined.split([up.shape[-1], rotary.shape[-1]], -1)
                dup = (flat.mT @ joined.flatten(0, 1)).unflatten(0, (len(up), -1))[:, : up.shape[1], : up.shape[-1]]
                dpast = more
                break
            drotary += dpacked[..., up.shape[1] :].sum(2)
            for head, part in enumerate(dpacked[..., : up.shape[1]].flatten(0, 1).unbind(1), heads.start):
                dlatent.view(-1, latent.shape[-1]).addmm_(part, up[head])
                dup[head] = part.mT @ latent.flatten(0, 1)
            for gradient, part in zip(dpast, more, strict=True):
                gradient[:, :, heads] = part
            del dpacked, more, part  # frees memory for the next heads
        return dq, dlatent, drotary, dup, None, *(g for d in dpast for g in (d, None))


class _Rebuilt(torch.autograd.Function):
    """Saves the tensors that queries, keys and values are built from, for a few heads at a time."""

    @staticmethod
    def forward(
        ctx: Any, share: Share, build: Build, num_heads: int, settings: tuple[int, float, float], count: int,
        *flat: Tensor | None,
    ) -> Tensor:  # fmt: skip
        tensors, past = flat[:count], _pairs(flat[count:])
        (value_dim, scale, dropout), parts = settings, []
        assert tensors[0] is not None
        out = tensors[0].new_empty(*tensors[0].shape[:2], num_heads, value_dim)
        with _exactly(out):
            shared = share(*tensors)
            for heads in _groups(out, REBUILT_HEADS):
                q, packed = build(heads, *shared)
                out, packed = out.to(q.dtype), packed.to(q.dtype)
                backend = choose("merged", q, dropout=dropout, value_dim=value_dim)  # by the width of queries
                run = MergedPattern(Kernel(value_dim, scale, dropout, backend))
                parts.append(run.fill(q, packed, _of_heads(past, heads), out[:, :, heads]))
                del q, packed  # frees memory for the next heads
        state = SavedForBackward.joined(parts)
        ctx.save_for_backward(*flat, out, *state.flat())
        ctx.functions, ctx.num_heads, ctx.run, ctx.counts = (share, build), num_heads, run, (count, len(flat))
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        (share, build), (count, total) = ctx.functions, ctx.counts
        saved = ctx.saved_tensors
        past, out, state = _pairs(saved[count:total]), saved[total], SavedForBackward.of(saved[total + 1 :])
        leaves = [t.detach().requires_grad_() for t in saved[:count]]
        with torch.enable_grad(), _exactly(out):
            shared = share(*leaves)
        cut = [t.detach().requires_grad_() for t in shared]  # backward through `share` runs once, at the end
        dpast = [torch.empty_like(p.packed) for p in past]
        for heads in _groups(out, REBUILT_HEADS):
            with torch.enable_grad(), _exactly(out):
                q, packed = build(heads, *cut)
                packed = packed.to(q.dtype)
            dq = q.new_empty(q.shape)
            dpacked, more = ctx.run.backward(
                grad[:, :, heads], q.detach(), packed.detach(), _of_heads(past, heads), out[:, :, heads],
                state.heads(heads), dq,
            )  # fmt: skip
            torch.autograd.backward((q, packed), (dq, dpacked), inputs=cut)
            for gradient, part in zip(dpast, more, strict=True):
                gradient[:, :, heads] = part
            del q, packed, dq, dpacked, more  # frees memory for the next heads
        torch.autograd.backward(shared, [t.grad for t in cut], inputs=leaves)
        return None, None, None, None, None, *(t.grad for t in leaves), *(g for d in dpast for g in (d, None))


def _exactly(like: Any) -> torch.autocast:
    """Disable autocast, so that forward builds in the same precision as backward, which runs outside autocast."""
    return torch.autocast(like.device.type, enabled=False)


def expand(latent: Tensor, rotary: Tensor, up: Tensor) -> Tensor:
    """[value | content key | rotary key] of h heads, (B, T, h, Dv + D).

    latent (B, T, r), rotary (B, T, d_r), up (h, Dv + d_n, r).
    """
    both = F.linear(latent, up.flatten(0, 1)).unflatten(-1, up.shape[:2])
    return torch.cat((both, rotary.to(both.dtype).unsqueeze(2).expand(-1, -1, up.shape[0], -1)), -1)


def _expanded(latent: Tensor, rotary: Tensor, up: Tensor) -> Tensor:
    """`expand` without gradients: products are written into slices of the result, which torch.compile refuses."""
    if torch.compiler.is_compiling():
        return expand(latent, rotary, up)
    heads, both, _ = up.shape
    if latent.is_cuda or latent.numel() * heads <= SMALL:
        return F.linear(torch.cat((latent, rotary), -1), _joined(up, rotary)).unflatten(-1, (heads, -1))
    packed = latent.new_empty(*latent.shape[:2], heads, both + rotary.shape[-1])
    packed[..., both:] = rotary.unsqueeze(2)
    flat, rows = packed.flatten(0, 1), latent.flatten(0, 1)
    for i in range(heads):
        torch.mm(rows, up[i].mT, out=flat[:, i, :both])
    return packed


def _joined(up: Tensor, rotary: Tensor) -> Tensor:
    """The matrix of `expand` for [latent | rotary key], (h (Dv + D), r + d_r): one product, not one per head.

    up (h, Dv + d_n, r), rotary (B, T, d_r).
    """
    heads, both, rank = up.shape
    matrix = up.new_zeros(heads, both + rotary.shape[-1], rank + rotary.shape[-1])
    matrix[:, :both, :rank] = up
    matrix[:, both:, rank:].diagonal(dim1=1, dim2=2).fill_(1.0)
    return matrix.flatten(0, 1)


def _of_heads(past: list[Past], heads: slice) -> list[Past]:
    return [Past(p.packed[:, :, heads], p.mask) for p in past]


def _at_once(q: Tensor) -> bool:
    """Whether the keys and values of all heads are computed together: on a GPU, or for few short texts."""
    return q.is_cuda or not torch.compiler.is_compiling() and q.numel() <= SMALL


def _groups(q: Tensor, size: int | None = None) -> list[slice]:
    """Heads whose keys and values are computed at a time. On CUDA all, because a kernel draws dropout for all heads."""
    heads = q.shape[2]
    if size is None and torch.compiler.is_compiling():
        size = 1
    elif size is None:  # the same work for each thread
        size = (threads := torch.get_num_threads()) // math.gcd(threads, q.shape[0])
    count = 1 if _at_once(q) else -(-heads // size)
    bounds = [heads * i // count for i in range(count + 1)]
    return [slice(first, last) for first, last in zip(bounds[:-1], bounds[1:], strict=True)]


def _pairs(tensors: Any) -> list[Past]:
    return [Past(*tensors[i : i + 2]) for i in range(0, len(tensors), 2)]
