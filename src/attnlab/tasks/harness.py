"""Evaluating a language model on tasks of lm-evaluation-harness.  Needs the extra `eval`."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
from annotated_types import Ge, MinLen

from attnlab.config.bounds import bounded
from attnlab.errors import ConfigError, DataError
from attnlab.pretrained.hub import offline_if_unreachable
from attnlab.pretrained.weights import first_line

try:
    from huggingface_hub.errors import OfflineModeIsEnabled as HFOfflineModeIsEnabled
    from lm_eval import simple_evaluate
    from lm_eval.api.model import LM
    from lm_eval.tasks import TaskManager
except ImportError as error:
    raise ConfigError(f"mode=evaluate needs lm-evaluation-harness: pip install 'attnlab[eval]' ({error})") from error

SEEDS = ("random_seed", "numpy_random_seed", "torch_random_seed", "fewshot_random_seed")


@bounded
@dataclass(frozen=True)
class Harness(ABC):
    """Evaluates a language model on tasks of lm-evaluation-harness.

    The harness downloads the data of its own tasks.

    Args:
        tasks: the names of the tasks.
        num_fewshot: the number of solved examples before each question; a list: all tasks with each of these numbers.
        limit: the largest number of examples of a task; None: all.
        batch_size: the number of texts in a batch.
        folder: a directory with YAML files of tasks, in place of the harness's own; None: the harness's own. Tasks can
            bring code, which is run (`!function`, templates of prompts), so only the command line may name it.

    Raises:
        ValueError: `folder` does not exist, or `num_fewshot` has a number twice.
    """

    tasks: Annotated[list[str], MinLen(1)]
    num_fewshot: Annotated[int, Ge(0)] | Annotated[list[Annotated[int, Ge(0)]], MinLen(1)] = 0
    limit: Annotated[int, Ge(1)] | None = None
    batch_size: Annotated[int, Ge(1)] = 16
    folder: str | None = None

    def __post_init__(self) -> None:
        if self.folder is not None and not Path(self.folder).expanduser().is_dir():
            raise ValueError(f"folder={self.folder}: no such directory of task files")
        if len(set(self.shots)) < len(self.shots):
            raise ValueError(f"num_fewshot={self.shots}: expected each number once")

    @property
    def shots(self) -> list[int]:
        """The numbers of solved examples, in the order in which the tasks are evaluated."""
        return [self.num_fewshot] if isinstance(self.num_fewshot, int) else list(self.num_fewshot)

    @abstractmethod
    def lm(self, module: Any, dtype: torch.dtype | None) -> LM:
        """The model as the harness knows models.

        Args:
            module: with the model and what turns texts into ids.
            dtype: of autocast and caches; None: float32.
        """

    def __call__(
        self, module: Any, seed: int, dtype: torch.dtype | None = None
    ) -> dict[int, dict[str, dict[str, Any]]]:
        """Evaluate all tasks with each number of solved examples.

        Args:
            module: what `lm` takes.
            seed: of the choice of few-shot examples and of sampling.
            dtype: of autocast and caches; None: float32.

        Returns:
            For each number of solved examples and each task its metrics with their standard errors, its version and its
            number of examples.

        Raises:
            ConfigError: there is no such task, or its file names no data.
            DataError: the model cannot score a text of the tasks, or their data is missing.
        """
        folder = None if self.folder is None else str(Path(self.folder).expanduser())
        manager = TaskManager(include_path=folder, include_defaults=self.folder is None)
        unknown = [name for name in self.tasks if name not in manager.all_tasks]  # it would take the path of a file
        if unknown:
            where = f"{self.folder} has" if self.folder else "lm-evaluation-harness has"
            raise ConfigError(f"task.evaluation.tasks: {where} no task {unknown[0]}")
        for name in self.tasks:
            self._check_source(manager.task_index[name])
        with offline_if_unreachable() as offline:
            try:
                lm = self.lm(module, dtype)
                return {shots: self._scores(lm, manager, shots, seed) for shots in self.shots}
            except FileNotFoundError as error:
                raise DataError(
                    f"task.evaluation.tasks={','.join(self.tasks)}: a file of their data is missing "
                    f"({first_line(error)}); correct dataset_path or data_files of the task's file"
                ) from error
            except (ConnectionError, HFOfflineModeIsEnabled) as error:
                if not offline:
                    raise
                raise DataError(
                    f"task.evaluation.tasks={','.join(self.tasks)}: their data is not in the hub's cache, and the hub "
                    f"cannot be reached ({first_line(error)}); run it once with a network, or give "
                    "task.evaluation.folder= with tasks on local files"
                ) from error

    def _check_source(self, task: Any) -> None:
        """Refuse a task's own file that says nowhere where its data is: `include` and `class` may say it elsewhere."""
        settings = task.cfg or {}
        says = {"dataset_path", "custom_dataset", "include", "class", "group"}
        if task.yaml_path and task.kind.name == "TASK" and not any(settings.get(key) for key in says):
            raise ConfigError(
                f"{task.yaml_path}: dataset_path is missing; expected json, csv, parquet or text with "
                "dataset_kwargs.data_files, or the name of a data set of the hub"
            )

    def _scores(self, lm: LM, manager: TaskManager, shots: int, seed: int) -> dict[str, dict[str, Any]]:
        """Of each task, with so many solved examples."""
        arguments = dict.fromkeys(SEEDS, seed) | {"num_fewshot": shots, "limit": self.limit}
        results = simple_evaluate(lm, tasks=list(self.tasks), task_manager=manager, log_samples=False, **arguments)
        assert results is not None
        return {
            name: {key.removesuffix(",none"): value for key, value in found.items() if isinstance(value, int | float)}
            | {
                "version": results["versions"].get(name),
                "examples": results["n-samples"].get(name, {}).get("effective"),
            }
            for name, found in results["results"].items()
        }
