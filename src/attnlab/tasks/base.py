"""The interface between a kind of task and the modes.

Four concepts make a task: the Task (the wiring), its Data, its Model and its Module (the LightningModule). A task's
folder under `tasks/` has the Task and the Module; `task.kind` of the configuration names the Task. What a mode needs of
a task is a class here (:class:`Trains`, :class:`Compresses`, ...), which the Task derives from.

Lightning takes seconds to import and describing a model does not need it, so tasks import it inside the methods that
train or score.
"""

from __future__ import annotations

import copy
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch
from hydra import compose
from omegaconf import DictConfig, OmegaConf, open_dict
from torch import Tensor, nn

from attnlab.attention import Attention
from attnlab.attention.ops.native import round_weights
from attnlab.callbacks.speedup import read_baseline, require_same_protocol, speedup
from attnlab.config.build import freeze, instantiate
from attnlab.config.check import check_fixed
from attnlab.config.compose import one_line
from attnlab.errors import ConfigError, DataError
from attnlab.models.build import CacheShape, cache_shape, count_parameters, width_key, without_memory
from attnlab.run import record as records
from attnlab.run.device import compiles, device_of, record_compiled
from attnlab.run.directory import CONFIG
from attnlab.run.identity import NOTHING_READ, corpus_content
from attnlab.run.record import NOT_RUN, RECORD
from attnlab.tasks.memory import check_memory, copied, with_largest_batch

if TYPE_CHECKING:
    from lightning.pytorch.callbacks import Callback
    from torch.optim import Optimizer

    from attnlab.callbacks.cost import MemoryMeter
    from attnlab.callbacks.scoring import Sections
    from attnlab.compression import Method
    from attnlab.data.inputs import InputKind
    from attnlab.data.report import Report
    from attnlab.tasks.prediction import Predictor
    from attnlab.training.module import Module


class Task(ABC):
    """Wires the data, the model and the module of one kind of task.

    `modes` in a task's YAML file lists its modes, the default first; those with `EVERY_TASK` in their file are added.
    """

    def __init__(self, cfg: DictConfig) -> None:
        self.cfg = cfg

    @property
    @abstractmethod
    def workloads(self) -> tuple[str, ...]:
        """The values of `bench.what` that mode=bench can measure, the defaults first."""

    @abstractmethod
    def build(self) -> nn.Module:
        """The model at the configured sizes. Sizes that depend on the data are upper bounds."""

    @abstractmethod
    def describe(self, record: dict[str, Any]) -> None:
        """Fill `record` from the configuration alone: parameters, cache bytes, multiply-adds."""

    def sizes(self, record: dict[str, Any], model: Any) -> None:
        """Fill `record` with the number of parameters and other sizes of the model."""
        record["parameters"] = count_parameters(model)
        if self.cfg.task.get("match") is not None:
            record["parameters"]["feed_forward_width"] = OmegaConf.select(self.cfg, width_key(self.cfg))


class ReadsData(Task):
    """Reads a corpus, and computes something on it."""

    def __init__(self, cfg: DictConfig) -> None:
        super().__init__(cfg)
        self.baseline = read_baseline(cfg.baseline) if cfg.baseline else None

    @abstractmethod
    def check(self, directory: Path) -> None:
        """Raise ConfigError or DataError for settings that would fail after the data is read."""

    @abstractmethod
    def prepare(self, record: dict[str, Any], stage: Literal["test"] | None) -> tuple[Any, Any]:
        """The data, read and ready, and the module with the model.

        `record` gets `corpus`, the identity of the run and the sizes of the model. The stage "test" reads the test
        split, None every split.
        """

    def save_files(self, directory: Path, data: Any) -> None:
        """Write the files into the run directory that its weights need: vocabularies, class names."""

    def compare(self, record: dict[str, Any]) -> None:
        """Fill `inference.speedup` from `baseline=`.  DataError: it was measured in another way."""
        if self.baseline:
            record["inference"]["speedup"] = speedup(record, self.baseline, self.cfg.baseline)


