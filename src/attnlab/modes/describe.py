"""mode=describe: parameters, cache and arithmetic from the configuration alone; with hardware=gpu memory, too."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig
from rich.table import Table

from attnlab.config.build import leaves
from attnlab.run.console import Screen
from attnlab.run.record import NOT_RUN, dumps
from attnlab.tasks.base import Task, Trains, task_of
from attnlab.tasks.memory import estimate

EVERY_TASK = True  # a task need not list this mode in `task.modes`
KEEPS = False  # no run directory, unless hydra.run.dir= names one
SECTIONS = ("parameters", "kv_cache", "multiply_adds_per_token", "compression", "memory")  # of the record


def run(cfg: DictConfig, record: dict[str, Any], directory: Path | None) -> None:
    """Fill the sizes in the record."""
    task = task_of(cfg, Task)
    task.describe(record)
    if cfg.hardware.accelerator in ("gpu", "cuda") and isinstance(task, Trains) and (memory := estimate(task)):
        record["memory"] = memory.describe()


def show(record: Mapping[str, Any]) -> None:
    """Print the complete record: its sizes as a table on a terminal, all of it as JSON elsewhere."""
    if not sys.stdout.isatty():
        print(dumps(record))
        return
    names = [record[key] for key in ("task", "attention", "compress", "scale") if record[key] not in (None, "none")]
    table = Table(title=" · ".join(map(str, names)), show_header=False, title_justify="left")
    for section in SECTIONS:
        rows = [(path, value) for path, value in leaves(record.get(section, {})) if value not in (NOT_RUN, None)]
        if rows:
            table.add_section()
            table.add_row(f"[bold]{section.replace('_', ' ')}[/]", "")
        for path, value in rows:
            number = "{:,.4g}" if isinstance(value, float) else "{:,}" if isinstance(value, int) else "{}"
            table.add_row(f"  {path.replace('.', ', ').replace('_', ' ')}", number.format(value))
    console = Screen(highlight=False)
    console.print(table)
    console.print("The whole record as JSON: the same command with its output in a file or a pipe.")
