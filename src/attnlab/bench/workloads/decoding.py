"""Decoding with caches: steps of a layer and of a language model, prefill, and beam search."""

import itertools
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
from omegaconf import DictConfig
from torch import Tensor
from torch.autograd.profiler_legacy import profile  # torch.profiler writes to the terminal at each start and stop

from attnlab.attention import Cache
from attnlab.attention.ops.native import NAME, RoundedLinear
from attnlab.bench.peers import Peer
from attnlab.bench.settings import Settings, Shape, rounded
from attnlab.bench.variants import AttentionVariant, LayerSteps
from attnlab.bench.workloads import AttentionWorkload, random_inputs
from attnlab.decoding import BeamSearch
from attnlab.decoding.beam import WARM_UP, Stepping, Steps
from attnlab.models import LanguageModel, PrefixDecoder

PRODUCTS = frozenset(
    f"aten::{name}"
    for name in (
        "mm", "addmm", "addmm_", "bmm", "baddbmm", "baddbmm_", "mv", "addmv", "addmv_", "dot",
        "_scaled_dot_product_flash_attention_for_cpu", "mkldnn_linear",
    )
) | {NAME}  # fmt: skip


class Decoding(AttentionWorkload):
    """Cached steps of an attention layer. `prepare` reads the prefix, sets the context, and takes the first steps.

    The context consists of random numbers in the cache, because the time of a step does not depend on values.

    Raises:
        LookupError: there is a context, but the cache has no preallocated buffers.
    """

    what = "decoding"
    about = (
        "one attention layer, one token a call, after the prefix, `context` positions of text "
        "(the cache filled at random) and a first token, on CUDA four, in which the step is captured (prepare_seconds)"
    )
    checked = ("output", "steps")
    section = "inference"
    steps = True
    keys = {"prefix": "prefix", "steps": "text", "context": "context", "reorder": "reorder"}
    model: Stepping
    inputs: Tensor  # inputs of all steps, (B, first + text, ...)
    step: Callable[[Tensor], Tensor]

    def __init__(self, variant: AttentionVariant, shape: Shape, dtype: torch.dtype, device: torch.device) -> None:
        self.shape, self.dtype = shape, dtype
        self.first = first_steps(device)
        self.size = (shape.batch, shape.context + shape.text + self.first, shape.prefix)
        self._build(variant, device)
        if shape.context and not all(a.new_cache(1, 1).buffers() for a in self.attentions[:1]):
            raise LookupError("its cache grows step by step: it cannot begin with a context")
        self.compiled = variant.compiler(device)
        self.rows = torch.arange(shape.batch, device=device)
        self.caches: list[Cache] = []

    def _build(self, variant: AttentionVariant, device: torch.device) -> None:
        attention = variant.attention(self.dtype, device)
        self.model, self.attentions = LayerSteps(attention), [attention]
        self.inputs = random_inputs(attention, self.shape.batch, self.shape.text + self.first)
        self.prefix = random_inputs(attention, self.shape.batch, self.shape.prefix)

    def _start(self) -> list[Cache]:
        """Caches that have read the prefix."""
        cache = self.attentions[0].new_cache(*self.size)
        if self.shape.prefix:
            self.attentions[0].read_prefix(self.prefix, None, cache)
        return [cache]

    @classmethod
    def shapes(cls, cfg: DictConfig, settings: Settings) -> list[Shape]:
        prefix = settings.prefix if "prefix" in cls.keys else 0
        ways = itertools.product(settings.batches, settings.contexts, settings.reorder)
        return [Shape(cls.what, way[0], 1, prefix, settings.steps, *way[:0:-1]) for way in ways]

    @torch.inference_mode()
    def prepare(self) -> None:
        self.caches = []  # frees memory for the next ones
        self.caches = self._start()
        if self.shape.context:
            self._set_context()
        caches = self.caches
        self.step = lambda tokens: self.model.step(tokens, caches)
        if self.compiled is not None or self.rows.is_cuda:
            self.step = Steps(self.model, caches, self.shape.text + self.first, compiled=self.compiled)
        for t in range(self.first):
            self.step(self.inputs[:, t : t + 1])
        self.captured = isinstance(self.step, Steps) and self.step.captured

    def _set_context(self) -> None:
        """Fill the caches at random."""
        for cache in self.caches:
            for buffer in cache.buffers():
                if buffer.dtype != torch.uint8:
                    buffer[...] = torch.randn(buffer.shape[1:], dtype=buffer.dtype, device=buffer.device)
            for coded in getattr(cache, "coded", {}).values():
                coded.randomise()
            cache.length = self.shape.context

    @torch.inference_mode()
    def run(self) -> None:
        for t in range(self.first, self.first + self.shape.text):
            if self.shape.reorder:
                for cache in self.caches:
                    cache.reorder(self.rows)
            self.step(self.inputs[:, t : t + 1])

    def rates(self, seconds: float) -> dict[str, Any]:
        """On a CPU: seconds of matrix products, and the share of time outside them.

        Measured in three runs with the profiler that alternate with three without. The share is negative if the
        profiler slows down a run more than the work between products takes.
        """
        if self.rows.device.type != "cpu":
            return {}
        products, runs = [], []
        for _ in range(3):
            self.prepare()
            began = time.perf_counter()
            self.run()
            runs.append(time.perf_counter() - began)
            self.prepare()
            with profile() as events:  # slows down the work between products
                self.run()
            microseconds = sum(event.self_cpu_time_total for event in events.key_averages() if event.key in PRODUCTS)
            products.append(microseconds / 1e6)
        share = 1 - median(part / run for part, run in zip(products, runs, strict=True))
        return {"product_seconds": rounded(median(products)), "share_outside_products": rounded(share, 3)}

    def cache_bytes(self) -> dict[str, int]:
        predicted = sum(a.cache_bytes(*self.size, dtype=self.dtype) for a in self.attentions)
        measured = sum(cache.nbytes for cache in self.caches)
        return {"measured": measured, "predicted": predicted if self.attentions else measured}