def show_data(record: dict[str, Any], report: Report) -> None:
    """Log what was read and what was left out, and write it to `record`."""
    report.show()
    record["data"] = report.plain()


class Transforms(ReadsData):
    """Changes a pretrained model without training it: mode=compress, mode=convert."""

    @abstractmethod
    def transform(self, record: dict[str, Any], directory: Path, data: Any, module: Any) -> None:
        """Score the model, change it, score it and save it; `module` has the new model."""


class Compresses(Transforms):
    """Compresses a pretrained model by `method`, which is None with `compress=none`, and scores it at `points`."""

    method: Method | None
    points: tuple[str, ...] = ("dense", "compressed")

    def __init__(self, cfg: DictConfig) -> None:
        super().__init__(cfg)
        none = cfg.choices.compress == "none"
        self.method = None if none else instantiate(cfg.compress, path="compress")
        self.decompositions = Path(cfg.cache_dir).expanduser() / "decompositions"  # the stored results of layers

    def outlined(self, method: Method | None) -> tuple[nn.Module, nn.Module]:
        """The dense model and the compressed one, without memory. ConfigError: a rank or a layer that cannot be."""
        from attnlab.compression import outline

        with without_memory():
            dense, model = self.build(), self.build()
            if method:
                outline(model, method)
        return dense, model

    def compress(self, record: dict[str, Any], directory: Path, data: Any, module: Any, **about: Any) -> dict[str, Any]:
        """Score the dense model, compress it in place and save it.  Returns `record["compression"]`, with `about`."""
        from attnlab.compression import compress
        from attnlab.compression.counting import parameters

        quality = dict.fromkeys(self.points, NOT_RUN)
        about = record["compression"] = {"method": self.cfg.choices.compress, **about, "layers": [], "quality": quality}
        self.measure("dense", about, directory, data, module)
        dense = copied(module.model, "meta")
        if self.method:
            began = time.perf_counter()
            method = self.calibrate(about, data, module)
            about["layers"] = compress(module.model, method, self.decompositions)
            about["seconds"] = round(time.perf_counter() - began, 2)
            about |= self.remaining(dense, module.model)
            self.save_compressed(directory, data, module)
            if record["rank"] is None and about["layers"]:
                record["rank"] = method.rank_of(about["layers"][0])
        self.sizes(record, module.model)
        record["parameters"]["original"] = parameters(dense)
        return about

    def changed(self, record: dict[str, Any], directory: Path) -> None:
        """Fill `compression.change`: how much the quality differs from the dense model's, by a paired test."""
        from attnlab.report.significance import sure
        from attnlab.run.store import SavedRecord

        about = record["compression"]
        dense = SavedRecord(directory / "dense.json", {"quality": about["quality"]["dense"]})
        about["change"] = sure(dense, SavedRecord(directory / RECORD, record))[0]

    @abstractmethod
    def measure(self, point: str, about: dict[str, Any], directory: Path, data: Any, module: Any) -> None:
        """Score the present model: fills `about["quality"][point]`; of an image, also its file of predictions."""

    @abstractmethod
    def calibrate(self, about: dict[str, Any], data: Any, module: Any) -> Method:
        """The method with its calibration data; `about` gets the search of its settings."""

    @abstractmethod
    def remaining(self, dense: nn.Module, model: nn.Module) -> dict[str, Any]:
        """Entries of `compression` that compare the compressed model with the dense one, which is on meta."""

    @abstractmethod
    def save_compressed(self, directory: Path, data: Any, module: Any) -> None:
        """Write the compressed folder; an earlier one is replaced completely."""


class Restores(Task):
    """Uses trained or pretrained weights without a corpus: mode=evaluate, and the modes of :class:`Trains`."""

    @abstractmethod
    def restore(self) -> Any:
        """The module of `checkpoint=`, or of `model=`, ready to compute. Neither corpus nor cache is read.

        Raises:
            ConfigError: `hardware.accelerator` is a GPU, and the machine has none.
            DataError: a file is missing or damaged, or the checkpoint is of another model.
        """


