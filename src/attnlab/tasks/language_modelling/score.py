"""A language model's perplexity on held-out text, and some of what it says itself."""

import math
import sys
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
from annotated_types import Ge
from rich.progress import Progress
from torch.utils.data import DataLoader

from attnlab.callbacks.memory import MemoryMeter
from attnlab.callbacks.predictions import write_predictions
from attnlab.callbacks.speed import now
from attnlab.config.bounds import bounded
from attnlab.data.text.language_modelling import LanguageModellingData
from attnlab.data.text.windows import Window
from attnlab.decoding import Sampling
from attnlab.errors import DataError
from attnlab.tasks.language_modelling.module import LanguageModelling


@bounded
@dataclass(frozen=True)
class LanguageScore:
    """How a language model is scored.

    Perplexity: exp of the mean negative log-probability of a token (or word), the text's first being given, over
    disjoint windows; and, unless `sliding_stride` is null, over windows that begin every so many tokens and predict
    their last ones only, so that every token has a long past.
    `continuations` places of the test text, each with `prompt_tokens` tokens, are gone on with.
    """

    sliding_stride: Annotated[int, Ge(1)] | None = None
    continuations: Annotated[int, Ge(1)] = 8
    prompt_tokens: Annotated[int, Ge(1)] = 16

    def __call__(
        self,
        module: LanguageModelling,
        data: LanguageModellingData,
        sampling: Sampling,
        device: torch.device,
        precision: str,
        directory: Path,
    ) -> dict[str, Any]:
        """Writes predictions.tsv; returns the record's `quality`, `inference` and `kv_cache` blocks."""
        module = module.to(device).eval()
        low = torch.bfloat16 if precision.startswith("bf16") else None
        with torch.autocast(device.type, low) if low else nullcontext():
            quality = self._quality(module, data, device)
            return {"quality": quality} | self._speak(module, data, sampling, device, low, directory)

    def _quality(self, module: LanguageModelling, data: LanguageModellingData, device: torch.device) -> dict[str, Any]:
        unit, window = data.vocabulary.unit, data.eval_window
        nats, count = _nats(module, data.held_out("test"), device, "disjoint windows")
        if not math.isfinite(nats):
            raise DataError(f"the test set's loss is {nats}: the weights give no probabilities")
        part = "" if data.eval_windows is None else f", at most {data.eval_windows} of them"
        file = data.tokens("test")
        quality: dict[str, Any] = {
            "perplexity": _perplexity(nats, count),
            "unit": unit,
            "signature": f"exp of the mean NLL per {unit}, disjoint windows of {window}{part}, text ends count",
            "tokens": count,
        }
        if unit == "token" and file.words:
            quality["perplexity_per_word"] = _perplexity(nats, count * file.words / len(file))
        if self.sliding_stride is not None:
            if self.sliding_stride > window:
                raise DataError(f"sliding_stride={self.sliding_stride} is more than the window of {window}")
            nats, count = _nats(module, data.held_out("test", self.sliding_stride), device, "sliding window")
            quality["sliding_perplexity"] = _perplexity(nats, count)
            quality["sliding_stride"] = self.sliding_stride
        if (floor := data.floor("test")) is not None:
            quality["floor"] = round(math.exp(floor), 4)  # no model can do better in the long run
        quality["held_out"] = data.source.held_out
        return quality

    def _speak(
        self,
        module: LanguageModelling,
        data: LanguageModellingData,
        sampling: Sampling,
        device: torch.device,
        low: torch.dtype | None,
        directory: Path,
    ) -> dict[str, Any]:
        model, vocabulary, file = module.model, data.vocabulary, data.tokens("test")
        size = min(self.prompt_tokens, len(file) - 1)
        room = max(0, len(file) - size - sampling.tokens)
        starts = [i * room // self.continuations for i in range(self.continuations)]
        prompts = torch.stack([torch.from_numpy(file.read(i, i + size)) for i in starts]).to(device)
        capacity, width = size + sampling.tokens, (low or torch.float32).itemsize
        caches = model.start(len(starts), capacity, dtype=low, device=device)
        kv_cache = {
            "bytes_predicted": width * sum(a.cache_elements(len(starts), capacity) for a in model.attentions),
            "bytes_measured": sum(cache.nbytes for cache in caches),
            "bytes_per_token": width * sum(a.cache_elements_per_token for a in model.attentions),  # of long texts
        }
        kv_cache["bytes_per_position"] = round(kv_cache["bytes_measured"] / len(starts) / capacity, 2)  # of these
        del caches
        with MemoryMeter(device) as meter:
            began = now(device)
            found = sampling(model, prompts, num_ids=vocabulary.num_ids, dtype=low)
            seconds = now(device) - began
        rows = [
            (
                f"test-{start}",
                vocabulary.text(file.read(start, start + size).tolist()),
                vocabulary.text(file.read(start + size, min(start + capacity, len(file))).tolist()),
                vocabulary.text(text),
            )
            for start, text in zip(starts, found.tolist(), strict=True)
        ]
        write_predictions(directory / "predictions.tsv", rows)
        return {
            "inference": {
                "seconds": round(seconds, 3),
                "tokens_per_second": round(found.numel() / seconds, 1),
                "peak_memory_mib": round(meter.peak, 1),
                "mean_memory_mib": round(meter.mean, 1),
                "batch": len(starts),
                "beam": 1,
                "dtype": str(low or torch.float32).removeprefix("torch."),
                "protocol": f"{len(starts)} prompts of {size} tokens read at once, then {sampling.tokens} sampled "
                f"tokens each; {meter.protocol}",
            },
            "kv_cache": kv_cache,
        }


def _perplexity(nats: float, count: float) -> float:
    return round(math.exp(min(nats / count, 700.0)), 4)


@torch.inference_mode()
def _nats(module: LanguageModelling, loader: DataLoader[Window], device: torch.device, what: str) -> tuple[float, int]:
    """Of all targets together, summed in float64; and how many there are."""
    nats, count = torch.zeros((), dtype=torch.float64), 0
    with Progress(transient=True, disable=not sys.stderr.isatty()) as progress:
        for window in progress.track(loader, description=what):
            loss, number = module.nll((window[0].to(device), window[1].to(device)))
            nats += loss.double().cpu()
            count += int(number)
    return float(nats), count
