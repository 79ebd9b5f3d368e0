"""Translation, recognition, understanding, summaries: what turns a sequence into text."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from torch import Tensor

from attnlab.config.build import instantiate
from attnlab.errors import ConfigError
from attnlab.models import CrossDecoder, PrefixDecoder
from attnlab.models.build import CacheShape, build_model, count_parameters, identity, without_memory
from attnlab.runs.device import device_of
from attnlab.tasks.base import TextTask, per_layer

if TYPE_CHECKING:
    from attnlab.data.sequence_to_text import SequenceToTextData
    from attnlab.tasks.sequence_to_text.module import Model, SequenceToText

log = logging.getLogger(__name__)


class SequenceToTextTask(TextTask):
    """Encoder, decoder, beam search; scored by `task.score` (BLEU, WER, ROUGE, intents)."""

    encoder: tuple[Path, dict[str, Tensor]] | None = None  # what the encoder starts from

    @property
    def workloads(self) -> tuple[str, ...]:
        """Beam search is measured for decoders that read the encoder's output as a prefix of their own attention."""
        with without_memory():
            prefixed = isinstance(self.build().decoder, PrefixDecoder)
        return ("training", "decoding", "beam", "model") if prefixed else super().workloads

    def build(self) -> Model:
        data = self.cfg.task.data
        return self._model(data.vocab_size, data.ctc_vocab_size)

    def _model(self, vocab_size: int, ctc_vocab_size: int | None) -> Model:
        ctc = {"ctc_vocab_size": ctc_vocab_size} if ctc_vocab_size else {}
        model: Model = build_model(self.cfg, vocab_size=vocab_size, **ctc)
        return model

    def decoder(self, model: Any) -> PrefixDecoder | CrossDecoder:
        decoder: PrefixDecoder | CrossDecoder = model.decoder
        return decoder

    def cache_elements(self, decoder: Any, shape: CacheShape) -> int:
        elements: int = decoder.cache_elements(shape.batch * shape.beam, shape.text, shape.prefix, shape.batch)
        return elements

    def check(self, directory: Path) -> None:
        from attnlab.tasks.sequence_to_text.score import Score
        from attnlab.training.checkpoints import find_weights, read_checkpoint

        task = self.cfg.task
        instantiate(task.decode, path="task.decode")
        if task.score not in get_args(Score):
            raise ConfigError(f"task.score={task.score}: it is one of {', '.join(get_args(Score))}")
        if not 0 <= task.train.label_smoothing < 1:
            raise ConfigError(f"task.train.label_smoothing={task.train.label_smoothing}: expected at least 0, below 1")
        if task.train.ctc_weight and task.data.ctc_vocab_size is None:
            raise ConfigError(
                f"task.train.ctc_weight={task.train.ctc_weight} needs CTC labels: set task.data.ctc_vocab_size"
            )
        if task.encoder_checkpoint:
            path = find_weights(Path(task.encoder_checkpoint).expanduser())
            self.encoder = path, read_checkpoint(path)[0]

    def module(self, record: dict[str, Any], data: SequenceToTextData) -> SequenceToText:
        from attnlab.tasks.sequence_to_text.module import SequenceToText

        cfg = self.cfg
        self._check_width(data)
        ctc = data.ctc_tokenizer
        model = self._model(data.tokenizer.size, ctc.size if ctc and cfg.task.train.ctc_weight else None)
        record["parameters"] = count_parameters(model)
        record["kv_cache"]["elements_per_token_per_layer"] = per_layer(model.decoder.attentions)
        ctc_vocabulary = ctc.fingerprint if ctc and model.ctc else None
        return SequenceToText(
            model,
            data.tokenizer,
            optimizer=instantiate(cfg.task.optimizer, path="task.optimizer"),
            schedule=instantiate(cfg.task.schedule, path="task.schedule"),
            identity=identity(cfg, vocabulary=data.tokenizer.fingerprint, CTC_vocabulary=ctc_vocabulary),
            seed=cfg.seed,
            label_smoothing=cfg.task.train.label_smoothing,
            ctc_weight=cfg.task.train.ctc_weight,
            first_token_weight=cfg.task.train.first_token_weight,
            clip=cfg.task.train.clip,
        )

    def _check_width(self, data: SequenceToTextData) -> None:
        width = getattr(data.front, "width", None)
        expected = self.cfg.task.model.encoder.get("num_mels")
        if width != expected:
            raise ConfigError(
                f"task.model.encoder.num_mels={expected}, but task.data.features gives frames of {width} numbers"
            )

    def before_fit(self, record: dict[str, Any], directory: Path, data: Any, module: Any) -> None:
        """Start the encoder from another run's, as the recipe starts translation from recognition."""
        if self.encoder:
            from attnlab.training.checkpoints import load_into

            path, weights = self.encoder
            encoder = {k.removeprefix("encoder."): v for k, v in weights.items() if k.startswith("encoder.")}
            load_into(module.model.encoder, path, encoder)
            log.info("encoder from %s", path)

    def score(self, record: dict[str, Any], directory: Path, data: Any, module: Any) -> None:
        from attnlab.callbacks.summary import show
        from attnlab.tasks.sequence_to_text.score import evaluate

        cfg = self.cfg
        results = evaluate(
            module,
            data.test_dataloader(max_frames=cfg.task.decode_max_frames),
            instantiate(cfg.task.decode, path="task.decode"),
            cfg.task.score,
            device_of(cfg),
            cfg.hardware.precision,
            directory,
        )
        for section, found in results.items():
            record[section] = record[section] | found if section == "kv_cache" else found
        show(record, directory)


class SpokenIntentTask(SequenceToTextTask):
    """Checkpoints are chosen by how often the first token, the class, is right."""

    monitor = "val_intent_accuracy"
