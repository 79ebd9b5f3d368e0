"""Language models, scored by perplexity."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from attnlab.config.build import instantiate
from attnlab.data.samples.markov import Source
from attnlab.data.text.vocabulary import Vocabulary, Words, read_vocabulary
from attnlab.decoding import Sampling
from attnlab.errors import ConfigError
from attnlab.models import LanguageModel
from attnlab.models.build import build_model, identity, without_memory
from attnlab.runs.device import device_of
from attnlab.tasks.base import TextTask, beside
from attnlab.tasks.language_modelling.predict import INPUT, Continuation

if TYPE_CHECKING:
    from lightning.pytorch.callbacks import Callback

    from attnlab.data.inputs import InputKind
    from attnlab.data.text.language_modelling import LanguageModellingData
    from attnlab.tasks.language_modelling.module import LanguageModelling
    from attnlab.tasks.language_modelling.score import LanguageScore

VOCABULARY = "vocabulary.json"  # in the run directory


class LanguageModellingTask(TextTask):
    """A decoder over text alone; the best checkpoint is the one with the lowest validation loss."""

    monitor = "val_loss"
    better: Literal["min", "max"] = "min"
    kept = (VOCABULARY,)

    def build(self) -> LanguageModel:
        data = self.cfg.task.data
        size: int = data.vocab_size
        sample = data.root is None and self.cfg.choices.scale == "sample"
        if sample and isinstance(instantiate(data.vocabulary, path="task.data.vocabulary"), Words):
            size = min(size, len(Source().words) + 1)  # the sample corpus has no more: its words and the end of a line
        return self._model(size)

    def _model(self, vocab_size: int) -> LanguageModel:
        model: LanguageModel = build_model(self.cfg, vocab_size=vocab_size)
        return model

    def decoder(self, model: Any) -> LanguageModel:
        decoder: LanguageModel = model
        return decoder

    def monitors(self) -> dict[str, bool]:
        return {"val_loss": False}

    def check(self, directory: Path) -> None:
        with without_memory():
            self._check_lengths(self.build())
        instantiate(self.cfg.task.score, path="task.score")
        instantiate(self.cfg.task.sampling, path="task.sampling")

    def _check_lengths(self, model: LanguageModel) -> None:
        """Refuse a window, or a prompt with its continuation, that is longer than the model or its mechanism."""
        task, longest = self.cfg.task, model.longest
        limit = f"task.model.max_length={longest}"
        if longest < model.max_length:
            limit = f"the {longest} positions that its attention has"
        lengths = {"window": task.data.window, "eval_window": task.data.eval_window}
        for name, length in lengths.items():
            if length is not None and length > longest:
                raise ConfigError(f"task.data.{name}={length} is longer than {limit}")
        window, stride = task.data.eval_window or task.data.window, task.score.sliding_stride
        if stride is not None and stride > window:
            raise ConfigError(f"task.score.sliding_stride={stride} is more than the window of {window}")
        together = task.score.prompt_tokens + task.sampling.tokens
        if together > longest:
            raise ConfigError(
                f"task.score.prompt_tokens={task.score.prompt_tokens} and task.sampling.tokens={task.sampling.tokens} "
                f"make {together} positions, more than {limit}"
            )

    def module(self, record: dict[str, Any], data: LanguageModellingData) -> LanguageModelling:
        module = self._module(data.vocabulary)
        self.sizes(record, module.model)
        return module

    def _module(self, vocabulary: Vocabulary) -> LanguageModelling:
        from attnlab.tasks.language_modelling.module import LanguageModelling

        cfg = self.cfg
        model = self._model(vocabulary.size)
        return LanguageModelling(
            model,
            vocabulary,
            compile=cfg.hardware.compile,
            optimizer=instantiate(cfg.task.optimizer, path="task.optimizer"),
            schedule=instantiate(cfg.task.schedule, path="task.schedule"),
            identity=identity(cfg, vocabulary=vocabulary.fingerprint),
            seed=cfg.seed,
            clip=cfg.task.train.clip,
        )

    def keep(self, directory: Path, data: LanguageModellingData) -> None:
        data.vocabulary.save(directory / VOCABULARY)

    def lend(self, data: LanguageModellingData, files: Mapping[str, Path]) -> None:
        if VOCABULARY in files:
            data.own_vocabulary = read_vocabulary(files[VOCABULARY])

    def rebuilt(self, weights: Path) -> LanguageModelling:
        return self._module(read_vocabulary(beside(weights, VOCABULARY, "the vocabulary")))

    def export(self, folder: Path, format: Literal["hf", "safetensors"], record: Mapping[str, Any]) -> None:
        """As for every task; "hf": a Llama or a folder with its own modelling files, which transformers loads."""
        if format == "safetensors":
            return super().export(folder, format, record)
        from attnlab.export import language

        module = self.restore().cpu()
        language.export(module.model, self.cfg, module.vocabulary, record, folder)

    @property
    def input_kind(self) -> InputKind:
        return INPUT

    def predictor(self, module: LanguageModelling, **settings: Any) -> Continuation:
        return Continuation(module, self.cfg, **settings)

    def scoring(self, directory: Path, data: LanguageModellingData, module: LanguageModelling) -> list[Callback]:
        score: LanguageScore = instantiate(self.cfg.task.score, path="task.score")
        return [score.quality(data, alone=self.cfg.hardware.strategy == "fsdp")]

    def after_scoring(self, record: dict[str, Any], directory: Path, data: Any, module: Any) -> None:
        """Continue some places of the test text."""
        cfg = self.cfg
        score: LanguageScore = instantiate(cfg.task.score, path="task.score")
        sampling: Sampling = instantiate(cfg.task.sampling, path="task.sampling")
        found = score.continue_texts(module, data, sampling, device_of(cfg), cfg.hardware.precision, directory)
        for section, values in found.items():
            record[section] |= values
