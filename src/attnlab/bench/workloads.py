"""What one measurement does: `prepare` untimed, then `run`."""

import gc
import time
from typing import Protocol

import torch
from omegaconf import OmegaConf
from torch import Tensor
from torch.nn import functional as F

from attnlab.attention import Attention, Cache
from attnlab.bench.settings import Shape
from attnlab.bench.variants import Variant
from attnlab.decoding import BeamSearch
from attnlab.models import LanguageModel, PrefixDecoder


class Workload(Protocol):
    attentions: list[Attention]

    def prepare(self) -> None: ...

    def run(self) -> None: ...

    def cache_bytes(self) -> dict[str, int] | None:
        """Measured after a run, and predicted from the shape; None where nothing is cached."""


def workload(variant: Variant, shape: Shape, dtype: torch.dtype, device: torch.device) -> Workload:
    """Everything built, nothing run."""
    match shape.what:
        case "training":
            return Training(variant.attention(dtype, device), shape)
        case "model":
            return Model(variant, shape, dtype, device)
        case "decoding":
            return Decoding(variant.attention(dtype, device), shape)
        case "beam":
            return Beam(variant, shape, dtype, device)
    raise ValueError(f"no workload {shape.what}")


def _random(attention: Attention, *shape: int) -> Tensor:
    """Inputs of an attention layer, the same for every variant."""
    weight = next(attention.parameters())
    generator = torch.Generator().manual_seed(0)
    return torch.randn(*shape, attention.d_model, generator=generator).to(weight)


class Training:
    """Forward and backward of an attention layer: gradients of inputs and weights."""

    def __init__(self, attention: Attention, shape: Shape) -> None:
        self.attention, self.attentions = attention, [attention]
        self.x = _random(attention, shape.batch, shape.text).requires_grad_()
        self.prefix = _random(attention, shape.batch, shape.prefix).requires_grad_() if shape.prefix else None
        self.grad = torch.ones_like(self.x)

    def prepare(self) -> None:
        self.attention.zero_grad()
        self.x.grad = None
        if self.prefix is not None:
            self.prefix.grad = None

    def run(self) -> None:
        self.attention(self.x, self.prefix).backward(self.grad)

    def cache_bytes(self) -> None:
        return None


class Model:
    """Loss and backward of the task's model.  `prefix`: outputs of its encoder, where it has one."""

    def __init__(self, variant: Variant, shape: Shape, dtype: torch.dtype, device: torch.device) -> None:
        self.model = variant.model(dtype, device)
        self.attentions = [m for m in self.model.modules() if isinstance(m, Attention)]
        vocab, generator = variant.cfg.task.data.vocab_size, torch.Generator().manual_seed(0)

        def tokens(length: int) -> Tensor:
            return torch.randint(4, vocab, (shape.batch, length), generator=generator).to(device)

        self.inputs: tuple[Tensor, ...] = ()
        if not isinstance(self.model, LanguageModel):
            sources = tokens(shape.prefix)
            if mels := OmegaConf.select(variant.cfg, "task.model.encoder.num_mels"):
                frames = shape.prefix * 2 ** len(variant.cfg.task.model.encoder.conv_kernels)
                sources = torch.randn(shape.batch, frames, mels, generator=generator).to(device, dtype)
            self.inputs = sources, torch.full((shape.batch,), sources.shape[1], device=device)
        self.tokens, self.targets = tokens(shape.text), tokens(shape.text)

    def prepare(self) -> None:
        self.model.zero_grad()

    def run(self) -> None:
        if isinstance(self.model, LanguageModel):
            loss = self.model.loss(self.tokens, self.targets).mean()
        else:
            logits = self.model(*self.inputs, self.tokens)[0]
            loss = F.cross_entropy(logits.flatten(0, 1).float(), self.targets.flatten())
        loss.backward()

    def cache_bytes(self) -> None:
        return None


