"""What a person sees while a run goes on, and at its end."""

import csv
import logging
import sys
from pathlib import Path
from typing import Any

import attnlab.torchvision_schemas  # noqa: F401  (before lightning)

from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, RichProgressBar
from rich.console import Console
from rich.markup import escape
from rich.table import Table

log = logging.getLogger(__name__)


WORDS = {"loss": "training loss", "val_loss": "validation loss", "val_accuracy": "accuracy"}


class Narrator(Callback):
    """A line in the log after each validation."""

    def on_validation_end(self, trainer: Trainer, module: LightningModule) -> None:
        if trainer.is_global_zero and not trainer.sanity_checking:
            seen = {k: float(v) for k, v in trainer.callback_metrics.items() if not k.startswith("lr-")}
            found = ", ".join(f"{WORDS.get(name, name)} {value:.3f}" for name, value in seen.items())
            log.info("epoch %d, update %d: %s", trainer.current_epoch, trainer.global_step, found)


def progress() -> list[Callback]:
    """A bar on a terminal, and lines in the log anywhere."""
    return [Narrator(), *([RichProgressBar(leave=False)] if sys.stdout.isatty() else [])]


def mib(count: int) -> str:
    return f"{count / 2**20:.2f}"


def show(record: dict[str, Any], directory: Path, samples: int = 5) -> None:
    """The record's main numbers and some of predictions.tsv."""
    console = Console(width=None if sys.stdout.isatty() else 130)  # a log need not fold what a terminal must
    table = Table(title=f"{record['task']} · {record['attention']} · {record['scale']}", show_header=False)
    quality, inference, cache = record["quality"], record["inference"], record["kv_cache"]
    corpus = "embedded sample corpus" if record["corpus"] == "sample" else record["corpus"]
    name = next(iter(quality))
    rows = {
        "corpus": corpus,
        name.upper(): f"{quality[name]}   ({quality.get('signature', '')})",
        **{key: str(value) for key, value in quality.items() if key != name and isinstance(value, float)},
        "parameters": f"{record['parameters']['total']:,}   (attention {record['parameters']['attention']:,})",
        "cache per token and layer": f"{cache['elements_per_token_per_layer']:g} numbers",
        "cache of the largest batch": f"{mib(cache['bytes_measured'])} MiB ({mib(cache['bytes_predicted'])} predicted)",
        "memory": f"{inference['peak_memory_mib']} MiB peak, {inference['mean_memory_mib']} mean while decoding",
        "decoding": f"{inference['tokens_per_second']} tokens/s, beam {inference['beam']}, {inference['seconds']} s",
    }
    if isinstance(record["training"], dict) and record["training"].get("seconds") != "not run":
        training = record["training"]
        rows["training"] = (
            f"{training['steps']} updates in {training['seconds']} s, {training['tokens_per_second']} tokens/s"
        )
    for key, value in rows.items():
        table.add_row(key, escape(str(value)))
    console.print(table)
    with open(directory / "predictions.tsv", encoding="utf-8", newline="") as file:
        lines = list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
    shown = lines[:: max(1, len(lines) // samples)][:samples]
    for line in shown:
        source, reference, hypothesis = (escape(line[key]) for key in ("source", "reference", "hypothesis"))
        console.print(f"[dim]{source}[/]\n  [green]ref[/] {reference}\n  [cyan]hyp[/] {hypothesis}", highlight=False)
    console.print(f"record: {directory / 'record.json'}", highlight=False, soft_wrap=True)
