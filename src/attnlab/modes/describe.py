"""mode=describe: parameters, cache and arithmetic from the configuration alone; with hardware=gpu memory, too."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig
from rich.table import Table

from attnlab.config.build import leaves
from attnlab.run.console import Screen
from attnlab.run.files import write_text
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
    """Print the sizes as a table on a terminal, the complete record as JSON elsewhere; `output=` gets the JSON, too.

    WriteError: the file cannot be written.
    """
    output, terminal = record["config"]["output"], sys.stdout.isatty()
    if output is not None:
        write_text(Path(output).expanduser(), dumps(record) + "\n")
    if terminal:
        console = Screen(highlight=False)
        console.print(table_of(record))
        console.print("The whole record as JSON: add output=FILE, or pipe this command.")
    elif output is None:
        print(dumps(record))


def table_of(record: Mapping[str, Any]) -> Table:
    """A table of the sizes in a record, with a column for the model before its conversion or compression."""
    names = [record[key] for key in ("task", "attention", "compress", "scale") if record[key] not in (None, "none")]
    originals = {name: dict(leaves(record.get(name, {}).get("original", {}))) for name in SECTIONS}
    changed = any(originals.values())
    table = Table("", *["original"] * changed, names[1] if changed else "", show_header=changed)
    table.title, table.title_justify = " · ".join(map(str, names)), "left"
    for section in SECTIONS:
        values = {path: value for path, value in leaves(record.get(section, {})) if value not in (NOT_RUN, None)}
        rows = [path for path in values if not path.startswith("original.")]
        if rows:
            table.add_section()
            table.add_row(f"[bold]{section.replace('_', ' ')}[/]")
        for path in rows:
            before = [_number(originals[section].get(path, ""))] * changed
            table.add_row(f"  {path.replace('.', ', ').replace('_', ' ')}", *before, _number(values[path]))
    return table


def _number(value: Any) -> str:
    return ("{:,.4g}" if isinstance(value, float) else "{:,}" if isinstance(value, int) else "{}").format(value)
