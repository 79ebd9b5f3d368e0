"""Cached steps of a whole language model."""

from typing import Any

import torch
from torch import Tensor

from attnlab.attention import Cache
from attnlab.bench.settings import Shape
from attnlab.bench.stepping import compiler, first_tokens
from attnlab.bench.variants import AttentionVariant
from attnlab.bench.workloads.decoding import Decoding, begin, begins_with_context
from attnlab.models import LanguageModel


class Generation(Decoding):
    """Cached steps of the task's language model: every layer and the logits, one token a call.

    Arguments are those of `Workload`.

    Raises:
        LookupError: the model is no language model or has no such positions, or its caches cannot be filled.
    """

    about = (
        "the task's language model: one token a call through all layers to the logits, after `context` positions "
        "(the caches filled at random) and a first token, on CUDA four, in which the step is captured; no prefix"
    )

    def __init__(self, variant: AttentionVariant, shape: Shape, dtype: torch.dtype, device: torch.device) -> None:
        self.first, self.shape = first_tokens(device), shape
        model = language_model(variant, shape.context + shape.text + self.first, dtype, device)
        self.language, self.model, self.attentions = model, model, model.attentions
        if shape.context:
            begins_with_context(self.attentions[0])
        self.tokens = random_tokens(variant, shape.batch, shape.text + self.first, device)
        self.rows = torch.arange(shape.batch, device=device)
        self.size = (shape.batch, shape.context + shape.text + self.first, 0)
        self.dtype = dtype
        self.caches: list[Cache] = []
        self.compiled = compiler(variant.compiled, variant.cfg, device)

    @classmethod
    def describe(cls, shape: Shape) -> dict[str, Any]:
        return {"steps": shape.text, "context": shape.context, "reorder": shape.reorder}

    @torch.inference_mode()
    def prepare(self) -> None:
        self.caches = []  # released before the next ones are made
        self.caches = self.language.start(*self.size[:2])
        if self.shape.context:
            for cache in self.caches:
                begin(cache, self.shape.context)
        self._begin(self.tokens, self.caches)

    @torch.inference_mode()
    def run(self) -> None:
        for t in range(self.first, self.first + self.shape.text):
            if self.shape.reorder:
                for cache in self.caches:
                    cache.reorder(self.rows)
            self.step(self.tokens[:, t : t + 1])

    def cache_bytes(self) -> dict[str, int]:
        predicted = sum(a.cache_bytes(*self.size, dtype=self.dtype) for a in self.attentions)
        return {"measured": sum(cache.nbytes for cache in self.caches), "predicted": predicted}


def language_model(
    variant: AttentionVariant, positions: int, dtype: torch.dtype, device: torch.device
) -> LanguageModel:
    """The task's model with random weights.

    Args:
        variant: with which mechanism.
        positions: that it will have.
        dtype: of the weights.
        device: where they lie.

    Raises:
        LookupError: it is no language model, or it has learned fewer positions.
    """
    learned = variant.cfg.task.model.get("positions") or positions
    if learned < positions:
        raise LookupError(f"the model has learned {learned} positions, not {positions}")
    model = variant.model(dtype, device)
    if not isinstance(model, LanguageModel):
        raise LookupError("the task's model is no language model: measure its decoder with bench.what=beam")
    return model


def random_tokens(variant: AttentionVariant, rows: int, positions: int, device: torch.device) -> Tensor:
    """(rows, positions), the same for every variant.

    Args:
        variant: for the size of the vocabulary.
        rows: how many texts.
        positions: of each.
        device: where they lie.
    """
    generator = torch.Generator().manual_seed(0)
    return torch.randint(variant.cfg.task.data.vocab_size, (rows, positions), generator=generator).to(device)
