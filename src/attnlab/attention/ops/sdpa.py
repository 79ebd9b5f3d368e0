"""The stock fused kernels of CPU and CUDA in one shape, and the arithmetic that merges what they return.

Shapes: q (B, T, H, D), packed [value | key] (B, K, H, Dv + D), out (B, T, H, Dv), log-sum-exp (B, T, H).
The flash kernels of CPU and CUDA need values as wide as keys; packed, the first D columns serve: what they make of the
columns beyond Dv (which belong to the key) is never read, and their gradient is zero.
The flash kernel of CUDA has no mask, a mask of cuDNN's differs between its versions, and cuDNN has no attention over a
single key: such a part goes through the memory-efficient kernel, whatever computes the others. Their log-sum-exps are
all natural logarithms.
"""

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from .backends import Backend

PADDED = (Backend.FUSED_CPU, Backend.FLASH_CUDA)  # kernels whose values are as wide as their keys

BLOCK = 256  # a causal triangle of so many queries is one call of the CPU kernel


class Random(NamedTuple):
    """Where a CUDA kernel's dropout was, for its backward.

    Args:
        seed: of the generator, or its full state, a tensor that the kernel returns; None: no dropout.
        offset: of the generator; None: no dropout.
    """

    seed: Tensor | None = None
    offset: Tensor | None = None


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype of softmax statistics."""
    return torch.promote_types(dtype, torch.float32)


def dot(a: Tensor, b: Tensor) -> Tensor:
    """Inner products along the last axis, summed in float32 or wider.

    Args:
        a: (..., D).
        b: (..., D).
    """
    return (a * b).sum(-1, dtype=wide(a.dtype))


def merge(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> None:
    """Merge a second normalised output into a first one, by their log-sum-exps, in place.

    Args:
        out: one output, (..., Dv).
        lse: log-sum-exp of its logits, (...).
        other: of the same queries over other keys.
        other_lse: log-sum-exp of its logits.
    """
    out.lerp_(other, (other_lse - lse).sigmoid().to(out.dtype).unsqueeze(-1))
    lse.copy_(torch.logaddexp(lse, other_lse))


def additive(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """(B', K) bool -> (B', 1, 1, K): finite, so that a row that sees nothing here has a weight of zero, not NaN.

    Args:
        mask: (B', K) bool, true where a key exists; None: no mask is needed, and None is returned.
    """
    if mask is None:
        return None
    low = torch.finfo(dtype).min / 2
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, low)[:, None, None]


class Kernel(NamedTuple):
    """One part of a softmax: all queries and keys, or the causal triangle of equally many; forward and backward.

    Args:
        backend: FUSED_CPU, FLASH_CUDA, CUDNN_CUDA or FUSED_CUDA.
    """

    value_dim: int
    scale: float
    dropout: float
    backend: Backend

    def causal(self, q: Tensor, packed: Tensor, out: Tensor, lse: Tensor, group: int = 1) -> list[Random]:
        """Fill out and lse: query i sees the keys j <= i // group.

        On a CPU the queries are divided into blocks of `group` times at most BLOCK: the triangles on the diagonal are
        the rows of one call for each place in a group, and the rectangles below them are halved, and halved again.

        Args:
            q: (B, group K, H, D); rows beyond those of `out` are padding.
            packed: [value | key], (B, K, H, Dv + D).
            out: (B, at most group K, H, Dv), to be filled.
            lse: (B, the same, H), to be filled.
            group: queries that see the same keys.
        """
        randoms = []
        bounds = self._bounds(packed)
        for place in range(group):
            queries, target, target_lse = (t[:, place::group] for t in (q, out, lse))
            for rows, count in _triangles(bounds, target):
                o, new, random = self.forward(
                    _folded(queries[:, rows], count), _folded(packed[:, rows], count), None, causal=True
                )
                part = target[:, rows]
                size = part.shape[1]
                part.copy_(_unfolded(o, count)[:, :size])
                target_lse[:, rows].copy_(_unfolded(new, count)[:, :size])
                randoms.append(random)
        for first, middle, last in _rectangles(bounds):
            rows = slice(middle * group, min(last * group, out.shape[1]))
            o, new, random = self.forward(q[:, rows], packed[:, first:middle], None, causal=False)
            merge(out[:, rows], lse[:, rows], o, new)
            randoms.append(random)
        return randoms

    def causal_backward(
        self, grad: Tensor, q: Tensor, packed: Tensor, out: Tensor, lse: Tensor, dq: Tensor, dpacked: Tensor,
        randoms: Iterator[Random], group: int = 1,
    ) -> None:  # fmt: skip
        """Fill dq and dpacked.

        Args:
            grad: of the output, (B, group K, H, Dv), as wide as `value_width` says; zero in rows of padding.
            q, packed: as in :meth:`causal`.
            out: of the full softmax, as wide as `grad`, with the same rows.
            lse: of the full softmax, with the same rows.
            dq: (B, at most group K, H, D), to be filled.
            dpacked: (B, K, H, Dv + D), to be filled.
            group: queries that see the same keys.
        """
        bounds = self._bounds(packed)
        for place in range(group):
            sources, target = [t[:, place::group] for t in (grad, q, out, lse)], dq[:, place::group]
            for rows, count in _triangles(bounds, target):
                g, queries, o, o_lse = (_folded(t[:, rows], count) for t in sources)
                keys = _folded(packed[:, rows], count)
                more, dk, d_value = self.backward(g, queries, keys, None, o, o_lse, True, next(randoms))
                part = target[:, rows]
                part.copy_(_unfolded(more, count)[:, : part.shape[1]])
                self._add(dpacked[:, rows], _unfolded(d_value, count), _unfolded(dk, count), first=place == 0)
        for first, middle, last in _rectangles(bounds):
            rows = slice(middle * group, min(last * group, dq.shape[1]))
            more, dk, d_value = self.backward(
                grad[:, rows], q[:, rows], packed[:, first:middle], None, out[:, rows], lse[:, rows], False,
                next(randoms),
            )  # fmt: skip
            dq[:, rows] += more
            self._add(dpacked[:, first:middle], d_value, dk)

    def _add(self, dpacked: Tensor, d_value: Tensor, dk: Tensor, first: bool = False) -> None:
        for part, more in zip(dpacked.split([self.value_dim, dk.shape[-1]], -1), (d_value, dk), strict=True):
            if first:
                part.copy_(more)
            else:
                part.add_(more)

    def _by(self, mask: Tensor | None, packed: Tensor | None = None) -> Backend:
        """What computes a part with this mask and these keys: cuDNN has no attention over a single one."""
        unmasked = self.backend in (Backend.FLASH_CUDA, Backend.CUDNN_CUDA)
        single = self.backend is Backend.CUDNN_CUDA and packed is not None and packed.shape[1] == 1
        return Backend.FUSED_CUDA if unmasked and mask is not None or single else self.backend

    def value_width(self, width: int, mask: Tensor | None = None) -> int:
        """How wide the kernel of a part has values: D or Dv.

        Args:
            mask: of the part.
        """
        return width if self._by(mask) in PADDED else self.value_dim

    def wide_enough(self, x: Tensor, width: int, mask: Tensor | None = None) -> Tensor:
        """An output or its gradient, (B, T, H, Dv), as wide as the kernel of a part has values.

        Args:
            x: the output or the gradient.
            mask: of the part.
        """
        extra = self.value_width(width, mask) - x.shape[-1]
        return F.pad(x, (0, extra)) if extra else x

    def forward(self, q: Tensor, packed: Tensor, mask: Tensor | None, *, causal: bool) -> tuple[Tensor, Tensor, Random]:
        """Output (B, T, H, Dv), log-sum-exp (B, T, H), and where the dropout was, of one part.

        Args:
            q: (B, T, H, D).
            packed: [value | key], (B, K, H, Dv + D).
            mask: (B, K) bool, true where a key exists; None: everywhere.
            causal: T = K, and query i sees the keys j <= i; then without a mask.
        """
        by, (q, k, v) = self._by(mask, packed), self._inputs(q, packed, mask)
        bias, random = additive(mask, q.dtype), Random()
        if by is Backend.FUSED_CPU:
            out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                q, k, v, 0.0, causal, attn_mask=bias, scale=self.scale
            )
        elif by is Backend.FLASH_CUDA:
            out, lse, _, _, _, _, *state, _ = torch.ops.aten._scaled_dot_product_flash_attention(
                q, k, v, self.dropout, causal, scale=self.scale
            )
            random = Random(*state)
        elif by is Backend.CUDNN_CUDA:
            out, lse, _, _, _, _, *state, _ = torch.ops.aten._scaled_dot_product_cudnn_attention(
                q, k, v, None, True, self.dropout, causal, scale=self.scale
            )
            lse, random = lse.squeeze(-1), Random(*state)
        else:
            out, lse, *state = torch.ops.aten._scaled_dot_product_efficient_attention(
                q, k, v, _cuda_bias(bias, q), True, self.dropout, causal, scale=self.scale
            )
            lse, random = lse[..., : q.shape[2]], Random(*state)
        return out.transpose(1, 2)[..., : self.value_dim], lse.transpose(1, 2), random

    def backward(
        self, grad: Tensor, q: Tensor, packed: Tensor, mask: Tensor | None,
        out: Tensor, lse: Tensor, causal: bool, random: Random,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """Gradients of q, keys and values; `grad` and `out` come from :meth:`wide_enough`."""
        by, (q, k, v) = self._by(mask, packed), self._inputs(q, packed, mask)
        grad, out, lse = (t.transpose(1, 2) for t in (grad, out, lse))
        bias, sizes = additive(mask, q.dtype), (q.shape[2], k.shape[2])
        if by is Backend.FUSED_CPU:
            dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                grad, q, k, v, out, lse, 0.0, causal, attn_mask=bias, scale=self.scale
            )
        elif by is Backend.FLASH_CUDA:
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
            dq, dk, dv, _ = torch.ops.aten._scaled_dot_product_efficient_attention_backward(
                grad, q, k, v, _cuda_bias(bias, q), out, lse, random.seed, random.offset, self.dropout,
                [True, True, True, False], causal, scale=self.scale,
            )  # fmt: skip
        return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)[..., : self.value_dim]

    def _inputs(self, q: Tensor, packed: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values as a kernel has them, (B, H, ., .)."""
        width = self.value_width(packed.shape[-1] - self.value_dim, mask)
        key, value = packed[..., self.value_dim :], packed[..., :width]
        return q.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)

    def _bounds(self, packed: Tensor) -> list[int]:
        """The keys at which blocks begin, and their number: 2^n blocks of at most BLOCK keys; on CUDA one block."""
        size = packed.shape[1]
        count = 1 << max(-(-size // BLOCK) - 1, 0).bit_length() if self.backend is Backend.FUSED_CPU else 1
        return [size * i // count for i in range(count + 1)]


def _triangles(bounds: list[int], rows: Tensor) -> Iterator[tuple[slice, int]]:
    """Keys of the triangles on the diagonal, and how many triangles these are: all, if they are of one size.

    Args:
        rows: the queries' results, (B, at most as many as keys, ...); triangles without any are left out.
    """
    size, count = bounds[-1], len(bounds) - 1
    spans = [(0, size, count)] if size % count == 0 else [(a, b, 1) for a, b in pairwise(bounds)]
    for first, last, many in spans:
        if first < rows.shape[1]:
            yield slice(first, last), many


def _rectangles(bounds: list[int]) -> Iterator[tuple[int, int, int]]:
    """(a, b, c): the queries of keys b ... c - 1 see all of the keys a ... b - 1; every pair of blocks once."""
    count, step = len(bounds) - 1, 1
    while step < count:
        for i in range(0, count, 2 * step):
            yield bounds[i], bounds[i + step], bounds[i + 2 * step]
        step *= 2


def _folded(x: Tensor, count: int) -> Tensor:
    """(B, count n, ...) -> (B count, n, ...)."""
    return x if count == 1 else x.unflatten(1, (count, -1)).flatten(0, 1)


def _unfolded(x: Tensor, count: int) -> Tensor:
    """(B count, n, ...) -> (B, count n, ...)."""
    return x if count == 1 else x.unflatten(0, (-1, count)).flatten(1, 2)


def _cuda_bias(bias: Tensor | None, q: Tensor) -> Tensor | None:
    """The mask for every head and query, its rows starting at the 16-byte boundaries that the kernel loads from."""
    if bias is None:
        return None
    size = bias.shape[-1]
    return F.pad(bias, (0, -size % 8))[..., :size].expand(bias.shape[0], q.shape[1], q.shape[2], size)
