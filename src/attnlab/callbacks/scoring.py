"""The fields of each scored batch, and the sections that callbacks contribute to the record."""

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import attnlab.torchvision_schemas  # noqa: F401  (before lightning)

import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from attnlab.metrics.text import IndexedMetric, Predictions, Row
from attnlab.run.files import write_text

Sections = dict[str, dict[str, Any]]  # values by section of the record


@dataclass(frozen=True)
class Scored:
    """One batch as a module's `test_step` returns it.

    Args:
        index: (B,) the items' indices in the corpus.
        update: further arguments of the metric's `update`, by name; a metric gets those that it takes.
        rows: lines of predictions.tsv: id, source, reference, hypothesis.  None: the task has none.
        seconds: time of the model alone, the device synchronised before and after.
        units: what `seconds` produced: tokens of best hypotheses, or images.
        cache_bytes: of the caches of this batch, as measured and as predicted.
        cut: the number of hypotheses that ended at the limit of length.
    """

    index: Tensor
    update: Mapping[str, Any]
    rows: list[Row] | None = None
    seconds: float = 0.0
    units: int = 0
    cache_bytes: tuple[int, int] = (0, 0)
    cut: int = 0


def update(metric: IndexedMetric, scored: Scored) -> None:
    """Give a metric its fields of a batch."""
    metric.update(scored.index, **{name: scored.update[name] for name in metric.fields})


class Contributor(Callback):
    """A callback that measures something and contributes it to the record.

    Attributes:
        sections: values by section, once the trainer's call has ended; {} if nothing was measured. A section's
            `protocol` describes how its numbers were measured; those of several callbacks are joined.
    """

    def __init__(self) -> None:
        self.sections: Sections = {}


class ScoringCallback(Callback):
    """A callback that reads every scored batch."""

    @abstractmethod
    def on_scored(self, scored: Scored, loader: int) -> None:
        """Called after each batch of `trainer.test` with the number of its dataloader."""

    def on_test_batch_end(self, trainer: Trainer, module: LightningModule, outputs: Any, *batch: Any) -> None:
        self.on_scored(outputs, batch[2] if len(batch) > 2 else 0)


def contributions(callbacks: Iterable[Callback]) -> Sections:
    """The sections of all callbacks, merged."""
    merged: Sections = {}
    for callback in callbacks:
        for section, values in callback.sections.items() if isinstance(callback, Contributor) else ():
            target = merged.setdefault(section, {})
            protocols = [text for text in (target.pop("protocol", ""), values.get("protocol", "")) if text]
            target |= values | ({"protocol": "; ".join(protocols)} if protocols else {})
    return merged


def over_processes(trainer: Trainer, value: float, reduce: str) -> float:
    """`value` reduced over the trainer's processes by "sum", "max" or "mean". Every process must call this."""
    tensor = torch.tensor(value, dtype=torch.float64, device=trainer.strategy.root_device)
    return float(trainer.strategy.reduce(tensor, reduce_op=reduce))


HEADER: Row = ("id", "source", "reference", "hypothesis")


class Quality(Contributor, ScoringCallback):
    """Scores what `test_step` returns and contributes the section `quality`.

    Args:
        metrics: a metric for each test dataloader, in their order.  The first one's values are contributed as they
            are; of every other one the first value and its interval, prefixed by its key (`{"": disjoint, "sliding_":
            sliding}` of two `Perplexity` gives `perplexity`, `tokens` and `sliding_perplexity`).
        about: values known beforehand, which are added; of two values with one name this one is taken.
    """

    def __init__(self, metrics: Mapping[str, IndexedMetric], about: Mapping[str, Any] | None = None) -> None:
        super().__init__()
        self.metrics, self.about = dict(metrics), dict(about or {})

    def on_test_start(self, trainer: Trainer, module: LightningModule) -> None:
        for metric in self.metrics.values():
            metric.reset()
            metric.to(module.device)
            # A trainer of one process must not wait for others that a process group still has.
            metric.distributed_available_fn = lambda: trainer.world_size > 1

    def on_scored(self, scored: Scored, loader: int) -> None:
        update(list(self.metrics.values())[loader], scored)

    def on_test_epoch_end(self, trainer: Trainer, module: LightningModule) -> None:
        quality: dict[str, Any] = {}
        for number, (prefix, metric) in enumerate(self.metrics.items()):
            values = metric.compute()
            headline = next(iter(values))
            chosen = [name for name in (headline, f"{headline}_interval") if name in values]
            quality |= {f"{prefix}{name}": values[name] for name in chosen} if number else values
        self.sections["quality"] = quality | self.about


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


def write_predictions(path: Path, rows: Iterable[Sequence[str]], header: Sequence[str] = HEADER) -> None:
    """Writes one item a line, atomically. Tabs and line ends inside a text become spaces."""
    lines = ("\t".join(" ".join(text.split()) for text in row) + "\n" for row in (header, *rows))
    write_text(path, "".join(lines))