Format = Literal["hf", "vllm", "deepseek", "safetensors"]  # of mode=export


class Trains(ReadsData, Restores):
    """Trains a model and scores it: mode=train and mode=test; runs are exported, and used by `attnlab.load`.

    Attributes:
        monitor: the validation metric by which the best checkpoints are chosen.
        better: "max" or "min", which values of `monitor` are better.
        file_names: names of the files that `save_files` may write.
        batch_key: of `task.data`, what limits a batch of one process.
    """

    monitor: str = "val_accuracy"
    better: Literal["min", "max"] = "max"
    file_names: tuple[str, ...] = ()
    batch_key: str

    @abstractmethod
    def rehearsal(self, model: nn.Module, size: int, device: torch.device) -> Callable[[], Tensor]:
        """A function that computes the training loss of a batch of `size` (in the unit of `batch_key`).

        `tasks/memory.py` measures its memory. `model` is that of :meth:`build`, on `device`.
        """

    def module_arguments(self) -> dict[str, Any]:
        """The arguments that every task gives to its LightningModule."""
        cfg = self.cfg
        return {
            "optimizer": instantiate(cfg.task.optimizer, path="task.optimizer"),
            "schedule": instantiate(cfg.task.schedule, path="task.schedule"),
            "seed": cfg.seed,
            "clip": cfg.task.train.clip,
            "compile": compiles(cfg),
        }

    def optimizer_of(self, model: nn.Module) -> Optimizer:
        """The configured optimizer of a model."""
        return instantiate(self.cfg.task.optimizer, path="task.optimizer")(model.parameters())

    def copies(self) -> int:
        """The number of copies of the weights in training: averages, a teacher."""
        return sum("WeightAveraging" in str(node.get("_target_")) for node in self.cfg.callbacks.values())

    def decoding_cache(self, model: Any, dtype: torch.dtype) -> int:
        """Bytes of the caches, of this dtype, of the largest decoding batch of a run."""
        return 0

    def check_steps(self, model: Any) -> None:
        """Raise ConfigError for a mechanism that decodes through its cache with other results than it is trained with.

        Without this, a mistake in a mechanism of one's own would show only after training.
        """
        for attention in {type(attention): attention for attention in self.cached(model)}.values():
            try:
                attention.check_steps()
            except ValueError as error:
                raise ConfigError(f"attention: {one_line(error)}") from error

    def monitors(self) -> dict[str, bool]:
        """The metrics of a validation, and whether higher values are better."""
        return {"val_loss": False, "val_accuracy": True, self.monitor: self.better == "max"}

    def check_monitors(self) -> None:
        """Raise ConfigError for a callback that watches a metric which no validation gives."""
        known = [*self.monitors(), "loss"]
        for name, node in self.cfg.callbacks.items():
            watched = node.get("monitor")
            if watched is not None and watched not in known:
                raise ConfigError(f"callbacks.{name}.monitor={watched}: expected {' or '.join(known)}")

    def prepare(self, record: dict[str, Any], stage: Literal["test"] | None) -> tuple[Any, Any]:
        """See :meth:`ReadsData.prepare`.

        Raises:
            ConfigError: a held-out split has fewer items than processes, or hardware.accelerator=gpu without a GPU.
            DataError: `baseline=` was measured with another protocol.
        """
        from attnlab.training.trainer import process_count

        device = device_of(self.cfg)  # a missing GPU is an error before the data is read
        if stage is None and self.cfg.hardware.find_batch:
            self.cfg = with_largest_batch(self, record)
        if device.type == "cuda":
            check_memory(self, record, training=stage is None)
        data = instantiate(self.cfg.task.data, path="task.data")
        if self.cfg.checkpoint:
            files = self.saved_files()
            if all((path.parent / CONFIG).is_file() for path in files.values()):
                self.reuse_files(data, files)
        data.setup(stage)
        if (processes := process_count(self.cfg)) > 1:
            alone = self.cfg.hardware.strategy == "fsdp"  # rank zero scores the test set alone
            if not (alone and stage):
                data.check_held_out(processes, "validate" if alone else stage)
        record["corpus"] = data.corpus
        module = self.module(record, data)
        show_data(record, data.report)
        record_compiled(self.cfg, module.compiled_part, record["environment"])
        if records.first_process():
            reads = data.location is not None  # otherwise the data is generated
            content = corpus_content(data.location, Path(self.cfg.cache_dir)) if reads else NOTHING_READ
            records.identify(record, content)
            if self.baseline:
                record["inference"] |= self.protocol(module)
                require_same_protocol(record, self.baseline, measured=False)
        return data, module

    @abstractmethod
    def module(self, record: dict[str, Any], data: Any) -> Module:
        """The LightningModule for `data`; `record` gets the number of parameters."""

    def protocol(self, module: Any) -> dict[str, Any]:
        """The values of the record's `inference` that are known before scoring."""
        return {}

    def reuse_files(self, data: Any, files: Mapping[str, Path]) -> None:
        """Give data that is not yet read the vocabularies of the run, by name."""

    def before_fit(self, record: dict[str, Any], directory: Path, data: Any, module: Any) -> None:
        """Change the model before training; not called for a resumed run."""

    def score(self, record: dict[str, Any], directory: Path, data: Any, module: Any) -> None:
        """Score the test set: write predictions.tsv, fill `quality` and `inference`, print a summary.

        Every process calls it; the record is rank zero's.
        """
        from attnlab.callbacks.summary import show

        sections = self.scored(self.scoring(directory, data, module), data, module)
        if sections:
            for section, values in sections.items():
                record[section] |= values
            self.after_scoring(record, directory, data, module)
            self.compare(record)
            show(record, directory)

    @abstractmethod
    def scoring(self, directory: Path, data: Any, module: Any) -> list[Callback]:
        """The callbacks of `trainer.test`, which score, measure, and contribute sections of the record."""

    def scored(self, callbacks: list[Callback], data: Any, module: Any) -> Sections:
        """Run `trainer.test`.  Returns the contributions of the callbacks on rank zero, {} on other processes."""
        from attnlab.callbacks.scoring import contributions
        from attnlab.training.trainer import test

        complete = test(self.cfg, data, module, callbacks)
        return contributions(callbacks) if complete and records.first_process() else {}

    def after_scoring(self, record: dict[str, Any], directory: Path, data: Any, module: Any) -> None:
        """Fill `record` on rank zero between scoring and the summary."""

    def restore(self) -> Any:
        """See :meth:`Restores.restore`."""
        from attnlab.pretrained.weights import check_identity, fill

        device = device_of(self.cfg)
        path, weights, identity = self.read_weights()
        module = self.rebuilt(path)
        changed = "a file of the run directory is damaged, or of another run: copy the whole directory again"
        check_identity(path, identity, module.identity, changed)
        fill(module.model, path, weights)
        self.round(module)
        return module.to(device).eval()

    def round(self, module: Any) -> None:
        """Round the weights of the model as `hardware.weights` says."""
        if self.cfg.hardware.weights != "float32":
            round_weights(module.model, getattr(torch, self.cfg.hardware.weights))

    @abstractmethod
    def rebuilt(self, weights: Path) -> Any:
        """The model with random weights, from the files of :meth:`save_files` in the run of `weights`."""

    def read_weights(self) -> tuple[Path, dict[str, Tensor], dict[str, Any]]:
        """The file of weights that `checkpoint=` names, the weights by name, and the identity of their model."""
        from attnlab.pretrained.weights import find_weights, read_checkpoint

        path = find_weights(Path(self.cfg.checkpoint).expanduser())
        return path, *read_checkpoint(path)

    def saved_files(self) -> dict[str, Path]:
        """The files of `file_names` in the run of `checkpoint=`, by name."""
        place = Path(self.cfg.checkpoint).expanduser()
        folders = [place] if place.is_dir() else [place.parent.parent, place.parent]
        return {name: folder / name for folder in folders for name in self.file_names if (folder / name).is_file()}

    def export(self, folder: Path, format: Format, record: Mapping[str, Any]) -> Callable[[], dict[str, Any]] | None:
        """Write the model of `checkpoint=` as a folder that other programs read, with a card of the `record`.

        An earlier folder is replaced when the new one is complete. The format "safetensors" has plain weights, a config
        of plain values, and copies of the saved files.

        Returns:
            A function that decodes the folder in an engine and gives the section `serving` of the record, if asked for.

        Raises:
            ConfigError: this model has no such format.
            DataError: a file of the run is missing or damaged.
            WriteError: the folder cannot be written; an earlier one then stays.
        """
        from attnlab.export import weights

        if format != "safetensors":
            raise ConfigError(
                f"format={format}: transformers has no model for task={self.cfg.task.name}; format=safetensors writes "
                "its weights, its config and its tokenizer, and attnlab uses the run directory as it is"
            )
        module = self.restore().cpu()
        files = {path.name: path.read_bytes() for path in self.saved_files().values()} | dict(self.files_beside(module))
        weights.export(module.model, self.cached(module.model), self.cfg, record, files, folder)
        return None

    def files_beside(self, module: Any) -> Mapping[str, bytes]:
        """Further files of an export with plain weights, by name."""
        return {}

    def cached(self, model: Any) -> list[Attention]:
        """The mechanisms of a model that have a cache in decoding."""
        return []


