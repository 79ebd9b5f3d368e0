"""Steps of a decoding loop: one token of each row, on CUDA by a graph that is captured once."""

from typing import Protocol

import torch
from torch import Tensor

from attnlab.attention import Cache

WARM_UP = 2  # steps that run as they are before the first capture: libraries allocate and choose kernels in them
LEAST = 8  # steps that must follow: a capture takes as long as some of them


class Stepping(Protocol):
    """A model that continues text through caches."""

    def step(self, tokens: Tensor, caches: list[Cache]) -> Tensor: ...


class Steps:
    """Calls `model.step` with one token of each row, again and again.

    On CUDA the step is captured in a graph after `WARM_UP` calls and replayed from then on: its dozens of small
    kernels are started at once. Caches become static for that (`Cache.make_static`). Where a mechanism's steps need the
    length on the host, or on another device, each call runs as it is.

    Args:
        model: in eval mode.
        caches: its own, of as many rows as the tokens that follow.
        steps: how many calls there will be at most.
        graphs: False: nothing is captured.
    """

    def __init__(self, model: Stepping, caches: list[Cache], steps: int, *, graphs: bool = True) -> None:
        self.model, self.caches, self.left, self.graphs = model, caches, steps, graphs
        self.calls = 0
        self._graph: torch.cuda.CUDAGraph | None = None
        self._tokens = self._logits = torch.empty(0)

    @property
    def captured(self) -> bool:
        """Whether steps are replayed now."""
        return self._graph is not None

    def __call__(self, tokens: Tensor) -> Tensor:
        """The next tokens (B, 1) -> logits (B, 1, V), which the next call may overwrite."""
        self.left -= 1
        self.calls += 1
        if self._graph is not None:
            self._tokens.copy_(tokens)
            self._graph.replay()
            for cache in self.caches:
                cache.length += cache.static_length is not None
            return self._logits
        if not self._worth_it(tokens):
            return self.model.step(tokens, self.caches)
        if not all(cache.is_static for cache in self.caches):
            for cache in self.caches:
                if not cache.is_static:
                    cache.make_static()
            return self._beside(tokens)
        return self._captured(tokens)

    def reset(self) -> None:
        """The caches have other rows, or other buffers: what was captured is not valid any more."""
        self._graph, self._tokens, self._logits = None, torch.empty(0), torch.empty(0)

    def _worth_it(self, tokens: Tensor) -> bool:
        return (
            self.graphs
            and tokens.is_cuda
            and self.calls > WARM_UP
            and self.left >= LEAST
            and all(cache.can_be_static for cache in self.caches)
        )

    def _beside(self, tokens: Tensor) -> Tensor:
        """The first static step, which has kernels of its own: on a side stream, as CUDA asks before a capture."""
        side, current = torch.cuda.Stream(), torch.cuda.current_stream()
        side.wait_stream(current)
        with torch.cuda.stream(side):
            logits = self.model.step(tokens, self.caches)
        current.wait_stream(side)
        return logits

    def _captured(self, tokens: Tensor) -> Tensor:
        """Capture a step, and replay it."""
        lengths = [cache.length for cache in self.caches]
        self._tokens, graph = tokens.clone(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._logits = self.model.step(self._tokens, self.caches)
        for cache, length in zip(self.caches, lengths, strict=True):
            cache.length = length  # capturing has run nothing
        self._graph, self.calls, self.left = graph, self.calls - 1, self.left + 1
        return self(tokens)
