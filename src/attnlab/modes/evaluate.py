"""mode=evaluate checkpoint=...: evaluate a trained language model on tasks of lm-evaluation-harness."""

from pathlib import Path
from typing import Any

from omegaconf import DictConfig
from rich.console import Console
from rich.table import Table

from attnlab.config.build import instantiate
from attnlab.runs.device import scoring_dtype
from attnlab.tasks.base import task_of
from attnlab.tasks.language_modelling.task import LanguageModellingTask


def run(cfg: DictConfig, record: dict[str, Any], directory: Path) -> None:
    """Fill the record's `quality` with the harness's numbers for each task, and print them.

    Args:
        cfg: the run's whole configuration, resolved.
        record: gets `quality` and `corpus`.
        directory: the run's; not used.

    Raises:
        ConfigError: lm-evaluation-harness is not installed or has no such task.
        DataError: the checkpoint cannot be read.
    """
    task: LanguageModellingTask = task_of(cfg)
    evaluation = instantiate(cfg.task.evaluation, path="task.evaluation")
    module = task.restore()
    task.sizes(record, module.model)
    low = scoring_dtype(cfg.hardware.precision)
    found = evaluation(module, cfg.seed, low)
    names = list(cfg.task.evaluation.tasks)
    record["corpus"] = f"lm-evaluation-harness: {', '.join(names)}"
    record["quality"] = {"tasks": found, "num_fewshot": cfg.task.evaluation.num_fewshot, "signature": "lm-eval"}
    table = Table("task", "metric", "value", "± standard error", box=None, pad_edge=False)
    for name, numbers in found.items():
        for metric, value in numbers.items():
            if isinstance(value, float) and not metric.endswith("_stderr"):
                error = numbers.get(f"{metric}_stderr")
                table.add_row(name, metric, f"{value:.4f}", f"{error:.4f}" if isinstance(error, float) else "")
    Console(highlight=False).print(table)