class TextTask(Trains):
    """A task whose model writes text token by token through the caches of its attention."""

    @property
    def workloads(self) -> tuple[str, ...]:
        return ("training", "decoding", "model", "kernels")

    def decoder(self, model: Any) -> Any:
        """The part of `model` that decodes through caches: it has `attentions` and counts `multiply_adds`."""
        return model

    def cached(self, model: Any) -> list[Attention]:
        return self.decoder(model).attentions

    def describe(self, record: dict[str, Any]) -> None:
        """Fill `parameters`, `kv_cache` and `multiply_adds_per_token` from the configuration alone.

        The decoding batch has the shape of the `bench` node: batch x beam hypotheses of `text` tokens after a prefix of
        `prefix` positions (the encoder's output).
        """
        with without_memory():
            model = self.build()
        decoder = self.decoder(model)
        shape = cache_shape(self.cfg.bench)
        context = shape.prefix + shape.text
        self.sizes(record, model)
        record["kv_cache"] |= self.cache_sizes(decoder, shape) | {"shape": shape.describe()}
        record["multiply_adds_per_token"] = {
            "attention": sum(a.multiply_adds(context, shape.prefix) for a in decoder.attentions),
            "decoder": decoder.multiply_adds(context, shape.prefix),
            "context": context,
        }

    def cache_sizes(self, decoder: Any, shape: CacheShape) -> dict[str, float]:
        """The predicted cache of a decoding batch, for the record."""
        size = shape.batch * shape.beam, shape.text, shape.prefix, shape.batch
        return {
            "elements_per_token_per_layer": per_layer(decoder.attentions),
            "bytes_per_token": sum(a.cache_bytes_per_token(shape.dtype) for a in decoder.attentions),
            "bytes_predicted": decoder.cache_bytes(*size, dtype=shape.dtype),
        }

    def sizes(self, record: dict[str, Any], model: Any) -> None:
        super().sizes(record, model)
        attentions = self.decoder(model).attentions
        record["kv_cache"]["elements_per_token_per_layer"] = per_layer(attentions)
        if bits := next((a.cache_bits for a in attentions if a.cache_bits), None):
            record["kv_cache"]["bits"] = bits


