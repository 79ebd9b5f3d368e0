"""One step's reading of the factors that tensor product attention caches."""

import copy

import torch
from torch import Tensor

from attnlab.attention import TPA
from attnlab.attention.ops.backends import Backend, prefer
from attnlab.attention.tpa import FactorCache
from attnlab.attention.tpa.factors import Factors
from attnlab.bench.settings import Shape


class FactorStep:
    """A step's query factors and a cache that holds random numbers; the newest position is the last of the context.

    Args:
        attention: TPA, or a variant that the kernel serves.
        shape: rows, prefix and context.
        dtype: of the cache.
        device: of the cache.
    """

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
        self.factors = attention._factors(cache.angles(size - 1, size), *attention._compact(x))
        self.attention, self.cache, self.batch = attention, cache, shape.batch

    @property
    def nbytes(self) -> int:
        """Bytes that are read: every factor once."""
        return self.cache.nbytes

    @torch.no_grad()
    def read(self, backend: Backend) -> Tensor:
        """(B, 1, h, D), by this backend."""
        text, prefix = self.cache.text_segment(self.cache.length + 1), self.cache.prefix_segment()
        with prefer(backend):
            if self.attention.step_backend(1, text.like) is Backend.TRITON:
                return self.attention._kernel_step(self.factors, self.batch, self.cache)
            return self.attention._step(self.factors, self.batch, [prefix, text] if prefix.size else [text])

    def exact(self) -> "FactorStep":
        """The same step in float64."""
        found = copy.copy(self)
        found.cache = copy.copy(self.cache)
        found.cache.text, found.cache.prefix = (
            {name: buffer.double() for name, buffer in held.items()} for held in (self.cache.text, self.cache.prefix)
        )
        found.factors = Factors(*(None if t is None else t.double() for t in self.factors))  # type: ignore[arg-type]
        return found
