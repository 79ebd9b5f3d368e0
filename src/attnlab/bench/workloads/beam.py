"""A whole beam search of the task's decoder."""

from typing import Any

import torch
from omegaconf import DictConfig
from torch import Tensor

from attnlab.attention import Cache
from attnlab.bench.settings import Settings, Shape
from attnlab.bench.stepping import compiler
from attnlab.bench.variants import AttentionVariant, copied
from attnlab.bench.workloads.attention import AttentionWorkload, random_inputs
from attnlab.decoding import BeamSearch
from attnlab.models import PrefixDecoder


class Beam(AttentionWorkload):
    """The prefix is read, then every hypothesis is continued by `steps` tokens and ended.

    Arguments are those of `Workload`.
    """

    about = "the task's decoder: the prefix is read, then every hypothesis is continued by `steps` tokens and </s>"
    checked = ("output", "steps")
    section = "inference"
    steps = True
    reads_prefix = "always"

    def __init__(self, variant: AttentionVariant, shape: Shape, dtype: torch.dtype, device: torch.device) -> None:
        decoder = variant.decoder(dtype, device)
        self.attentions = decoder.attentions
        self.spy = Spy(decoder, variant.copied)
        self.search = BeamSearch(shape.beam, max_len_b=shape.text, min_len=shape.text)
        self.prefix = random_inputs(decoder.attentions[0], shape.batch, shape.prefix)
        self.lengths = torch.full((shape.batch,), shape.prefix, device=device)
        rows = shape.batch * shape.beam
        prefixes = rows if variant.copied else shape.batch
        self.compiled = compiler(variant.compiled, variant.cfg, device)
        size = rows, shape.text + 1, shape.prefix, prefixes
        self.predicted = sum(a.cache_bytes(*size, dtype=dtype) for a in decoder.attentions)

    @classmethod
    def lineup(cls, cfg: DictConfig, settings: Settings) -> list[AttentionVariant]:
        """After the chosen mechanism, the same with the prefix stored once per hypothesis."""
        chosen, *others = super().lineup(cfg, settings)
        return [chosen, copied(chosen), *others]

    @classmethod
    def shapes(cls, cfg: DictConfig, settings: Settings) -> list[Shape]:
        return [Shape("beam", settings.batch, settings.beam, settings.prefix, settings.steps)]

    @classmethod
    def describe(cls, shape: Shape) -> dict[str, Any]:
        return {"prefix": shape.prefix, "beam": shape.beam, "steps": shape.text}

    def prepare(self) -> None:
        self.spy.caches = []

    def run(self) -> None:
        # Special pieces as everywhere: 0 <s>, 1 <pad>, 2 </s>.
        self.search(self.spy, self.prefix, self.lengths, bos=2, eos=2, pad=1, compiled=self.compiled)

    def cache_bytes(self) -> dict[str, int]:
        return {"measured": sum(cache.nbytes for cache in self.spy.caches), "predicted": self.predicted}


class Spy:
    """A decoder whose caches can be looked at. `copied`: every hypothesis has a copy of the prefix.

    Args:
        decoder: what decodes.
        copied: True: it is stored in the cache as often as it is read.
    """

    def __init__(self, decoder: PrefixDecoder, copied: bool) -> None:
        self.decoder, self.copied = decoder, copied
        self.step = decoder.step  # the method itself, which is compiled once
        self.caches: list[Cache] = []

    def start(
        self,
        prefix: Tensor,
        prefix_lengths: Tensor | None,
        beam: int,
        capacity: int,
        *,
        dtype: torch.dtype | None = None,
    ) -> list[Cache]:
        if self.copied:
            prefix, beam = prefix.repeat_interleave(beam, 0), 1
            prefix_lengths = None
        self.caches = self.decoder.start(prefix, prefix_lengths, beam, capacity, dtype=dtype)
        return self.caches