class Predicts(Trains):
    """Uses a trained model on new inputs: mode=predict, and `predict` of what `attnlab.load` gives."""

    @property
    @abstractmethod
    def input_kind(self) -> InputKind:
        """The kind of the predictor's inputs, from the configuration alone."""

    @abstractmethod
    def predictor(self, module: Any, **settings: Any) -> Predictor:
        """The predictor of a restored module; `settings` replace the configured ones of decoding."""


def file_of_run(weights: Path, name: str, what: str) -> Path:
    """The file `name` of the run with these weights: a file, or a folder of checkpoints.

    DataError: it is missing; the message calls it `what`.
    """
    places = [folder / name for folder in (weights.parent, weights.parent.parent)]
    for place in places:
        if place.is_file():
            return place
    raise DataError(f"{places[weights.is_file()]}: no such file; expected {what}: copy the whole run directory")


def per_layer(attentions: list[Attention]) -> float:
    """Cached numbers per token and layer, the mean over layers; an int where all layers have the same."""
    counts = [a.cache_elements_per_token for a in attentions]
    return counts[0] if len(set(counts)) == 1 else sum(counts) / len(counts)


def measured_by(meter: MemoryMeter, batch: int, dtype: torch.dtype, busy: float, protocol: str) -> dict[str, Any]:
    """Memory and circumstances of steps through caches, for the record's `inference`; `busy`: cores busy before."""
    return {
        "peak_memory_mib": round(meter.peak, 1),
        "mean_memory_mib": round(meter.mean, 1),
        "batch": batch,
        "beam": 1,
        "dtype": str(dtype).removeprefix("torch."),
        "busy_cores_before": busy,
        "protocol": f"{protocol}; {meter.protocol}",
    }


