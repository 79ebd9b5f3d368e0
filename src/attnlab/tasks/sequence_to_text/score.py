"""Decode a test set through the caches, score it, and say what it cost."""

import re
import sys
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from rich.progress import Progress
from torch import Tensor
from torch.utils.data import DataLoader

from attnlab.attention import Cache
from attnlab.callbacks.memory import MemoryMeter
from attnlab.callbacks.predictions import write_predictions
from attnlab.callbacks.speed import now
from attnlab.decoding import BeamSearch
from attnlab.errors import DataError
from attnlab.metrics import BLEU, ROUGE, WER, IntentAccuracy
from attnlab.metrics.base import TextMetric
from attnlab.models import CrossDecoder, PrefixDecoder
from attnlab.tasks.sequence_to_text.module import SequenceToText


class CacheWatch:
    """A decoder that notes the largest caches made through it, in bytes: as allocated and as predicted."""

    def __init__(self, decoder: PrefixDecoder | CrossDecoder) -> None:
        self.decoder, self.measured, self.predicted = decoder, 0, 0

    def start(
        self, prefix: Tensor, lengths: Tensor | None, beam: int, capacity: int, *, dtype: torch.dtype | None = None
    ) -> list[Cache]:
        caches = self.decoder.start(prefix, lengths, beam, capacity, dtype=dtype)
        sentences, size = prefix.shape[:2]
        width = (dtype or prefix.dtype).itemsize
        predicted = width * self.decoder.cache_elements(sentences * beam, capacity, size, sentences)
        measured = sum(cache.nbytes for cache in caches)
        self.measured, self.predicted = max((self.measured, self.predicted), (measured, predicted))
        return caches

    def step(self, tokens: Tensor, caches: list[Cache]) -> Tensor:
        return self.decoder.step(tokens, caches)


Score = Literal["bleu", "wer", "wer_as_written", "rouge", "intent"]


@dataclass(frozen=True)
class Decoded:
    """One line of predictions, and what a score needs besides; `forced`: the class found among the known ones alone."""

    id: str
    source: str
    reference: str
    hypothesis: str
    others: tuple[str, ...] = ()
    label: str = ""
    found: str = ""
    forced: str = ""

    def line(self) -> tuple[str, str, str, str]:
        texts = (f"{self.label} {self.reference}", f"{self.found} {self.hypothesis}")
        return (self.id, self.source, texts[0].strip(), texts[1].strip())


def quality_of(rows: list[Decoded], score: Score) -> dict[str, Any]:
    """The record's `quality` block; its first number is the headline.  Scored in this process alone."""
    index, size = range(len(rows)), len(rows)
    texts = [row.hypothesis for row in rows], [row.reference for row in rows]
    alone = {"sync_on_compute": False}
    metric: TextMetric
    match score:
        case "bleu":
            metric = BLEU(size, **alone)
            metric.update(index, *texts)
        case "wer" | "wer_as_written":
            metric = WER(size, punctuation=score == "wer_as_written", **alone)
            metric.update(index, *texts)
        case "rouge":
            metric = ROUGE(size, **alone)
            metric.update(index, *texts, [row.others for row in rows])
        case "intent":
            metric = IntentAccuracy(size, **alone)
            labels, found_labels = [row.label for row in rows], [row.found for row in rows]
            metric.update(index, labels, found_labels, [row.forced for row in rows], *texts)
    found: dict[str, Any] = metric.compute()
    return found


def evaluate(
    module: SequenceToText,
    loader: DataLoader[Any],
    search: BeamSearch,
    score: Score,
    device: torch.device,
    precision: str,
    directory: Path,
) -> dict[str, Any]:
    """Writes predictions.tsv; returns the record's `quality`, `inference` and `kv_cache` blocks.

    Seconds are those of encoding and searching alone; for score=intent, of the free search alone: what is searched
    again with the first token among the classes is not counted.
    """
    module = module.to(device).eval()
    low = torch.bfloat16 if precision.startswith("bf16") else None
    context = torch.autocast(device.type, low) if low else nullcontext()
    watch = CacheWatch(module.model.decoder)
    rows: list[Decoded] = []
    labels = list(module.tokenizer.labels.values()) if score == "intent" else []
    seconds, tokens, sentences = 0.0, 0, 0
    batches = len(loader)
    meter = MemoryMeter(device)
    with Progress(transient=True, disable=not sys.stderr.isatty()) as progress, meter, context:
        bar = progress.add_task("decoding", total=batches)
        for batch in loader:
            batch = batch.to(device)
            began = now(device)
            found = module.decode(batch, search, low, watch)
            seconds += now(device) - began
            tokens += sum(len(h[0].tokens) for h in found if h)
            sentences = max(sentences, len(batch.ids))
            forced = [""] * len(found)
            if labels:
                forced = list(map(module.label, module.decode(batch, search, low, first=labels)))
            columns = (batch.ids, batch.sources, batch.references, map(module.text, found), batch.others, batch.labels)
            rows += map(Decoded, *columns, map(module.label, found), forced)
            progress.advance(bar)
    if not tokens:
        raise DataError("decoding ended no hypothesis in the whole test set: the weights give no numbers to search in")
    rows.sort(key=lambda row: [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", row.id)])
    write_predictions(directory / "predictions.tsv", [row.line() for row in rows])
    return {
        "quality": quality_of(rows, score) | {"sentences": len(rows)},
        "inference": {
            "seconds": round(seconds, 3),
            "tokens_per_second": round(tokens / seconds, 1) if seconds else "not run",
            "peak_memory_mib": round(meter.peak, 1),
            "mean_memory_mib": round(meter.mean, 1),
            "batch": sentences,
            "beam": search.beam,
            "dtype": str(low or torch.float32).removeprefix("torch."),
            "protocol": f"encoder and search of {len(rows)} sentences; tokens of best hypotheses; {meter.protocol}",
        },
        "kv_cache": {"bytes_predicted": watch.predicted, "bytes_measured": watch.measured},
    }
