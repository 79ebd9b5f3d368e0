"""mode=evaluate checkpoint=...: a trained language model on tasks of lm-evaluation-harness."""

from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig
from rich.console import Console
from rich.table import Table

from attnlab.config.build import instantiate
from attnlab.tasks.base import task_of
from attnlab.tasks.language_modelling.task import LanguageModellingTask


def run(cfg: DictConfig, record: dict[str, Any], directory: Path) -> None:
    """Fill `quality` with the harness's own numbers for each of its tasks, and print them."""
    task: LanguageModellingTask = task_of(cfg)
    evaluation = instantiate(cfg.task.evaluation, path="task.evaluation")
    module = task.restore(record)
    low = torch.bfloat16 if cfg.hardware.precision.startswith("bf16") else None
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