T = TypeVar("T", bound=Task)


def task_of(cfg: DictConfig, capability: type[T]) -> T:
    """The Task that `task.kind` names. ConfigError: it lacks what the mode needs."""
    task = instantiate(cfg.task.kind, path="task.kind", cfg=cfg)
    if not isinstance(task, capability):
        raise ConfigError(f"mode={cfg.mode}: task={cfg.task.name} has no such mode")
    return task


# --- task.match=parameters ---

NEAR = 0.01  # of the parameters


def matched(cfg: DictConfig) -> DictConfig:
    """The composed configuration with the width at which its model has as many parameters as with attention=mha.

    The parameters of a model are linear in the width, so two widths give every other.

    Raises:
        ConfigError: the model has no feed-forward layers, or no width is near enough.
    """
    key = width_key(cfg)
    refused = f"task.match={cfg.task.match}"
    if OmegaConf.select(cfg, key) == 0:
        raise ConfigError(f"{refused}: {key}=0, so there is no width to choose; give a width or leave task.match out")
    reference = copy.deepcopy(cfg)
    with open_dict(reference):
        reference.attention = compose("attention/mha").attention
        reference.hydra.runtime.choices.attention = "mha"
    wanted = _parameters(reference)
    counts = [_parameters(_at_width(cfg, key, width)) for width in (1, 2)]
    width = 1 + round((wanted - counts[0]) / (counts[1] - counts[0]))
    reached = counts[0] + (width - 1) * (counts[1] - counts[0])
    if width < 1 or abs(reached - wanted) > NEAR * wanted:
        raise ConfigError(
            f"{refused}: no {key} gives the {wanted:,} parameters of attention=mha; with 1 there are {counts[0]:,}"
        )
    return _at_width(cfg, key, width)


def _at_width(cfg: DictConfig, key: str, width: int) -> DictConfig:
    changed = copy.deepcopy(cfg)
    OmegaConf.update(changed, key, width)
    return changed


def _parameters(cfg: DictConfig) -> int:
    """The number of parameters of a composed configuration's model."""
    fixed: Any = freeze(cfg, cfg.hydra.runtime.choices)
    check_fixed(fixed)
    with without_memory():
        return count_parameters(task_of(fixed, Trains).build())["total"]
