"""Attention of one step to a layer's cache, by each backend that supports it, and its bytes per second."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from omegaconf import DictConfig
from torch import Tensor

from attnlab.attention import GLA, GTA, MFA, MHA, MLA, TPA, Attention
from attnlab.attention.base import Cache
from attnlab.attention.ops.backends import Backend, prefer
from attnlab.attention.ops.decode import attend_cached
from attnlab.attention.ops.kernels import usable
from attnlab.attention.positional import PositionalCache
from attnlab.attention.tpa import FactorCache, Factors
from attnlab.bench.exactness import TOLERANCE
from attnlab.bench.settings import Settings, Shape, rounded
from attnlab.bench.variants import AttentionVariant, lineup
from attnlab.bench.workloads import Workload
from attnlab.run.record import NOT_RUN

CHECKED = {"cpu": (2, 5, 20), "cuda": (4, 130, 1000)}  # rows, prefix and context of the check


@dataclass(frozen=True)
class Reading(AttentionVariant):
    """A mechanism whose step is computed by a Triton kernel or by torch."""

    by: Literal["triton", "torch"] = "torch"

    def attention(self, dtype: torch.dtype, device: torch.device) -> MHA | MLA | TPA:
        """The mechanism of a layer. LookupError: no kernel supports it, or the layers have several."""
        attention = super().attention(dtype, device)
        other = isinstance(attention, GTA | MFA | GLA)  # which prepare queries or keys at each step
        if other or not (isinstance(attention, MHA | MLA) or isinstance(attention, TPA) and attention.has_kernel):
            raise LookupError(f"no kernel reads the cache of {type(attention).__name__} as it is")
        return attention

    def backend(self, attention: Attention, prefix: int, device: torch.device) -> Backend:
        """TRITON, or the fastest backend of torch. LookupError: no kernel runs on the device."""
        if self.by == "torch":
            return Backend.SDPA if isinstance(attention, MHA) and not prefix else Backend.PLAIN
        if not usable(device):
            raise LookupError(
                f"no Triton kernel runs on {device}: expected compute capability 8.0 or later, and triton"
            )
        return Backend.TRITON


class LayerRead:
    """Queries of a step, and a cache of random numbers with the rows, prefix and context of the shape."""

    def __init__(self, attention: MHA | MLA, shape: Shape, dtype: torch.dtype, device: torch.device) -> None:
        cache = attention.new_cache(shape.batch, max(1, shape.context), shape.prefix, dtype=dtype, device=device)
        assert isinstance(cache, PositionalCache)
        generator = torch.Generator(device).manual_seed(0)
        for buffer in cache.buffers():
            buffer.normal_(generator=generator)
        self.key, self.value = _keys_and_values(cache.text)
        self.prefix_key, self.prefix_value = _keys_and_values(cache.prefix)
        self.value_dim = attention.latent_dim if isinstance(attention, MLA) else None
        self.scale = self.key.shape[-1] ** -0.5
        self.used = self.key.shape[2] if shape.context else 0
        self.counts = torch.full((shape.batch,), self.used, device=device) if device.type == "cuda" else None
        heads, width = attention.num_heads, self.key.shape[-1]
        self.q = torch.randn(shape.batch, heads, 1, width, generator=generator, device=device, dtype=dtype)
        self.cache: Cache = cache

    def read(self, backend: Backend) -> Tensor:
        """Output (B, H, 1, Dv), computed by this backend."""
        with prefer(backend):
            return attend_cached(
                self.q, self.key, self.value, self.scale, self.prefix_key, self.prefix_value,
                value_dim=self.value_dim, used=self.used, counts=self.counts if backend is Backend.TRITON else None,
            )  # fmt: skip

    def exact(self) -> "LayerRead":
        """The same step in float64."""
        step = copy.copy(self)
        for name, tensor in vars(self).items():
            if isinstance(tensor, Tensor) and tensor.is_floating_point():
                setattr(step, name, tensor.double())
        return step


class FactorRead:
    """Query factors of a step, and a cache of random numbers, whose last position is that of the query."""

    @torch.no_grad()
    def __init__(self, attention: TPA, shape: Shape, dtype: torch.dtype, device: torch.device) -> None:
        size = max(1, shape.context)
        cache = attention.new_cache(shape.batch, size, shape.prefix, dtype=dtype, device=device)
        assert isinstance(cache, FactorCache)
        generator = torch.Generator(device).manual_seed(0)
        for buffer in cache.buffers():
            buffer.normal_(generator=generator)
        cache.length, cache.prefix_size = size - 1, shape.prefix
        x = torch.randn(shape.batch, 1, attention.d_model, generator=generator, device=device, dtype=dtype)
        self.factors = attention.rotated_factors(cache.angles(size - 1, size), *attention.project(x))
        self.attention, self.cache, self.batch = attention, cache, shape.batch

    @torch.no_grad()
    def read(self, backend: Backend) -> Tensor:
        """Output (B, 1, h, D), computed by this backend."""
        text, prefix = self.cache.text_segment(self.cache.length + 1), self.cache.prefix_segment()
        with prefer(backend):
            if self.attention.step_backend(1, text.like) is Backend.TRITON:
                return self.attention.read_by_kernel(self.factors, self.batch, self.cache)
            return self.attention.read_factors(self.factors, self.batch, [prefix, text] if prefix.size else [text])

    def exact(self) -> "FactorRead":
        """The same step in float64."""
        step = copy.copy(self)
        step.cache = copy.copy(self.cache)
        step.cache.text, step.cache.prefix = (
            {name: buffer.double() for name, buffer in buffers.items()}
            for buffers in (self.cache.text, self.cache.prefix)
        )
        step.factors = Factors(*(None if t is None else t.double() for t in self.factors))  # type: ignore[arg-type]
        return step


def step_of(
    attention: MHA | MLA | TPA, shape: Shape, dtype: torch.dtype, device: torch.device
) -> LayerRead | FactorRead:
    """The step of a mechanism that a kernel supports."""
    if isinstance(attention, TPA):
        return FactorRead(attention, shape, dtype, device)
    return LayerRead(attention, shape, dtype, device)


def _keys_and_values(buffers: dict[str, Tensor]) -> tuple[Tensor, Tensor | None]:
    """Keys and values (B, G, K, .); values of None are the first columns of the keys."""
    return (buffers["slots"].unsqueeze(1), None) if "slots" in buffers else (buffers["key"], buffers["value"])


class Kernels(Workload):
    """Attention of one step to a cache of `context` positions after a prefix of each row, without projections.

    On CUDA it is captured in a graph.

    Raises:
        LookupError: no kernel supports the mechanism, or a kernel would run in Triton's interpreter.
    """

    what = "kernels"
    about = (
        "the attention of one step of one layer, without projections, over `context` positions of text and a prefix of "
        "each row, at random. CUDA: a replayed CUDA graph of it; bytes_per_second: of the cache. Triton's interpreter "
        "is not timed"
    )
    checked = ("output",)
    keys = {"prefix": "prefix", "context": "context"}

    def __init__(self, variant: Reading, shape: Shape, dtype: torch.dtype, device: torch.device) -> None:
        attention = variant.attention(dtype, device)
        backend = variant.backend(attention, shape.prefix, device)
        if backend is Backend.TRITON and device.type != "cuda":
            raise LookupError("a kernel is timed on CUDA: its time in Triton's interpreter says nothing about it")
        self.step = step_of(attention, shape, dtype, device)
        self.call: Callable[[], object] = partial(self.step.read, backend)
        self.captured = device.type == "cuda"
        if self.captured:
            self.call = _captured(self.call)

    @classmethod
    def lineup(cls, cfg: DictConfig, settings: Settings) -> list[Reading]:
        """The configured mechanism by kernel and by torch, then each reference that is not a published algorithm."""
        backends: tuple[Literal["triton", "torch"], ...] = ("triton", "torch")
        return [
            Reading(**vars(variant) | {"name": f"{variant.name} {by}"}, by=by)
            for variant in lineup(cfg, settings)
            if not variant.published
            for by in backends
        ]

    @classmethod
    def shapes(cls, cfg: DictConfig, settings: Settings) -> list[Shape]:
        return [Shape("kernels", settings.batches[0], 1, settings.prefix, 1, False, c) for c in settings.contexts]

    @classmethod
    def check(cls, variant: Reading, settings: Settings, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
        """Error of a step against matrix products in float64."""
        batch, prefix, context = CHECKED[device.type]
        attention = variant.attention(dtype, device)
        prefix = prefix if settings.prefix else 0
        backend = variant.backend(attention, prefix, device)
        step = step_of(attention, Shape("kernels", batch, 1, prefix, 1, False, context), dtype, device)
        want, got = step.exact().read(Backend.PLAIN), step.read(backend).double()
        error = float((got - want).norm() / want.norm())
        return {"output": rounded(error, 2), "tolerance": TOLERANCE[dtype]}

    @torch.inference_mode()
    def run(self) -> None:
        self.call()

    def rates(self, seconds: float) -> dict[str, Any]:
        read = self.step.cache.nbytes
        return {"bytes": read, "bytes_per_second": rounded(read / seconds) if self.captured else NOT_RUN}


def _captured(call: Callable[[], object]) -> Callable[[], object]:
    """Capture a call in a CUDA graph, after two calls on a side stream, which compile kernels."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.inference_mode(), torch.cuda.stream(side):
        for _ in range(2):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.inference_mode(), torch.cuda.graph(graph):
        call()
    return graph.replay
