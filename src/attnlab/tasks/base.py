"""The interface between a kind of task and the modes.

Four concepts make a task: the Task (the wiring), its Data, its Model and its Module (the LightningModule). A task's
folder under `tasks/` holds the Task and the Module; `task.kind` of the configuration names the Task.

Lightning takes seconds to import and describing a model does not need it, so tasks import it inside the methods that
train or score.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from omegaconf import DictConfig
from torch import Tensor, nn

from attnlab.attention import Attention
from attnlab.config.build import instantiate
from attnlab.errors import ConfigError, DataError
from attnlab.models.build import count_parameters
from attnlab.run import fingerprint
from attnlab.run import record as records
from attnlab.run.device import device_of, record_compiled
from attnlab.run.directory import CONFIG
from attnlab.run.identity import NOTHING_READ
from attnlab.run.speedup import read_baseline, require_same_protocol, speedup
from attnlab.tasks.memory import check_memory, with_largest_batch

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from attnlab.data.inputs import InputKind
    from attnlab.tasks.prediction import Predictor
    from attnlab.training.module import Module


class Task(ABC):
    """Wires the data, the model and the module of one kind of task.

    The modes that a task supports are in its YAML file (`modes`, the default first), except those that every task
    has (`EVERY_TASK` in the mode's file); `config/check.py` refuses the others.

    Args:
        cfg: the run's whole configuration, resolved.

    Attributes:
        monitor: the validation metric by which the best checkpoints are chosen.
        better: "max" or "min", which values of `monitor` are better.
        workloads: the values of `bench.what` that mode=bench can measure for this task, the defaults first.
        kept: names of the files that `keep` may write.
        batch_key: of `task.data`, what limits a batch of one process; empty: the task trains nothing.
    """

    monitor: str = "val_accuracy"
    better: Literal["min", "max"] = "max"
    kept: tuple[str, ...] = ()
    batch_key: str = ""

    def __init__(self, cfg: DictConfig) -> None:
        self.cfg = cfg
        self.baseline = read_baseline(cfg.baseline)

    @property
    def workloads(self) -> tuple[str, ...]:
        return ()

    @abstractmethod
    def build(self) -> nn.Module:
        """The model at the configured sizes, as far as they are known without data."""

    @abstractmethod
    def describe(self, record: dict[str, Any]) -> None:
        """Fill `record` with what follows from the configuration alone: parameters, cache bytes, multiply-adds."""

    def rehearsal(self, model: nn.Module, size: int, device: torch.device) -> Callable[[], Tensor]:
        """A function that gives the training loss of one batch, for the memory that it takes; see `tasks/memory.py`.

        Args:
            model: as :meth:`build` makes it, on `device`.
            size: what the batch has, in the unit of `batch_key`.
            device: of the run.
        """
        raise NotImplementedError(f"task={self.cfg.task.name} trains nothing")

    def optimizer_of(self, model: nn.Module) -> Optimizer:
        """The optimizer of a model."""
        made: Optimizer = instantiate(self.cfg.task.optimizer, path="task.optimizer")(model.parameters())
        return made

    def copies(self) -> int:
        """How often training holds the weights besides the model's own: averages, a teacher."""
        return sum("WeightAveraging" in str(node.get("_target_")) for node in self.cfg.callbacks.values())

    def decoding_cache(self, model: Any, dtype: torch.dtype) -> int:
        """Bytes of the caches, of this dtype, of the largest decoding batch of a run; 0: the task has none."""
        return 0

    def check(self, directory: Path) -> None:  # noqa: B027
        """Raise ConfigError or DataError for settings that would otherwise fail after the data is read."""

    def monitors(self) -> dict[str, bool]:
        """The metrics of a validation, and whether higher values are better."""
        return {"val_loss": False, "val_accuracy": True, self.monitor: self.better == "max"}

    def check_monitors(self) -> None:
        """Refuse a callback that watches a metric which no validation gives.

        Raises:
            ConfigError: names the callback's key and the metrics.
        """
        known = [*self.monitors(), "loss"]
        for name, node in self.cfg.callbacks.items():
            watched = node.get("monitor")
            if watched is not None and watched not in known:
                raise ConfigError(f"callbacks.{name}.monitor={watched}: expected {' or '.join(known)}")

    def prepare(self, record: dict[str, Any], stage: str | None) -> tuple[Any, Any]:
        """The data, read and ready, and the module that trains on it.

        Args:
            record: gets `corpus`, the identity of the run and what `module` adds.
            stage: "test" reads what testing needs; None reads every split.

        Raises:
            ConfigError: a held-out split has fewer items than there are processes, or there is no GPU for
                hardware.accelerator=gpu.
            DataError: `baseline=` was measured in another way, as far as that is known before scoring.
        """
        from attnlab.training.trainer import process_count

        device = device_of(self.cfg)  # a GPU that is not there costs seconds, not the reading of the data
        if stage is None and self.cfg.hardware.find_batch:
            self.cfg = with_largest_batch(self, record)
        if device.type == "cuda":
            check_memory(self, record, training=stage is None)
        data = instantiate(self.cfg.task.data, path="task.data")
        files = self.kept_files() if self.cfg.checkpoint else {}
        if all((path.parent / CONFIG).is_file() for path in files.values()):
            self.lend(data, files)
        data.setup(stage)
        if self.cfg.hardware.strategy != "fsdp":
            data.check_held_out(process_count(self.cfg), stage)
        elif stage is None:  # rank zero scores the test set alone
            data.check_held_out(process_count(self.cfg), "validate")
        record["corpus"] = data.corpus
        module = self.module(record, data)
        record_compiled(self.cfg, module.compiled_part, record["environment"])
        if records.first_process():
            read = data.location is not None  # else the data is generated
            content = fingerprint.corpus(data.location, Path(self.cfg.cache_dir)) if read else NOTHING_READ
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

    def keep(self, directory: Path, data: Any) -> None:  # noqa: B027
        """Write into the run directory what its weights need besides the configuration: vocabularies, class names.

        Args:
            directory: the run's.
            data: the data, ready.
        """

    def lend(self, data: Any, files: Mapping[str, Path]) -> None:  # noqa: B027
        """Give data that is not yet read the run's own vocabularies, which are then not learnt again from its text.

        Args:
            data: not yet read.
            files: those that :meth:`keep` has written, by name.
        """

    def restore(self) -> Any:
        """The module of `checkpoint=`, ready to compute. Only the run directory is read, neither corpus nor cache.

        Raises:
            ConfigError: `hardware.accelerator` is a GPU, and there is none.
            DataError: a file of the run is missing or damaged, or the checkpoint is of another model.
        """
        from attnlab.pretrained.weights import fill
        from attnlab.training.checkpoints import check_identity

        device = device_of(self.cfg)
        path, weights, found = self.read_weights(Path(self.cfg.checkpoint).expanduser())
        module = self.rebuilt(path)
        changed = "a file of the run directory is damaged, or of another run: copy the whole directory again"
        check_identity(path, found, module.identity, changed)
        fill(module.model, path, weights)
        return module.to(device).eval()

    def rebuilt(self, weights: Path) -> Module:
        """The module with random weights, from what :meth:`keep` has written beside these weights."""
        raise ConfigError(f"checkpoint={self.cfg.checkpoint}: task={self.cfg.task.name} has no model of a run to use")

    def export(self, folder: Path, format: Literal["hf", "safetensors", "deepseek"], record: Mapping[str, Any]) -> None:
        """Write the model of `checkpoint=` as a folder that other programs read.

        Here: plain weights with a config of plain values, and copies of the files that `keep` has written.

        Args:
            folder: replaced as a whole when the new one is complete.
            format: "safetensors" or, for tasks that override this, "hf".
            record: of the run, for the model card.

        Raises:
            ConfigError: there is no such form of this model.
            DataError: a file of the run is missing or damaged.
            WriteError: the folder cannot be written; an earlier one then stays.
        """
        from attnlab.export import plain

        if format == "deepseek":
            raise ConfigError("format=deepseek is for language models that convert=mla has made")
        if format != "safetensors":
            raise ConfigError(
                f"format={format}: transformers has no model for task={self.cfg.task.name}; format=safetensors writes "
                "its weights, its config and its tokenizer, and attnlab uses the run directory as it is"
            )
        module = self.restore().cpu()
        files = self.kept_files().values()
        plain.export(module.model, self.cached(module.model), self.cfg, record, files, folder)

    def cached(self, model: Any) -> list[Attention]:
        """The mechanisms of a model that keep a cache in decoding."""
        return []

    def kept_files(self) -> dict[str, Path]:
        """Those files of `kept` that the run of `checkpoint=` has, by name."""
        place = Path(self.cfg.checkpoint).expanduser()
        folders = [place] if place.is_dir() else [place.parent, place.parent.parent]
        return {name: path for folder in reversed(folders) for name in self.kept if (path := folder / name).is_file()}

    @property
    def input_kind(self) -> InputKind:
        """What :meth:`predictor` reads, from the configuration alone."""
        raise self._unused()

    def predictor(self, module: Any, **settings: Any) -> Predictor:
        """What uses the model on inputs that it has not seen.

        Args:
            module: as :meth:`restore` gives it.
            settings: of decoding, in place of the configured ones.

        Raises:
            ConfigError: there is no such setting.
        """
        raise self._unused()

    def _unused(self) -> ConfigError:
        return ConfigError(f"mode=predict: task={self.cfg.task.name} has no such mode")

    def sizes(self, record: dict[str, Any], model: Any) -> None:
        """Fill `record` with the number of parameters, and what else follows from the model."""
        record["parameters"] = count_parameters(model)

    def compare(self, record: dict[str, Any]) -> None:
        """Fill `inference.speedup` from `baseline=`.  DataError: it was measured in another way."""
        if self.baseline:
            record["inference"]["speedup"] = speedup(record, self.baseline, self.cfg.baseline)

    def before_fit(self, record: dict[str, Any], directory: Path, data: Any, module: Any) -> None:  # noqa: B027
        """What happens between building the model and training it; not called for a resumed run."""

    def read_weights(self, checkpoint: Path) -> tuple[Path, dict[str, Tensor], dict[str, Any]]:
        """The weights that mode=test scores.

        Args:
            checkpoint: the value of `checkpoint=`.

        Returns:
            Their path, the weights by name, and the identity of their model.

        Raises:
            DataError: there are none, or they are damaged.
        """
        from attnlab.training.checkpoints import find_weights, read_checkpoint

        path = find_weights(checkpoint)
        return path, *read_checkpoint(path)

    @abstractmethod
    def score(self, record: dict[str, Any], directory: Path, data: Any, module: Any) -> None:
        """Score the test set: write predictions.tsv, fill `quality` and `inference`, print a summary.

        Every process calls it; the record is rank zero's.
        """


def beside(weights: Path, name: str, what: str) -> Path:
    """A file of the run to which some weights belong.

    Args:
        weights: the file of weights, in the run directory or in its checkpoints/.
        name: of the file.
        what: what it is, for the message.

    Raises:
        DataError: there is no such file.
    """
    places = [folder / name for folder in (weights.parent, weights.parent.parent)]
    found = next((place for place in places if place.is_file()), None)
    if found is None:
        raise DataError(
            f"{places[weights.is_file()]}: no such file; expected {what} that training saves there: copy the whole "
            "run directory (runs of older versions lack it; mode=test with their corpus still works)"
        )
    return found


def task_of(cfg: DictConfig) -> Any:
    """The Task that `task.kind` names.

    Typed Any: a mode calls what its tasks declare by listing that mode in `task.modes`.

    Args:
        cfg: the fixed configuration.
    """
    return instantiate(cfg.task.kind, path="task.kind", cfg=cfg)
