"""Cached steps of one attention layer."""

import itertools
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from omegaconf import DictConfig
from torch import Tensor

from attnlab.attention import Attention, Cache
from attnlab.bench.products import product_seconds
from attnlab.bench.settings import Settings, Shape, rounded
from attnlab.bench.stepping import Layer, compiler, first_tokens
from attnlab.bench.variants import AttentionVariant
from attnlab.bench.workloads.attention import AttentionWorkload, random_inputs
from attnlab.decoding.steps import Stepping, Steps


def begins_with_context(attention: Attention) -> None:
    """LookupError: the mechanism's cache has no buffers that could be filled.

    Args:
        attention: the mechanism.
    """
    if not attention.new_cache(1, 1).buffers():
        raise LookupError("its cache grows step by step: it cannot begin with a context")


def begin(cache: Cache, context: int) -> None:
    """Fill a cache at random: a step's time does not depend on the values, and attending would take long.

    Args:
        cache: new, with room for them.
        context: text positions.
    """
    for buffer in cache.buffers():
        buffer[...] = torch.randn(buffer.shape[1:], dtype=buffer.dtype, device=buffer.device)
    cache.length = context


class Decoding(AttentionWorkload):
    """Cached steps of an attention layer, after the prefix, the context and a first step, which `prepare` takes.

    Arguments are those of `Workload`.

    Raises:
        LookupError: there is a context, but the cache has no buffers that could be filled with it.
    """

    about = (
        "one attention layer, one token a call, after the prefix, `context` positions of text "
        "(the cache filled at random) and a first token, on CUDA four, in which the step is captured (prepare_seconds)"
    )
    checked = ("output", "steps")
    section = "inference"
    steps = True

    def __init__(self, variant: AttentionVariant, shape: Shape, dtype: torch.dtype, device: torch.device) -> None:
        attention = variant.attention(dtype, device)
        self.attention, self.attentions, self.shape = attention, [attention], shape
        self.first = first_tokens(device)
        self.x = random_inputs(attention, shape.batch, shape.text + self.first)
        self.prefix = random_inputs(attention, shape.batch, shape.prefix)
        self.rows = torch.arange(shape.batch, device=self.x.device)
        self.size = (shape.batch, shape.context + shape.text + self.first, shape.prefix)
        if shape.context:
            begins_with_context(attention)
        self.cache: Cache | None = None
        self.model: Stepping = Layer(attention)
        self.compiled = compiler(variant.compiled, variant.cfg, device)
        self.step = self._stepped([])

    def _stepped(self, caches: list[Cache]) -> Callable[[Tensor], Tensor]:
        """What takes the next step of a run; steps that are compiled or captured need their loop (`Steps`)."""
        if self.compiled is not None or self.rows.is_cuda:
            return Steps(self.model, caches, self.shape.text + self.first, compiled=self.compiled)
        return lambda tokens: self.model.step(tokens, caches)

    def _begin(self, tokens: Tensor, caches: list[Cache]) -> None:
        """The first steps, which are not measured."""
        self.step = self._stepped(caches)
        for t in range(self.first):
            self.step(tokens[:, t : t + 1])
        self.captured = isinstance(self.step, Steps) and self.step.captured

    @classmethod
    def shapes(cls, cfg: DictConfig, settings: Settings) -> list[Shape]:
        common = cls.__name__.lower(), settings.batch, settings.beam, settings.prefix, settings.steps
        ways = itertools.product(settings.contexts, settings.reorder)
        return [Shape(*common, reorder, context) for context, reorder in ways]

    @classmethod
    def describe(cls, shape: Shape) -> dict[str, Any]:
        return {"prefix": shape.prefix, "steps": shape.text, "context": shape.context, "reorder": shape.reorder}

    @torch.inference_mode()
    def prepare(self) -> None:
        self.cache = None  # released before the next one is made
        self.cache = self.attention.new_cache(*self.size)
        if self.shape.prefix:
            self.attention.read_prefix(self.prefix, None, self.cache)
        if self.shape.context:
            begin(self.cache, self.shape.context)
        self._begin(self.x, [self.cache])

    @torch.inference_mode()
    def run(self) -> None:
        assert self.cache is not None
        for t in range(self.first, self.first + self.shape.text):
            if self.shape.reorder:
                self.cache.reorder(self.rows)
            self.step(self.x[:, t : t + 1])

    def bytes_read(self) -> int:
        """Of each step the weights and the whole cache: a lower bound but for the slots that fill up meanwhile."""
        assert self.cache is not None
        weights = sum(p.numel() * p.element_size() for p in self.attention.parameters())
        return self.shape.text * (weights + self.cache.nbytes)

    def rates(self, seconds: float) -> dict[str, Any]:
        """On a CPU: of three more runs with the profiler and three without, in turns, what matrix products take.

        Seconds, and the share of the time outside of them. It is negative where other work slows the former runs down.
        """
        if self.rows.device.type != "cpu":
            return {}
        products, whole = [], []
        for _ in range(3):
            self.prepare()
            began = time.perf_counter()
            self.run()
            whole.append(time.perf_counter() - began)
            self.prepare()
            products.append(product_seconds(self.run))
        share = 1 - median(part / run for part, run in zip(products, whole, strict=True))
        return {"product_seconds": rounded(median(products)), "share_outside_products": rounded(share, 3)}

    def cache_bytes(self) -> dict[str, int]:
        assert self.cache is not None
        predicted = self.attention.cache_bytes(*self.size, dtype=self.x.dtype)
        return {"measured": self.cache.nbytes, "predicted": predicted}
