"""Softmax attention over keys that come in several parts, each read by a stock fused kernel, exactly merged.

A fused kernel returns its output and the log-sum-exp of its logits.  With those, parts merge exactly:
    L = log sum_p exp(L_p),   o = sum_p exp(L_p - L) o_p.
The kernels' backward needs only the rows' output and log-sum-exp: called with the merged o and L it computes
P_ij = exp(s_ij - L_i) and dS_ij = P_ij (dO_i . v_j - dO_i . o_i), which are the probabilities and gradients of the
whole softmax restricted to that part.  No T x T tensor is ever formed.

Shapes: q (B, H, T, D); keys (B', H, K, D), values (B', H, K, Dv) with Dv <= D; B' divides B where rows share a prompt.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

EVERY = slice(None)


class Source(NamedTuple):
    """Keys and values; `mask`, (B', K) bool, says which keys exist (null: all)."""

    key: Tensor
    value: Tensor
    mask: Tensor | None = None


class Part(NamedTuple):
    """The keys `keys` of source number `source`, read by the queries `queries`.

    Causal: the n-th of these queries sees the first n + 1 of these keys (equally many of both).
    """

    source: int
    keys: slice = EVERY
    queries: slice = EVERY
    causal: bool = False


class _Kernel(NamedTuple):
    """What a fused forward leaves for its backward: the random state of dropout (CUDA)."""

    seed: Tensor | None = None
    offset: Tensor | None = None


def merged_attention(
    q: Tensor, sources: list[Source], parts: list[Part], scale: float, *, own: bool = False, dropout: float = 0.0
) -> Tensor:
    """(B, H, T, Dv) in q's dtype: softmax over all that the parts let each query see.

    `own`: query i also sees key i of source 0 (as many keys as queries).  The first part, or `own`, must reach every query.
    """
    sources = [Source(k.to(q.dtype), v.to(q.dtype), mask) for k, v, mask in sources]
    k, v, mask = sources[0]
    if len(parts) == 1 and parts[0] == Part(0, causal=parts[0].causal) and mask is None and not own and k.shape[:2] == q.shape[:2]:
        if k.shape[-1] == v.shape[-1] or q.is_cuda:
            return F.scaled_dot_product_attention(q, k, v, is_causal=parts[0].causal, dropout_p=dropout, scale=scale)
    fused = (q.device.type == "cpu" and dropout == 0.0) or (q.is_cuda and q.dtype != torch.float64)
    if not fused:  # dropout inside the CPU kernel does not exist, nor float64 inside the CUDA one

        def dense(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool) -> tuple[Tensor, Tensor, _Kernel]:
            return *_dense(q, k, v, mask, causal, scale, dropout), _Kernel()

        return _merge(q, sources, parts, own, scale, dropout, dense)[0].to(q.dtype)
    tensors = [t for source in sources for t in source]
    return _Merged.apply(q, parts, scale, own, dropout, *tensors)


class _Merged(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, q: Tensor, parts: list[Part], scale: float, own: bool, dropout: float, *tensors: Tensor | None
    ) -> Tensor:
        sources = _sources(tensors)

        def kernel(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool) -> tuple[Tensor, Tensor, _Kernel]:
            return _fused_forward(q, k, v, mask, causal, scale, dropout)

        out, lse, kernels, kept = _merge(q, sources, parts, own, scale, dropout, kernel)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, out, lse, kept, *tensors, *(t for kernel in kernels for t in kernel))
        ctx.settings = parts, scale, own, dropout, len(tensors)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        parts, scale, own, dropout, count = ctx.settings
        q, out, lse, kept, *rest = ctx.saved_tensors
        sources = _sources(rest[:count])
        kernels = [_Kernel(*rest[i : i + 2]) for i in range(count, len(rest), 2)]
        if own:
            k, v, _ = sources[0]
            p = torch.exp(_dot(q, k) * scale - lse)
            dv0 = (p * kept if kept is not None else p).to(v.dtype).unsqueeze(-1) * grad
            inner = _dot(grad, v) * kept if kept is not None else _dot(grad, v)
            ds = ((inner - _dot(grad, out)) * p * scale).to(q.dtype).unsqueeze(-1)
            dq, dk0 = ds * k, ds * q
        else:
            dq = torch.zeros_like(q)
            dk0 = dv0 = None
        grads: list[Tensor | None] = [dk0, dv0, None] + [None] * (count - 3)
        for part, kernel in zip(parts, kernels, strict=True):
            source, rows = sources[part.source], part.queries
            gk, gv = grads[3 * part.source], grads[3 * part.source + 1]
            if gk is None or gv is None:
                gk, gv = torch.zeros_like(source.key), torch.zeros_like(source.value)
                grads[3 * part.source : 3 * part.source + 2] = gk, gv
            k, v = source.key[:, :, part.keys], source.value[:, :, part.keys]
            beam = q.shape[0] // k.shape[0]
            dq_part, dk_part, dv_part = _fused_backward(
                _fold(grad[:, :, rows], beam), _fold(q[:, :, rows], beam), k, v,
                _fold(out[:, :, rows], beam), _fold(lse[:, :, rows, None], beam).squeeze(-1),
                source.mask, part.causal, scale, dropout, kernel,
            )  # fmt: skip
            dq[:, :, rows] += _unfold(dq_part, beam)
            gk[:, :, part.keys] += dk_part
            gv[:, :, part.keys] += dv_part[..., : v.shape[-1]]
        return dq, None, None, None, None, *grads


