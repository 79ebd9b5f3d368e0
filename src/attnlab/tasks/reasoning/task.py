"""The task reasoning: ask a language model, compress it, ask it again, and save it."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

from omegaconf import DictConfig
from torch import nn

from attnlab.callbacks.summary import show
from attnlab.compression import Method, compress, folder, outline
from attnlab.compression.calibration import Grams, calibrated
from attnlab.compression.counting import parameters, rate
from attnlab.compression.folder import COMPRESSED
from attnlab.config.build import instantiate
from attnlab.data.corpus import read_text
from attnlab.data.questions import Questions
from attnlab.data.samples.world import TEXT
from attnlab.errors import ConfigError, WriteError
from attnlab.models.build import without_memory
from attnlab.pretrained import huggingface
from attnlab.run import fingerprint
from attnlab.run import record as records
from attnlab.run.device import device_of
from attnlab.run.files import replacing_folder, write_text
from attnlab.run.progress import each
from attnlab.run.record import NOT_RUN
from attnlab.tasks.base import Task
from attnlab.tasks.reasoning.model import AskedModel
from attnlab.tasks.reasoning.rows import padded, with_positions
from attnlab.tasks.reasoning.score import Answer, Asked, ask, frozen, perplexity, quality
from attnlab.tasks.reasoning.search import Search

log = logging.getLogger(__name__)

POINTS = ("dense", "compressed")
CALIBRATION_ROWS = 256  # questions of the validation split


class ReasoningTask(Task):
    """Asks a pretrained language model the questions of one set, dense and compressed.

    `record["compression"]` has the rate, a report of each unit, and under `quality` the numbers of the test split at
    the points `dense` and `compressed`, with `search` also the curve of the validation split.

    Args:
        cfg: the run's whole configuration, resolved.

    Raises:
        ConfigError: `compress=` names no method, or `task.search` names keys that it does not have.
    """

    monitor = "accuracy"

    def __init__(self, cfg: DictConfig) -> None:
        super().__init__(cfg)
        self.spec: AskedModel = instantiate(cfg.task.model, path="task.model")
        self.method: Method | None = None
        self.search: Search | None = None
        if cfg.choices.compress != "none":
            self.method = self.built(cfg.compress)
        if cfg.task.search is not None:
            self.search = Search.of(cfg)

    @staticmethod
    def built(node: DictConfig) -> Method:
        """The method of a node."""
        method = instantiate(node, path="compress")
        if not isinstance(method, Method):
            raise ConfigError(f"compress._target_={node._target_}: expected a class derived from Method")
        return method

    @property
    def workloads(self) -> tuple[str, ...]:
        return ("projections", "whole", "decomposition")

    # --- from the config alone ----------------------------------------------------------------------------------

    def build(self) -> nn.Module:
        """The dense model; sizes alone on meta."""
        return self.spec.outline()

    def describe(self, record: dict[str, Any]) -> None:
        """Fill `record` with the parameters and the compression rate; neither weights nor a network are needed."""
        with without_memory():
            model = dense = self.build()
            if self.method:
                model = self.build()
                outline(model, self.method)
        if self.method:
            record["compression"] = {"rate": rate(dense, model)}
        record["parameters"] = parameters(model)

    def check(self, directory: Path) -> None:
        """Raise ConfigError or DataError for settings, ranks or a model that cannot work, before anything is read."""
        if self.cfg.hardware.strategy != "auto" or self.cfg.hardware.devices not in ("auto", 1):
            raise ConfigError("task=reasoning runs in one process on one device: hardware=cpu or hardware=gpu")
        if self.method is None:
            return
        for method in self.search.methods() if self.search else [self.method]:
            source = method.calibration
            if source not in (None, "validation") and not Path(source).expanduser().is_file():
                raise ConfigError(f"compress.calibration={source}: no such file; give a text, or validation")
            with without_memory():
                outline(self.build(), method)

    # --- with data ----------------------------------------------------------------------------------------------

    def prepare(self, record: dict[str, Any], stage: str | None) -> tuple[Questions, Asked]:
        """The questions, read, and the model with its tokenizer."""
        cfg = self.cfg
        data: Questions = instantiate(cfg.task.data, path="task.data")
        data.read()  # a question without an answer is found before the weights are read
        asked = self.module(record, None)
        data.setup(lambda text: len(asked.words.ids(text)))
        record["corpus"] = data.corpus
        records.identify(record, fingerprint.corpus(data.location, Path(cfg.cache_dir)))
        return data, asked

    def module(self, record: dict[str, Any], data: Any) -> Any:
        """The model with its tokenizer; `record` gets the number of parameters."""
        asked = self._asked_model()
        self.sizes(record, asked.model)
        return asked

    def _asked_model(self) -> Asked:
        asked: Asked = self.spec.load(self.cfg.seed, Path(self.cfg.cache_dir).expanduser(), device_of(self.cfg))
        frozen(asked.model)
        return asked

    def restore(self) -> Asked:
        """The model of `checkpoint=`, for mode=evaluate: a run of mode=compress, its folder, or a Hugging Face folder.

        Without it, that of `model=`, which may be a name of the hub too.

        Raises:
            DataError: it is none of these, or damaged.
        """
        if self.cfg.checkpoint is None:
            return self._asked_model()
        source = str(self.cfg.checkpoint)
        if place := folder.find(source):
            asked = Asked(folder.load(place).to(device_of(self.cfg)), huggingface.tokenizer(str(place)))
        else:  # the dense model, for comparison
            asked = Asked(huggingface.load(source, device=device_of(self.cfg)), huggingface.tokenizer(source))
        return asked

    def sizes(self, record: dict[str, Any], model: nn.Module) -> None:
        record["parameters"] = parameters(model)

    def compress(self, record: dict[str, Any], directory: Path, data: Questions, module: Asked) -> None:
        """Score, compress, score, and save the compressed folder with the tokenizer.

        Args:
            record: gets `compression`, `quality` and the sizes of the compressed model.
            directory: the run's.
            data: the questions.
            module: its model is compressed in place.
        """
        about: dict[str, Any] = {
            "method": self.cfg.choices.compress,
            "layers": [],
            "quality": dict.fromkeys(POINTS, NOT_RUN),
        }
        record["compression"] = about
        answers = self._asked(data, module)
        about["quality"]["dense"] = self._quality(answers, module, data)
        about["validation"] = {"dense": quality(self._asked(data, module, "validation"))}
        if self.method:
            began = time.perf_counter()
            store = Path(self.cfg.cache_dir).expanduser() / "decompositions"
            method = self.method
            if self.search:
                found = self.search.run(
                    module.model,
                    lambda: quality(self._asked(data, module, "validation")),
                    lambda candidate: self._calibrated(candidate, data, module),
                    store,
                )
                about["search"], method = found.curve, found.method
                log.info("the search has chosen %s", found.chosen)
                about["chosen"] = found.chosen
            method = self._calibrated(method, data, module)
            with without_memory():
                dense = huggingface.create("dense", huggingface.options_of(module.model))
            about["layers"] = compress(module.model, method, store)
            about["seconds"] = round(time.perf_counter() - began, 2)
            about["rate"] = rate(dense, module.model)
            self._save(directory, module)
            answers = self._asked(data, module)
            about["quality"]["compressed"] = self._quality(answers, module, data)
            about["validation"]["compressed"] = quality(self._asked(data, module, "validation"))
            if record["rank"] is None and about["layers"]:
                record["rank"] = method.rank_of(about["layers"][0])
        record["quality"] = about["quality"]["compressed" if self.method else "dense"]
        record["parameters"] = parameters(module.model)
        self._predictions(directory, data, answers)
        self.compare(record)
        show(record, directory)

    def score(self, record: dict[str, Any], directory: Path, data: Questions, module: Asked) -> None:
        """Score the test split."""
        answers = self._asked(data, module)
        record["quality"] = self._quality(answers, module, data)
        self._predictions(directory, data, answers)
        show(record, directory)

    def _asked(self, data: Questions, module: Asked, split: str = "test") -> list[Answer]:
        task = self.cfg.task
        return ask(module, data.kind, getattr(data, split), task.batch_size, task.compat)

    def _quality(self, answers: list[Answer], module: Asked, data: Questions) -> dict[str, Any]:
        """Accuracy and loss of answers, and the perplexity of a decoder on the text."""
        found = quality(answers)
        file = self.cfg.task.text.file
        if file is None and data.root is None and module.is_decoder:
            file = data.location / TEXT
        if file is not None:
            text = read_text(Path(file).expanduser())
            numbers = perplexity(module, text, self.cfg.task.batch_size, self.cfg.task.text.context)
            found |= {"perplexity": numbers["perplexity"], "text_tokens": numbers["tokens"]}
        return found | {"signature": f"{data.kind.name}, {'compat' if self.cfg.task.compat else 'corrected'}"}

    def _calibrated(self, method: Method, data: Questions, module: Asked) -> Method:
        """The method with the inputs of projections over the validation questions or a text file, if it asks."""
        words = module.words
        if method.calibration == "validation":
            texts = [f"{question.prompt} {question.answers[0]}" for question in data.validation[:CALIBRATION_ROWS]]
        elif method.calibration is not None:
            text = read_text(Path(method.calibration).expanduser())
            texts = [line for line in text.split("\n") if line.strip()][:CALIBRATION_ROWS]

        def feed(grams: Grams) -> None:
            rows = [words.ids(text)[-words.longest :] for text in texts]
            for first in each("calibrating the compression", range(0, len(rows), self.cfg.task.batch_size)):
                chosen = rows[first : first + self.cfg.task.batch_size]
                side = "left" if module.is_decoder else "right"
                batch = padded(chosen, module.tokenizer.pad_token_id, side, next(module.model.parameters()).device)  # type: ignore[arg-type]
                grams.mask = batch["attention_mask"].bool()
                module.model(**(with_positions(batch) if module.is_decoder else batch))

        return calibrated(method, module.model, feed)

    def _save(self, directory: Path, module: Asked) -> None:
        """The compressed folder with the tokenizer; an earlier one is replaced as a whole, or stays."""
        place = directory / COMPRESSED
        notes = {"compress": self.cfg.choices.compress}
        name, options = self.spec.weights or "world", huggingface.options_of(module.model)
        with replacing_folder(place) as partial:
            try:
                folder.save(module.model, partial, name, options, notes)
            except WriteError as error:
                raise WriteError(error.errno, error.strerror, str(place)) from error
            huggingface.save_tokenizer(module.tokenizer, partial, place)

    def _predictions(self, directory: Path, data: Questions, answers: list[Answer]) -> None:
        """predictions.tsv: prompt, answer, what the model answered, whether it is right, and the loss."""
        rows = ["source\treference\thypothesis\tright\tloss"]
        for question, answer in zip(data.test, answers, strict=True):
            cells = [question.prompt, question.answers[0], answer.text, str(int(answer.right))]
            rows.append("\t".join(" ".join(cell.split()) for cell in cells) + f"\t{answer.nats / answer.tokens:.5f}")
        write_text(directory / "predictions.tsv", "\n".join(rows) + "\n")
