"""One interface to torch's fused attention kernels for CPU and CUDA, and the merging of their partial softmaxes.

Shapes: q (B, T, H, D), packed [value | key] (B, K, H, Dv + D), out (B, T, H, Dv), log-sum-exp (B, T, H).
The flash kernels of CPU and CUDA need values as wide as keys. They read the first D packed columns as the value: their
output in the columns beyond Dv, which belong to the key, is never read, and its gradient is zero.
The flash kernel of CUDA has no mask, cuDNN's mask differs between its versions, and cuDNN has no attention over a
single key. The memory-efficient kernel computes such a part, whichever kernel computes the others. All kernels return
natural log-sum-exps.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from .backends import Backend

CPU = (Backend.NATIVE, Backend.FUSED_CPU)


class Random(NamedTuple):
    """Random state of a CUDA kernel's dropout, which its backward needs.

    Args:
        seed: seed of the generator, or its full state, as the kernel returns it; None: no dropout.
        offset: offset of the generator; None: no dropout.
    """

    seed: Tensor | None = None
    offset: Tensor | None = None


def wide(dtype: torch.dtype) -> torch.dtype:
    """Dtype of softmax statistics: float32 or wider."""
    return torch.promote_types(dtype, torch.float32)


def dot(a: Tensor, b: Tensor) -> Tensor:
    """Inner products of a (..., D) and b (..., D) along the last axis, summed in float32 or wider."""
    return (a * b).sum(-1, dtype=wide(a.dtype))


def merge(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> None:
    """Merge the outputs of the same queries over two sets of keys, in place: out, other (..., Dv).

    `lse`, `other_lse`: log-sum-exps of their logits, (...).
    """
    out.lerp_(other, (other_lse - lse).sigmoid().to(out.dtype).unsqueeze(-1))
    lse.copy_(torch.logaddexp(lse, other_lse))


def additive(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """mask (B', K) bool, true where a key exists -> additive mask (B', 1, 1, K); None -> None.

    Its values are finite, so that a row that sees no key of a part gives it a weight of zero, not NaN.
    """
    if mask is None:
        return None
    low = torch.finfo(dtype).min / 2
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, low)[:, None, None]


class Kernel(NamedTuple):
    """Forward and backward of one part of a softmax: a rectangle of queries and keys, or a causal triangle.

    Args:
        backend: FUSED_CPU, FLASH_CUDA, CUDNN_CUDA or FUSED_CUDA; NATIVE: as FUSED_CPU.
    """

    value_dim: int
    scale: float
    dropout: float
    backend: Backend

    def causal(self, q: Tensor, packed: Tensor, out: Tensor, lse: Tensor, group: int = 1) -> list[Random]:
        """Fill out and lse, in one call per place in a group. Query i sees the keys j <= i // group.

        Args:
            q: (B, n, H, D), n at most group * K.
            packed: [value | key], (B, K, H, Dv + D).
            out: (B, n, H, Dv).
            lse: (B, n, H).
            group: number of consecutive queries that see the same keys.
        """
        randoms = []
        for place in range(min(group, q.shape[1])):
            rows = slice(place, None, group)
            keys = packed[:, : q[:, rows].shape[1]]
            out[:, rows], lse[:, rows], random = self.forward(q[:, rows], keys, None, causal=True)
            randoms.append(random)
        return randoms

    def causal_backward(
        self, grad: Tensor, q: Tensor, packed: Tensor, out: Tensor, lse: Tensor, dq: Tensor, dpacked: Tensor,
        randoms: Iterator[Random], group: int = 1,
    ) -> None:  # fmt: skip
        """Fill dq and dpacked. Every key must be seen.

        Args:
            grad: gradient of the output, (B, n, H, Dv).
            q, packed, group: as in :meth:`causal`.
            out, lse: output, (B, n, H, Dv), and log-sum-exp of the full softmax.
            dq: (B, n, H, D).
            dpacked: (B, K, H, Dv + D).
        """
        targets = dpacked.split([self.value_dim, q.shape[-1]], -1)
        for place in range(min(group, q.shape[1])):
            rows = slice(place, None, group)
            g, o = (self.wide_enough(t[:, rows], q.shape[-1]) for t in (grad, out))
            size = g.shape[1]
            dq[:, rows], dk, d_value = self.backward(
                g, q[:, rows], packed[:, :size], None, o, lse[:, rows], True, next(randoms)
            )
            for target, more in zip(targets, (d_value, dk), strict=True):
                if place:
                    target[:, :size].add_(more)
                else:
                    target.copy_(more)

    def value_width(self, width: int, mask: Tensor | None = None) -> int:
        """Width of values in the kernel of a part with this mask: `width` (D) in flash kernels, else Dv."""
        flash = self.backend in CPU or self.backend is Backend.FLASH_CUDA and mask is None
        return width if flash else self.value_dim

    def wide_enough(self, x: Tensor, width: int, mask: Tensor | None = None) -> Tensor:
        """Pad an output or its gradient, x (B, T, H, Dv), to the `value_width` of a part with this mask."""
        extra = self.value_width(width, mask) - x.shape[-1]
        return F.pad(x, (0, extra)) if extra else x

    def forward(self, q: Tensor, packed: Tensor, mask: Tensor | None, *, causal: bool) -> tuple[Tensor, Tensor, Random]:
        """Output (B, T, H, Dv), log-sum-exp (B, T, H) and dropout state of one part.

        Args:
            q: (B, T, H, D).
            packed: [value | key], (B, K, H, Dv + D).
            mask: (B, K) bool, true where a key exists; None: all keys exist. It excludes `causal`.
            causal: T = K, and query i sees the keys j <= i.
        """
        (q, k, v), random = self._inputs(q, packed, mask), Random()
        if self.backend in CPU:
            out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                q, k, v, 0.0, causal, attn_mask=additive(mask, q.dtype), scale=self.scale
            )
        else:
            out, lse, random = self._forward_cuda(q, k, v, mask, causal)
        return out.transpose(1, 2)[..., : self.value_dim], lse.transpose(1, 2), random

    def _backend_of(self, mask: Tensor | None, keys: int) -> Backend:
        """The CUDA backend that computes a part with this mask and number of keys."""
        unmasked = self.backend in (Backend.FLASH_CUDA, Backend.CUDNN_CUDA)
        single = self.backend is Backend.CUDNN_CUDA and keys == 1
        return Backend.FUSED_CUDA if unmasked and mask is not None or single else self.backend

    def _forward_cuda(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool
    ) -> tuple[Tensor, Tensor, Random]:
        """As :meth:`forward`, with heads before positions."""
        by = self._backend_of(mask, k.shape[2])
        if by is Backend.FLASH_CUDA:
            out, lse, _, _, _, _, *state, _ = torch.ops.aten._scaled_dot_product_flash_attention(
                q, k, v, self.dropout, causal, scale=self.scale
            )
        elif by is Backend.CUDNN_CUDA:
            out, lse, _, _, _, _, *state, _ = torch.ops.aten._scaled_dot_product_cudnn_attention(
                q, k, v, None, True, self.dropout, causal, scale=self.scale
            )
            lse = lse.squeeze(-1)
        else:
            out, lse, *state = torch.ops.aten._scaled_dot_product_efficient_attention(
                q, k, v, _cuda_bias(mask, q), True, self.dropout, causal, scale=self.scale
            )
            lse = lse[..., : q.shape[2]]
        return out, lse, Random(*state)

    def backward(
        self, grad: Tensor, q: Tensor, packed: Tensor, mask: Tensor | None,
        out: Tensor, lse: Tensor, causal: bool, random: Random,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """Gradients of q, keys and values; `grad` and `out` come from :meth:`wide_enough`."""
        q, k, v = self._inputs(q, packed, mask)
        grad, out, lse = (t.transpose(1, 2) for t in (grad, out, lse))
        if self.backend in CPU:
            dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                grad, q, k, v, out, lse, 0.0, causal, attn_mask=additive(mask, q.dtype), scale=self.scale
            )
        else:
            dq, dk, dv = self._backward_cuda(grad, q, k, v, mask, out, lse, causal, random)
        return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)[..., : self.value_dim]

    def _backward_cuda(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None,
        out: Tensor, lse: Tensor, causal: bool, random: Random,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """As :meth:`backward`, with heads before positions."""
        by, sizes = self._backend_of(mask, k.shape[2]), (q.shape[2], k.shape[2])
        if by is Backend.FLASH_CUDA:
            dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_backward(
                grad, q, k, v, out, lse.contiguous(), None, None, *sizes, self.dropout, causal, *random,
                scale=self.scale,
            )  # fmt: skip
        elif by is Backend.CUDNN_CUDA:
            dq, dk, dv = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
                grad, q, k, v, out, lse.contiguous().unsqueeze(-1), *random, None, None, None, *sizes, self.dropout,
                causal, scale=self.scale,
            )  # fmt: skip
        else:
            lse = F.pad(lse, (0, -lse.shape[-1] % 32)).contiguous()  # the kernel reads full tiles of 32 rows
            out = out.transpose(1, 2).contiguous().transpose(1, 2)  # the kernel has no strides of it
            dq, dk, dv, _ = torch.ops.aten._scaled_dot_product_efficient_attention_backward(
                grad, q, k, v, _cuda_bias(mask, q), out, lse, random.seed, random.offset, self.dropout,
                [True, True, True, False], causal, scale=self.scale,
            )  # fmt: skip
        return dq, dk, dv

    def _inputs(self, q: Tensor, packed: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values with heads before positions, (B, H, ., .), as kernels take them."""
        width = self.value_width(packed.shape[-1] - self.value_dim, mask)
        key, value = packed[..., self.value_dim :], packed[..., :width]
        return q.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)


def unfold(x: Tensor, count: int) -> Tensor:
    """x (B, count * n, ...) -> (B * count, n, ...)."""
    return x if count == 1 else x.unflatten(1, (count, -1)).flatten(0, 1)


def fold(x: Tensor, count: int) -> Tensor:
    """x (B * count, n, ...) -> (B, count * n, ...): as of rows that share a prefix and query it together."""
    return x if count == 1 else x.unflatten(0, (-1, count)).flatten(1, 2)


def _cuda_bias(mask: Tensor | None, q: Tensor) -> Tensor | None:
    """The additive mask for every head and query, with rows aligned to the 16 bytes that the kernel loads."""
    bias = additive(mask, q.dtype)
    if bias is None:
        return None
    size = bias.shape[-1]
    return F.pad(bias, (0, -size % 8))[..., :size].expand(bias.shape[0], q.shape[1], q.shape[2], size)
