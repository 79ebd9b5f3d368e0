"""mode=evaluate checkpoint=...: evaluate a trained language model on tasks of lm-evaluation-harness."""

from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from rich.table import Table

from attnlab.config.build import instantiate
from attnlab.run.console import Screen
from attnlab.run.device import record_compiled, scoring_dtype
from attnlab.run.directory import directory_of
from attnlab.run.record import recorded
from attnlab.tasks.base import Restores, task_of


def run(cfg: DictConfig, record: dict[str, Any], directory: Path) -> None:
    """Fill the record's `quality` with the harness's numbers for each task and number of shots, and print them.

    `corpus` names the training corpus too, where the run's record is there.

    Raises:
        ConfigError: lm-evaluation-harness is not installed or has no such task.
        DataError: the checkpoint cannot be read.
    """
    task = task_of(cfg, Restores)
    evaluation = instantiate(cfg.task.evaluation, path="task.evaluation")
    module = task.restore()
    task.sizes(record, module.model)
    low = scoring_dtype(cfg.hardware.precision)
    record_compiled(cfg, getattr(module, "compiled_steps_part", ""), record["environment"])
    results = evaluation(module, cfg.seed, low)
    names = list(cfg.task.evaluation.tasks)
    trained = trained_on(cfg.checkpoint)
    record["corpus"] = f"lm-evaluation-harness: {', '.join(names)}" + (f"; trained on {trained}" if trained else "")
    shots: Any = OmegaConf.to_container(cfg.task.evaluation)["num_fewshot"]  # type: ignore[index, call-overload]
    by_shots = {"shots": {str(number): tasks for number, tasks in results.items()}}  # of a list of numbers
    numbers = {"tasks": results[shots]} if isinstance(shots, int) else by_shots
    record["quality"] = numbers | {"num_fewshot": shots, "signature": "lm-eval"}
    table = Table("task", "questions", "shots", "metric", "value", "± standard error", box=None, pad_edge=False)
    for shots, tasks in results.items():
        for name, numbers in tasks.items():
            for metric, value in numbers.items():
                if isinstance(value, float) and metric != "version" and not metric.endswith("_stderr"):
                    error = numbers.get(f"{metric}_stderr")
                    shown = f"{error:.4f}" if isinstance(error, float) else ""
                    table.add_row(name, str(numbers["examples"] or ""), str(shots), metric, f"{value:.4f}", shown)
    Screen(highlight=False).print(table)


def trained_on(checkpoint: str | None) -> str:
    """The corpus in the record of the run that trained the model; empty without a record."""
    run = None if checkpoint is None else directory_of("checkpoint", checkpoint)
    return "" if run is None else str(recorded(run).get("corpus", ""))
