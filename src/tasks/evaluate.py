"""Decode a test set through the caches, score it, and say what it cost."""

import os
import re
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from rich.progress import Progress
from torch import Tensor
from torch.utils.data import DataLoader

from src.attention import Cache
from src.callbacks import quality
from src.callbacks.memory import MemoryMeter
from src.decoding import BeamSearch
from src.errors import DataError
from src.models import PrefixDecoder

from .sequence_to_text import SequenceToText


class CacheWatch:
    """A decoder that notes the largest caches made through it, in bytes: as allocated and as predicted."""

    def __init__(self, decoder: PrefixDecoder) -> None:
        self.decoder, self.measured, self.predicted = decoder, 0, 0

    def start(
        self, prompt: Tensor, lengths: Tensor | None, beam: int, capacity: int, *, dtype: torch.dtype | None = None
    ) -> list[Cache]:
        caches = self.decoder.start(prompt, lengths, beam, capacity, dtype=dtype)
        sentences, size = prompt.shape[:2]
        width = (dtype or prompt.dtype).itemsize
        predicted = sum(
            width * attention.cache_elements(sentences * beam, capacity, size, sentences)
            for attention in self.decoder.attentions
        )
        measured = sum(cache.nbytes for cache in caches)
        self.measured, self.predicted = max((self.measured, self.predicted), (measured, predicted))
        return caches

    def step(self, tokens: Tensor, caches: list[Cache]) -> Tensor:
        return self.decoder.step(tokens, caches)


def evaluate(
    module: SequenceToText,
    loader: DataLoader[Any],
    search: BeamSearch,
    score: str,
    device: torch.device,
    precision: str,
    directory: Path,
) -> dict[str, Any]:
    """Writes predictions.tsv; returns the record's `quality`, `inference` and `kv_cache` blocks.

    `score` is bleu or wer.  Seconds are those of encoding and searching alone.
    """
    module = module.to(device).eval()
    low = torch.bfloat16 if precision.startswith("bf16") else None
    context = torch.autocast(device.type, low) if low else nullcontext()
    watch = CacheWatch(module.model.decoder)
    rows: list[tuple[str, str, str, str]] = []
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
            rows += zip(batch.ids, batch.sources, batch.references, map(module.text, found), strict=True)
            progress.advance(bar)
    if not tokens:
        raise DataError("decoding ended no hypothesis in the whole test set: the weights give no numbers to search in")
    rows.sort(key=lambda row: [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", row[0])])
    write_predictions(directory / "predictions.tsv", rows)
    hypotheses, references = [row[3] for row in rows], [row[2] for row in rows]
    return {
        "quality": {"bleu": quality.bleu, "wer": quality.wer}[score](hypotheses, references) | {"sentences": len(rows)},
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


def write_predictions(path: Path, rows: list[tuple[str, str, str, str]]) -> None:
    """id, source, reference, hypothesis; tabs and line ends inside a text become spaces.  Atomic."""
    part = path.with_name(path.name + ".part")
    lines = [("id", "source", "reference", "hypothesis"), *rows]
    part.write_text(
        "".join("\t".join(" ".join(text.split()) for text in line) + "\n" for line in lines), encoding="utf-8"
    )
    os.replace(part, path)


def now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
