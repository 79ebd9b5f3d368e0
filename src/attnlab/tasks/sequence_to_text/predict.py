"""Translating, transcribing, understanding and summarising inputs that a model has not seen."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
from omegaconf import DictConfig

from attnlab.config.build import instantiate
from attnlab.config.rules import check_ctc
from attnlab.data.batch import Example, Ids, collate
from attnlab.data.corpus import AUDIO, Reader, Row, Segment, Utterance, inspect_audio, part_of_recording
from attnlab.data.inputs import InputKind
from attnlab.data.report import noted
from attnlab.data.speech.features import Array, FilterBank, read_waveform, usable
from attnlab.data.speech.stored import StoredFeatures
from attnlab.data.text.tokenizer import SourceText, Tokenizer
from attnlab.decoding import BeamSearch
from attnlab.errors import DataError
from attnlab.tasks.prediction import Predictor, Result, changed
from attnlab.tasks.restored import RestoredTranslator

log = logging.getLogger(__name__)


def input_kind(cfg: DictConfig) -> InputKind:
    """The kind of inputs of a model of this configuration."""
    front = instantiate(cfg.task.data.features, path="task.data.features")
    match front:
        case FilterBank():
            return InputKind("audio file", AUDIO, ("audio", "path", "input"), check_audio, part)
        case StoredFeatures():
            return InputKind("file of features", (".npy", ".mfc"), ("features", "path", "input"), front.frames)
    return InputKind("text", (), ("text", "source", "document", "input"))


class TextPredictor(Predictor):
    """Predicts the text of each input, `prediction`, without <unk>; with classes also the class, `intent`.

    `settings` are fields of `task.decode`, in place of the configured ones.
    """

    def __init__(self, module: RestoredTranslator, cfg: DictConfig, **settings: Any) -> None:
        super().__init__(module, cfg.hardware.precision)
        self.module, self.limit = module, int(cfg.task.decode_max_frames)
        self.front: FilterBank | StoredFeatures | SourceText = instantiate(
            cfg.task.data.features, path="task.data.features"
        )
        self.reader: Reader = instantiate(cfg.task.data.reader, path="task.data.reader")
        self.search: BeamSearch = changed(module.search, settings | {"unknown": False}, "task.decode")
        check_ctc(cfg, self.search.ctc_weight)
        self.classes = list(module.tokenizer.labels.values()) or None

    def read(self, value: Any) -> Array | Ids:
        match self.front:
            case FilterBank():
                samples, rate = recording(value)
                if not np.ptp(samples):
                    noted("recording without any sound", str(value) if isinstance(value, str | Path) else "")
                return self.front(samples, rate)
            case StoredFeatures():
                return self.front(Path(value) if isinstance(value, str) else np.asarray(value))
        if not isinstance(value, str):
            raise DataError(f"expected a text, not {type(value).__name__}")
        inputs = self.front.texts([self.reader.plain(value)], self.module.tokenizer)
        noted(f"cut to {self.front.max_tokens} source pieces", f"{value[:30]} ...", inputs.truncated)
        return inputs[0]

    def size(self, prepared: Array | Ids) -> int:
        return len(prepared)

    def predict(self, batch: list[Array | Ids]) -> list[Result]:
        unknown, no_text = Utterance(id="", source="", target=""), np.asarray([Tokenizer.eos], dtype=np.int64)
        examples = [Example(unknown, features, no_text) for features in batch]
        best = self.module.decode(
            collate(examples).to(self.device), self.search, self.module.cache_dtype, first=self.classes
        )
        if any(not hypotheses for hypotheses in best):
            raise DataError(
                "decoding produced no finished hypothesis: the model's logits are NaN or infinite, or "
                "task.decode.min_len asks for more tokens than CTC can write in so few frames"
            )
        noted("text that ended at the limit of length, task.decode.max_len_b", count=sum(h[0].at_limit for h in best))
        written = map(self.module.written, best)
        return [({"intent": label} if self.classes else {}) | {"prediction": text} for label, text in written]

    def shown(self, result: Result) -> str:
        return "\t".join([*([result["intent"]] if "intent" in result else []), super().shown(result)])


def recording(value: Any) -> tuple[Array, int]:
    """Samples, (samples,) float32 in [-1, 1), and their rate, of a file or an object.

    Args:
        value: the path of a file, a Segment of it, (samples, rate, ...), or {"array": samples, "sampling_rate": rate}.
            The shorter of two axes is that of the channels; integers are scaled by their largest value.

    Raises:
        DataError: the file cannot be read, or the object is no recording.
    """
    if isinstance(value, str | Path):
        rate, count = check_audio(Path(value))
        return read_waveform(Path(value), 0, count), rate
    if isinstance(value, Segment):
        return read_waveform(value.audio, value.start, value.num_samples), value.rate
    try:
        samples, rate = value[:2] if isinstance(value, tuple | list) else (value["array"], value["sampling_rate"])
        array = np.asarray(samples)
        if array.dtype.kind == "i":
            array = array / -float(np.iinfo(array.dtype).min)
        array = array.mean(int(np.argmin(array.shape))) if array.ndim == 2 else array
        if array.ndim != 1 or not array.size or array.dtype.kind != "f":
            raise ValueError(f"samples of shape {array.shape}")
        with np.errstate(over="ignore"):
            return usable(array.astype(np.float32), "a recording"), int(rate)
    except (TypeError, ValueError, LookupError) as error:
        raise DataError(f"not a recording ({error}); expected a path, or (samples, rate)") from error


def part(path: Path, row: Row) -> Segment:
    """The part of a recording that the times of a row name, or all of it.  DataError: as of `part_of_recording`."""
    return Segment(id=row.where, source="", target="", **part_of_recording(row, path, ("audio", "path", "input")))


def check_audio(path: Path) -> tuple[int, int]:
    """Rate and samples of a recording. DataError: it cannot be read, or is empty."""
    rate, samples = inspect_audio(path, "input=")
    if not samples:
        raise DataError(f"{path}: an audio file without samples")
    return rate, samples
