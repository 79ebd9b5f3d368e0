"""A decoder that measures its caches."""

import torch
from torch import Tensor

from attnlab.attention import Cache
from attnlab.models import CrossDecoder, PrefixDecoder


class CacheWatch:
    """A decoder that measures the caches made through it.

    Args:
        decoder: the decoder that does the work.

    Attributes:
        bytes: of the largest caches, as measured and as predicted.
    """

    def __init__(self, decoder: PrefixDecoder | CrossDecoder) -> None:
        self.decoder, self.bytes = decoder, (0, 0)
        self.step = decoder.step  # the method itself, which is compiled once for all watches

    def start(
        self, prefix: Tensor, lengths: Tensor | None, beam: int, capacity: int, *, dtype: torch.dtype | None = None
    ) -> list[Cache]:
        caches = self.decoder.start(prefix, lengths, beam, capacity, dtype=dtype)
        sentences, size = prefix.shape[:2]
        rows = sentences * beam
        predicted = self.decoder.cache_bytes(rows, capacity, size, sentences, dtype=dtype or prefix.dtype)
        self.bytes = max(self.bytes, (sum(cache.nbytes for cache in caches), predicted))
        return caches
