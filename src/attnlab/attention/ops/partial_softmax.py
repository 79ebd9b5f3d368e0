"""Exact softmax attention in which stock fused kernels do the work, though no kernel has these patterns.

A fused kernel returns its output and the log-sum-exp of its logits. With those, parts of a softmax merge exactly:
    L = log sum_p exp(L_p),   o = sum_p exp(L_p - L) o_p.
And its backward needs nothing but the rows' output and log-sum-exp: called with the merged o and L it computes
P_ij = exp(s_ij - L_i) and dS_ij = P_ij (dO_i . v_j - dO_i . o_i), the probabilities and gradients of the full softmax
restricted to its part. No T x T tensor is formed, and only the inputs, o and L are saved.

Shapes: q (B, T, H, D). Keys and values come packed, [value | key] on the last axis: (B, T, H, Dv + D), Dv <= D.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from .backends import Backend, choose
from .pattern import MergedPattern, SavedForBackward
from .pattern import Past as Past  # callers know it from here
from .sdpa import additive, wide

REBUILT_HEADS = 17  # at most, built at a time in backward on a CPU


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
    """(B, T, H, Dv): query i sees the keys j <= i with (j + 1) mod stride = 0, key i itself, and all of `past`.

    T must be a multiple of stride. With stride 1 that is plain causal attention.

    Args:
        q: queries, (B, T, H, D).
        packed: [value | key] of the text, (B, T, H, Dv + D).
        stride: s; every s-th key is read by all later queries, the others by the query at their position alone.
    """
    past = [Past(p.packed.to(q.dtype), p.mask) for p in past or []]
    packed = packed.to(q.dtype)
    if q.shape[1] % stride:
        raise ValueError(f"{q.shape[1]} positions are no multiple of the stride {stride}")
    backend = choose("merged", q, dropout=dropout, value_dim=value_dim)
    if backend is Backend.PLAIN:  # what the fused kernels lack
        return _plain(q, packed, value_dim, scale, stride, past, dropout)
    return _Merged.apply(
        q, packed, MergedPattern(value_dim, scale, stride, dropout, backend), *(t for p in past for t in p)
    )


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
    """`merged_attention` over `expand(latent, rotary, up)`, which is not saved for backward but made again.

    Args:
        q: queries, (B, T, H, D).
        latent: (B, T, r).
        rotary: keys that all heads share, (B, T, d_r).
        up: [U^v | U^k], (H, Dv + d_n, r), with d_n + d_r = D.
    """
    latent, rotary, up = (t.to(q.dtype) for t in (latent, rotary, up))
    backend = choose("merged", q, dropout=dropout, value_dim=value_dim)
    if not torch.is_grad_enabled() or backend is Backend.PLAIN:
        packed = expand(latent, rotary, up)
        return merged_attention(q, packed, value_dim, scale, stride=stride, past=past, dropout=dropout)
    tensors = [t for p in past or [] for t in (p.packed.to(q.dtype), p.mask)]
    return _Expanded.apply(q, latent, rotary, up, MergedPattern(value_dim, scale, stride, dropout, backend), *tensors)


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
    """Causal `merged_attention` over queries, keys and values that are not saved for backward but built again.

    `share(*tensors)` gives what all heads are built of, and `build(heads, *shared)` q (B, T, h, D) and packed
    (B, T, h, Dv + D) of a slice of the heads; whatever needs a gradient must be among `tensors`.

    Args:
        build: the second, called for some heads at a time in backward.
        tensors: the arguments of `share`.
    """
    example = tensors[0]
    state = not torch.is_grad_enabled() or torch.compiler.is_compiling()  # autograd inside backward cannot be captured
    if state or choose("merged", example, dropout=dropout, noted=False) is Backend.PLAIN:
        q, packed = build(slice(0, num_heads), *share(*tensors))
        return merged_attention(q, packed, value_dim, scale, past=past, dropout=dropout)
    flat = [t for p in past or [] for t in (p.packed.to(example.dtype), p.mask)]
    return _Rebuilt.apply(share, build, num_heads, (value_dim, scale, 1, dropout), len(tensors), *tensors, *flat)


def tiled_attention(q: Tensor, packed: Tensor, value_dim: int, scale: float, past: Iterable[Past]) -> Tensor:
    """Causal `merged_attention` whose pasts are made one at a time, as they are read. No gradients.

    Args:
        q: queries, (B, T, H, D).
        packed: [value | key] of the text, (B, T, H, Dv + D).
        past: what every query reads besides; each is asked for once.
    """
    backend = choose("merged", q, value_dim=value_dim)
    if backend is Backend.PLAIN:
        return merged_attention(q, packed, value_dim, scale, past=list(past))
    return MergedPattern(value_dim, scale, 1, 0.0, backend).forward(q, packed.to(q.dtype), past)[0]


def _plain(
    q: Tensor, packed: Tensor, value_dim: int, scale: float, stride: int, past: list[Past], dropout: float
) -> Tensor:
    """The same by matrix products: T x T / stride logits, built one place of the chunk at a time."""
    kind = wide(q.dtype)
    value, key = (t.transpose(1, 2) for t in packed.split([value_dim, packed.shape[-1] - value_dim], -1))
    slot_key, slot_value = key[:, :, stride - 1 :: stride], value[:, :, stride - 1 :: stride]
    size = slot_key.shape[2]
    before = torch.ones(size, size, dtype=torch.bool, device=q.device)
    outs = []
    for r in range(stride):
        queries = q.transpose(1, 2)[:, :, r::stride]
        own_key, own_value = key[:, :, r::stride], value[:, :, r::stride]
        logits = [((queries @ slot_key.mT).to(kind) * scale).masked_fill(before.triu(), float("-inf"))]
        logits.append((queries * own_key).sum(-1, keepdim=True, dtype=kind) * scale)
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
        p_slots, p_own, *p_past = p_all.split([size, 1, *[v.shape[2] for v in values[1:]]], -1)
        out = p_own * own_value
        for weights, seen in zip((p_slots, *p_past), values, strict=True):
            out = out + weights @ seen
        outs.append(out.transpose(1, 2))
    return torch.stack(outs, 2).flatten(1, 2)


class _Merged(torch.autograd.Function):
    """Keeps q, the packed keys and values, the output and its log-sum-exp."""

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
        dq = torch.empty_like(q)
        dpacked, more = ctx.run.backward(grad, q, packed, past, out, state, dq)
        return dq, dpacked, None, *(g for dpast in more for g in (dpast, None))


class _Expanded(torch.autograd.Function):
    """Keeps the latents instead of keys and values, and makes these of a few heads at a time, forward and backward."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, latent: Tensor, rotary: Tensor, up: Tensor, run: MergedPattern, *rest: Tensor | None
    ) -> Tensor:
        past, out, parts = _pairs(rest), q.new_empty(*q.shape[:3], run.value_dim), []
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
        dq, dup = torch.empty_like(q), torch.empty_like(up)
        dlatent, drotary = torch.zeros_like(latent), torch.zeros_like(rotary)
        dpast = [torch.empty_like(p.packed) for p in past]
        for heads in _groups(q):
            dpacked, more = ctx.run.backward(
                grad[:, :, heads], q[:, :, heads], _expanded(latent, rotary, up[heads]), _of_heads(past, heads),
                out[:, :, heads], state.heads(heads), dq[:, :, heads],
            )  # fmt: skip
            both, shared = dpacked.split([up.shape[1], rotary.shape[-1]], -1)
            drotary += shared.sum(2)
            flat = both.flatten(2).flatten(0, 1)
            dlatent.view(-1, latent.shape[-1]).addmm_(flat, up[heads].flatten(0, 1))
            dup[heads] = (flat.mT @ latent.flatten(0, 1)).view_as(up[heads])
            for gradient, part in zip(dpast, more, strict=True):
                gradient[:, :, heads] = part
            del dpacked, more, both, shared, flat  # before the next ones are made
        return dq, dlatent, drotary, dup, None, *(g for d in dpast for g in (d, None))


