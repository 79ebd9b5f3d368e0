"""Steps of a decoding loop: one token of each row, by a CUDA graph that is captured once, or compiled."""

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from attnlab.attention import Cache

WARM_UP = 2  # steps that run as they are before the first capture: libraries allocate and choose kernels in them
LEAST = 8  # steps that must follow: a capture takes as long as some of them
BLOCK = 32  # positions by which the reads of a compiled step grow, which has no kernel that reads counts
Compiler = Callable[[Callable[..., Any]], Callable[..., Any]]  # a bound method -> its compiled form


class Stepping(Protocol):
    """A model that continues text through caches."""

    @property
    def step(self) -> Callable[[Tensor, list[Cache]], Tensor]:
        """(B, n) tokens, caches -> logits (B, n, V). A model that wraps another may hand on the other's method."""


class Steps:
    """Calls `model.step` with one token of each row, again and again.

    On CUDA the step is captured in a graph after `WARM_UP` calls and replayed from then on: its dozens of small
    kernels are started at once. On a CPU a compiler fuses them, where there is one. Caches become static for both
    (`Cache.make_static`). Where a mechanism's steps need the length on the host, or on another device, each call runs
    as it is.

    A compiled step is one graph for all lengths, numbers of rows and sizes of prefixes from two on, and another one
    where prefixes differ in length. It reads the text positions that exist, rounded up to `BLOCK`.

    Args:
        model: in eval mode.
        caches: of as many rows as the tokens that follow.
        steps: how many calls there will be at most.
        graphs: False: nothing is captured.
        compiled: gives the compiled form of `model.step`, the same one for every search; it must take sizes as
            variables. None: nothing is compiled.
    """

    def __init__(
        self,
        model: Stepping,
        caches: list[Cache],
        steps: int,
        *,
        graphs: bool = True,
        compiled: Compiler | None = None,
    ) -> None:
        self.model, self.caches, self.left, self.graphs, self.compiled = model, caches, steps, graphs, compiled
        self.calls = 0
        self._varied = False
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
            self._count()
            return self._logits
        if self.compiled is not None and tokens.device.type == "cpu" and self._can_be_static:
            return self._compiled(tokens, self.compiled)
        if not self._worth_it(tokens):
            return self.model.step(tokens, self.caches)
        if not all(cache.is_static for cache in self.caches):
            self._make_static()
            return self._beside(tokens)
        return self._captured(tokens)

    def reset(self) -> None:
        """The caches have other rows, or other buffers: what was captured is not valid any more."""
        self._graph, self._tokens, self._logits = None, torch.empty(0), torch.empty(0)
        self._varied = False

    @property
    def _can_be_static(self) -> bool:
        return all(cache.can_be_static for cache in self.caches)

    def _make_static(self) -> None:
        for cache in self.caches:
            if not cache.is_static:
                cache.make_static()

    def _count(self) -> None:
        """What a replayed or compiled step does not see."""
        for cache in self.caches:
            cache.length += cache.static_length is not None

    def _compiled(self, tokens: Tensor, compiled: Compiler) -> Tensor:
        self._make_static()
        for cache in self.caches:
            if cache.static_length is None:
                continue
            if cache.length >= cache.capacity:
                raise ValueError(f"the cache has room for {cache.capacity} positions, which are held already")
            if not self._varied or cache.length % BLOCK == 0:
                cache.bound_reads(cache.length + BLOCK - cache.length % BLOCK)
                self._varied = False
        _let_vary([tokens] if self._varied else [tokens, *self.caches])
        self._varied = True
        lengths = [cache.length for cache in self.caches]
        logits: Tensor = compiled(self.model.step)(tokens, self.caches)
        for cache, length in zip(self.caches, lengths, strict=True):
            cache.length = length  # counted already where torch ran the step, or a part of it, without compiling it
        self._count()
        return logits

    def _worth_it(self, tokens: Tensor) -> bool:
        return self.graphs and tokens.is_cuda and self.calls > WARM_UP and self.left >= LEAST and self._can_be_static

    def _beside(self, tokens: Tensor) -> Tensor:
        """The first static step, which starts other kernels: on a side stream, as CUDA asks before a capture."""
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


def _let_vary(things: list[Any]) -> None:
    """Sizes of these tensors, and of those that caches hold, are variables of what is compiled, not constants."""
    for thing in things:
        if isinstance(thing, Cache):
            _let_vary(list(vars(thing).values()))
        elif isinstance(thing, dict):
            _let_vary(list(thing.values()))
        elif isinstance(thing, Tensor):
            for axis in range(thing.dim()):
                torch._dynamo.maybe_mark_dynamic(thing, axis)
