"""mode=statistics: utterances, hours and words of a corpus, by its reader. Nothing is trained."""

from pathlib import Path
from typing import Any

from omegaconf import DictConfig
from rich.table import Table

from attnlab.run.console import Screen
from attnlab.run.record import corpus_of, first_process
from attnlab.tasks.base import task_of
from attnlab.tasks.sequence_to_text.task import SequenceToTextTask

READS_CORPUS = True  # the files of data_root are checked before a library is loaded


def run(cfg: DictConfig, record: dict[str, Any], directory: Path) -> None:
    """Fill the record's `statistics`, a mapping for each split, and print it as a table with the record's place."""
    task_of(cfg, SequenceToTextTask).statistics(record)
    if first_process():
        _show(record, directory)


def _show(record: dict[str, Any], directory: Path) -> None:
    splits = record["statistics"]
    table = Table(title=f"{record['task']}: {corpus_of(record)}", title_justify="left")
    table.add_column("")
    for name in splits:
        table.add_column(name, justify="right")
    for key in dict.fromkeys(key for values in splits.values() for key in values):
        values = [split.get(key) for split in splits.values()]
        table.add_row(key.replace("_", " "), *("–" if value is None else f"{value:,}" for value in values))
    console = Screen(highlight=False)
    console.print(table)
    console.print(f"record: {directory / 'record.json'}", soft_wrap=True)
