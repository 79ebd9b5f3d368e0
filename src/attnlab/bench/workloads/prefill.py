"""A whole language model reads a prompt."""

from typing import Any

import torch
from omegaconf import DictConfig

from attnlab.attention import Cache
from attnlab.bench.settings import Settings, Shape
from attnlab.bench.variants import AttentionVariant
from attnlab.bench.workloads.attention import AttentionWorkload
from attnlab.bench.workloads.generation import language_model, random_tokens


class Prefill(AttentionWorkload):
    """`text` positions read into empty caches in one call: every layer, and the logits of every position.

    Arguments are those of `Workload`.

    Raises:
        LookupError: the model is no language model or has no such positions.
    """

    about = "the task's language model reads `text` positions into empty caches in one call, logits included"
    checked = ("output", "steps")

    def __init__(self, variant: AttentionVariant, shape: Shape, dtype: torch.dtype, device: torch.device) -> None:
        self.model, self.shape = language_model(variant, shape.text, dtype, device), shape
        self.attentions = self.model.attentions
        self.tokens = random_tokens(variant, shape.batch, shape.text, device)
        self.caches: list[Cache] = []

    @classmethod
    def shapes(cls, cfg: DictConfig, settings: Settings) -> list[Shape]:
        return [Shape("prefill", settings.batch, 1, 0, text) for text in settings.texts]

    @classmethod
    def describe(cls, shape: Shape) -> dict[str, Any]:
        return {"text": shape.text}

    @torch.inference_mode()
    def prepare(self) -> None:
        self.caches = []  # released before the next ones are made
        self.caches = self.model.start(self.shape.batch, self.shape.text)

    @torch.inference_mode()
    def run(self) -> None:
        self.model.step(self.tokens, self.caches)