class _Rebuilt(torch.autograd.Function):
    """Keeps what queries, keys and values are built of, and builds these of a few heads at a time."""

    @staticmethod
    def forward(
        ctx: Any, share: Share, build: Build, num_heads: int, how: tuple[int, float, int, float], count: int,
        *flat: Tensor | None,
    ) -> Tensor:  # fmt: skip
        tensors, past = flat[:count], _pairs(flat[count:])
        with _exactly(flat[0]):
            q, packed = build(slice(0, num_heads), *share(*tensors))
        run = MergedPattern(*how, choose("merged", q, dropout=how[-1], value_dim=how[0]))  # known by the queries' width
        out, state = run.forward(q, packed, past)
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
        cut = [t.detach().requires_grad_() for t in shared]  # the graph up to here is gone through once, at the end
        dpast = [torch.empty_like(p.packed) for p in past]
        for heads in _groups(out, REBUILT_HEADS):
            with torch.enable_grad(), _exactly(out):
                q, packed = build(heads, *cut)
            dq = torch.empty_like(q)
            dpacked, more = ctx.run.backward(
                grad[:, :, heads], q.detach(), packed.detach(), _of_heads(past, heads), out[:, :, heads],
                state.heads(heads), dq,
            )  # fmt: skip
            torch.autograd.backward((q, packed), (dq, dpacked), inputs=cut)
            for gradient, part in zip(dpast, more, strict=True):
                gradient[:, :, heads] = part
            del q, packed, dq, dpacked, more  # before the next ones are made
        torch.autograd.backward(shared, [t.grad for t in cut], inputs=leaves)
        return None, None, None, None, None, *(t.grad for t in leaves), *(g for d in dpast for g in (d, None))


