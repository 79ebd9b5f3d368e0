"""The task reasoning: ask a language model, compress it, ask it again, and save it."""

from __future__ import annotations

import copy
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from torch import nn

from attnlab.callbacks.summary import show
from attnlab.compression import Method, compress, folder
from attnlab.compression.calibration import Grams, calibrated
from attnlab.compression.counting import parameters, rate
from attnlab.compression.folder import COMPRESSED
from attnlab.config.build import instantiate
from attnlab.config.nodes import check_nodes
from attnlab.data.corpus import read_text
from attnlab.data.questions import Questions
from attnlab.data.samples.world import TEXT
from attnlab.errors import ConfigError, nearest
from attnlab.pretrained import huggingface
from attnlab.pretrained.weights import new_folder
from attnlab.run import record as records
from attnlab.run.console import each
from attnlab.run.device import autocast, device_of, scoring_dtype
from attnlab.run.directory import DENSE
from attnlab.run.files import write_text
from attnlab.run.identity import corpus_content
from attnlab.tasks.base import Compresses, Restores, show_data
from attnlab.tasks.reasoning.model import AskedModel
from attnlab.tasks.reasoning.score import Answer, Asked, ask, perplexity, quality

log = logging.getLogger(__name__)

CALIBRATION_ROWS = 256  # questions of the validation split


