"""The scores of the sequence-to-text tasks, and a decoder that measures its caches."""

from typing import Literal

import torch
from torch import Tensor

from attnlab.attention import Cache
from attnlab.metrics import BLEU, ROUGE, WER, IntentAccuracy
from attnlab.metrics.base import TextMetric
from attnlab.models import CrossDecoder, PrefixDecoder

Score = Literal["bleu", "wer", "wer_as_written", "rouge", "intent"]  # the values of `task.score`

# The values that each score logs of a validation, and whether higher ones are better.
LOGGED: dict[Score, dict[str, bool]] = {
    "bleu": {"bleu": True},
    "wer": {"wer": False},
    "wer_as_written": {"wer": False},
    "rouge": {"rouge1": True, "rouge2": True, "rougeL": True},
    "intent": {"accuracy": True, "accuracy_constrained": True, "wer": False},
}


def metric_of(score: Score, size: int) -> TextMetric:
    """The metric of `task.score` for a corpus of `size` items."""
    match score:
        case "bleu":
            return BLEU(size)
        case "wer" | "wer_as_written":
            return WER(size, punctuation=score == "wer_as_written")
        case "rouge":
            return ROUGE(size)
        case "intent":
            return IntentAccuracy(size)


class CacheWatch:
    """A decoder that measures the caches made through it.

    Args:
        decoder: the decoder that does the work.

    Attributes:
        bytes: of the largest caches, as measured and as predicted.
    """

    def __init__(self, decoder: PrefixDecoder | CrossDecoder) -> None:
        self.decoder, self.bytes = decoder, (0, 0)

    def start(
        self, prefix: Tensor, lengths: Tensor | None, beam: int, capacity: int, *, dtype: torch.dtype | None = None
    ) -> list[Cache]:
        caches = self.decoder.start(prefix, lengths, beam, capacity, dtype=dtype)
        sentences, size = prefix.shape[:2]
        width = (dtype or prefix.dtype).itemsize
        predicted = width * self.decoder.cache_elements(sentences * beam, capacity, size, sentences)
        self.bytes = max(self.bytes, (sum(cache.nbytes for cache in caches), predicted))
        return caches

    def step(self, tokens: Tensor, caches: list[Cache]) -> Tensor:
        return self.decoder.step(tokens, caches)