class Decoding:
    """Cached steps of an attention layer, after prefix, text and a first step that `prepare` takes.

    LookupError: there is text to begin with, but no buffer that could hold it.
    """

    def __init__(self, attention: Attention, shape: Shape) -> None:
        self.attention, self.attentions, self.shape = attention, [attention], shape
        self.x = _random(attention, shape.batch, shape.text + 1)
        self.prefix = _random(attention, shape.batch, shape.prefix)
        self.rows = torch.arange(shape.batch, device=self.x.device)
        self.size = (shape.batch, shape.context + shape.text + 1, shape.prefix)
        if shape.context and not attention.new_cache(1, shape.context).buffers():
            raise LookupError("its cache grows step by step: it cannot begin with a context")
        self.cache: Cache | None = None

    @torch.inference_mode()
    def prepare(self) -> None:
        self.cache = None  # gone before the next one is made
        self.cache = self.attention.new_cache(*self.size)
        if self.shape.prefix:
            self.attention.read_prefix(self.prefix, None, self.cache)
        if self.shape.context:  # no step takes longer for what it reads: attending to it all would take much longer
            for buffer in self.cache.buffers():
                buffer[...] = torch.randn(buffer.shape[1:], dtype=buffer.dtype, device=buffer.device)
            self.cache.length = self.shape.context
        self.attention.extend(self.x[:, :1], self.cache)

    @torch.inference_mode()
    def run(self) -> None:
        assert self.cache is not None
        for t in range(1, self.shape.text + 1):
            if self.shape.reorder:
                self.cache.reorder(self.rows)
            self.attention.extend(self.x[:, t : t + 1], self.cache)

    def cache_bytes(self) -> dict[str, int]:
        assert self.cache is not None
        predicted = self.attention.cache_elements(*self.size) * self.x.element_size()
        return {"measured": self.cache.nbytes, "predicted": predicted}


class Beam:
    """A whole search: the prefix is read, then every hypothesis goes on for `text` tokens and its end."""

    def __init__(self, variant: Variant, shape: Shape, dtype: torch.dtype, device: torch.device) -> None:
        decoder = variant.decoder(dtype, device)
        self.attentions = decoder.attentions
        self.spy = Spy(decoder, variant.copied)
        self.search = BeamSearch(shape.beam, max_len_b=shape.text, min_len=shape.text)
        self.prefix = _random(decoder.attentions[0], shape.batch, shape.prefix)
        self.lengths = torch.full((shape.batch,), shape.prefix, device=device)
        rows = shape.batch * shape.beam
        prefixes = rows if variant.copied else shape.batch
        self.predicted = dtype.itemsize * sum(
            a.cache_elements(rows, shape.text + 1, shape.prefix, prefixes) for a in decoder.attentions
        )

    def prepare(self) -> None:
        self.spy.caches = []

    def run(self) -> None:
        # Special pieces as everywhere: 0 <s>, 1 <pad>, 2 </s>.
        self.search(self.spy, self.prefix, self.lengths, bos=2, eos=2, pad=1)

    def cache_bytes(self) -> dict[str, int]:
        return {"measured": sum(cache.nbytes for cache in self.spy.caches), "predicted": self.predicted}


class Spy:
    """A decoder whose caches can be looked at.  `copied`: every hypothesis has a copy of the prefix."""

    def __init__(self, decoder: PrefixDecoder, copied: bool) -> None:
        self.decoder, self.copied = decoder, copied
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

    def step(self, tokens: Tensor, caches: list[Cache]) -> Tensor:
        return self.decoder.step(tokens, caches)


def timed(work: Workload, device: torch.device) -> dict[str, float]:
    """Seconds of one run, and of its preparation; on a CPU also the processor's seconds, all threads together."""
    gc.disable()
    try:
        _wait(device)
        began = time.perf_counter()
        work.prepare()
        _wait(device)
        ready, used = time.perf_counter(), time.process_time()
        work.run()
        _wait(device)
        found = {"prepare_seconds": ready - began, "seconds": time.perf_counter() - ready}
        if device.type == "cpu":
            found["cpu_seconds"] = time.process_time() - used
        return found
    finally:
        gc.enable()


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
