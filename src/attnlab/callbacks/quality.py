"""Quality of the test set, and predictions.tsv."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attnlab.torchvision_schemas  # noqa: F401  (before lightning)

from lightning import LightningModule, Trainer

from attnlab.callbacks.contribution import Contributor, Scored, ScoringCallback, Sections, update
from attnlab.metrics.base import IndexedMetric, Predictions, Row
from attnlab.run.files import write_text

HEADER: Row = ("id", "source", "reference", "hypothesis")


class Quality(Contributor, ScoringCallback):
    """Scores what `test_step` returns and contributes the section `quality`.

    Args:
        metrics: a metric for each test dataloader, in their order.  The first one's values are contributed as they
            are; of every other one the first value, prefixed by its key (`{"": disjoint, "sliding_": sliding}` of two
            `Perplexity` gives `perplexity`, `tokens` and `sliding_perplexity`).
        about: values known beforehand, which are added; of two values with one name this one is taken.
    """

    def __init__(self, metrics: Mapping[str, IndexedMetric], about: Mapping[str, Any] | None = None) -> None:
        self.metrics, self.about = dict(metrics), dict(about or {})
        self._values: dict[str, Any] = {}

    def on_test_start(self, trainer: Trainer, module: LightningModule) -> None:
        for metric in self.metrics.values():
            metric.reset()
            metric.to(module.device)
            # A trainer of one process must not wait for others that a process group still has.
            metric.distributed_available_fn = lambda: trainer.world_size > 1

    def on_scored(self, scored: Scored, loader: int) -> None:
        update(list(self.metrics.values())[loader], scored)

    def on_test_epoch_end(self, trainer: Trainer, module: LightningModule) -> None:
        self._values = {}
        for number, (prefix, metric) in enumerate(self.metrics.items()):
            values = metric.compute()
            headline = next(iter(values))
            self._values |= {f"{prefix}{headline}": values[headline]} if number else values

    def contribution(self) -> Sections:
        return {"quality": self._values | self.about} if self._values else {}


class PredictionsFile(ScoringCallback):
    """Writes the rows of `Scored` in corpus order to `path`, from rank zero. `size`: number of items in the corpus."""

    def __init__(self, size: int, path: Path) -> None:
        self.path, self.rows = path, Predictions(size)

    def on_test_start(self, trainer: Trainer, module: LightningModule) -> None:
        self.rows.reset()
        self.rows.to(module.device)
        self.rows.distributed_available_fn = lambda: trainer.world_size > 1

    def on_scored(self, scored: Scored, loader: int) -> None:
        assert scored.rows is not None
        self.rows.update(scored.index, scored.rows)

    def on_test_epoch_end(self, trainer: Trainer, module: LightningModule) -> None:
        rows = self.rows.compute()  # on every process: it gathers
        if trainer.is_global_zero:
            write_predictions(self.path, rows)


def write_predictions(path: Path, rows: Sequence[Row]) -> None:
    """Writes one item a line, atomically. Tabs and line ends inside a text become spaces."""
    lines = ("\t".join(" ".join(text.split()) for text in row) + "\n" for row in (HEADER, *rows))
    write_text(path, "".join(lines))
