"""The stock fused kernels of CPU and CUDA in one shape, and the arithmetic that merges what they return.

Shapes: q (B, T, H, D), packed [value | key] (B, K, H, Dv + D), out (B, T, H, Dv), log-sum-exp (B, T, H).
The CPU kernel needs values as wide as keys; packed, the first D columns serve: what it makes of the columns beyond
Dv (which belong to the key) is never read, and their gradient is zero.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

BLOCK = 256  # a causal triangle of so many queries is one call of the CPU kernel


class Random(NamedTuple):
    """Where the CUDA kernel's dropout was, for its backward.

    Args:
        seed: of the generator, a tensor that the kernel returns; None: no dropout.
        offset: of the generator; None: no dropout.
    """

    seed: Tensor | None = None
    offset: Tensor | None = None


def wide(dtype: torch.dtype) -> torch.dtype:
    """What softmax statistics are kept in.

    Args:
        dtype: of the inputs. The result is float32 or wider.
    """
    return torch.promote_types(dtype, torch.float32)


def dot(a: Tensor, b: Tensor) -> Tensor:
    """Inner products along the last axis, summed in float32 or wider.

    Args:
        a: (..., D).
        b: (..., D).
    """
    return (a * b).sum(-1, dtype=wide(a.dtype))


def mix(a: Tensor, b: Tensor, a_lse: Tensor, b_lse: Tensor) -> Tensor:
    """Merge two normalised outputs by their log-sum-exps.

    Args:
        a: one output, (B, T, H, Dv).
        b: the other one, of the same queries over other keys.
        a_lse: log-sum-exp of the first one's logits, (B, T, H).
        b_lse: of the other one's.
    """
    return torch.lerp(a, b, (b_lse - a_lse).sigmoid().to(a.dtype).unsqueeze(-1))


def additive(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """(B', K) bool -> (B', 1, 1, K): finite, so that a row that sees nothing here has a weight of zero, not NaN.

    Args:
        mask: (B', K) bool, true where a key exists; None: no mask is needed, and None is returned.
        dtype: of the result, which is added to logits.
    """
    if mask is None:
        return None
    low = torch.finfo(dtype).min / 2
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, low)[:, None, None]


class Kernel(NamedTuple):
    """One part of a softmax: all queries and keys, or the causal triangle of equally many; forward and backward.

    Args:
        value_dim: Dv, width of values.
        scale: factor of the logits.
        dropout: of attention weights, 0 to 1.
    """

    value_dim: int
    scale: float
    dropout: float

    def causal(self, q: Tensor, packed: Tensor, out: Tensor, lse: Tensor) -> Random:
        """Fill out and lse: query i sees the keys j <= i.

        The CPU kernel skips only whole tiles of 512 keys, so there the triangle is halved down to BLOCK.
        """
        size = q.shape[1]
        if q.is_cuda or size <= BLOCK:
            o, new, random = self.forward(q, packed, None, causal=True)
            out.copy_(o)
            lse.copy_(new)
            return random
        half = -(-size // 2)
        for rows in (slice(None, half), slice(half, None)):
            self.causal(q[:, rows], packed[:, rows], out[:, rows], lse[:, rows])
        o, new, random = self.forward(q[:, half:], packed[:, :half], None, causal=False)
        out[:, half:] = mix(out[:, half:], o, lse[:, half:], new)
        lse[:, half:] = torch.logaddexp(lse[:, half:], new)
        return random

    def causal_backward(
        self, grad: Tensor, q: Tensor, packed: Tensor, out: Tensor, lse: Tensor, dpacked: Tensor, random: Random
    ) -> Tensor:
        """Adds to dpacked, returns dq.  out and lse are those of the whole softmax."""
        size, dv = q.shape[1], self.value_dim
        if q.is_cuda or size <= BLOCK:
            dq, dk, d_value = self.backward(grad, q, packed, None, out, lse, True, random)
            dpacked[..., :dv] += d_value
            dpacked[..., dv:] += dk
            return dq
        half = -(-size // 2)
        first, second = slice(None, half), slice(half, None)
        dq = torch.empty_like(q)
        for rows in (first, second):
            dq[:, rows] = self.causal_backward(
                grad[:, rows], q[:, rows], packed[:, rows], out[:, rows], lse[:, rows], dpacked[:, rows], random
            )
        more, dk, d_value = self.backward(
            grad[:, second], q[:, second], packed[:, first], None, out[:, second], lse[:, second], False, random
        )
        dq[:, second] += more
        dpacked[:, first, :, :dv] += d_value
        dpacked[:, first, :, dv:] += dk
        return dq

    def forward(self, q: Tensor, packed: Tensor, mask: Tensor | None, *, causal: bool) -> tuple[Tensor, Tensor, Random]:
        k, v = self._key_value(packed)
        bias, random = additive(mask, q.dtype), Random()
        q = q.transpose(1, 2)
        if q.is_cuda:
            out, lse, *state = torch.ops.aten._scaled_dot_product_efficient_attention(
                q, k, v, _cuda_bias(bias, q), True, self.dropout, causal, scale=self.scale
            )
            lse, random = lse[..., : q.shape[2]], Random(*state)
        else:
            out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                q, k, v, 0.0, causal, attn_mask=bias, scale=self.scale
            )
        return out.transpose(1, 2)[..., : self.value_dim], lse.transpose(1, 2), random

    def backward(
        self, grad: Tensor, q: Tensor, packed: Tensor, mask: Tensor | None,
        out: Tensor, lse: Tensor, causal: bool, random: Random,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """Gradients of q, keys and values."""
        k, v = self._key_value(packed)
        extra = v.shape[-1] - self.value_dim
        if extra:
            grad, out = F.pad(grad, (0, extra)), F.pad(out, (0, extra))
        grad, q, out, lse = (t.transpose(1, 2) for t in (grad, q, out, lse))
        bias = additive(mask, q.dtype)
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

    def _key_value(self, packed: Tensor) -> tuple[Tensor, Tensor]:
        width = packed.shape[-1] - self.value_dim if packed.device.type == "cpu" else self.value_dim
        return packed[..., self.value_dim :].transpose(1, 2), packed[..., :width].transpose(1, 2)


def _cuda_bias(bias: Tensor | None, q: Tensor) -> Tensor | None:
    """The mask for every head and query, its rows starting at the 16-byte boundaries that the kernel loads from."""
    if bias is None:
        return None
    size = bias.shape[-1]
    return F.pad(bias, (0, -size % 8))[..., :size].expand(bias.shape[0], q.shape[1], q.shape[2], size)
