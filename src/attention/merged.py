"""Exact softmax attention in which stock fused kernels do the work, though no kernel knows these patterns.

A fused kernel returns its output and the log-sum-exp of its logits.  With those, parts of a softmax merge exactly:
    L = log sum_p exp(L_p),   o = sum_p exp(L_p - L) o_p.
And its backward needs nothing but the rows' output and log-sum-exp: called with the merged o and L it computes
P_ij = exp(s_ij - L_i) and dS_ij = P_ij (dO_i . v_j - dO_i . o_i), the probabilities and gradients of the whole softmax
restricted to its part.  No T x T tensor is formed, and none but the inputs, o and L is kept.

Shapes: q (B, T, H, D).  Keys and values come packed, [value | key] on the last axis: (B, T, H, Dv + D), Dv <= D.
The CPU kernel wants values as wide as keys; packed, the first D columns serve: what it makes of the columns beyond
Dv (which belong to the key) is never read, and their gradient is zero.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F


class Past(NamedTuple):
    """Packed keys and values (B', K, H, Dv + D) that every query sees; `mask` (B', K) bool: which exist (None: all).

    B' divides B where rows share a prompt.
    """

    packed: Tensor
    mask: Tensor | None = None


class _Random(NamedTuple):
    """Where the CUDA kernel's dropout was, for its backward."""

    seed: Tensor | None = None
    offset: Tensor | None = None


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

    T must be a multiple of stride.  With stride 1 that is plain causal attention.
    """
    past = [Past(p.packed.to(q.dtype), p.mask) for p in past or []]
    packed = packed.to(q.dtype)
    if q.shape[1] % stride:
        raise ValueError(f"{q.shape[1]} positions are no multiple of the stride {stride}")
    if q.is_cuda and q.dtype != torch.float64 or q.device.type == "cpu" and dropout == 0.0:
        tensors = [t for p in past for t in p]
        return _Merged.apply(q, packed, value_dim, scale, stride, dropout, *tensors)
    return _plain(q, packed, value_dim, scale, stride, past, dropout)  # what the fused kernels lack


def _plain(
    q: Tensor, packed: Tensor, value_dim: int, scale: float, stride: int, past: list[Past], dropout: float
) -> Tensor:
    """The same by matrix products: T x T / stride logits, built one place of the chunk at a time."""
    wide = torch.promote_types(q.dtype, torch.float32)
    value, key = (t.transpose(1, 2) for t in packed.split([value_dim, packed.shape[-1] - value_dim], -1))
    slot_key, slot_value = key[:, :, stride - 1 :: stride], value[:, :, stride - 1 :: stride]
    size = slot_key.shape[2]
    before = torch.ones(size, size, dtype=torch.bool, device=q.device)
    outs = []
    for r in range(stride):
        queries = q.transpose(1, 2)[:, :, r::stride]
        own_key, own_value = key[:, :, r::stride], value[:, :, r::stride]
        logits = [((queries @ slot_key.mT).to(wide) * scale).masked_fill(before.triu(), float("-inf"))]
        logits.append((queries * own_key).sum(-1, keepdim=True, dtype=wide) * scale)
        values = [slot_value]
        for p in past:
            beam = q.shape[0] // p.packed.shape[0]
            past_value, past_key = (
                t.transpose(1, 2).repeat_interleave(beam, 0) for t in p.packed.split([value_dim, key.shape[-1]], -1)
            )
            bias = _additive(p.mask, wide)
            extra = (queries @ past_key.mT).to(wide) * scale
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
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        packed: Tensor,
        value_dim: int,
        scale: float,
        stride: int,
        dropout: float,
        *rest: Tensor | None,
    ) -> Tensor:
        kernel = _Kernel(value_dim, scale, dropout)
        past = _pairs(rest)
        randoms: list[_Random] = []
        slots = packed[:, stride - 1 :: stride]
        out, lse, random = kernel.forward(q[:, stride - 1 :: stride], slots, None, causal=True)
        randoms.append(random)
        own = kept = None
        if stride > 1:
            whole_out, whole_lse = out.new_empty(*q.shape[:3], out.shape[-1]), lse.new_empty(*q.shape[:3])
            whole_out[:, stride - 1 :: stride], whole_lse[:, stride - 1 :: stride] = out, lse
            out, lse = whole_out, whole_lse
            own = lse.new_empty(stride - 1, q.shape[0], slots.shape[1], q.shape[2])
            kept = F.dropout(torch.ones_like(own), dropout) if dropout else None
            for r in range(stride - 1):
                value, key = packed[:, r::stride].split([value_dim, q.shape[-1]], -1)
                queries = q[:, r::stride]
                own[r] = _dot(queries, key) * scale
                read = value if kept is None else value * kept[r].unsqueeze(-1).to(value.dtype)
                rows, rows_lse = out[:, r::stride], lse[:, r::stride]
                rows[:, 0, :, :value_dim], rows_lse[:, 0] = read[:, 0], own[r][:, 0]
                rows[..., value_dim:] = 0
                if slots.shape[1] > 1:
                    o, new, random = kernel.forward(queries[:, 1:], slots[:, :-1], None, causal=True)
                    randoms.append(random)
                    rows[:, 1:, :, :value_dim] = _mix(read[:, 1:], o[..., :value_dim], own[r][:, 1:], new)
                    rows_lse[:, 1:] = torch.logaddexp(own[r][:, 1:], new)
        for p in past:
            beam = q.shape[0] // p.packed.shape[0]
            o, new, random = kernel.forward(_fold(q, beam), p.packed, p.mask, causal=False)
            randoms.append(random)
            o, new = _unfold(o, beam), _unfold(new, beam)
            mixed = _mix(out[..., :value_dim], o[..., :value_dim], lse, new)
            out[..., :value_dim] = mixed
            lse = torch.logaddexp(lse, new)
        ctx.save_for_backward(q, packed, out, lse, own, kept, *rest, *(t for random in randoms for t in random))
        ctx.settings = value_dim, scale, stride, dropout, len(rest)
        return out[..., :value_dim]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        value_dim, scale, stride, dropout, count = ctx.settings
        q, packed, out, lse, own, kept, *rest = ctx.saved_tensors
        kernel = _Kernel(value_dim, scale, dropout)
        past = _pairs(rest[:count])
        randoms = iter([_Random(*rest[i : i + 2]) for i in range(count, len(rest), 2)])
        grad = F.pad(grad, (0, out.shape[-1] - value_dim))
        slots = packed[:, stride - 1 :: stride]
        last = slice(stride - 1, None, stride)
        d_last, dk, dv = kernel.backward(
            grad[:, last], q[:, last], slots, None, out[:, last], lse[:, last], True, next(randoms)
        )
        if stride == 1:
            dq, dpacked = d_last, torch.cat((dv, dk), -1)
        else:
            dq, dpacked = torch.empty_like(q), torch.empty_like(packed)
            dq[:, last] = d_last
            for r in range(stride - 1):
                rows = slice(r, None, stride)
                value, key = packed[:, rows].split([value_dim, q.shape[-1]], -1)
                queries, g, o, o_lse = q[:, rows], grad[:, rows], out[:, rows], lse[:, rows]
                p = torch.exp(own[r] - o_lse)
                scores, weight = value - o[..., :value_dim], p
                if kept is not None:
                    scores, weight = value * kept[r].unsqueeze(-1).to(value.dtype) - o[..., :value_dim], p * kept[r]
                ds = (_dot(g[..., :value_dim], scores) * p * scale).to(q.dtype).unsqueeze(-1)
                d_own = dpacked[:, rows]
                torch.mul(g[..., :value_dim], weight.to(q.dtype).unsqueeze(-1), out=d_own[..., :value_dim])
                torch.mul(queries, ds, out=d_own[..., value_dim:])
                torch.mul(key, ds, out=dq[:, rows])
                if slots.shape[1] > 1:
                    more_q, more_k, more_v = kernel.backward(
                        g[:, 1:], queries[:, 1:], slots[:, :-1], None, o[:, 1:], o_lse[:, 1:], True, next(randoms)
                    )
                    dq[:, rows][:, 1:] += more_q
                    dk[:, :-1] += more_k
                    dv[:, :-1] += more_v
            dpacked[:, last, :, :value_dim], dpacked[:, last, :, value_dim:] = dv, dk
        grads: list[Tensor | None] = []
        for each in past:
            beam = q.shape[0] // each.packed.shape[0]
            more_q, dk, dv = kernel.backward(
                _fold(grad, beam), _fold(q, beam), each.packed, each.mask,
                _fold(out, beam), _fold(lse, beam), False, next(randoms),
            )  # fmt: skip
            dq += _unfold(more_q, beam)
            grads += [torch.cat((dv, dk), -1), None]
        return dq, dpacked, None, None, None, None, *grads


def _pairs(tensors: Any) -> list[Past]:
    return [Past(*tensors[i : i + 2]) for i in range(0, len(tensors), 2)]


def _dot(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).sum(-1, dtype=torch.promote_types(a.dtype, torch.float32))


def _mix(a: Tensor, b: Tensor, a_lse: Tensor, b_lse: Tensor) -> Tensor:
    """Merge two normalised outputs by their log-sum-exps."""
    return torch.lerp(a, b, (b_lse - a_lse).sigmoid().to(a.dtype).unsqueeze(-1))


def _fold(x: Tensor, beam: int) -> Tensor:
    """(N * beam, T, ...) -> (N, beam * T, ...): the rows of a prompt query it together."""
    return x if beam == 1 else x.unflatten(0, (-1, beam)).flatten(1, 2)


def _unfold(x: Tensor, beam: int) -> Tensor:
    return x if beam == 1 else x.unflatten(1, (beam, -1)).flatten(0, 1)


def _additive(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """(B', K) bool -> (B', 1, 1, K): finite, so that a row that sees nothing here has a weight of zero, not NaN."""
    if mask is None:
        return None
    low = torch.finfo(dtype).min / 2
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, low)[:, None, None]


class _Kernel(NamedTuple):
    """The stock kernels of CPU and CUDA in one shape: (B, T, H, .) in and out, log-sum-exp (B, T, H)."""

    value_dim: int
    scale: float
    dropout: float

    def _key_value(self, packed: Tensor) -> tuple[Tensor, Tensor]:
        width = packed.shape[-1] - self.value_dim if packed.device.type == "cpu" else self.value_dim
        return packed[..., self.value_dim :].transpose(1, 2), packed[..., :width].transpose(1, 2)

    def forward(
        self, q: Tensor, packed: Tensor, mask: Tensor | None, *, causal: bool
    ) -> tuple[Tensor, Tensor, _Random]:
        k, v = self._key_value(packed)
        bias, random = _additive(mask, q.dtype), _Random()
        q = q.transpose(1, 2)
        if q.is_cuda:
            out, lse, *state = torch.ops.aten._scaled_dot_product_efficient_attention(
                q, k, v, _cuda_bias(bias, q), True, self.dropout, causal, scale=self.scale
            )
            lse, random = lse[..., : q.shape[2]], _Random(*state)
        else:
            out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                q, k, v, 0.0, causal, attn_mask=bias, scale=self.scale
            )
        return out.transpose(1, 2), lse.transpose(1, 2), random

    def backward(
        self,
        grad: Tensor,
        q: Tensor,
        packed: Tensor,
        mask: Tensor | None,
        out: Tensor,
        lse: Tensor,
        causal: bool,
        random: _Random,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of q, keys and values."""
        k, v = self._key_value(packed)
        grad, q, out, lse = (t.transpose(1, 2) for t in (grad, q, out, lse))
        bias = _additive(mask, q.dtype)
        if q.is_cuda:
            lse = F.pad(lse, (0, -lse.shape[-1] % 32)).contiguous()  # the kernel reads whole tiles of 32 rows
            dq, dk, dv, _ = torch.ops.aten._scaled_dot_product_efficient_attention_backward(
                grad, q, k, v, _cuda_bias(bias, q), out, lse, random.seed, random.offset, self.dropout,
                [True, True, True, False], causal, scale=self.scale,
            )  # fmt: skip
        else:
            dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                grad, q, k, v, out, lse, 0.0, causal, attn_mask=bias, scale=self.scale
            )
        return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)[..., : self.value_dim]


def _cuda_bias(bias: Tensor | None, q: Tensor) -> Tensor | None:
    """The mask for every head and query, its rows starting at the 16-byte boundaries that the kernel loads from."""
    if bias is None:
        return None
    size = bias.shape[-1]
    return F.pad(bias, (0, -size % 8))[..., :size].expand(bias.shape[0], q.shape[1], q.shape[2], size)
