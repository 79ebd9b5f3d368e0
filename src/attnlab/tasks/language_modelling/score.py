"""A language model's perplexity on held-out text, and continuations of it."""

import csv
import math
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
from annotated_types import Ge
from lightning import LightningModule, Trainer
from torch import Tensor

from attnlab.callbacks.cost import WATCHED, MemoryMeter, timed
from attnlab.callbacks.scoring import Quality, write_predictions
from attnlab.data.text.language_modelling import LanguageModellingData
from attnlab.data.text.vocabulary import PretrainedVocabulary
from attnlab.data.text.windows import begun
from attnlab.decoding import Sampling
from attnlab.errors import ConfigError
from attnlab.metrics.numbers import Perplexity, exp_of_mean
from attnlab.run.device import autocast, busy_cores, scoring_dtype
from attnlab.run.directory import ORIGINAL, PREDICTIONS, WINDOWS
from attnlab.tasks.base import measured_by
from attnlab.tasks.language_modelling.module import LanguageModelling
from attnlab.tasks.language_modelling.needle import Needle

SHORT_WINDOW, FEW_TOKENS = 512, 10_000  # below which scores of a pretrained model are marked


class WindowQuality(Quality):
    """Also writes the tokens and the loss in nats of each window of the first metric to `path`, from rank zero."""

    def __init__(self, path: Path, metrics: dict[str, Perplexity], about: dict[str, Any]) -> None:
        super().__init__(metrics, about)
        self.path = path

    def on_test_epoch_end(self, trainer: Trainer, module: LightningModule) -> None:
        super().on_test_epoch_end(trainer, module)
        rows = self.metrics[""].rows()  # on every process: it gathers
        if trainer.is_global_zero:
            lines = ((str(i), f"{count:.0f}", f"{nats:.4f}") for i, (nats, count) in enumerate(rows))
            write_predictions(self.path, lines, ("id", "tokens", "nats"))