class ReasoningTask(Compresses, Restores):
    """Asks a pretrained language model the questions of one set, dense and compressed.

    `record["compression"]` has the rate, a report of each unit, and under `quality` the numbers of the test split at
    the points `dense` and `compressed`, with `task.search` also the curve of the validation split.

    Attributes:
        candidates: the settings of `task.search`, and the method with each of them.
        answers: of the last scored model, to the test questions.
    """

    answers: list[Answer]
    workloads = ("projections", "whole", "decomposition")

    def __init__(self, cfg: DictConfig) -> None:
        super().__init__(cfg)
        self.spec: AskedModel = instantiate(cfg.task.model, path="task.model")
        self.candidates: list[tuple[Any, Method]] = []
        if cfg.task.search is not None and self.method is None:
            raise ConfigError("task.search: there is nothing to search with compress=none")
        search: Any = [] if cfg.task.search is None else OmegaConf.to_container(cfg.task.search, resolve=True)
        for i, settings in enumerate(search):
            for key in settings:
                if key not in cfg.compress or key == "_target_":
                    hint = nearest(key, [str(name) for name in cfg.compress if name != "_target_"])
                    raise ConfigError(f"task.search.{i}.{key}: compress={cfg.choices.compress} has no such key{hint}")
            node: Any = OmegaConf.merge(cfg.compress, settings)
            check_nodes(OmegaConf.to_container(node), "compress")
            self.candidates.append((settings, instantiate(node, path="compress")))

    def build(self) -> nn.Module:
        """The dense model; sizes alone on meta."""
        return self.spec.outline()

    def describe(self, record: dict[str, Any]) -> None:
        """Fill `record` with the parameters and the compression rate; neither weights nor a network are needed."""
        dense, model = self.outlined(self.method)
        self.sizes(record, model)
        if self.method:
            record["compression"] = {"rate": rate(dense, model)}
            record["parameters"]["original"] = parameters(dense)

    def check(self, directory: Path) -> None:
        """Raise ConfigError or DataError for settings, ranks or a model that cannot work, before anything is read."""
        if self.cfg.hardware.strategy != "auto" or self.cfg.hardware.devices not in ("auto", 1):
            raise ConfigError("task=reasoning runs in one process on one device: hardware=cpu or hardware=gpu")
        if self.method is None:
            return
        for method in [method for _, method in self.candidates] or [self.method]:
            source = method.calibration
            if source not in (None, "validation") and not Path(source).expanduser().is_file():
                raise ConfigError(f"compress.calibration={source}: no such file; give a text, or validation")
            self.outlined(method)

    def prepare(self, record: dict[str, Any], stage: str | None) -> tuple[Questions, Asked]:
        """The questions, read, and the model with its tokenizer."""
        cfg = self.cfg
        data: Questions = instantiate(cfg.task.data, path="task.data")
        data.read()  # a question without an answer is named before the weights are read
        asked = self._loaded(self.spec)
        self.sizes(record, asked.model)
        data.setup(lambda text: len(asked.ids(text)))
        record["corpus"] = data.corpus
        show_data(record, data.report)
        records.identify(record, corpus_content(data.location, Path(cfg.cache_dir)))
        return data, asked

    def _loaded(self, spec: AskedModel) -> Asked:
        """Weights of half precision are read in float32 unless `hardware.precision` or `task.model.dtype` is lower."""
        if spec.dtype is None and scoring_dtype(self.cfg.hardware.precision) is None:
            spec = replace(spec, dtype="float32")
        asked = spec.load(self.cfg.seed, Path(self.cfg.cache_dir).expanduser(), device_of(self.cfg))
        asked.model.eval().requires_grad_(False)
        return asked

    def restore(self) -> Asked:
        """For mode=evaluate: `checkpoint=` is a run of mode=compress, its folder, or a Hugging Face folder."""
        checkpoint = self.cfg.checkpoint
        return self._loaded(self.spec if checkpoint is None else AskedModel(str(checkpoint)))

    def sizes(self, record: dict[str, Any], model: nn.Module) -> None:
        record["parameters"] = parameters(model)
        if self.spec.weights and not self.cfg.checkpoint:
            record |= huggingface.stored(self.spec.weights)

    def transform(self, record: dict[str, Any], directory: Path, data: Questions, module: Asked) -> None:
        """Score, compress, score, and save the compressed folder with the tokenizer."""
        about = self.compress(record, directory, data, module)
        if self.method:
            self.measure("compressed", about, directory, data, module)
        record["quality"] = about["quality"]["compressed" if self.method else "dense"]
        self._predictions(directory / "predictions.tsv", data)
        if self.method:
            self.changed(record, directory)
        self.compare(record)
        show(record, directory)

    def measure(self, point: str, about: dict[str, Any], directory: Path, data: Questions, module: Asked) -> None:
        self.answers = self._asked(data, module, "test")
        if point == "dense":
            self._predictions(directory / DENSE, data)
        about["quality"][point] = self._quality(module, data)
        about.setdefault("validation", {})[point] = quality(self._asked(data, module, "validation"))

    def calibrate(self, about: dict[str, Any], data: Questions, module: Asked) -> Method:
        """The method of `compress=`, or the candidate with the highest accuracy, of equal ones the lowest loss."""
        assert self.method is not None
        if not self.candidates:
            return self._calibrated(self.method, data, module)
        curve, methods = [], []
        for settings, method in each("searching the settings of the compression", self.candidates):
            methods.append(self._calibrated(method, data, module))
            model = copy.deepcopy(module.model)
            reports = compress(model, methods[-1], self.decompositions)
            errors = [report["error"] for report in reports if isinstance(report.get("error"), float)]
            numbers = quality(self._asked(data, Asked(model, module.tokenizer), "validation"))
            curve.append(
                {
                    "settings": settings,
                    "rate": rate(module.model, model)["rate"],
                    "error": max(errors, default=None),
                    "validation": numbers,
                }
            )
            log.info("search: %s, %s", settings, numbers)
        scores = [(-point["validation"]["accuracy"], point["validation"]["loss"]) for point in curve]
        best = scores.index(min(scores))
        about |= {"search": curve, "chosen": curve[best]["settings"]}
        log.info("the search has chosen %s", about["chosen"])
        return methods[best]

    def remaining(self, dense: nn.Module, model: nn.Module) -> dict[str, Any]:
        return {"rate": rate(dense, model)}

    def _asked(self, data: Questions, module: Asked, split: str) -> list[Answer]:
        task = self.cfg.task
        with self._autocast():
            return ask(module, data.kind, getattr(data, split), task.batch_size, task.compat)

    def _autocast(self) -> torch.autocast:
        """As `hardware.precision` says, unless `task.model.dtype` does."""
        low = scoring_dtype(self.cfg.hardware.precision) if self.spec.dtype is None else None
        return autocast(device_of(self.cfg), low)

    def _quality(self, module: Asked, data: Questions) -> dict[str, Any]:
        """Accuracy and loss of the answers, and the perplexity of a decoder on the text."""
        numbers, task = quality(self.answers), self.cfg.task
        file = task.text.file
        if file is None and data.root is None and module.is_decoder:
            file = data.location / TEXT
        if file is not None:
            with self._autocast():
                of_text = perplexity(module, read_text(Path(file).expanduser()), task.batch_size, task.text.context)
            numbers |= {"perplexity": of_text["perplexity"], "text_tokens": of_text["tokens"]}
        return numbers | {"signature": f"{data.kind.name}, {'compat' if task.compat else 'corrected'}"}

    def _calibrated(self, method: Method, data: Questions, module: Asked) -> Method:
        """The method with the inputs of projections over the validation questions or a text file, if it asks."""
        if method.calibration == "validation":
            texts = [f"{question.prompt} {question.answers[0]}" for question in data.validation]
        elif method.calibration is not None:
            lines = read_text(Path(method.calibration).expanduser()).split("\n")
            texts = [line for line in lines if line.strip()]

        def feed(grams: Grams) -> None:
            rows = [module.ids(text)[-module.longest :] for text in texts[:CALIBRATION_ROWS]]
            for first in each("calibrating the compression", range(0, len(rows), self.cfg.task.batch_size)):
                batch = module.batch(rows[first : first + self.cfg.task.batch_size])
                grams.mask = batch["attention_mask"].bool()
                module.model(**batch)

        return calibrated(method, module.model, feed)

    def save_compressed(self, directory: Path, data: Questions, module: Asked) -> None:
        """The compressed folder with the tokenizer."""
        place = directory / COMPRESSED
        notes = {"compress": self.cfg.choices.compress}
        name, options = self.spec.weights or "world", huggingface.options_of(module.model)
        with new_folder(place) as partial:
            folder.save(module.model, partial, name, options, notes)
            huggingface.copy_tokenizer(module.tokenizer, partial)

    def _predictions(self, path: Path, data: Questions) -> None:
        """A file of predictions: prompt, answer, what the model answered, whether it is right, and the loss."""
        rows = ["source\treference\thypothesis\tright\tloss"]
        for question, answer in zip(data.test, self.answers, strict=True):
            cells = [question.prompt, question.answers[0], answer.text, str(int(answer.right))]
            rows.append("\t".join(" ".join(cell.split()) for cell in cells) + f"\t{answer.nats / answer.tokens:.5f}")
        write_text(path, "\n".join(rows) + "\n")
