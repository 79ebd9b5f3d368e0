"""Base classes of the published algorithms: a growing cache, one token per step, masks and tables at each call."""

from abc import abstractmethod
from functools import partial
from typing import Any

import torch
from torch import Tensor

from attnlab.attention.base import Attention, Cache, rows_of
from attnlab.attention.ops.backends import memoized


class PublishedCache(Cache):
    """Tensors that grow by concatenation. Every row has a copy of the prefix.

    Args:
        like: empty tensor with the dtype and device of the cache.
    """

    def __init__(
        self, attention: Any, batch: int, capacity: int, prefix_capacity: int, beam: int, like: Tensor
    ) -> None:
        self.batch, self.beam, self.capacity, self.prefix_capacity = batch, beam, capacity, prefix_capacity
        self.tensors: dict[str, Tensor] = {}
        self.prefix: Tensor | None = None  # until the first step has computed its keys
        self.steps: Tensor | None = None  # (B,) positions read, including the prefix

    def buffers(self) -> list[Tensor]:
        return list(self.tensors.values())

    @property
    def rows(self) -> int:
        return super().rows if self.tensors else self.batch

    def reorder(self, rows: Tensor) -> None:
        self.tensors = {name: tensor.index_select(0, rows) for name, tensor in self.tensors.items()}
        if self.steps is not None:
            self.steps = self.steps.index_select(0, rows)

    def select(self, prefixes: Tensor) -> None:
        self.reorder(rows_of(prefixes, self.beam))

    def crop(self, length: int) -> None:
        raise ValueError("the published cache cannot be cropped")

    def grow(self, name: str, new: Tensor, dim: int) -> Tensor:
        """Append to a tensor of the cache, by concatenation."""
        before = self.tensors.get(name)
        self.tensors[name] = new if before is None else torch.cat((before, new), dim)
        return self.tensors[name]


class Published(Attention):
    """A published algorithm: a step takes one token, and its cache stores prefix and text together.

    Args:
        original: module of attnlab, whose weights are used.
    """

    cache_type = PublishedCache

    def __init__(self, original: Any) -> None:
        super().__init__()
        self.original, self.d_model = original, original.d_model

    @abstractmethod
    def step(self, x: Tensor, new: Tensor, cache: PublishedCache) -> Tensor:
        """One query x (B, 1, d). `new` (B, n, d) are the positions that are not in the cache, ending with x."""

    def _store_prefix(self, prefix: Tensor, prefix_lengths: Tensor | None, cache: Cache) -> None:
        """Copy the prefix to every row. The first step computes its keys."""
        assert isinstance(cache, PublishedCache)
        equally_long(prefix_lengths, prefix)
        cache.prefix = prefix.repeat_interleave(cache.beam, 0)

    def _extend(self, x: Tensor, cache: Cache) -> Tensor:
        assert isinstance(cache, PublishedCache)
        if x.shape[1] != 1:
            raise ValueError("the published step takes one token a call")
        new = x if cache.prefix is None else torch.cat((cache.prefix, x), 1)
        if cache.steps is None:
            cache.steps = torch.zeros(cache.batch, dtype=torch.long, device=x.device)
        cache.prefix = None
        cache.steps = cache.steps + new.shape[1]
        return self.step(x, new, cache)

    @property
    def cache_elements_per_token(self) -> float:
        return float(self.original.cache_elements_per_token)

    def cache_elements(
        self, batch: int, capacity: int, prefix_capacity: int = 0, prefix_batch: int | None = None
    ) -> int:
        """Elements of the cache after `capacity` tokens: prefix and text, once per row."""
        return int(self.original.cache_elements(batch, prefix_capacity + capacity))

    def multiply_adds(self, context: int, prefix: int = 0) -> int:
        return int(self.original.multiply_adds(context, prefix))

    def quadratic_bytes(self, batch: int, text: int, prefix: int = 0, layers: int = 1) -> int:
        """Approximate bytes of the N x K tensors of a training step: probabilities per layer, and two temporaries."""
        scores = batch * self.original.num_heads * text * (prefix + text)
        return int((layers + 2) * scores * self.original.out.weight.itemsize)


class PublishedJoint(Published):
    """Base of algorithms whose queries read prefix and text as one sequence."""

    def _forward(
        self, x: Tensor, prefix: Tensor | None, lengths: Tensor | None, prefix_lengths: Tensor | None
    ) -> Tensor:
        equally_long(lengths, x)
        if prefix is None:
            return self.attend(x, x)
        equally_long(prefix_lengths, prefix)
        return self.attend(x, torch.cat((prefix, x), 1))

    @abstractmethod
    def attend(self, x: Tensor, joint: Tensor) -> Tensor:
        """Attention of x (B, N, d), the last N positions of joint (B, K, d), in parallel."""


def equally_long(lengths: Tensor | None, x: Tensor) -> None:
    """Raise ValueError if rows of `x` (B, T, d) with these `lengths` (B,) have padding."""
    if lengths is not None and bool((lengths != x.shape[1]).any()):
        raise ValueError("the published algorithms have no padding: expected rows of equal length")


def heads(x: Tensor, heads: int) -> Tensor:
    """x (B, T, H D) -> (B, H, T, D)."""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def softmax(scores: Tensor) -> Tensor:
    """Softmax over the last axis of `scores`, computed in float32 or wider, in their dtype."""
    return scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(scores.dtype)


def frequencies(width: int, theta: float, dtype: torch.dtype, device: torch.device | None = None) -> Tensor:
    """theta^(-2m / width) for m = 0 ... width/2 - 1, (width/2,)."""
    return theta ** (-torch.arange(0, width, 2, dtype=dtype, device=device) / width)


def turn(x: Tensor, first: int, theta: float) -> Tensor:
    """Rotary embedding of x (..., n, D) at positions first ... first+n-1. The table is computed at each call."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    positions = torch.arange(first, first + x.shape[-2], dtype=dtype, device=x.device)
    angles = positions[:, None] * frequencies(x.shape[-1], theta, dtype, x.device)
    cos, sin = angles.cos(), angles.sin()
    left, right = x.to(dtype).chunk(2, -1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), -1).to(x.dtype)


@partial(memoized, size=1)  # the released decoder caches one mask
def causal(queries: int, keys: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Additive mask of the last N positions over K = S + N keys, (N, K): 0 where a key is seen."""
    return torch.full((queries, keys), float("-inf"), dtype=dtype, device=device).triu(keys - queries + 1)
