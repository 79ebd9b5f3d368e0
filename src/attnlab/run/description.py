"""The record of mode=describe as a table, for a terminal."""

from collections.abc import Mapping
from typing import Any

from rich.table import Table

from attnlab.config.build import leaves
from attnlab.run.console import Screen
from attnlab.run.record import NOT_RUN

SECTIONS = {
    "parameters": "parameters",
    "kv_cache": "cache",
    "multiply_adds_per_token": "multiply-adds of one token",
    "compression": "compression",
    "memory": "memory of training",
}
MEMORY = ("weights", "gradients", "optimizer_state", "activations", "decoding_cache", "total")
NAMES = {
    "elements_per_token_per_layer": "per token and layer",
    **{f"{name}_mib": name.replace("_", " ") for name in MEMORY},
}
UNITS = {
    "bytes_per_token": "bytes",
    "bytes_predicted": "bytes",
    "elements_per_token_per_layer": "numbers",
    "model_saving_percent": "%",
    "context": "positions",
    **dict.fromkeys((f"{name}_mib" for name in MEMORY), "MiB"),
}


def show(record: Mapping[str, Any]) -> None:
    """Print what a record says without a run: title, sizes by section, and where the whole record is to be had.

    Args:
        record: of mode=describe.
    """
    names = [record[key] for key in ("task", "attention", "compress", "scale") if record[key] not in (None, "none")]
    table = Table(title=" · ".join(map(str, names)), show_header=False, title_justify="left")
    for section, title in SECTIONS.items():
        rows = [
            (_name(path), value, UNITS.get(path.rpartition(".")[2], ""))
            for path, value in leaves(record.get(section, {}))
            if value not in (NOT_RUN, None) and not isinstance(value, list | dict)
        ]
        if rows:
            table.add_section()
            table.add_row(f"[bold]{title}[/]", "")
        for name, value, unit in rows:
            table.add_row(f"  {name}", f"{_number(value)} {unit}".rstrip())
    console = Screen(highlight=False)
    console.print(table)
    console.print("The whole record as JSON: the same command with its output in a file or a pipe.")


def _name(path: str) -> str:
    """For instance "original, bytes per token" of original.bytes_per_token."""
    *before, last = path.split(".")
    return ", ".join((*before, NAMES.get(last, last))).replace("_", " ")


def _number(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:,.4g}"