class Generation(Decoding):
    """Cached steps of the task's language model, from token to logits.

    Raises:
        LookupError: the model is not a language model or has too few positions, or its caches grow step by step.
    """

    what = "generation"
    about = (
        "the task's language model: one token a call through all layers to the logits, after `context` positions "
        "(the caches filled at random) and a first token, on CUDA four, in which the step is captured; no prefix"
    )
    keys = {"steps": "text", "context": "context", "reorder": "reorder"}

    def _build(self, variant: AttentionVariant, device: torch.device) -> None:
        model = self.language = language_model(variant, self.size[1], self.dtype, device)
        self.model, self.attentions = model, model.attentions
        self.inputs = random_tokens(variant, self.shape.batch, self.shape.text + self.first, device)

        self.reads: list[float] = []

    def _start(self) -> list[Cache]:
        return self.language.start(*self.size[:2])

    def _set_context(self) -> None:
        if isinstance(self.language, Peer):
            self.language.read(self.inputs[:, :1].expand(-1, self.shape.context), self.caches)
        else:
            super()._set_context()

    def prepare(self) -> None:
        super().prepare()
        if self.rows.device.type == "cpu":
            positions, capacity = self.shape.context + self.first + self.shape.text // 2, self.size[1]
            cache = sum(cache.nbytes for cache in self.caches) * min(1.0, positions / capacity)
            bytes_read = torch.ones(int(weight_bytes(self.language) + cache) // 4)
            bytes_read.sum()
            began = time.perf_counter()
            bytes_read.sum()
            self.reads.append(time.perf_counter() - began)

    def rates(self, seconds: float) -> dict[str, Any]:
        """The number of parameters and, on a CPU, the time of reading their bytes and those of the caches once."""
        rates: dict[str, Any] = {"parameters": sum(t.numel() for t in tensors_of(self.language))}
        if self.reads:
            read = median(self.reads)
            rates |= {"read_seconds": rounded(read), "times_read": rounded(seconds / self.shape.text / read, 3)}
        return rates if isinstance(self.language, Peer) else super().rates(seconds) | rates


class Prefill(AttentionWorkload):
    """Prefill of `text` positions into empty caches in one call, including the logits of every position.

    Raises:
        LookupError: the model is not a language model or has too few positions.
    """

    what = "prefill"
    about = "the task's language model reads `text` positions into empty caches in one call, logits included"
    checked = ("output", "steps")
    keys = {"text": "text"}

    def __init__(self, variant: AttentionVariant, shape: Shape, dtype: torch.dtype, device: torch.device) -> None:
        self.model, self.shape = language_model(variant, shape.text, dtype, device), shape
        self.attentions = self.model.attentions
        self.tokens = random_tokens(variant, shape.batch, shape.text, device)
        self.caches: list[Cache] = []

    @torch.inference_mode()
    def prepare(self) -> None:
        self.caches = []  # frees memory for the next ones
        self.caches = self.model.start(self.shape.batch, self.shape.text)

    @torch.inference_mode()
    def run(self) -> None:
        self.model.step(self.tokens, self.caches)


class Beam(AttentionWorkload):
    """Beam search: reads the prefix, and continues every hypothesis by `steps` tokens and </s>."""

    what = "beam"
    about = "the task's decoder: the prefix is read, then every hypothesis is continued by `steps` tokens and </s>"
    checked = ("output", "steps")
    section = "inference"
    steps = True
    reads_prefix = "always"
    keys = {"prefix": "prefix", "beam": "beam", "steps": "text"}

    def __init__(self, variant: AttentionVariant, shape: Shape, dtype: torch.dtype, device: torch.device) -> None:
        decoder = variant.decoder(dtype, device)
        self.attentions = decoder.attentions
        self.spy = Spy(decoder, variant.copied)
        self.search = BeamSearch(shape.beam, max_len_b=shape.text, min_len=shape.text)
        self.prefix = random_inputs(decoder.attentions[0], shape.batch, shape.prefix)
        self.lengths = torch.full((shape.batch,), shape.prefix, device=device)
        rows = shape.batch * shape.beam
        prefixes = rows if variant.copied else shape.batch
        self.compiled = variant.compiler(device)
        size = rows, shape.text + 1, shape.prefix, prefixes
        self.predicted = sum(a.cache_bytes(*size, dtype=dtype) for a in decoder.attentions)

    @classmethod
    def lineup(cls, cfg: DictConfig, settings: Settings) -> list[AttentionVariant]:
        """Adds, after the configured mechanism, the same with the prefix stored once per hypothesis."""
        chosen, *others = super().lineup(cfg, settings)
        return [chosen, replace(chosen, name=f"{chosen.name}_copied", copied=True), *others]

    @classmethod
    def shapes(cls, cfg: DictConfig, settings: Settings) -> list[Shape]:
        return [Shape("beam", batch, settings.beam, settings.prefix, settings.steps) for batch in settings.batches]

    def prepare(self) -> None:
        self.spy.caches = []

    def run(self) -> None:
        # Ids of special tokens: 0 <s>, 1 <pad>, 2 </s>.
        self.search(self.spy, self.prefix, self.lengths, bos=2, eos=2, pad=1, compiled=self.compiled)

    def rates(self, seconds: float) -> dict[str, Any]:
        """On a CPU: seconds of each part of a search, from one of three further runs.

        `most_times_faster`: if attention, with its projections, and the reordering of its cache took no time.
        """
        if self.lengths.is_cuda or self.compiled is not None:  # a GPU does not wait; a compiled step has no parts
            return {}
        whole, parts = sorted((self._parts() for _ in range(3)), key=lambda run: run[0])[1]
        rest = whole - parts["attention"] - parts["reorder"]
        return {
            "parts": {name: rounded(part) for name, part in parts.items()},
            "most_times_faster": rounded(whole / rest),
        }

    def _parts(self) -> tuple[float, dict[str, float]]:
        """Seconds of a run and of its parts."""
        spent = dict.fromkeys(("prefix", "step", "attention", "vocabulary", "reorder"), 0.0)
        decoder, caches = self.spy.decoder, {attention.cache_type for attention in self.attentions}
        attentions = [part for block in decoder.blocks for part in block.children() if hasattr(part, "extend")]
        places: list[tuple[Any, str, str]] = [(self.spy, "start", "prefix"), (self.spy, "step", "step")]
        places += [(decoder, "logits", "vocabulary"), *((cache, "reorder", "reorder") for cache in caches)]
        places += [(attention, "extend", "attention") for attention in attentions]
        with ExitStack() as stack:
            for owner, method, part in places:
                stack.enter_context(patch.object(owner, method, timed(getattr(owner, method), spent, part)))
            self.prepare()
            began = time.perf_counter()
            self.run()
            whole = time.perf_counter() - began
        step = spent.pop("step")
        spent["feed_forward"] = step - spent["attention"] - spent["vocabulary"]
        return whole, spent | {"search": whole - step - spent["prefix"] - spent["reorder"]}

    def cache_bytes(self) -> dict[str, int]:
        return {"measured": sum(cache.nbytes for cache in self.spy.caches), "predicted": self.predicted}


def timed(function: Callable[..., Any], seconds: dict[str, float], part: str) -> Callable[..., Any]:
    """The function, which adds the time of its calls to a part's seconds."""

    def run(*args: Any, **options: Any) -> Any:
        began = time.perf_counter()
        result = function(*args, **options)
        seconds[part] += time.perf_counter() - began
        return result

    return run


class Spy:
    """A decoder whose caches are accessible. `copied`: the prefix is stored once per hypothesis."""

    def __init__(self, decoder: PrefixDecoder, copied: bool) -> None:
        self.decoder, self.copied = decoder, copied
        self.step = decoder.step  # the method of the decoder, which is compiled once
        self.caches: list[Cache] = []

    def start(
        self, prefix: Tensor, prefix_lengths: Tensor | None, beam: int, capacity: int, **options: Any
    ) -> list[Cache]:
        if self.copied:
            prefix, prefix_lengths, beam = prefix.repeat_interleave(beam, 0), None, 1
        self.caches = self.decoder.start(prefix, prefix_lengths, beam, capacity, **options)
        return self.caches


def first_steps(device: torch.device) -> int:
    """Number of steps before the measured ones: one, or on CUDA those before `Steps` replays a graph."""
    return WARM_UP + 2 if device.type == "cuda" else 1


def tensors_of(model: LanguageModel) -> list[Tensor]:
    """Its parameters, and its rounded weights."""
    return [*model.parameters(), *(part.codes for part in model.modules() if isinstance(part, RoundedLinear))]


def weight_bytes(model: LanguageModel) -> int:
    """Bytes of the weights that a step reads: not those of an embedding that is not the output matrix too."""
    inputs: Any = model.embedding if getattr(model, "output", None) is not None else None
    embedding: int = 0 if inputs is None else inputs.weight.nbytes
    return sum(tensor.nbytes for tensor in tensors_of(model)) - embedding


def language_model(
    variant: AttentionVariant, positions: int, dtype: torch.dtype, device: torch.device
) -> LanguageModel:
    """The task's model with random weights. LookupError: it is not a language model, or learned fewer positions."""
    learned = variant.cfg.task.model.get("positions") or positions
    if learned < positions:
        raise LookupError(f"the model has learned {learned} positions, not {positions}")
    model = variant.model(dtype, device)
    if not isinstance(model, LanguageModel):
        raise LookupError("the task's model is no language model: measure its decoder with bench.what=beam")
    return model


def random_tokens(variant: AttentionVariant, rows: int, positions: int, device: torch.device) -> Tensor:
    """Tokens (rows, positions), the same for every variant."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(variant.cfg.task.data.vocab_size, (rows, positions), generator=generator).to(device)