def ratio_to_original(directory: Path) -> dict[str, Any] | None:
    """The perplexity over the original's in a run directory, with its 95 % interval; None: the original's is not there.

    Both are of the same windows, and the interval is that of their differences: see
    :func:`attnlab.metrics.numbers.exp_of_mean`.
    """
    tables = []
    for path in (directory / f"{ORIGINAL}{WINDOWS}", directory / WINDOWS):
        if not path.is_file():
            return None
        with open(path, encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
        tables.append([(float(row["tokens"]), float(row["nats"])) for row in rows])
    pairs = list(zip(*tables, strict=True))
    changes, counts = [second[1] - first[1] for first, second in pairs], [first[0] for first, _ in pairs]
    value, interval = exp_of_mean(changes, counts)
    return {"value": value, **({"interval": interval} if interval else {}), "windows": len(pairs)}


def score_warnings(data: LanguageModellingData) -> list[str]:
    """Warnings, of a line each, of a pretrained model that is scored on short windows or on few tokens."""
    if not isinstance(data.vocabulary, PretrainedVocabulary):
        return []
    window, tokens = data.eval_window, min(len(data.tokens("test")), data.test_windows() * data.eval_window)
    short = f"windows of {window} tokens: with less to read a pretrained model's perplexity is higher than elsewhere"
    few = f"{tokens:,} tokens are scored: fewer than {FEW_TOKENS:,} tell little of a pretrained model"
    more = "" if data.eval_windows is None else "; raise task.data.eval_windows"
    return [
        *([f"{short}; task.data.eval_window={SHORT_WINDOW} or more"] if window < SHORT_WINDOW else []),
        *([f"{few}{more}"] if tokens < FEW_TOKENS else []),
    ]


@dataclass(frozen=True)
class LanguageScore:
    """Scores a language model.

    Perplexity is exp of the mean negative log-probability of a token (or word) after those before it in its window. It
    has a 95 % interval over the windows (:func:`attnlab.metrics.numbers.exp_of_mean`). The first token of the text is
    not predicted. Where the tokenizer of a pretrained model puts a token before a text, windows and prompts begin with
    it, in place of their own first token, which the window before predicts.

    Args:
        sliding_stride: perplexity also over windows that begin every `sliding_stride` tokens and predict only their
            last ones; None: over disjoint windows alone.
        continuations: places of the test text that are continued, evenly spread.
        prompt_tokens: tokens that the model reads before each place.
        needle: recall of a fact by the length of a text and the fact's depth; None: not measured.
    """

    sliding_stride: Annotated[int, Ge(1)] | None = None
    continuations: Annotated[int, Ge(1)] = 8
    prompt_tokens: Annotated[int, Ge(1)] = 16
    needle: Needle | None = None

    def quality(self, data: LanguageModellingData, directory: Path, alone: bool = False) -> Quality:
        """The callback that computes the record's `quality`; `alone`: rank zero alone scores."""
        unit, window = data.vocabulary.unit, data.eval_window
        if self.sliding_stride is not None and self.sliding_stride > window:
            raise ConfigError(f"task.score.sliding_stride={self.sliding_stride} is more than the window of {window}")
        data.sliding_stride = self.sliding_stride
        part = "" if data.eval_windows is None else f", at most {data.eval_windows} of them"
        about: dict[str, Any] = {
            "unit": unit,
            "signature": f"exp of the mean NLL per {unit}, disjoint windows of {window}{part}{data.vocabulary.begins}, "
            "text ends count" + (", on rank zero alone" if alone else ""),
        }
        words = data.words_per_id("test") or None if unit == "token" else None
        metrics = {"": Perplexity(data.test_windows(), words)}
        if self.sliding_stride is not None:
            metrics["sliding_"] = Perplexity(data.test_windows(self.sliding_stride))
            about["sliding_stride"] = self.sliding_stride
        if (floor := data.floor("test")) is not None:
            about["floor"] = round(math.exp(floor), 4)  # no model can do better in the long run
        if warnings := score_warnings(data):
            about["warnings"] = warnings
        return WindowQuality(directory / WINDOWS, metrics, about | {"held_out": data.source.held_out})

    def continue_texts(
        self,
        module: LanguageModelling,
        data: LanguageModellingData,
        sampling: Sampling,
        device: torch.device,
        precision: str,
        directory: Path,
    ) -> dict[str, dict[str, Any]]:
        """Continue the places of the test text, on one process, and write predictions.tsv.

        Returns:
            The sections `inference` and `kv_cache` of the record.
        """
        module, low = module.to(device).eval(), scoring_dtype(precision)
        model, vocabulary, file = module.model, data.vocabulary, data.tokens("test")
        size = min(self.prompt_tokens, len(file) - 1)
        room = max(0, len(file) - size - sampling.tokens)
        starts = [i * room // self.continuations for i in range(self.continuations)]
        prompts = begun(torch.stack([torch.from_numpy(file.read(i, i + size)) for i in starts]), vocabulary).to(device)
        capacity, dtype = size + sampling.tokens, low or torch.float32
        caches = model.start(len(starts), capacity, dtype=low, device=device)
        kv_cache = {
            "bytes_predicted": model.cache_bytes(len(starts), capacity, dtype=dtype),
            "bytes_measured": sum(cache.nbytes for cache in caches),
            "bytes_per_token": sum(a.cache_bytes_per_token(dtype) for a in model.attentions),  # long texts
        }
        if bits := next((a.cache_bits for a in model.attentions if a.cache_bits), None):
            kv_cache["bits"] = bits
        kv_cache["bytes_per_position"] = round(kv_cache["bytes_measured"] / len(starts) / capacity, 2)  # of these
        del caches

        def sampled(sampling: Sampling) -> Tensor:
            ids = vocabulary.num_ids
            return sampling(model, prompts, num_ids=ids, dtype=low, compiled=module.compiled or None)

        with autocast(device, low):
            if module.compiled:  # the compiler's time and memory are no part of what is measured
                sampled(replace(sampling, tokens=2))
            busy = busy_cores(WATCHED, advise=False)
            with MemoryMeter(device) as meter:
                texts, passes = timed(lambda: sampled(sampling), device)
        seconds = median(passes)
        protocol = f"{len(starts)} prompts of {size} tokens read at once, then {sampling.tokens} sampled tokens each"
        rows = [
            (
                f"test-{start}",
                vocabulary.text(file.read(start, start + size).tolist()),
                vocabulary.text(file.read(start + size, min(start + capacity, len(file))).tolist()),
                vocabulary.text(text),
            )
            for start, text in zip(starts, texts.tolist(), strict=True)
        ]
        write_predictions(directory / PREDICTIONS, rows)
        return {
            "inference": {
                "seconds": round(seconds, 3),
                "passes": len(passes),  # of which these are the median
                "tokens_per_second": round(texts.numel() / seconds, 1),
                "tokens_per_second_range": [round(texts.numel() / extreme(passes), 1) for extreme in (max, min)],
                **measured_by(meter, len(starts), dtype, busy, protocol),
            },
            "kv_cache": kv_cache,
        }
