"""Forward and backward of merged attention: a causal text with a stride, after pasts that every query sees.

Shapes: q (B, T, H, D). Keys and values come packed, [value | key] on the last axis: (B, T, H, Dv + D), Dv <= D.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from .backends import Backend, kernels_run
from .merged import merged_backward, merged_forward
from .sdpa import Kernel, Random, dot, fold, merge, unfold, wide


class Past(NamedTuple):
    """Keys and values that every query sees. B' divides B if rows share a prefix.

    Args:
        packed: [value | key] of each position, (B', K, H, Dv + D).
        mask: (B', K) bool, true where a position exists; None: all exist.
    """

    packed: Tensor
    mask: Tensor | None = None


class SavedForBackward(NamedTuple):
    """Values that backward needs besides inputs and output.

    Args:
        lse: log-sum-exp of each query's logits, (B, T, H).
        diagonal: logits of the keys that only one query reads, (B, T/s, s - 1, H); None if s = 1, after one call and
            after NATIVE.
        mask: dropout factors of these keys, (B, T/s, s - 1, H); None without dropout.
        randoms: dropout state of each kernel call, in the order of the calls.
    """

    lse: Tensor
    diagonal: Tensor | None
    mask: Tensor | None
    randoms: tuple[Random, ...]

    def flat(self) -> list[Tensor | None]:
        return [self.lse, self.diagonal, self.mask, *(t for random in self.randoms for t in random)]

    @classmethod
    def of(cls, flat: Any) -> "SavedForBackward":
        lse, diagonal, mask, *rest = flat
        return cls(lse, diagonal, mask, tuple(Random(*rest[i : i + 2]) for i in range(0, len(rest), 2)))

    @classmethod
    def joined(cls, parts: Sequence["SavedForBackward"]) -> "SavedForBackward":
        """Join groups of heads, which had the same kernel calls. With dropout there is only one group."""
        if len(parts) == 1:
            return parts[0]
        diagonals = [part.diagonal for part in parts if part.diagonal is not None]
        diagonal = torch.cat(diagonals, -1) if diagonals else None
        return cls(torch.cat([part.lse for part in parts], -1), diagonal, None, parts[0].randoms)

    def heads(self, heads: slice) -> "SavedForBackward":
        diagonal, mask = (None if t is None else t[..., heads] for t in (self.diagonal, self.mask))
        return SavedForBackward(self.lse[..., heads], diagonal, mask, self.randoms)


class MergedPattern(NamedTuple):
    """Forward and backward over packed keys and values.

    With a stride s, s consecutive queries, beginning with the last one of a chunk, see the same slots: shifted by s - 1
    positions, query i sees the slots j <= i // s. Keys that only one query sees are merged afterwards.
    """

    kernel: Kernel
    stride: int = 1

    def forward(self, q: Tensor, packed: Tensor, past: Iterable[Past]) -> tuple[Tensor, SavedForBackward]:
        """Output (B, T, H, Dv), and the values that backward needs."""
        out = q.new_empty(*q.shape[:3], self.kernel.value_dim)
        return out, self.fill(q, packed, past, out)

    def fill(self, q: Tensor, packed: Tensor, past: Iterable[Past], out: Tensor) -> SavedForBackward:
        """As :meth:`forward`, written into `out`."""
        (kernel, s), lse = self, q.new_empty(q.shape[:3], dtype=wide(q.dtype))
        diagonal: Tensor | None = None
        mask: Tensor | None = None
        randoms: list[Random] = []
        if kernel.backend is Backend.NATIVE:
            merged_forward(q, packed, out, lse, kernel.scale, s)
        elif self._one_call(q):
            randoms.append(self._fill_at_once(q, packed, out, lse))
        else:
            randoms += kernel.causal(q[:, s - 1 :], packed[:, s - 1 :: s], out[:, s - 1 :], lse[:, s - 1 :], s)
            if s > 1:
                diagonal, mask = self._merge_diagonal(q, packed, out, lse)
        for p in past:
            beam = q.shape[0] // p.packed.shape[0]
            o, new, random = kernel.forward(fold(q, beam), p.packed, p.mask, causal=False)
            randoms.append(random)
            merge(out, lse, unfold(o, beam), unfold(new, beam))
        return SavedForBackward(lse, diagonal, mask, tuple(randoms))

    def _merge_diagonal(self, q: Tensor, packed: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor | None]:
        """Merge the keys that only one query reads -> their logits and dropout factors, (B, T/s, s - 1, H)."""
        queries, rows, rows_lse = (self._places(t) for t in (q, out, lse))
        value, key = self._diagonal_packed(packed)
        diagonal = dot(queries, key) * self.kernel.scale
        mask = F.dropout(torch.ones_like(diagonal), self.kernel.dropout) if self.kernel.dropout else None
        read = value if mask is None else value * mask.unsqueeze(-1).to(value.dtype)
        rows[:, 0], rows_lse[:, 0] = read[:, 0], diagonal[:, 0]
        merge(rows[:, 1:], rows_lse[:, 1:], read[:, 1:], diagonal[:, 1:])
        return diagonal, mask

    def _one_call(self, q: Tensor) -> bool:
        """Whether one call computes all places of a chunk, and a Triton kernel merges it with each query's own key."""
        return self.stride > 1 and self.kernel.dropout == 0 and q.stride(-1) == 1 and kernels_run(q)

    def _at_once(self, packed: Tensor, *of_queries: Tensor) -> list[Tensor]:
        """Slots that later chunks read, (B s, T/s - 1, ...), and (B, T, ...) in the same form, from chunk 1 on."""
        s = self.stride
        slots = packed[:, s - 1 : packed.shape[1] - s : s].unsqueeze(1).expand(-1, s, -1, -1, -1).flatten(0, 1)
        return [slots.contiguous(), *(t[:, s:].unflatten(1, (-1, s)).transpose(1, 2).flatten(0, 1) for t in of_queries)]

    def _fill_at_once(self, q: Tensor, packed: Tensor, out: Tensor, lse: Tensor) -> Random:
        from .kernels.own import merge_own  # needs triton

        random, (slots, queries) = Random(), self._at_once(packed, q)
        part, part_lse = out[:, :0], lse[:, :0]
        if queries.shape[1]:
            part, part_lse, random = self.kernel.forward(queries, slots, None, causal=True)
        merge_own(q, packed, self.kernel.scale, self.stride, part, part_lse, out, lse)
        return random

    def _backward_at_once(
        self, grad: Tensor, q: Tensor, packed: Tensor, out: Tensor, lse: Tensor, dq: Tensor, dpacked: Tensor,
        random: Random,
    ) -> None:  # fmt: skip
        from .kernels.own import merge_own_backward

        slots, g, queries, o, o_lse = self._at_once(packed, grad, q, out, lse)
        parts = queries, queries, queries
        if queries.shape[1]:
            g, o = (self.kernel.wide_enough(t, q.shape[-1]) for t in (g, o))
            parts = self.kernel.backward(g, queries, slots, None, o, o_lse, True, random)
        merge_own_backward(grad, q, packed, self.kernel.scale, self.stride, out, lse, parts, dq, dpacked)

    def backward(
        self,
        grad: Tensor,
        q: Tensor,
        packed: Tensor,
        past: list[Past],
        out: Tensor,
        saved: SavedForBackward,
        dq: Tensor,
    ) -> tuple[Tensor, list[Tensor]]:
        """Fill dq, the gradient of q, and return the gradients of `packed` and of each past."""
        (kernel, s), width, randoms = self, q.shape[-1], iter(saved.randoms)
        dpacked = q.new_empty(packed.shape)
        if kernel.backend is Backend.NATIVE:
            merged_backward(grad, q, packed, out, saved.lse, dq, dpacked, kernel.scale, s)
        elif s > 1 and saved.diagonal is None:
            self._backward_at_once(grad, q, packed, out, saved.lse, dq, dpacked, next(randoms))
        else:
            shifted = slice(s - 1, None)
            kernel.causal_backward(
                grad[:, shifted], q[:, shifted], packed[:, s - 1 :: s], out[:, shifted], saved.lse[:, shifted],
                dq[:, shifted], dpacked[:, s - 1 :: s], randoms, s,
            )  # fmt: skip
            dq[:, : s - 1] = 0.0
        if saved.diagonal is not None:
            self._diagonal_backward(grad, q, packed, out, saved, dq, dpacked)
        more = []
        for item in past:
            beam = q.shape[0] // item.packed.shape[0]
            g, queries, o, lse = (fold(t, beam) for t in (grad, q, out, saved.lse))
            g, o = (kernel.wide_enough(t, width, item.mask) for t in (g, o))
            more_q, dk, d_value = kernel.backward(g, queries, item.packed, item.mask, o, lse, False, next(randoms))
            dq += unfold(more_q, beam)
            more.append(torch.cat((d_value, dk), -1))
        return dpacked, more

    def _diagonal_backward(
        self, grad: Tensor, q: Tensor, packed: Tensor, out: Tensor, saved: SavedForBackward, dq: Tensor, dpacked: Tensor
    ) -> None:
        """Gradients of the keys that only one query sees: fill these positions of dpacked, and add to dq."""
        assert saved.diagonal is not None
        queries, g, o, d_queries, lse = (self._places(t) for t in (q, grad, out, dq, saved.lse))
        (value, key), (d_value, d_key) = self._diagonal_packed(packed), self._diagonal_packed(dpacked)
        p = torch.exp(saved.diagonal - lse)
        scores, weight = value - o, p
        if saved.mask is not None:
            scores, weight = value * saved.mask.unsqueeze(-1).to(value.dtype) - o, p * saved.mask
        ds = (dot(g, scores) * p * self.kernel.scale).to(q.dtype).unsqueeze(-1)
        _multiply_into(d_value, g, weight.to(q.dtype).unsqueeze(-1))
        _multiply_into(d_key, queries, ds)
        d_queries.addcmul_(key, ds)

    def _places(self, x: Tensor) -> Tensor:
        """(B, T, ...) -> (B, T/s, s - 1, ...): the positions whose keys only one query sees."""
        return x.unflatten(1, (-1, self.stride))[:, :, :-1]

    def _diagonal_packed(self, packed: Tensor) -> tuple[Tensor, ...]:
        """Values and keys at these positions."""
        return self._places(packed).tensor_split([self.kernel.value_dim], -1)


def _multiply_into(out: Tensor, a: Tensor, b: Tensor) -> None:
    """out = a * b without a temporary tensor. torch.compile refuses `out=` of a slice, and fuses the copy."""
    if torch.compiler.is_compiling():
        out.copy_(a * b)
    else:
        torch.mul(a, b, out=out)
