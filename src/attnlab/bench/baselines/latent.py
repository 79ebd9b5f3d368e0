"""Algorithms of MTLA's released system: multi-head, latent and temporal latent attention."""

import torch
from torch import Tensor

from attnlab.bench.baselines.base import PublishedCache, PublishedJoint, causal, frequencies, heads, softmax, turn


class PublishedMHA(PublishedJoint):
    """Plain matrix products. Key and value heads are copied to the number of query heads."""

    def _keys(self, new: Tensor, first: int) -> tuple[Tensor, Tensor]:
        a = self.original
        k = turn(heads(a.key(new), a.num_kv_heads), first, a.rope_theta)
        return k, heads(a.value(new), a.num_kv_heads)

    def _read(self, x: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        a, steps = self.original, x.shape[1]
        q = turn(heads(a.query(x) * a.head_dim**-0.5, a.num_heads), k.shape[2] - steps, a.rope_theta)
        group = a.num_heads // a.num_kv_heads
        if group > 1:
            k, v = (t.repeat_interleave(group, dim=1) for t in (k, v))
        scores = q @ k.mT
        if mask is not None:
            scores = scores + mask
        return a.out((softmax(scores) @ v).transpose(1, 2).flatten(2))

    def attend(self, x: Tensor, joint: Tensor) -> Tensor:
        return self._read(x, *self._keys(joint, 0), causal(x.shape[1], joint.shape[1], x.dtype, x.device))

    def step(self, x: Tensor, new: Tensor, cache: PublishedCache) -> Tensor:
        first = cache.tensors["key"].shape[2] if cache.tensors else 0
        k, v = self._keys(new, first)
        return self._read(x, cache.grow("key", k, 2), cache.grow("value", v, 2), None)


class PublishedMLA(PublishedJoint):
    """Absorbed in training and in decoding: queries of width r + d_r read latents of width r."""

    def _latents(self, new: Tensor, first: int) -> tuple[Tensor, Tensor]:
        a = self.original
        latent, rotary = a.down(new).split([a.latent_dim, a.rope_dim], -1)
        return a.norm(latent), turn(rotary, first, a.rope_theta)

    def _read(self, x: Tensor, latent: Tensor, rotary: Tensor, first: int, mask: Tensor | None) -> Tensor:
        """latent (B, K, r), rotary (B, K, d_r); `first` is the index of x's first position."""
        a = self.original
        q = a.query(x).unflatten(-1, (a.num_heads, -1))
        content, turned = q[..., : a.head_dim], q[..., a.head_dim :]
        turned = turn(turned.transpose(1, 2), first, a.rope_theta).transpose(1, 2)
        up_key, up_value = a.up_matrices()
        absorbed = torch.einsum("bnhd,hdr->bnhr", content, up_key)
        scores = torch.einsum("bnhr,bkr->bnhk", absorbed, latent) + torch.einsum("bnhr,bkr->bnhk", turned, rotary)
        scores = scores * a.scale
        if mask is not None:
            scores = scores + mask[:, None]
        read = torch.einsum("bnhk,bkr->bnhr", softmax(scores), latent)
        return a.out(torch.einsum("bnhr,hdr->bnhd", read, up_value).flatten(2))

    def attend(self, x: Tensor, joint: Tensor) -> Tensor:
        size, steps = joint.shape[1], x.shape[1]
        return self._read(x, *self._latents(joint, 0), size - steps, causal(steps, size, x.dtype, x.device))

    def step(self, x: Tensor, new: Tensor, cache: PublishedCache) -> Tensor:
        first = cache.tensors["latent"].shape[1] if cache.tensors else 0
        latent, rotary = self._latents(new, first)
        last = first + new.shape[1] - 1
        return self._read(x, cache.grow("latent", latent, 1), cache.grow("rotary", rotary, 1), last, None)


class PublishedMTLA(PublishedMLA):
    """Gates for every pair of positions, K x K masks at each call, and scores of all K columns."""

    def _slot_gates(self, slots: int, like: Tensor, first: int = 0) -> Tensor:
        """fc_c of the sinusoid of slots first ... first+slots-1, (slots, g), computed on the CPU at each call."""
        width = self.original.latent_dim
        dtype = torch.promote_types(like.dtype, torch.float32)
        angles = torch.arange(first, first + slots, dtype=dtype)[:, None] * frequencies(width, 10000.0, dtype)
        sinusoid = torch.stack((angles.sin(), angles.cos()), -1).flatten(1)
        return self.original.gate_slot(sinusoid.to(like.device, like.dtype))

    def _gates(self, slots: Tensor, latent: Tensor) -> Tensor:
        """Gates of every slot row for every latent: (., g), (B, K, r) -> (B, ., K)."""
        return torch.sigmoid(slots @ self.original.gate_latent(latent).mT)

    def attend(self, x: Tensor, joint: Tensor) -> Tensor:
        s, size, steps = self.original.stride, joint.shape[1], x.shape[1]
        latent, rotary = self._latents(joint, 0)
        slots = self._slot_gates(-(-size // s), latent).repeat_interleave(s, 0)[:size]
        merged = (self._gates(slots, latent) * _chunk_mask(size, s).to(latent)) @ latent
        return self._read(x, merged, rotary, size - steps, _stride_mask(size, s).to(latent)[-steps:])

    def step(self, x: Tensor, new: Tensor, cache: PublishedCache) -> Tensor:
        assert cache.steps is not None
        s, size = self.original.stride, new.shape[1]
        total = int(cache.steps[0])  # the same for all rows; synchronises
        latent, rotary = self._latents(new, total - size)
        slots = -(-total // s)
        if not cache.tensors and size > 1:
            ends = list(range(s - 1, size, s))
            if size % s:
                ends.append(size - 1)
            gates = self._gates(self._slot_gates(slots, latent), latent) * _chunk_mask(size, s)[ends].to(latent)
            cache.tensors = {"latent": gates @ latent, "rotary": rotary[:, ends]}
        else:
            gated = self._gates(self._slot_gates(1, latent, slots - 1), latent).mT * latent
            if not cache.tensors or total % s == 1:
                cache.grow("latent", gated, 1)
                cache.grow("rotary", rotary, 1)
            else:  # with stride 1 always, as published: all tokens share one slot
                cache.tensors["latent"][:, -1:] += gated
                cache.tensors["rotary"][:, -1:] = rotary
        return self._read(x, cache.tensors["latent"], cache.tensors["rotary"], total - 1, None)

    def quadratic_bytes(self, batch: int, text: int, prefix: int = 0, layers: int = 1) -> int:
        """Includes the gates of all pairs, before and after sigmoid and mask, and the masks."""
        pairs = (prefix + text) ** 2 * self.original.out.weight.itemsize
        gates = (layers * (2 * batch + 1) + batch + 2) * pairs
        return super().quadratic_bytes(batch, text, prefix, layers) + gates


def _chunk_mask(size: int, stride: int) -> Tensor:
    """(K, K): 1 where b is in the chunk of a, at or before a."""
    a, b = torch.arange(size)[:, None], torch.arange(size)[None]
    return ((a // stride == b // stride) & (a % stride >= b % stride)).float()


def _stride_mask(size: int, stride: int) -> Tensor:
    """Additive mask (K, K): query i sees the ends of chunks up to i, and itself."""
    i, j = torch.arange(size)[:, None], torch.arange(size)[None]
    return torch.full((size, size), -1e9).masked_fill_(((j <= i) & ((j + 1) % stride == 0)) | (i == j), 0.0)