def _sources(tensors: Any) -> list[Source]:
    return [Source(*tensors[i : i + 3]) for i in range(0, len(tensors), 3)]


def _dot(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).sum(-1, dtype=torch.promote_types(a.dtype, torch.float32))


PartKernel = Callable[[Tensor, Tensor, Tensor, Tensor | None, bool], tuple[Tensor, Tensor, _Kernel]]


def _merge(
    q: Tensor, sources: list[Source], parts: list[Part], own: bool, scale: float, dropout: float, kernel: PartKernel
) -> tuple[Tensor, Tensor, list[_Kernel], Tensor | None]:
    """Output and log-sum-exp over all parts, the kernels' states, and what dropout left of the own keys."""
    out: Tensor | None = None
    lse: Tensor | None = None
    kept, kernels = None, []
    if own:
        k, v, _ = sources[0]
        lse = _dot(q, k) * scale
        out = v.to(lse.dtype)
        if dropout:
            kept = F.dropout(torch.ones_like(lse), dropout)
            out = out * kept.unsqueeze(-1)
        elif out is v:
            out = v.clone()
    for part in parts:
        k, v, mask = sources[part.source]
        beam = q.shape[0] // k.shape[0]
        o, new, state = kernel(
            _fold(q[:, :, part.queries], beam), k[:, :, part.keys], v[:, :, part.keys], mask, part.causal
        )
        kernels.append(state)
        o, new = _unfold(o[..., : v.shape[-1]], beam), _unfold(new.unsqueeze(-1), beam)
        if out is None or lse is None:
            out, lse = o.to(new.dtype), new.squeeze(-1)
            continue
        held, old = out[:, :, part.queries], lse[:, :, part.queries, None]
        both = torch.logaddexp(old, new)
        if out.requires_grad or lse.requires_grad:  # the plain formula under autograd, which has saved them
            out, lse = out.clone(), lse.clone()
        out[:, :, part.queries] = held * (old - both).exp() + o * (new - both).exp()
        lse[:, :, part.queries] = both.squeeze(-1)
    assert out is not None and lse is not None
    return out, lse, kernels, kept


def _fold(x: Tensor, beam: int) -> Tensor:
    """(N * beam, H, T, D) -> (N, H, beam * T, D): the rows of a prompt query it together."""
    if beam == 1:
        return x
    rows, heads, length, width = x.shape
    return x.view(rows // beam, beam, heads, length, width).transpose(1, 2).reshape(-1, heads, beam * length, width)


def _unfold(x: Tensor, beam: int) -> Tensor:
    if beam == 1:
        return x
    prompts, heads, length, width = x.shape
    return x.view(prompts, heads, beam, length // beam, width).transpose(1, 2).reshape(-1, heads, length // beam, width)


def _additive(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """(B', K) bool -> (B', 1, 1, K): finite, so that a row that sees nothing here has a weight of zero, not NaN."""
    if mask is None:
        return None
    low = torch.finfo(dtype).min / 2
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, low)[:, None, None]


def _dense(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float, dropout: float
) -> tuple[Tensor, Tensor]:
    """One part by the plain formula."""
    wide = torch.promote_types(q.dtype, torch.float32)
    logits = (q @ k.mT).to(wide) * scale
    if mask is not None:
        logits = logits + _additive(mask, wide)
    if causal:
        size = logits.shape[-1]
        logits = logits.masked_fill(torch.ones(size, size, dtype=torch.bool, device=q.device).triu(1), -math.inf)
    lse = logits.logsumexp(-1)
    p = F.dropout((logits - lse.unsqueeze(-1)).exp(), dropout)
    return p.to(v.dtype) @ v, lse


def _fused_forward(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float, dropout: float
) -> tuple[Tensor, Tensor, _Kernel]:
    bias = _additive(mask, q.dtype)
    if q.is_cuda:
        out, lse, seed, offset = torch.ops.aten._scaled_dot_product_efficient_attention(
            q, k, v, _cuda_bias(bias, q), True, dropout, causal, scale=scale
        )
        return out, lse[..., : q.shape[2]], _Kernel(seed, offset)
    v = F.pad(v, (0, k.shape[-1] - v.shape[-1]))  # this kernel wants one width
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, causal, attn_mask=bias, scale=scale
    )
    return out, lse, _Kernel()


def _fused_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    mask: Tensor | None, causal: bool, scale: float, dropout: float, kernel: _Kernel,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    bias = _additive(mask, q.dtype)
    if q.is_cuda:
        lse = F.pad(lse, (0, -lse.shape[-1] % 32)).contiguous()  # the kernel reads whole tiles of 32 rows
        dq, dk, dv, _ = torch.ops.aten._scaled_dot_product_efficient_attention_backward(
            grad, q, k, v, _cuda_bias(bias, q), out, lse, kernel.seed, kernel.offset, dropout,
            [True, True, True, False], causal, scale=scale,
        )  # fmt: skip
        return dq, dk, dv
    extra = (0, k.shape[-1] - v.shape[-1])
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        F.pad(grad, extra), q, k, F.pad(v, extra), F.pad(out, extra), lse.contiguous(),
        0.0, causal, attn_mask=bias, scale=scale,
    )  # fmt: skip


def _cuda_bias(bias: Tensor | None, q: Tensor) -> Tensor | None:
    """The mask for every head and query, its rows starting at the 16-byte boundaries that the kernel loads from."""
    if bias is None:
        return None
    size = bias.shape[-1]
    return F.pad(bias, (0, -size % 8))[..., :size].expand(bias.shape[0], q.shape[1], q.shape[2], size)