def _exactly(like: Any) -> torch.autocast:
    """For what is built in the tensors' precision: backward runs outside autocast, and must build the same."""
    return torch.autocast(like.device.type, enabled=False)


def expand(latent: Tensor, rotary: Tensor, up: Tensor) -> Tensor:
    """(B, T, r), (B, T, d_r), (h, Dv + d_n, r) -> [value | content key | rotary key] of h heads, (B, T, h, Dv + D).

    Args:
        latent: (B, T, r).
        rotary: keys that all heads share, (B, T, d_r).
        up: [U^v | U^k] of h heads, (h, Dv + d_n, r).
    """
    both = F.linear(latent, up.flatten(0, 1)).unflatten(-1, up.shape[:2])
    return torch.cat((both, rotary.to(both.dtype).unsqueeze(2).expand(-1, -1, up.shape[0], -1)), -1)


def _expanded(latent: Tensor, rotary: Tensor, up: Tensor) -> Tensor:
    """`expand` without gradients: products are written where they belong; torch.compile refuses that."""
    if torch.compiler.is_compiling():
        return expand(latent, rotary, up)
    heads, both, _ = up.shape
    packed = latent.new_empty(*latent.shape[:2], heads, both + rotary.shape[-1])
    packed[..., both:] = rotary.unsqueeze(2)
    flat, rows = packed.flatten(0, 1), latent.flatten(0, 1)
    for i in range(heads):
        torch.mm(rows, up[i].mT, out=flat[:, i, :both])
    return packed


def _of_heads(past: list[Past], heads: slice) -> list[Past]:
    return [Past(p.packed[:, :, heads], p.mask) for p in past]


def _groups(q: Tensor, size: int = 2) -> list[slice]:
    """Heads to make keys and values of at a time: on CUDA all, for a kernel's dropout is drawn for all at once."""
    heads = q.shape[2]
    count = 1 if q.is_cuda else -(-heads // size)
    bounds = [heads * i // count for i in range(count + 1)]
    return [slice(first, last) for first, last in zip(bounds[:-1], bounds[1:], strict=True)]


def _pairs(tensors: Any) -> list[Past]:
    return [Past(*tensors[i : i + 2]) for i in range(0, len(tensors), 2)]
